"""`wflmc.sample`: many chains of a plan, in chunks, charged, stored and resumed."""

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
        """The plan, or the first of them."""
        return self.plans[0]

    @property
    def chains(self) -> int:
        """How many chains there are."""
        return self.numbers.size

    @property
    def rounds(self) -> int:
        """S."""
        return len(self.plan.rounds)

    @property
    def first_kept(self) -> int:
        """Index of the first round whose draws are kept."""
        return 0 if self.keep_burn_in else int(self.plan.burn_in)

    @property
    def kept_rounds(self) -> int:
        """How many draws of a chain are kept."""
        return self.rounds - self.first_kept

    @property
    def by_example(self) -> bool:
        """Whether gradients of single examples are clipped."""
        different_plans = distinct_plans(self.plans)
        return any(np.isfinite(plan.example_clip).any() for plan in different_plans)

    @property
    def workload(self) -> Workload:
        """The sizes by which the work is cut."""
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
        """A name for what is recorded, for checkpoints."""
        return "draws" if self.features is None else digest(self.features)

    def plans_of(self, chains: NDArray[np.intp]) -> list[Plan]:
        """Return the plan of each of some chains, or the one that all share."""
        return [self.plans[index] for index in chains] if self.zipped else self.plans


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
        ledger: charged for every round before it is transmitted. A round that would
            take a device beyond its budget is refused before anything is transmitted,
            with or without a ledger.
        transcript: keep what the server has received in every round and where, as
            `Trace.transcript`.
        predictions: features u[n, d]: of every chain only the mean prediction at these
            is kept, with mean and variance of the parameters (`Trace.predictions`), and
            `Trace.theta` is that mean. For softmax regressions with too many parameters
            to keep every draw.
        execution: memory, files, accelerators, and a callback for progress.

    Returns:
        Draws θ[chain, draw, m] of the kept rounds, with clip rates and, where they were
        asked for, burn-in, transcript and predictions.

    Raises:
        InputError: if an argument is not as described, or a checkpoint is of another
            run.
        OverspendError: if a device would be taken beyond its budget.
        SamplingError: if a chain leaves the finite numbers.
    """
    check_execution(execution)
    if predictions is not None and (keep_burn_in or execution.store is not None):
        allowed = "given without keep_burn_in and store, which are for draws"
        raise InputError("predictions", "features", allowed)
    request = _check_request(
        key,
        posterior,
        plan,
        chains,
        numbers=numbers,
        initial=initial,
        keep_burn_in=keep_burn_in,
        transcript=transcript,
        predictions=predictions,
    )
    refuse_plans(request.plans)
    machine = prepare_machine(
        execution,
        posterior,
        request.workload,
        request.by_example,
    )
    run = ""
    if ledger is not None or execution.checkpoint is not None:
        run = name_run(
            key,
            posterior,
            request.plans,
            request.numbers,
            initial=request.start,
        )
    checkpoint = _open_checkpoint(request, machine, execution, run)
    saved = Progress() if checkpoint is None else checkpoint.load()
    account = None
    if ledger is not None:
        transmitted = request.rounds if saved.first_chain else saved.rounds
        account = open_account(
            ledger,
            run,
            key,
            posterior,
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


def _check_request(
    key: jax.Array,
    posterior: Posterior,
    plan: Plan | Sequence[Plan],
    chains: int | None,
    *,
    numbers: Sequence[int] | None,
    initial: ArrayLike | Start | None,
    keep_burn_in: bool,
    transcript: bool,
    predictions: ArrayLike | None,
) -> _ChainRequest:
    """Refuse what cannot be run together."""
    check_key(key)
    check_posterior(posterior)
    zipped = isinstance(plan, list | tuple)
    plans: list[Plan] = [*plan] if zipped else [plan]  # type: ignore[list-item, misc]
    _check_plans(plans, posterior)
    if zipped and chains not in (None, len(plans)):
        raise InputError("chains", chains, f"the number of plans ({len(plans)})")
    count: object = chains
    if chains is None:
        count = len(plans) if zipped else DEFAULT_CHAINS
    elif zipped:
        count = len(plans)
    if not isinstance(count, int | np.integer) or count < 1:
        raise InputError("chains", count, "a whole number of at least 1")
    chain_numbers = np.arange(count) if numbers is None else np.asarray(numbers)
    if chain_numbers.shape != (count,):
        allowed = f"one for each of {count} chains"
        raise InputError("numbers", f"{chain_numbers.size} numbers", allowed)
    start = None
    if initial is not None:
        start = check_start(
            initial,
            chains=int(count),
            plan=plans[0],
            posterior=posterior,
        )
    return _ChainRequest(
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


def _check_plans(plans: Sequence[Plan], posterior: Posterior) -> None:
    """Refuse plans of another posterior, and plans that differ in shape."""
    different_plans = distinct_plans(plans)
    for plan in different_plans:
        check_belongs(plan, posterior)
    if len({_shape(plan) for plan in different_plans}) != 1:
        allowed = "one plan, or several of equal rounds, devices, start and dynamics"
        raise InputError("plan", f"{len(plans)} plans", allowed)


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
    chains, dim = request.chains, request.plan.dim
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
        position, velocity = saved.chains.position, saved.chains.velocity
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

    def keep(self, chunk: Chunk, block: slice, state: State, kept: BlockDraws) -> None:
        """Keep a block of a chunk."""
        self._record(chunk, block, state, kept)
        if self.results.transcript is not None:
            self._record_transcript(chunk, block, kept)
        if self.checkpoint is not None:
            self._save(chunk, block)
        if self.progress is not None:
            rounds = self.partition.rounds
            chunks_done = chunk.own.start // self.partition.chunk_chains
            done = rounds * chunks_done + block.stop
            self.progress(done, rounds * self.partition.chunk_count)

    def _record(
        self,
        chunk: Chunk,
        block: slice,
        state: State,
        kept: BlockDraws,
    ) -> None:
        """Record draws, clip rates and states."""
        results = self.results
        length = block.stop - block.start
        draws = np.asarray(kept.draws)[:, : chunk.size]
        parameters = self.request.posterior.parameters(draws)
        results.recorder.add(kept.first_draw, chunk.own, parameters)
        clip_rate = np.asarray(kept.info.clip_rate)[:length, : chunk.size]
        results.clip_rate[block, chunk.own] = clip_rate
        results.position[chunk.own] = np.asarray(state.position)[: chunk.size]
        if results.velocity is not None:
            results.velocity[chunk.own] = np.asarray(state.velocity)[: chunk.size]

    def _record_transcript(self, chunk: Chunk, block: slice, kept: BlockDraws) -> None:
        """Merge the rounds of a block into groups, and record these."""
        length = block.stop - block.start
        own = (slice(length), slice(chunk.size))
        groups = self.partition.groups(block)
        plans = self.request.plans_of(chunk.members[: chunk.size])
        estimate = merge_rounds(
            position=np.asarray(kept.info.gradient_position)[own],
            received=np.asarray(kept.info.received)[own],
            noise=reception_noise(plans, block),
            group_offsets=groups.offsets,
        )
        assert self.results.transcript is not None
        write_rows(self.results.transcript, (groups.own, chunk.own), estimate)

    def _save(self, chunk: Chunk, block: slice) -> None:
        """Save progress, after the files that it counts on."""
        results = self.results
        results.recorder.flush()
        if results.transcript is not None:
            flush(results.transcript)
        assert self.checkpoint is not None
        self.checkpoint.save(
            Progress(
                first_chain=chunk.own.start,
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
        if account is not None:
            account(block)

    for chunk in partition.chunks(saved.first_chain):
        rounds_done = saved.rounds if chunk.own.start == saved.first_chain else 0
        start = saved.chains if rounds_done else request.start
        numbers = jax.device_put(request.numbers[chunk.members])
        state = initial_states(
            request.key,
            machine.posterior,
            request.plan,
            numbers,
            None if start is None else start.state(rounds_done, chunk.members),
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

        def keep(
            block: slice,
            state: State,
            kept: BlockDraws,
            chunk: Chunk = chunk,
        ) -> None:
            keeper.keep(chunk, block, state, kept)

        run_rounds(
            simulation.place(state),
            partition.blocks(rounds_done),
            transport=superpose_locally,
            charge=charge,
            advance=simulation,
            keep=keep,
        )


def _make_trace(
    request: _ChainRequest,
    partition: Partition,
    results: _Results,
) -> Trace:
    """Return the trace of all chains."""
    plan = request.plan
    burn_in = plan.burn_in
    kept_burn_in = burn_in - request.first_kept
    theta = results.recorder.theta
    clip_rate = results.clip_rate
    transcript = None
    if results.transcript is not None:
        transcript = Transcript.from_rows(
            results.transcript,
            partition.group_starts,
            request.rounds,
        )
    return Trace(
        theta=theta[:, kept_burn_in:],
        clip_rate=clip_rate[burn_in:].T,
        burn_in_clip_rate=(clip_rate[:burn_in].sum(1) / request.chains).astype(float),
        warmup=theta[:, :kept_burn_in] if request.keep_burn_in else None,
        plans=tuple(request.plans),
        velocity=results.velocity,
        warmup_clip_rate=clip_rate[:burn_in].T if request.keep_burn_in else None,
        key=tuple(np.ravel(jax.random.key_data(request.key)).tolist()),
        predictions=results.recorder.predictions,
        transcript=transcript,
    )
