"""`wflmc.sample`: many chains of a plan, in chunks, charged, stored and resumed."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.planning.plan import Plan, distinct_plans
from wflmc.posterior.base import Posterior, check_posterior
from wflmc.privacy import Ledger
from wflmc.sampling.checkpoint import Checkpoint, Progress, allocate, flush
from wflmc.sampling.chunks import Chunk, Partition, Workload
from wflmc.sampling.execution import (
    DEFAULT_EXECUTION,
    Execution,
    Machine,
    ProgressCallback,
    check_execution,
    prepare_machine,
)
from wflmc.sampling.kernel import State, check_belongs, step
from wflmc.sampling.loop import run_rounds, superpose_locally
from wflmc.sampling.payment import name_run, open_account, refuse_plans
from wflmc.sampling.recorders import DrawRecorder, Recorder, record_averages
from wflmc.sampling.simulation import BlockDraws, BlockProgram, Simulation
from wflmc.sampling.starts import Start, chain_keys, check_start, initial_states
from wflmc.sampling.trace import Trace
from wflmc.sampling.transcript import (
    Transcript,
    merge_rounds,
    reception_noise,
    transcript_dtype,
    write_rows,
)
from wflmc.support.errors import InputError, without_data
from wflmc.support.keys import check_key, digest

DEFAULT_CHAINS = 100
"""Chains of a single plan unless the caller says how many."""

Account = Callable[[slice], None]
"""Charges a ledger for a block of rounds."""


@without_data
@dataclass(frozen=True, eq=False, kw_only=True)
class _ChainRequest:
    """The chains that `sample` is asked for, checked."""

    key: jax.Array
    posterior: Posterior
    plans: list[Plan]
    zipped: bool
    """Whether every chain has a plan of its own."""
    numbers: NDArray[np.integer]
    """Which chains these are, [chain]."""
    start: Start | None
    """Where chains start, in the coordinates that they move in; None to draw it."""
    keep_burn_in: bool
    transcript: bool
    features: NDArray[np.generic] | None
    """u[n, d], where predictions are recorded in place of draws."""

    @property
    def plan(self) -> Plan:
        """Return the plan of all chains, or that of the first one.

        What is read from it here is equal in all plans that run together: the numbers
        of rounds, devices and parameters, burn-in and dynamics (`_check_plans`).
        """
        return self.plans[0]

    @property
    def chains(self) -> int:
        """Return the number of chains, at least 1.

        With a plan for each chain it is the number of plans; else what the caller has
        set, or `DEFAULT_CHAINS`.
        """
        return self.numbers.size

    @property
    def rounds(self) -> int:
        """Return S, the number of rounds that every chain runs, burn-in included.

        A plan that continues another one counts only its own rounds here.
        """
        return len(self.plan.rounds)

    @property
    def first_kept(self) -> int:
        """Return the index of the first round whose draws are kept.

        That is the end of burn-in, or 0 where burn-in is kept as well. Indices count
        from the first round of the plan.
        """
        return 0 if self.keep_burn_in else int(self.plan.burn_in)

    @property
    def kept_rounds(self) -> int:
        """Return how many draws of a chain are kept: one for every kept round.

        Arrays of draws have this length along their axis of rounds, and averages are
        taken over as many.
        """
        return self.rounds - self.first_kept

    @property
    def by_example(self) -> bool:
        """Return whether gradients of single examples are clipped, in any of the plans.

        It costs more memory and more work, and needs other programs than clipping whole
        devices; `Workload` and `Posterior.on_accelerator` depend on it.
        """
        different_plans = distinct_plans(self.plans)
        return any(np.isfinite(plan.example_clip).any() for plan in different_plans)

    @property
    def workload(self) -> Workload:
        """Return the sizes by which the work is cut.

        Nothing in it depends on values of the data, so that a run which continues from
        a checkpoint is cut as it was before.
        """
        return Workload(
            chains=self.chains,
            rounds=self.rounds,
            kept_rounds=self.kept_rounds,
            dim=self.plan.dim,
            has_velocity=self.plan.dynamics.has_velocity,
            gradient_bytes=self.posterior.working_bytes(1, self.by_example),
            operations=self.posterior.work(self.by_example),
            transcript=self.transcript,
        )

    @property
    def recorded(self) -> str:
        """Return a name for what is recorded, for checkpoints.

        It is "draws", or a digest of the features at which predictions are averaged: a
        run with other features must not continue from these averages.
        """
        return "draws" if self.features is None else digest(self.features)

    def plans_of(self, chains: NDArray[np.intp]) -> list[Plan]:
        """Return the plans of the members of a chunk.

        Args:
            chains: indices of the members, [chain].

        Returns:
            One plan for each of them; where all chains share a plan, that one alone.
        """
        if not self.zipped:
            return self.plans
        return [self.plans[index] for index in chains]


def sample(  # noqa: PLR0913
    key: jax.Array,
    posterior: Posterior,
    plan: Plan | Sequence[Plan],
    chains: int | None = None,
    *,
    keep_burn_in: bool = False,
    numbers: Sequence[int] | None = None,
    initial: ArrayLike | Start | None = None,
    ledger: Ledger | None = None,
    transcript: bool = False,
    predictions: ArrayLike | None = None,
    execution: Execution = DEFAULT_EXECUTION,
) -> Trace:
    """Run chains of a plan, or one chain for each of several plans of one shape.

    Chains are replicas of the whole experiment: each one alone has the plan's privacy,
    and publishing several of them from the same real devices would add their losses up.

    Args:
        key: seeds starts and noise; the same key gives the same noise to every plan.
        posterior: what is sampled from.
        plan: one plan for all chains, or a list with one for each.
        chains: number of chains (100 for a single plan); for several plans it is their
            number.
        keep_burn_in: keep the draws of burn-in as well.
        numbers: which chains these are, 0, 1, … by default; equal numbers share start
            and noise.
        initial: the parameters that chains are at, [chain, m], for a plan that
            continues others; drawn by default. With kinetic dynamics a `Start` may
            have velocities as well (`Trace.velocity`); else these are drawn.
        ledger: charged for every round before it is transmitted; rounds that the same
            run was charged for before cost nothing again. Only for a single plan, which
            must clip. With or without a ledger, a plan that clips and would take a
            device beyond its budget is refused before anything is transmitted, unless
            its policy ignores budgets (`Plan.enforced`).
        transcript: keep what the server has received, and where gradients were taken,
            as `Trace.transcript`; rounds are merged where memory is short.
        predictions: features u[n, d]: of every chain only the mean prediction at these
            is kept, with mean and variance of the parameters (`Trace.predictions`), and
            `Trace.theta` is that mean. For softmax regressions with too many parameters
            to keep every draw. Not together with `keep_burn_in` or `Execution.store`,
            which are about draws.
        execution: memory, files, accelerators, and a callback for progress.

    Returns:
        Draws θ[chain, draw, m] of the kept rounds, with clip rates and, where they were
        asked for, burn-in, transcript and predictions.

    Raises:
        InputError: if an argument is not as described, or a checkpoint is of another
            run.
        OverspendError: if a device would be taken beyond its budget, as said under
            `ledger`, or beyond what the ledger has left.
        SamplingError: if a chain becomes infinite or nan.
    """
    check_execution(execution)
    if predictions is not None and (keep_burn_in or execution.store is not None):
        requirement = "given without keep_burn_in and store, which are for draws"
        raise InputError("predictions", "features", requirement)
    check_key(key)
    check_posterior(posterior)
    zipped = isinstance(plan, list | tuple)
    plans: list[Plan] = [*plan] if zipped else [plan]  # type: ignore[list-item, misc]
    _check_plans(plans, posterior)
    count = _count_chains(chains, len(plans) if zipped else None)
    chain_numbers = _check_numbers(numbers, count)
    start = None
    if initial is not None:
        start = check_start(initial, chains=count, plan=plans[0], posterior=posterior)
    request = _ChainRequest(
        key=key,
        posterior=posterior,
        plans=plans,
        zipped=zipped,
        numbers=chain_numbers,
        start=start,
        keep_burn_in=keep_burn_in,
        transcript=transcript,
        features=None if predictions is None else np.asarray(predictions),
    )
    refuse_plans(request.plans)
    return _run_request(request, execution, ledger)


def _run_request(
    request: _ChainRequest,
    execution: Execution,
    ledger: Ledger | None,
) -> Trace:
    """Run chains, from their checkpoint where there is one, and charge their ledger."""
    machine = prepare_machine(
        execution,
        request.posterior,
        request.workload,
        request.by_example,
    )
    run = ""
    if ledger is not None or execution.checkpoint is not None:
        run = name_run(
            request.key,
            request.posterior,
            request.plans,
            request.numbers,
            initial=request.start,
        )
    checkpoint = _open_checkpoint(request, machine, execution, run)
    saved = Progress() if checkpoint is None else checkpoint.load()
    account = None
    if ledger is not None:
        # The first chunk of chains has been through all rounds if a later one has begun.
        transmitted = request.rounds if saved.first_chain else saved.rounds
        account = open_account(
            ledger,
            run,
            request.key,
            request.posterior,
            plans=request.plans,
            transmitted=transmitted,
        )
    store = execution.store if checkpoint is None else checkpoint.samples
    results = _open_results(request, machine.partition, saved, store)
    keeper = _Keeper(
        request,
        machine.partition,
        results,
        checkpoint,
        execution.progress,
    )
    _run_chunks(request, machine, saved, account, keeper)
    return _make_trace(request, machine.partition, results)


def _count_chains(chains: object, plan_count: int | None) -> int:
    """Return the number of chains.

    Args:
        chains: as the caller has set it, or None.
        plan_count: the number of plans, where each chain has its own; else None.
    """
    if plan_count is not None:
        if chains not in (None, plan_count):
            raise InputError("chains", chains, f"the number of plans ({plan_count})")
        chains = plan_count
    elif chains is None:
        chains = DEFAULT_CHAINS
    if not isinstance(chains, int | np.integer) or chains < 1:
        raise InputError("chains", chains, "a whole number of at least 1")
    return int(chains)


def _check_numbers(
    numbers: Sequence[int] | None,
    chains: int,
) -> NDArray[np.integer]:
    """Return the numbers of the chains, 0, 1, … by default."""
    if numbers is None:
        return np.arange(chains)
    chain_numbers = np.asarray(numbers)
    if chain_numbers.shape != (chains,):
        requirement = f"one for each of {chains} chains"
        raise InputError("numbers", f"{chain_numbers.size} numbers", requirement)
    return chain_numbers


def _check_plans(plans: Sequence[Plan], posterior: Posterior) -> None:
    """Refuse plans of another posterior, and plans that differ in shape."""
    different_plans = distinct_plans(plans)
    for plan in different_plans:
        check_belongs(plan, posterior)
    if len({_shape(plan) for plan in different_plans}) != 1:
        raise InputError(
            "plan",
            f"{len(plans)} plans",
            "one plan, or several of equal rounds, devices, start and dynamics",
        )


def _shape(plan: Plan) -> tuple[object, ...]:
    """Return what plans that run together must share."""
    return (
        len(plan.gain),
        plan.devices,
        plan.dim,
        plan.burn_in,
        plan.init,
        plan.start,
        plan.dynamics.name,
    )


def _open_checkpoint(
    request: _ChainRequest,
    machine: Machine,
    execution: Execution,
    run: str,
) -> Checkpoint | None:
    """Return the checkpoint that the caller has asked for."""
    if execution.checkpoint is None:
        return None
    cut = machine.name(request.first_kept, request.transcript)
    name = f"{run}-{cut}-{request.recorded}"
    return Checkpoint(Path(execution.checkpoint), name)


class _Results(NamedTuple):
    """Arrays of all chains, filled chunk by chunk and block by block."""

    recorder: Recorder
    position: NDArray[np.float32]
    """θ of every chain after the last round that it has done, [chain, m]."""
    velocity: NDArray[np.float32] | None
    """v of every chain then, [chain, m], with kinetic dynamics."""
    clip_rate: NDArray[np.float32]
    """[round, chain]."""
    transcript: NDArray[np.void] | None
    """Rows [group, chain] of `transcript_dtype`."""


def _open_results(
    request: _ChainRequest,
    partition: Partition,
    saved: Progress,
    store: str | Path | None,
) -> _Results:
    """Return arrays for results, with those in them that a checkpoint has saved."""
    chains = request.chains
    dim = request.plan.dim
    recorder: Recorder
    if request.features is None:
        shape = (request.kept_rounds, chains, dim)
        recorder = DrawRecorder(allocate(shape, store, begun=saved.begun))
    else:
        recorder = record_averages(
            request.posterior,
            request.features,
            chains=chains,
            draws=request.kept_rounds,
            saved=saved.averages,
        )
    transcript = None
    if request.transcript:
        path = None if store is None else Path(store).with_name("transcript.npy")
        transcript = allocate(
            (partition.group_starts.size, chains),
            path,
            begun=saved.begun,
            dtype=transcript_dtype(dim),
        )
    position = np.zeros((chains, dim), np.float32)
    velocity = None
    if request.plan.dynamics.has_velocity:
        velocity = np.zeros((chains, dim), np.float32)
    if saved.chains is not None:
        position = saved.chains.position
        velocity = saved.chains.velocity
    clip_rate = saved.clip_rate
    if clip_rate is None:
        clip_rate = np.zeros((request.rounds, chains), np.float32)
    return _Results(recorder, position, velocity, clip_rate, transcript)


class _Keeper(NamedTuple):
    """Keeps what blocks leave: in arrays, in a checkpoint, as reported progress."""

    request: _ChainRequest
    partition: Partition
    results: _Results
    checkpoint: Checkpoint | None
    progress: ProgressCallback | None

    def keep(
        self,
        chunk: Chunk,
        block: slice,
        state: State,
        simulated: BlockDraws,
    ) -> None:
        """Record a block of a chunk, save progress and report it.

        The order matters: a checkpoint must not count rounds whose draws are not yet
        recorded.

        Args:
            chunk: the chains.
            block: the rounds, all of them finite.
            state: of the chunk's members after the block.
            simulated: kept draws, clip rates and, for a transcript, receptions.
        """
        self._record(chunk, block, state, simulated)
        if self.results.transcript is not None:
            self._record_transcript(chunk, block, simulated)
        if self.checkpoint is not None:
            self._save(chunk, block)
        if self.progress is not None:
            rounds = self.partition.rounds
            chunks_done = chunk.chains.start // self.partition.chunk_chains
            rounds_done = rounds * chunks_done + block.stop
            self.progress(rounds_done, rounds * self.partition.chunk_count)

    def _record(
        self,
        chunk: Chunk,
        block: slice,
        state: State,
        simulated: BlockDraws,
    ) -> None:
        """Record draws, clip rates and states."""
        results = self.results
        length = block.stop - block.start
        draws = np.asarray(simulated.draws)[:, : chunk.size]
        parameters = self.request.posterior.parameters(draws)
        results.recorder.add(simulated.first_draw, chunk.chains, parameters)
        clip_rate = np.asarray(simulated.info.clip_rate)
        results.clip_rate[block, chunk.chains] = clip_rate[:length, : chunk.size]
        position = np.asarray(state.position)
        results.position[chunk.chains] = position[: chunk.size]
        if results.velocity is not None:
            velocity = np.asarray(state.velocity)
            results.velocity[chunk.chains] = velocity[: chunk.size]

    def _record_transcript(
        self,
        chunk: Chunk,
        block: slice,
        simulated: BlockDraws,
    ) -> None:
        """Merge the rounds of a block into groups, and record these."""
        info = simulated.info
        length = block.stop - block.start
        counted = (slice(length), slice(chunk.size))
        position = np.asarray(info.gradient_position)
        received = np.asarray(info.received)
        groups = self.partition.groups(block)
        plans = self.request.plans_of(chunk.members[: chunk.size])
        estimate = merge_rounds(
            position=position[counted],
            received=received[counted],
            noise=reception_noise(plans, block),
            group_offsets=groups.offsets,
        )
        assert self.results.transcript is not None
        index = (groups.indices, chunk.chains)
        write_rows(self.results.transcript, index, estimate)

    def _save(self, chunk: Chunk, block: slice) -> None:
        """Save progress, after the files that it counts on."""
        results = self.results
        results.recorder.flush()
        if results.transcript is not None:
            flush(results.transcript)
        assert self.checkpoint is not None
        self.checkpoint.save(
            Progress(
                first_chain=chunk.chains.start,
                rounds=block.stop,
                chains=Start(results.position, results.velocity),
                clip_rate=results.clip_rate,
                averages=results.recorder.arrays,
            )
        )


def _run_chunks(
    request: _ChainRequest,
    machine: Machine,
    saved: Progress,
    account: Account | None,
    keeper: _Keeper,
) -> None:
    """Run chains chunk by chunk, from where they were saved."""
    partition = machine.partition
    program = BlockProgram(
        kernel=step,
        model_axes=None,
        zipped=request.zipped,
        transcript=request.transcript,
    )

    def charge(block: slice, signal: None) -> None:
        # Only the first chunk pays: chains are replicas of one experiment, and the
        # ledger charges a round of a run once.
        if account is not None:
            account(block)

    for chunk in partition.chunks(saved.first_chain):
        is_begun = chunk.chains.start == saved.first_chain
        rounds_done = saved.rounds if is_begun else 0
        start = saved.chains if rounds_done else request.start
        begin = None
        if start is not None:
            begin = start.state(rounds_done, chunk.members)
        numbers = jax.device_put(request.numbers[chunk.members])
        state = initial_states(
            request.key,
            machine.posterior,
            request.plan,
            numbers,
            begin,
        )
        simulation = Simulation(
            machine.posterior,
            request.plans_of(chunk.members),
            chain_keys(request.key, numbers),
            partition=partition,
            first_kept=request.first_kept,
            program=program,
            mesh=machine.mesh,
        )
        run_rounds(
            simulation.place(state),
            partition.blocks(rounds_done),
            transport=superpose_locally,
            charge=charge,
            advance=simulation,
            keep=functools.partial(keeper.keep, chunk),
        )


def _make_trace(
    request: _ChainRequest,
    partition: Partition,
    results: _Results,
) -> Trace:
    """Return the trace of all chains."""
    burn_in = request.plan.burn_in
    theta = results.recorder.theta
    kept_burn_in = burn_in - request.first_kept
    burn_in_clip_rate = results.clip_rate[:burn_in]
    mean_clip_rate = burn_in_clip_rate.sum(1) / request.chains
    warmup = None
    warmup_clip_rate = None
    if request.keep_burn_in:
        warmup = theta[:, :kept_burn_in]
        warmup_clip_rate = burn_in_clip_rate.T
    transcript = None
    if results.transcript is not None:
        transcript = Transcript.from_rows(
            results.transcript,
            partition.group_starts,
            request.rounds,
        )
    key_numbers = np.ravel(jax.random.key_data(request.key))
    return Trace(
        theta=theta[:, kept_burn_in:],
        clip_rate=results.clip_rate[burn_in:].T,
        burn_in_clip_rate=mean_clip_rate.astype(float),
        warmup=warmup,
        plans=tuple(request.plans),
        velocity=results.velocity,
        warmup_clip_rate=warmup_clip_rate,
        key=tuple(key_numbers.tolist()),
        predictions=results.recorder.predictions,
        transcript=transcript,
    )
