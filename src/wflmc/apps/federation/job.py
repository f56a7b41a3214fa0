"""A job: all that the server of a federation holds before the first round.

None of the devices' data is in it.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.apps.federation.messages import (
    DEVICE,
    PREPARED_BY_THIS_VERSION,
    SERVER,
    RoundRequest,
    Terms,
)
from wflmc.channel import Link
from wflmc.dynamics import Array
from wflmc.planning.plan import PLAN_FILE, Plan
from wflmc.posterior import Posterior, SoftmaxPosterior
from wflmc.posterior.regression import Regression
from wflmc.privacy.lattice import Lattice
from wflmc.runs.documents import JsonObject
from wflmc.runs.planning import make_plan
from wflmc.sampling import Start, initial_states
from wflmc.scenario import Inputs, Scenario, build_posterior
from wflmc.support.errors import InputError, without_data
from wflmc.support.keys import digest
from wflmc.support.storage import (
    Arrays,
    arrays_digest,
    private_folder,
    read_verified_arrays,
    replacing,
    write_arrays,
    write_text,
)

NORM_TOLERANCE = 1e-3
"""By which the norm of a gradient clipped in float32 may exceed its limit, relative."""
NOISE_TAIL_DEVIATIONS = 8.0
"""Standard deviations by which the norm of a device's own noise may exceed √m of them;
the chance of more is 1e-14."""
SECRET_BYTES = 32
"""The length of a device's secret."""

ARRAYS_FILE = "job.npz"
"""In a server's folder: starts, key, channels and power limits."""
OPTIONS_FILE = "job.json"
"""In a server's folder: the options of a job, and the digest of all its files."""
DIGEST = "digest"
"""In job.json: the hash of everything else in it, in job.npz and in plan.npz."""
NOISES = ("channel", "devices", "simulated")
"""Who adds the noise, see `make_job`."""


@without_data
@dataclass(frozen=True, eq=False)
class Job:
    """A plan, where its chains start, their key, and the channels of the rounds."""

    plan: Plan
    position: NDArray[np.float32]
    """θ[0] of every chain, [chain, m]."""
    velocity: NDArray[np.float32] | None
    """v[0] of every chain with kinetic dynamics, [chain, m]."""
    key: NDArray[np.uint32]
    """The seed of simulated noise, of the server's own noise and of mini-batches; never
    sent to a device."""
    channel_estimates: Array
    """|ĥ|[S, K], what devices know of their channels; 1 where the link is ideal."""
    power: Array
    """P_k: the largest ‖x_k‖² that a device may transmit, [K]; infinite where the link
    is ideal."""
    noise: str = "simulated"
    """Who adds the noise: the emulated channel, or every device its part. Simulated
    noise is the channel's, drawn from the key, as that of `wflmc.sample`."""
    tolerate: int = 0
    """With noise by the devices: how many may be absent from a round before it has less
    noise than planned."""
    releases: int = 1
    """Chains whose samples are all released; 1 where chains are replicas for
    evaluation."""
    batch: bool = False
    """Whether devices draw mini-batches."""

    @property
    def chains(self) -> int:
        """Return the number of chains.

        All of them run at the same time: one request has the positions of all chains,
        and one reply their signals. Whether each is a release of its own, which costs,
        is a matter of `releases`.
        """
        return len(self.position)

    @property
    def start(self) -> Start:
        """Return where the chains start.

        These are θ[0], and v[0] with kinetic dynamics, in the coordinates that the
        chains move in. They are drawn from the key of the job, and so are the same as
        those of `wflmc.sample` with this key.
        """
        return Start(self.position, self.velocity)

    @cached_property
    def run(self) -> str:
        """Return the name under which ledgers charge this job.

        It is a hash of everything that determines what is sent, except for the devices'
        data: the plan, the starts, the key, the channels, the power limits and the
        options. Two jobs that differ in any of these have different names.
        """
        options = f"{self.noise} {self.tolerate} {self.releases} {self.batch}"
        return digest(
            self.plan.digest.encode(),
            *self.start.arrays,
            self.key,
            self.channel_estimates,
            self.power,
            options.encode(),
        )

    @property
    def noise_name(self) -> str:
        """Return a name for noise that another job could draw again.

        A ledger refuses to charge two runs for the same round under the same name, as
        whoever sees both could subtract the noise. The name is empty where the noise is
        drawn from the entropy of the operating system, which never repeats.
        """
        return digest(self.key) if self.lattice is None else ""

    @cached_property
    def quorum(self) -> NDArray[np.intp]:
        """Return how many senders suffice for the planned noise, [S].

        With noise by the devices, each adds N0/quorum, so that the noise of at least so
        many senders has a variance of N0 or more. It is K_a less the tolerated
        absences, and at least 1.
        """
        return np.maximum(self.plan.active_devices - self.tolerate, 1)

    @cached_property
    def device_noise(self) -> Array:
        """Return the variance of the noise that every device adds itself, [S].

        It is N0/quorum with noise by the devices: a message alone is hidden by this
        variance only, which is why rounds then cost `quorum` times as much. What
        devices draw is the noise of `lattice`, which is slightly wider. The variance
        is 0 where the channel adds the noise, or a simulation of it.
        """
        if self.noise == "devices":
            return self.plan.noise_power / self.quorum
        return np.zeros(len(self.plan.rounds))

    @cached_property
    def gain(self) -> Array:
        """Return the amplitude at which every gradient is to arrive, [S, K].

        This is α r of the paper, the gain of the sum over its scale K/K_a, times the
        weight of the device. It is 0 in rounds in which a device is silent.
        """
        amplitude = self.plan.gain / self.plan.scale
        return np.asarray(amplitude[:, None] * self.plan.weight)

    @cached_property
    def lattice(self) -> Lattice | None:
        """Return the lattice of the noise that protects the data.

        It is that of the sum, or of every message where devices add the noise. None
        where the noise is simulated, and where nothing is clipped, so that no noise
        would protect anybody. Noise that is too small beside the signals is refused
        with an InputError.
        """
        plan = self.plan
        if self.noise == "simulated" or not plan.clips:
            return None
        received_ratio = 1.0 if plan.received is None else plan.received
        norm = self.gain * plan.clip * received_ratio
        if self.noise == "channel":
            total = norm.sum(1)
            variance = plan.noise_power
        else:
            total = norm
            variance = self.device_noise.max()
        # A loss is 2 (α r s)²/N0, and neighbours move a signal by up to 2 α r s.
        change = np.sqrt(2 * plan.loss * plan.noise_power)
        return Lattice.fitted(
            deviation=float(np.sqrt(variance)),
            change=change,
            norm=norm,
            total=float(total.max()),
            dim=plan.dim,
        )

    def round_noise(self, round_index: int, sent: NDArray[np.bool_]) -> float:
        """Return the variance of the noise in the sum of a round.

        The channel's is N0, whoever sends. With noise by the devices it is the sum over
        those that sent: N0 if exactly a quorum did, more if more did. This is the
        planned variance: the noise of `lattice` is wider by at most about 2 %, to make
        up for rounding.

        Args:
            round_index: from 0.
            sent: which devices sent, [K].

        Returns:
            The variance of every coordinate.
        """
        if self.noise == "devices":
            return float(self.device_noise[round_index]) * int(sent.sum())
        return float(self.plan.noise_power)

    def largest_norm(self, request: RoundRequest) -> float:
        """Return the largest norm that the answer to a request can have.

        The bound is α r ℓ/|ĥ| for a clipped gradient. Where the device adds noise, it
        also allows √m + `NOISE_TAIL_DEVIATIONS` standard deviations of it. A longer
        signal was not computed by the rules, and is rejected.

        Args:
            request: to a device of this job.

        Returns:
            The bound on ‖x_k‖ of a chain, with a margin for rounding.
        """
        clipped = request.precoder * float(self.plan.clip[request.device])
        deviation = 0.0
        if self.noise == "devices" and self.lattice:
            deviation = self.lattice.variance**0.5
        noise_norm = deviation * (np.sqrt(self.plan.dim) + NOISE_TAIL_DEVIATIONS)
        return (clipped + noise_norm) * (1 + NORM_TOLERANCE)

    @cached_property
    def planned_loss(self) -> Array:
        """Return the loss of all rounds in which all scheduled devices send, [S, K].

        No round costs a device more, whoever is absent. A device is hidden by the noise
        of the sum; but where devices add the noise, each message is hidden by its own
        part alone. Every released chain costs the same again.
        """
        plan = self.plan
        hiding_noise = np.full(len(plan.rounds), plan.noise_power)
        if self.noise == "devices":
            hiding_noise = self.device_noise
        factor = self.releases * plan.noise_power / hiding_noise
        return np.asarray(plan.loss * factor[:, None])

    def loss(self, round_index: int, sent: NDArray[np.bool_]) -> Array:
        """Return what a round costs every device, by who really sent.

        A device that did not send pays nothing, even if it was scheduled. Those that
        sent pay the planned loss, which does not depend on the others.

        Args:
            round_index: from 0.
            sent: which devices sent, [K].

        Returns:
            The losses, [K].
        """
        return np.where(sent, self.planned_loss[round_index], 0.0)

    def terms(self, device: int) -> Terms:
        """Return the terms that one device is to agree to.

        They limit what a server can request of the device: in which rounds, at which
        amplitude, for which channel and power, and what it costs. The device checks
        every request against them, so that it need not trust the server.

        Args:
            device: its number.

        Returns:
            The terms, without anything about other devices.
        """
        plan = self.plan
        gains = self.gain[:, device]
        channel_estimates = self.channel_estimates[:, device]
        noise_variance = 0.0
        lattice_step = 0.0
        noise_parts = 1
        if self.noise == "devices":
            noise_parts = int(self.quorum.max())
            if self.lattice is not None:
                noise_variance = self.lattice.variance
                lattice_step = self.lattice.step
        factor = self.releases * plan.context.uncertainty**2 * noise_parts
        promise = plan.privacy.of_device(device, plan.devices)
        return Terms(
            run=self.run,
            device=device,
            chains=self.chains,
            dim=plan.dim,
            start=plan.start,
            gain=tuple(gains.tolist()),
            known=tuple(channel_estimates.tolist()),
            clip=float(plan.clip[device]),
            example_clip=float(plan.example_clip[device]),
            rounding=plan.rounding,
            noise_power=float(plan.noise_power),
            share=noise_variance,
            step=lattice_step,
            factor=factor,
            power=float(self.power[device]),
            enforced=plan.enforced,
            simulated=self.lattice is None,
            promise=promise,
        )

    def save(self, folder: Path) -> None:
        """Write the job into the folder of a server.

        plan.npz has the plan, job.npz the other arrays, and job.json all else, with a
        digest of everything. The first two are for their owner alone: job.npz has the
        key of simulated noise.

        Args:
            folder: of the server; exists already.
        """
        self.plan.save(folder / PLAN_FILE, mode=0o600)
        arrays: dict[str, NDArray[np.generic]] = {
            "position": self.position,
            "key": self.key,
            "known": self.channel_estimates,
            "power": self.power,
        }
        if self.velocity is not None:
            arrays["velocity"] = self.velocity
        with replacing(folder / ARRAYS_FILE, mode=0o600) as file:
            write_arrays(file, arrays)
        options: dict[str, str | int] = {
            "noise": self.noise,
            "tolerate": self.tolerate,
            "releases": self.releases,
            "batch": self.batch,
        }
        document = {**options, DIGEST: _job_digest(self.plan, arrays, options)}
        write_text(folder / OPTIONS_FILE, json.dumps(document, indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read the job that `save` has written.

        The digest in job.json covers all three files: a plan or arrays of another job
        in their place are refused.

        Args:
            folder: of the server.

        Returns:
            The job, equal to the one that was saved.

        Raises:
            InputError: a file is missing, is damaged or has been changed.
        """
        arrays = read_verified_arrays(
            folder / ARRAYS_FILE, key="job", requirement=PREPARED_BY_THIS_VERSION
        )
        plan = Plan.load(folder / PLAN_FILE, key="job")
        try:
            text = (folder / OPTIONS_FILE).read_text(encoding="utf-8")
            options: JsonObject = dict(json.loads(text))
            if options.pop(DIGEST, None) != _job_digest(plan, arrays, options):
                raise ValueError("its files are not as they were written")
            return cls(
                plan=plan,
                position=arrays["position"],
                velocity=arrays.get("velocity"),
                key=arrays["key"],
                channel_estimates=arrays["known"],
                power=arrays["power"],
                noise=options["noise"],
                tolerate=options["tolerate"],
                releases=options["releases"],
                batch=options["batch"],
            )
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            expected = f"{PREPARED_BY_THIS_VERSION} ({error})"
            raise InputError("job", str(folder), expected) from None


def _job_digest(plan: Plan, arrays: Arrays, options: Mapping[str, object]) -> str:
    """Return a hash of all that plan.npz, job.npz and job.json hold."""
    options_text = json.dumps(options, sort_keys=True)
    arrays_hash = arrays_digest(arrays)
    return digest(plan.checksum.encode(), arrays_hash.encode(), options_text.encode())


def make_job(
    key: jax.Array,
    posterior: Posterior,
    link: Link,
    plan: Plan,
    *,
    chains: int = 1,
    noise: str = "simulated",
    tolerate: int = 0,
    releases: int = 1,
) -> Job:
    """Make the job of a plan: draw where chains start, and note the channels.

    Args:
        key: seeds starts and simulated noise as in `wflmc.sample`: the same key and
            plan give the same chains.
        posterior: of all devices; says where chains start.
        link: whose channels the devices know.
        plan: from `federated_plan`, or `wflmc.plan`.
        chains: how many run at the same time, in the same messages.
        noise: "simulated" is that of `wflmc.sample`, which protects nobody from those
            who know the key. "channel" is that of the emulated channel, added at the
            server, and with "devices" every device adds its part; both are drawn from
            the entropy of the operating system.
        tolerate: with noise by the devices, how many may be absent from a round; all
            devices add more noise for it.
        releases: how many chains of the same real devices are released.

    Returns:
        The job, to be saved or opened by `open_server`.

    Raises:
        InputError: the options do not fit each other or the plan, or no lattice can
            carry the noise beside such signals.
    """
    _check_noise_options(plan, noise, tolerate)
    state = initial_states(key, posterior, plan, jnp.arange(chains))
    start = Start.of_state(state)
    job = Job(
        plan=plan,
        position=start.position,
        velocity=start.velocity,
        key=np.asarray(jax.random.key_data(key)),
        channel_estimates=_channel_estimates(plan, link),
        power=_power_limits(plan, link),
        noise=noise,
        tolerate=tolerate,
        releases=releases,
        batch=posterior.batch is not None,
    )
    # Computed for its error: a job whose noise no lattice can carry is refused here.
    _ = job.lattice
    return job


def _check_noise_options(plan: Plan, noise: str, tolerate: int) -> None:
    """Refuse options about the noise that do not fit each other or the plan."""
    if noise not in NOISES:
        raise InputError("noise", noise, f"one of {', '.join(NOISES)}")
    if noise != "devices":
        if tolerate:
            expected = "0 unless noise is 'devices' (--noise devices)"
            raise InputError("tolerate", tolerate, expected)
        return
    if not _is_ideal(plan):
        expected = "'noiseless-dp' where devices add the noise"
        raise InputError("policy.power", "a policy for a radio link", expected)
    max_absences = int(plan.active_devices.min()) - 1
    if not 0 <= tolerate <= max_absences:
        raise InputError("tolerate", tolerate, f"between 0 and {max_absences}")


def _is_ideal(plan: Plan) -> bool:
    """Return whether a plan is for an ideal link, where transmit power is free."""
    return not np.any(plan.power_share)


def _channel_estimates(plan: Plan, link: Link) -> Array:
    """Return |ĥ|[S, K], what devices know of their channels."""
    if _is_ideal(plan):
        return np.ones((len(plan.rounds), plan.devices))
    gains = link.gains(plan.start + len(plan.rounds), plan.devices)
    channel_gains = np.abs(gains)[plan.start :].astype(float)
    if plan.received is None:
        return channel_gains
    return channel_gains / plan.received


def _power_limits(plan: Plan, link: Link) -> Array:
    """Return P_k[K], the largest ‖x_k‖² that devices may transmit."""
    if _is_ideal(plan):
        return np.full(plan.devices, np.inf)
    return np.array(link.snr(plan.devices) * plan.dim * plan.noise_power)


def federated_plan(
    scenario: Scenario,
    inputs: Inputs,
    *,
    noise: str = "simulated",
    tolerate: int = 0,
    releases: int = 1,
    paid: Array | None = None,
) -> Plan:
    """Plan a scenario so that its budgets suffice for what a federation costs.

    A round of a plan costs 2 (α r s)²/N0, with the sensitivity s, for one chain of
    which only the sum is seen. Chains that are all released cost that each. Where
    devices add the noise, the server sees messages one by one, each hidden by its own
    part of the noise alone, and a round costs as many times more as there are parts in
    N0.

    Args:
        scenario: what is planned.
        inputs: built from the scenario.
        noise: as of `make_job`, which checks it.
        tolerate: as of `make_job`, which checks it.
        releases: as of `make_job`.
        paid: what devices have spent before, [K]; None takes it from the inputs.

    Returns:
        The plan, whose losses are those of a single chain and a sum.
    """
    devices = inputs.posterior.devices
    noise_parts = max(devices - tolerate, 1) if noise == "devices" else 1
    factor = releases * noise_parts
    spent = inputs.spent if paid is None else paid
    budget = inputs.privacy.budget(devices)
    remaining = np.maximum(budget - spent, 0.0)
    finite_remaining = np.where(np.isfinite(budget), remaining, 0.0)
    # All but one part of the budget counts as spent: a round of the plan, which uses
    # that part, costs `factor` times as much here.
    reserved = finite_remaining * (1 - 1 / factor)
    plan = make_plan(scenario, inputs, ledger=spent + reserved)
    if factor == 1:
        return plan
    return replace(plan, context=replace(plan.context, ledger=spent))


def write_federation(
    folder: Path,
    scenario: Scenario,
    inputs: Inputs,
    job: Job,
    *,
    with_data: bool = True,
) -> None:
    """Write the folders of the server and of all devices.

    The server's has none of the data. Each folder is all that one machine needs:

        server/plan.npz                       the plan
        server/job.npz, job.json              the key of the noise, the channels
        device-k/terms.json, model.json       what the device agrees to, and its model
        device-k/data.npz                     X and y of this device alone
        device-k/secret                       salts the names of requests
        device-k/ledger.jsonl, answer.npz     what has left the device, once it has
                                              answered, and its last answer

    Nobody but their owner can read these folders, from when they are created.

    Args:
        folder: of the federation, with a subfolder for each machine.
        scenario: whose model is written.
        inputs: built from the scenario, with its data.
        job: whose terms are written. What devices have spent before it is charged to
            their ledgers.
        with_data: whether devices get their part of the scenario's data; if not, each
            brings a data.npz of its own.
    """
    private_folder(folder)
    job.save(private_folder(folder / SERVER))
    posterior = inputs.posterior
    raw: Posterior = posterior
    # A custom model cannot be written to a file: see `open_device`.
    if isinstance(posterior, Regression):
        raw = build_posterior(scenario)[0]
    model_text = json.dumps(_model_document(scenario, posterior, raw))
    for device, spent in enumerate(job.plan.ledger):
        device_folder = private_folder(folder / DEVICE.format(device))
        terms = job.terms(device)
        terms.save(device_folder / "terms.json")
        if spent > 0:
            terms.open_ledger(device_folder).charge("before", 0, [[spent]])
        write_text(device_folder / "model.json", model_text)
        with replacing(device_folder / "secret", mode=0o600) as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        if with_data and isinstance(raw, Regression):
            _write_data(device_folder / "data.npz", raw, device)


def _model_document(
    scenario: Scenario,
    posterior: Posterior,
    raw: Posterior,
) -> dict[str, object]:
    """Return the content of model.json.

    Args:
        scenario: of the model.
        posterior: in the coordinates that the chains move in.
        raw: the same model before its features were whitened.
    """
    model: dict[str, object] = {}
    if isinstance(raw, Regression):
        model["intercept"] = raw.intercept
        # A device alone has the share 1/K of the prior.
        model["prior_std"] = raw.prior_std * posterior.devices**0.5
        if raw.prior_mean is not None:
            model["prior_mean"] = raw.prior_mean.tolist()
    if isinstance(raw, SoftmaxPosterior):
        model["classes"] = list(raw.class_names)
    whitening: list[list[float]] | None = None
    if isinstance(posterior, Regression) and posterior.coordinates is not None:
        whitening = np.asarray(posterior.coordinates.matrix).tolist()
    return {
        "model": model,
        "whitening": whitening,
        "prior_on": scenario.posterior.prior_on,
    }


def _write_data(path: Path, raw: Regression, device: int) -> None:
    """Write the features and outcomes of one device, for its owner alone."""
    size = raw.sizes[device]
    rows = raw.features[device, :size]
    features = rows[:, :-1] if raw.intercept else rows
    outcomes = raw.outcomes[device, :size]
    with replacing(path, mode=0o600) as file:
        np.savez(file, X=features, y=outcomes)
