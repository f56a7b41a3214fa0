"""A job: all that the server of a federation holds before the first round, and none of the devices' data."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.apps.federation.messages import DEVICE, EARLIER, SERVER, RoundRequest, Terms
from wflmc.channel import Link
from wflmc.dynamics import Array
from wflmc.planning.plan import PLAN_FILE, Plan
from wflmc.posterior import Posterior, SoftmaxPosterior
from wflmc.posterior.regression import Regression
from wflmc.privacy.lattice import Lattice
from wflmc.runs.planning import make_plan
from wflmc.sampling import Start, initial_states
from wflmc.scenario import Inputs, Scenario, build_posterior
from wflmc.support.errors import InputError, refuse, without_data
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

SLACK = 1e-3
"""Relative rounding by which a clipped gradient of float32 may exceed its limit."""
TAIL = 8.0
"""Standard deviations of a device's own noise beyond what may be expected of it; more has a chance of 1e-14."""

DIGEST = "digest"
"""In job.json: the hash of everything else in it, in job.npz and in plan.npz."""
ARRAYS = ("position", "velocity", "key", "known", "power")
"""Fields of a job that job.npz holds, where they are not None."""
OPTIONS = ("noise", "tolerate", "releases", "batch")
"""Fields of a job that job.json holds."""
NOISES = ("channel", "devices", "simulated")


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
    """What seeds simulated noise, noise of the server's own and mini-batches; never told to a device."""
    known: Array
    """|ĥ|[S, K], what devices know of their channels; 1 where the link is ideal."""
    power: Array
    """P_k: the most that ‖x_k‖² may be, [K]; infinite where the link is ideal."""
    noise: str = "simulated"
    """Who adds the noise: the emulated channel, or every device its share. Simulated noise is the channel's, from the
    key, as that of `wflmc.sample`."""
    tolerate: int = 0
    """Devices that may be absent from a round before it is lost, with noise by the devices."""
    releases: int = 1
    """Chains whose samples are all given away; 1 where chains are replicas for evaluation."""
    batch: bool = False
    """Whether devices draw mini-batches."""

    @property
    def chains(self) -> int:
        """The number of chains."""
        return len(self.position)

    @property
    def start(self) -> Start:
        """Where chains start."""
        return Start(self.position, self.velocity)

    @cached_property
    def run(self) -> str:
        """A name for all that is sent, but for the devices' data."""
        about = f"{self.noise} {self.tolerate} {self.releases} {self.batch}"
        start = self.start.arrays
        return digest(
            self.plan.digest.encode(),
            *start,
            self.key,
            self.known,
            self.power,
            about.encode(),
        )

    @property
    def noise_name(self) -> str:
        """A name for noise that another job could have again; none where it is drawn from entropy."""
        return digest(self.key) if self.lattice is None else ""

    @cached_property
    def quorum(self) -> NDArray[np.intp]:
        """With noise by the devices: the fewest senders whose shares of noise add up to N0, [S]."""
        return np.maximum(self.plan.active_devices - self.tolerate, 1)

    @cached_property
    def share(self) -> Array:
        """Variance of the noise that every device adds itself, [S]."""
        return (
            self.plan.noise_power / self.quorum
            if self.noise == "devices"
            else np.zeros(len(self.plan.rounds))
        )

    @cached_property
    def gain(self) -> Array:
        """α r, the amplitude at which every device's gradient is to arrive, [S, K]; 0 where a device is silent."""
        return np.asarray(
            (self.plan.gain / self.plan.scale)[:, None] * self.plan.weight
        )

    @cached_property
    def lattice(self) -> Lattice | None:
        """Where noise lies that protects somebody: that of the sum, or of every message where devices add it.

        None where it is simulated, and where nothing is clipped, so that no noise would protect anybody.
        """
        plan = self.plan
        if self.noise == "simulated" or not plan.clips:
            return None
        norm = self.gain * plan.clip * (1.0 if plan.received is None else plan.received)
        total = norm.sum(1) if self.noise == "channel" else norm
        deviation = np.sqrt(
            self.share.max() if self.noise == "devices" else plan.noise_power
        )
        change = np.sqrt(2 * plan.loss * plan.noise_power)
        return Lattice.fitted(
            float(deviation), change, norm, float(total.max()), plan.dim
        )

    def round_noise(self, at: int, sent: NDArray[np.bool_]) -> float:
        """Return the variance of the noise in the sum of those who sent."""
        return (
            float(self.share[at]) * int(sent.sum())
            if self.noise == "devices"
            else float(self.plan.noise_power)
        )

    def largest_norm(self, request: RoundRequest) -> float:
        """Return the most that a clipped, precoded gradient can measure, with the noise that its device adds."""
        clipped = request.precoder * float(self.plan.clip[request.device])
        noise = (
            self.lattice.variance**0.5
            if self.noise == "devices" and self.lattice
            else 0.0
        )
        return (clipped + noise * (np.sqrt(self.plan.dim) + TAIL)) * (1 + SLACK)

    @cached_property
    def planned_loss(self) -> Array:
        """The loss of all rounds with all who are to send, [S, K]: no round costs more.

        A device is hidden by the noise of the sum; but where devices add it, each message by its own share alone.
        """
        hidden_by = (
            self.share
            if self.noise == "devices"
            else np.full(len(self.plan.rounds), self.plan.noise_power)
        )
        return np.asarray(
            self.plan.loss
            * (self.releases * self.plan.noise_power / hidden_by)[:, None]
        )

    def loss(self, at: int, sent: NDArray[np.bool_]) -> Array:
        """Return what a round costs every device, by who really sent, [K]."""
        return np.where(sent, self.planned_loss[at], 0.0)

    def terms(self, device: int) -> Terms:
        """Return what one device is to agree to."""
        plan, lattice = self.plan, self.lattice if self.noise == "devices" else None
        return Terms(
            run=self.run,
            device=device,
            chains=self.chains,
            **{
                name: getattr(plan, name)
                for name in ("dim", "start", "rounding", "enforced")
            },
            gain=tuple(self.gain[:, device].tolist()),
            known=tuple(self.known[:, device].tolist()),
            clip=float(plan.clip[device]),
            example_clip=float(plan.example_clip[device]),
            noise_power=float(plan.noise_power),
            share=0.0 if lattice is None else lattice.variance,
            step=0.0 if lattice is None else lattice.step,
            factor=self.releases
            * plan.context.uncertainty**2
            * (int(self.quorum.max()) if self.noise == "devices" else 1),
            power=float(self.power[device]),
            simulated=self.lattice is None,
            promise=plan.privacy.of_device(device, plan.devices),
        )

    def save(self, folder: Path) -> None:
        """Write it into a folder.

        plan.npz has the plan, job.npz the other arrays, and job.json all else.
        """
        self.plan.save(folder / PLAN_FILE, mode=0o600)
        fields = {name: getattr(self, name) for name in ARRAYS}
        arrays = {name: array for name, array in fields.items() if array is not None}
        with replacing(
            folder / "job.npz", mode=0o600
        ) as file:  # it has the key of the noise
            write_arrays(file, arrays)
        options = {name: getattr(self, name) for name in OPTIONS}
        whole = _job_digest(self.plan, arrays, options)
        write_text(
            folder / "job.json", json.dumps({**options, DIGEST: whole}, indent=1)
        )

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read it again.

        Args:
            folder: that `save` has written to.

        Raises:
            InputError: a file is missing, is damaged or has been changed.
        """
        arrays = read_verified_arrays(folder / "job.npz", key="job", allowed=EARLIER)
        plan = Plan.load(folder / PLAN_FILE, key="job")
        try:
            options: dict[str, Any] = dict(
                json.loads((folder / "job.json").read_text(encoding="utf-8"))
            )
            if options.pop(DIGEST, None) != _job_digest(plan, arrays, options):
                raise ValueError("its files are not as they were written")
            fields: dict[str, Any] = {name: arrays.get(name) for name in ARRAYS}
            return cls(plan=plan, **fields, **options)
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InputError("job", str(folder), f"{EARLIER} ({error})") from None


def _job_digest(plan: Plan, arrays: Arrays, options: Mapping[str, object]) -> str:
    """Return a hash of all that plan.npz, job.npz and job.json hold."""
    text = json.dumps(options, sort_keys=True)
    return digest(plan.checksum.encode(), arrays_digest(arrays).encode(), text.encode())


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
    """Return the job of a plan.

    Args:
        key: seeds starts and simulated noise, as of `wflmc.sample`: the same key and plan give the same chains.
        posterior: of all devices; says where chains start.
        link: whose channels the devices know.
        plan: see `federated_plan`.
        chains: how many run at the same time, in the same messages.
        noise: "simulated", that of `wflmc.sample`, which protects nobody from those who know the key; "channel", of
            the emulated channel, added at the server; or "devices", every device adds its share. The latter two come
            from the operating system's entropy.
        tolerate: with noise by the devices, how many may be absent from a round; all add more noise for it.
        releases: how many chains of the same real devices are given away.
    """
    ideal, most = not np.any(plan.power_share), int(plan.active_devices.min()) - 1
    by_devices, radio = noise == "devices", "a policy for a radio link"
    refuse(
        (noise not in NOISES, "noise", noise, f"one of {', '.join(NOISES)}"),
        (
            by_devices and not ideal,
            "policy.power",
            radio,
            "'noiseless-dp' where devices add the noise",
        ),
        (
            by_devices and not 0 <= tolerate <= most,
            "tolerate",
            tolerate,
            f"between 0 and {most}",
        ),
        (
            not by_devices and tolerate,
            "tolerate",
            tolerate,
            "0 unless noise is 'devices' (--noise devices)",
        ),
    )
    known, power = (
        np.ones((len(plan.rounds), plan.devices)),
        np.full(plan.devices, np.inf),
    )
    if not ideal:
        known = np.abs(link.gains(plan.start + len(plan.rounds), plan.devices))[
            plan.start :
        ].astype(float)
        known = known if plan.received is None else known / plan.received
        power = np.array(link.snr(plan.devices) * plan.dim * plan.noise_power)
    start = Start.of_state(initial_states(key, posterior, plan, jnp.arange(chains)))
    job = Job(
        plan=plan,
        position=start.position,
        velocity=start.velocity,
        key=np.asarray(jax.random.key_data(key)),
        known=known,
        power=power,
        noise=noise,
        tolerate=tolerate,
        releases=releases,
        batch=posterior.batch is not None,
    )
    _ = job.lattice  # where there is none that will do, it is refused here
    return job


def federated_plan(
    scenario: Scenario,
    inputs: Inputs,
    noise: str = "simulated",
    tolerate: int = 0,
    releases: int = 1,
    paid: Array | None = None,
) -> Plan:
    """Return the scenario's plan, from budgets that are left when every round costs as much as it does here.

    A round of a plan costs 2 (α r ℓ)²/N0 for one chain whose sum alone is seen. Chains that are all given away cost
    that each; where devices add the noise, the server sees messages one by one, each hidden by its share alone, and a
    round costs as many times more as there are shares in N0.

    Args:
        scenario, inputs: what is planned.
        noise, tolerate, releases: as of `make_job`, which checks them.
        paid: what devices have spent before, [K].
    """
    devices = inputs.posterior.devices
    factor = releases * (max(devices - tolerate, 1) if noise == "devices" else 1)
    spent, budget = (
        inputs.spent if paid is None else paid,
        inputs.privacy.budget(devices),
    )
    # All but a part of the budget counts as spent, and what the plan makes of that part is multiplied again.
    left = np.where(np.isfinite(budget), np.maximum(budget - spent, 0.0), 0.0)
    plan = make_plan(scenario, inputs, ledger=spent + left * (1 - 1 / factor))
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
    """Write the folder of the server, which has none of the data, and those of all devices, `device-0`, `device-1`, ….

    Each is all that one machine needs:

        server/plan.npz                       the plan
        server/job.npz, job.json              the key of the noise, the channels
        device-k/terms.json, model.json       what the device agrees to, and which model it computes
        device-k/data.npz                     X and y of this device alone
        device-k/secret                       salts the names of what it was asked
        device-k/ledger.jsonl, answer.npz     what has left the device, once it has answered, and its last answer

    Nobody but their owner can look into these folders, from when they are created.

    Args:
        with_data: whether devices get their part of the scenario's data; else each brings a data.npz of its own.
    """
    private_folder(folder)
    job.save(private_folder(folder / SERVER))
    own = not isinstance(
        inputs.posterior, Regression
    )  # a model of one's own is no file: see `open_device`
    raw, coordinates = (
        inputs.posterior if own else build_posterior(scenario)[0],
        inputs.posterior.coordinates,
    )
    model: dict[str, Any] = {}
    if isinstance(raw, Regression):
        model = {
            "intercept": raw.intercept,
            "prior_std": raw.prior_std * job.plan.devices**0.5,
        }
    if isinstance(raw, SoftmaxPosterior):
        model["classes"] = list(raw.class_names)
    whitening = (
        None if coordinates is None or own else np.asarray(coordinates.matrix).tolist()
    )
    about = {
        "model": model,
        "whitening": whitening,
        "prior_on": scenario.posterior.prior_on,
    }
    for k, spent in enumerate(job.plan.ledger):
        place = private_folder(folder / DEVICE.format(k))
        terms = job.terms(k)
        terms.save(place / "terms.json")
        if spent > 0:
            terms.open_ledger(place).charge("before", 0, [[spent]])
        write_text(place / "model.json", json.dumps(about))
        with replacing(place / "secret", mode=0o600) as file:
            file.write(secrets.token_bytes(32))
        if with_data and isinstance(raw, Regression):
            rows = raw.features[k, : raw.sizes[k]]
            features = rows[:, :-1] if raw.intercept else rows
            with replacing(place / "data.npz", mode=0o600) as file:
                np.savez(file, X=features, y=raw.outcomes[k, : raw.sizes[k]])
