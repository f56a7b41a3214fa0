"""Attacks on transcripts: what is attacked, neighbouring data sets through the real kernel or sampler, and the tests.

A `Target` is a plan at its worst, and what it claims for every device and round; `window` chooses rounds to listen to.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.apps.audit.canary import Canary, Pair, TurningCanary, canary_pair, direction
from wflmc.dynamics import Array, overdamped
from wflmc.planning.plan import Plan
from wflmc.posterior import Posterior, Regression
from wflmc.privacy.accountants import epsilon_spent, positive
from wflmc.sampling import (
    CHAIN_AXES,
    KernelRounds,
    State,
    kernel_rounds,
    round_keys,
    sample,
    step,
    transmit,
)
from wflmc.sums.devices import Sum
from wflmc.support.errors import InputError
from wflmc.support.keys import host_generator, named

Mask = NDArray[np.bool_]
Statistics = NDArray[np.floating]
Run = Callable[[jax.Array, int, int], tuple[Statistics, Statistics]]

MAIN_SHARE = 14.0
"""Share of the main test in the probability to be wrong, where each other attack's tests have 1."""
CHUNK = 2**22
"""Numbers of a round's transcripts that are computed at a time."""
PARTS = 4
"""How many times as many trials the main attack has as the other ones by the kernel, and so many chunks at least."""
COLUMNS = 4
"""Tests that transcripts of one canary have room for; a fixed number, so that all of them are compiled once."""
RAW = 1e4
"""Norm of a canary's gradient over the clip, and over what is sent."""


class Target(NamedTuple):
    """A plan under attack."""

    plan: Plan
    """The plan, every device arriving as strongly as the audit assumes."""
    device: int
    loss: Array
    """Claimed by the plan, [S, K]."""
    delta: Array
    """[K]."""
    signal: Array
    """Half of what the plan means to arrive of a device's canary and not of its neighbour, [S, K]."""
    raw: float
    """Norm of the canary's gradient before any clipping."""
    others: Array
    """What known examples beside a canary add against it, [K]: then it and an empty example in its place arrive as
    ±signal, whatever the clips."""

    @property
    def neighbour(self) -> float:
        """The factor of the canary in the neighbouring data set: −1, or 0 where neighbours are silent or empty."""
        return -1.0 if self.plan.privacy.adjacency == "replace" else 0.0

    @property
    def midpoint(self) -> Array:
        """What arrives half way between the neighbours, [S, K]: half of the signal where one of them is silent."""
        silent = self.neighbour == 0 and self.plan.privacy.unit == "device"
        return self.signal if silent else np.zeros_like(self.signal)


def float32_rounds(plan: Plan) -> KernelRounds:
    """Return the rounds of a plan as the kernel takes them."""
    return jax.tree.map(
        lambda values: np.asarray(values, np.float32), kernel_rounds(plan)
    )


def attack_target(
    plan: Plan,
    delta: ArrayLike | None = None,
    device: int | None = None,
    csi_error: float | None = None,
) -> Target:
    """Check what was asked for, and take the plan at its worst: all devices as strong as they may arrive."""
    if not plan.clips:
        raise InputError(
            "plan",
            "a scheme that does not clip",
            "one that clips: without it nothing is promised",
        )
    devices, loss = plan.devices, plan.loss
    chance = plan.privacy.delta if delta is None else delta
    if chance is None:
        raise InputError(
            "delta",
            None,
            "given: this plan has no privacy constraint, and ε is stated at a δ",
        )
    deltas = positive("delta", chance, 1)
    if deltas.ndim > 1 or deltas.size not in (1, devices):
        raise InputError(
            "delta", chance, f"one number, or one for each of the {devices} devices"
        )
    deltas = np.broadcast_to(deltas.reshape(-1), (devices,))
    worst = (
        int(np.argmax(epsilon_spent(loss.sum(0), deltas))) if device is None else device
    )
    if not 0 <= worst < devices:
        raise InputError("device", device, f"between 0 and {devices - 1}")
    if csi_error is not None and not 0 <= csi_error < 1:
        raise InputError("csi_error", csi_error, "at least 0 and below 1")
    strength = plan.context.uncertainty if csi_error is None else 1 / (1 - csi_error)
    received = plan.received
    if strength > 1 or received is not None:
        received = np.maximum(
            strength, 0.0 if received is None else received
        ) * np.ones_like(plan.weight)
    half = plan.privacy.half_change(plan.clip, plan.example_clip)
    amplitude = plan.context.uncertainty * plan.weight / plan.scale[:, None]
    largest = np.where(np.isfinite(plan.clip), plan.clip, plan.example_clip).max()
    empty = plan.privacy.unit == "record" and plan.privacy.adjacency == "add-remove"
    # What devices receive does not change what they may send; canaries do not depend on that noise.
    attacked = replace(
        plan,
        rounds=replace(plan.rounds, received=received),
        context=replace(plan.context, downlink_noise=0.0),
    )
    signal, raw = (
        plan.gain[:, None] * amplitude * half,
        RAW * largest * max(1.0, 1 / plan.gain.min()),
    )
    return Target(
        attacked,
        worst,
        loss,
        deltas,
        signal,
        float(min(raw, 1e15)),
        half if empty else np.zeros(devices),
    )


def above_cap(plan: Plan, factor: float = 2.0) -> Plan:
    """Return a plan to attack the server's noise with: gains `factor` times those at which the channel alone is enough.

    No sensible plan sends so strongly. The server must add the rest of the noise, which hides nothing from itself;
    bound, objective and power share are those of the given plan, and mean nothing here.
    """
    if not factor > 1:
        raise InputError("factor", factor, "above 1")
    at_cap = plan.scale * np.sqrt(
        plan.dynamics.noise_step(plan.step_size) * plan.noise_power / 2
    )
    gain = np.maximum(plan.gain, factor * at_cap)
    rest = plan.langevin_noise - plan.noise_power * (plan.kick * plan.scale / gain) ** 2
    return plan.with_rounds(gain=gain, server_noise=rest)


def window(loss: Array, limit: float) -> Mask:
    """Return the rounds to attack: a run of them that is claimed to lose as much as possible within a limit, [S].

    An attack of n trials proves nothing about losses far beyond log n, but claims hold for any part of a transcript.
    A device that is said never to send is attacked in all rounds.
    """
    if not np.any(loss > 0):
        return np.ones(loss.size, dtype=bool)
    best, start, total, chosen = 0.0, 0, 0.0, slice(0, 0)
    for stop in range(loss.size):
        total += loss[stop]
        while total > limit and start <= stop:
            total -= loss[start]
            start += 1
        if total > best:
            best, chosen = total, slice(start, stop + 1)
    mask = np.zeros(loss.size, dtype=bool)
    if best == 0:  # every round is beyond the limit
        mask[np.argmin(np.where(loss > 0, loss, np.inf))] = True
    else:
        mask[chosen] = loss[chosen] > 0
    return mask


def pairs(mask: Mask, first: int = 0) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return neighbours among the chosen rounds, two by two, beginning with the first or the second of them."""
    at = np.flatnonzero(mask)[first:]
    count = at.size // 2
    return at[0 : 2 * count : 2], at[1 : 2 * count : 2]


def differences(
    signal: Array, mask: Mask, first: int = 0, gain: Array | None = None
) -> Array:
    """Return the best weights that cancel noise which is in two neighbouring rounds as their gains are, or the same."""
    one, two = pairs(mask, first)
    strength = np.ones(mask.size) if gain is None else gain
    weight = np.zeros(signal.shape)
    across = signal[..., one] * strength[two] - signal[..., two] * strength[one]
    part = across / (strength[one] ** 2 + strength[two] ** 2)
    weight[..., one], weight[..., two] = part * strength[two], -part * strength[one]
    return weight


class AttackQuestion(NamedTuple):
    """One question to a transcript: + or −, by a statistic with mean ±μ/2 and variance 1 if all is as claimed."""

    name: str
    device: int
    rounds: int
    mu: float
    """What the plan claims of the device over these rounds."""
    visible_mu: float
    """μ that this test sees of it."""
    share: float = 1.0
    """Of the probability to be wrong, in proportion to the other tests."""


class Attack(NamedTuple):
    """Transcripts of both data sets, and the tests on them."""

    tests: tuple[AttackQuestion, ...]
    trials: int
    """Of each data set."""
    chunk: int
    """Of them at a time."""
    run: Run
    """(key, first trial, count) -> statistics [count, test] of the transcripts of + and of −."""


Tests = list[tuple[AttackQuestion, Array]]
"""Questions, and their weights[S]."""


def _attack(
    tests: list[AttackQuestion], trials: int, numbers: int, run: Run, least: int = 1
) -> Attack:
    """Return an attack in equal chunks, at least so many of them.

    Args:
        numbers: that one trial takes in a round.
    """
    chunks = max(least, -(-trials // max(1, CHUNK // (4 * numbers))))
    size = -(-trials // chunks)
    return Attack(tuple(tests), chunks * size, size, run)


def _apart(side: Callable[[jax.Array, int, int, int], Statistics]) -> Run:
    """Compute transcripts of + and − apart, by side(key, 0 for + or 1 for −, first trial, count)."""
    return lambda key, first, count: (
        side(named(key, "+"), 0, first, count),
        side(named(key, "-"), 1, first, count),
    )


def _unit(weight: Array, noise_power: float) -> Array:
    """Return weights[..., S] that give noise of variance 1."""
    size = np.sqrt(noise_power * np.sum(weight**2, axis=-1, keepdims=True))
    return np.divide(weight, size, out=np.zeros_like(weight), where=size > 0)


def _expected_signal(signal: Array, gain: Array) -> Array:
    """Return what to look for, [S]: the signal, or the gain where a device is said to send none."""
    return np.where(signal.any(0), signal, gain)


def _question(
    name: str,
    target: Target,
    device: int,
    signal: Array,
    weight: Array,
    mask: Mask,
    share: float = 1.0,
) -> AttackQuestion:
    mu = float(np.sqrt(2 * target.loss[mask, device].sum()))
    visible = 2 * float(signal @ _unit(weight, target.plan.noise_power))
    return AttackQuestion(name, device, int(mask.sum()), mu, visible, share)


@partial(jax.jit, static_argnames=("count",))
def _filtered(
    key: jax.Array,
    canary: Canary,
    rounds: KernelRounds,
    signs: jax.Array,
    weight: jax.Array,
    first: int,
    count: int,
) -> jax.Array:
    """Return Σ_s weight[s] y[s] of `count` transcripts by the kernel, round by round.

    With weight[S, test] all tests see the first coordinate, with weight[S, 1, m] there is one for each coordinate; a
    canary may differ from trial to trial. It turns with signs[S].
    """
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, first + jnp.arange(count))
    dim, all_rounds = canary.example.shape[-1], jax.tree.map(jnp.asarray, rounds)
    by_coordinate = weight.ndim == 3
    axis = 0 if by_coordinate else None

    def body(
        carry: tuple[State, jax.Array], at: tuple[jax.Array, ...]
    ) -> tuple[tuple[State, jax.Array], None]:
        state, total = carry
        index, sign, filters = at
        now = all_rounds[index]
        turned = canary._replace(example=sign * canary.example, base=sign * canary.base)
        keys_of_round = round_keys(keys, index)
        state, info = jax.vmap(step, (0, axis, CHAIN_AXES, None), (CHAIN_AXES, 0))(
            keys_of_round, turned, state, now
        )
        received = info.received if by_coordinate else info.received[:, :1]
        return (state, total + received * filters), None

    still = (
        jnp.zeros((count, dim)) if all_rounds.constants.dynamics.has_velocity else None
    )
    state = State(jnp.zeros((count, dim)), jnp.zeros((), jnp.int32), still)
    start = state, jnp.zeros((count, weight.shape[-1]))
    (_, total), _ = jax.lax.scan(
        body, start, (jnp.arange(weight.shape[0]), signs, weight)
    )
    return total


def _by_kernel(
    target: Target,
    tests: Tests,
    trials: int,
    signs: Array | None = None,
    others: tuple[float, float] | None = None,
    chunks: int = 1,
) -> Attack:
    """Return attacks with a raw canary on one device, along the first of two coordinates; others send nothing.

    Args:
        signs: of the canary in every round, [S].
        others: what known examples of the device add to both neighbours, two numbers.
    """
    plan, k = target.plan, target.device
    signs = np.ones(len(plan.rounds)) if signs is None else signs
    example, weight = (
        np.zeros((plan.devices, 2), np.float32),
        np.zeros((len(plan.rounds), COLUMNS), np.float32),
    )
    base = np.zeros_like(example)
    example[k, 0], base[k] = (
        target.raw,
        (-target.others[k], 0) if others is None else others,
    )
    sides = Canary(example, base), Canary(np.float32(target.neighbour) * example, base)
    for column, (_, values) in enumerate(tests):
        weight[:, column] = _unit(values, plan.noise_power)
    midpoint = (signs * target.midpoint[:, k]) @ weight
    rounds, turns = float32_rounds(plan), signs.astype(np.float32)

    def side(key: jax.Array, which: int, first: int, count: int) -> Statistics:
        statistics = (
            np.asarray(
                _filtered(key, sides[which], rounds, turns, weight, first, count)
            )
            - midpoint
        )
        return statistics[:, : len(tests)]

    return _attack([question for question, _ in tests], trials, 2, _apart(side), chunks)


def constant(target: Target, trials: int, mu_limit: float) -> Attack:
    """Let the canary point one way in all rounds: the strongest attack on code that does what it says."""
    k, gain = target.device, target.plan.gain
    signal, loss, sends = (
        target.signal[:, k],
        target.loss[:, k],
        target.plan.weight[:, k] > 0,
    )
    expected, everywhere, part = (
        _expected_signal(signal, gain),
        window(loss, np.inf),
        window(loss, mu_limit**2 / 2),
    )
    chosen = [("matched filter", expected * everywhere, everywhere, MAIN_SHARE)]
    if part.sum() < everywhere.sum():
        chosen.append(
            ("matched filter, part of the rounds", expected * part, part, 1.0)
        )
    if sends.any() and not sends.all():
        chosen.append(("rounds of silence", gain * ~sends, ~sends, 1.0))
    tests = [
        (_question(name, target, k, signal, w, mask, share), w)
        for name, w, mask, share in chosen
    ]
    return _by_kernel(target, tests, trials, chunks=PARTS)


def turning(key: jax.Array, target: Target, trials: int, mu_limit: float) -> Attack:
    """Change its sign from round to round by a fixed pattern: noise that is used twice cannot hide it."""
    k, gain = target.device, target.plan.gain
    mask = window(target.loss[:, k], mu_limit**2 / 2)
    signs = host_generator(key, "signs").choice([-1.0, 1.0], size=gain.size)
    one, two = pairs(mask)
    signs[two] = -signs[one]
    signal, expected = (
        signs * target.signal[:, k],
        signs * _expected_signal(target.signal[:, k], gain),
    )
    filters = {
        "signs that vary": expected * mask,
        "differences of rounds": differences(expected, mask),
        "scaled differences of rounds": differences(expected, mask, gain=gain),
    }
    tests = [
        (_question(name, target, k, signal, w, mask), w)
        for name, w in filters.items()
        if w.any()
    ]
    return _by_kernel(target, tests, trials, signs)


def full_device(target: Target, trials: int, mu_limit: float) -> Attack:
    """Attack one record beside others that are known and alone make twice the device's clip, which then bites."""
    k, plan = target.device, target.plan
    mask = window(target.loss[:, k], mu_limit**2 / 2)
    size, half = (
        float(plan.clip[k]),
        float(plan.example_clip[k]) * (1 - target.neighbour) / 2,
    )
    signal = (
        target.signal[:, k] * size * half / (np.hypot(2 * size, half) * min(size, half))
    )
    weight = _expected_signal(signal, plan.gain) * mask
    test = _question(
        "record on a device that is clipped", target, k, signal, weight, mask
    )
    return _by_kernel(
        target,
        [(test, weight)],
        trials,
        others=(half - float(plan.example_clip[k]), 2 * size),
    )


def every_device(target: Target, trials: int, mu_limit: float) -> Attack:
    """Put a canary on every device at once, each in a coordinate of its own and with signs of its own."""
    plan, devices = target.plan, target.plan.devices
    masks = np.stack([window(loss, mu_limit**2 / 2) for loss in target.loss.T], axis=1)
    weights = _expected_signal(target.signal, plan.gain[:, None]) * masks
    tests = [
        _question(
            "every device",
            target,
            k,
            target.signal[:, k],
            weights[:, k],
            masks[:, k],
            1 / devices,
        )
        for k in range(devices)
    ]
    unit = np.stack([_unit(weight, plan.noise_power) for weight in weights.T], axis=1)
    midpoint, rounds = np.sum(target.midpoint * unit, axis=0), float32_rounds(plan)
    weight, same = (
        unit.astype(np.float32)[:, None],
        np.ones(len(plan.rounds), np.float32),
    )

    def run(key: jax.Array, first: int, count: int) -> tuple[Statistics, Statistics]:
        generator = host_generator(jax.random.fold_in(key, first), "signs")
        signs = generator.choice(np.array([-1, 1], np.float32), size=(count, devices))
        base = np.broadcast_to(-target.others.astype(np.float32), signs.shape)
        factors = (
            np.where(signs > 0, 1, target.neighbour),
            np.where(signs > 0, target.neighbour, 1),
        )
        one, two = (
            np.asarray(
                _filtered(
                    named(key, name),
                    Canary(loud, base),
                    rounds,
                    same,
                    weight,
                    first,
                    count,
                )
            )
            - midpoint
            for name, loud in zip(
                "+-", (target.raw * np.stack(factors)).astype(np.float32), strict=True
            )
        )
        return np.where(signs > 0, one, two), np.where(signs > 0, two, one)

    return _attack(tests, trials, devices, run)


def _slow_plan(target: Target, dim: int, reach: float) -> Plan:
    """Return the plan for a run from θ = 0 that goes no further than `reach`: θ then changes nothing of what is sent.

    Step sizes are the server's, as is the noise that it adds and knows: neither is in y. They are such that θ moves
    by the same share of y in all rounds, and float32 keeps every one of them. Steps are overdamped, whatever the plan's
    are: y can be read off them. Nothing is really sent, so no budget stands in the way.
    """
    plan = target.plan
    strength = 1.0 if plan.received is None else plan.received.max()
    total = np.where(np.isfinite(plan.clip), plan.clip, plan.example_clip).sum()
    share = reach / float(
        np.sum(strength * total * plan.gain + 6 * np.sqrt(plan.noise_power))
    )
    slow = plan.with_rounds(
        step_size=share * plan.gain / plan.scale,
        server_noise=np.zeros(len(plan.rounds)),
    )
    context = replace(
        plan.context,
        burn_in=0,
        init="zero",
        dim=dim,
        enforced=False,
        dynamics=overdamped(),
    )
    return replace(slow, context=context)


def _transcripts(
    key: jax.Array, posterior: Posterior, plan: Plan, first: int, count: int
) -> tuple[Array, Array]:
    """Return y[trial, S, m] and θ before each round, from what `wflmc.sample` returns: a run that starts at 0."""
    trace = sample(key, posterior, plan, count, numbers=range(first, first + count))
    after = np.asarray(trace.theta, dtype=np.float64)
    before = np.concatenate([np.zeros_like(after[:, :1]), after[:, :-1]], axis=1)
    return (before - after) * (plan.gain / (plan.step_size * plan.scale))[
        :, None
    ], before


def by_sampler(target: Target, trials: int, mu_limit: float) -> Attack:
    """Attack whole runs of `wflmc.sample`, keys and all, with a canary whose sign follows θ, which the server knows."""
    k, plan = target.device, _slow_plan(target, 2, 1e-3)
    mask, signal = window(target.loss[:, k], mu_limit**2 / 2), target.signal[:, k]
    expected = _expected_signal(signal, plan.gain)
    turn = np.float32(
        np.min(plan.step_size * plan.scale * np.sqrt(plan.noise_power) / plan.gain)
    )
    example = np.zeros(plan.devices, np.float32)
    example[k] = target.raw
    base = np.where(example > 0, -target.others, 0.0).astype(np.float32)
    whole = _question("whole runs", target, k, signal, expected * mask, mask)
    offsets = [first for first in (0, 1) if pairs(mask, first)[0].size]
    visible = whole.visible_mu / 2**0.5  # every second pair of signs is of no use
    names = [
        "whole runs, differences of rounds",
        "whole runs, differences beginning with the second",
    ]
    tests = [
        whole,
        *(whole._replace(name=names[first], visible_mu=visible) for first in offsets),
    ]

    def side(key: jax.Array, which: int, first: int, count: int) -> Statistics:
        canary = TurningCanary(
            np.float32((1.0, target.neighbour)[which]) * example, base, turn
        )
        received, before = _transcripts(key, canary, plan, first, count)
        signs = direction(before.astype(np.float32), turn).astype(np.float64)
        filters = [
            expected * signs * mask,
            *(differences(expected * signs, mask, first) for first in offsets),
        ]
        centred = received[..., 0] - signs * target.midpoint[:, k]
        return np.stack(
            [np.sum(_unit(w, plan.noise_power) * centred, axis=1) for w in filters],
            axis=1,
        )

    return _attack(tests, trials, len(plan.rounds), _apart(side))


def by_model(
    posterior: Regression, target: Target, trials: int, mu_limit: float
) -> Attack:
    """Attack whole runs on two canary data sets for a model of this kind."""
    plan, k = target.plan, target.device
    size = RAW * float(
        np.where(np.isfinite(plan.clip), plan.clip, plan.example_clip).max()
    )
    sides = canary_pair(posterior, k, size, target.neighbour, float(target.others[k]))
    name = type(posterior).__name__.removesuffix("Posterior").lower() + " model"
    # Even an unclipped canary must not go far enough to be learned.
    return by_pair(target, sides, 0.1 / (RAW * size), trials, mu_limit, name)


def by_pair(
    target: Target, sides: Pair, reach: float, trials: int, mu_limit: float, name: str
) -> Attack:
    """Attack whole runs of `wflmc.sample` on two neighbouring posteriors, told apart by what they send at θ = 0."""
    k, dim, plan = target.device, sides[0].dim, _slow_plan(target, sides[0].dim, reach)
    mask = window(target.loss[:, k], mu_limit**2 / 2)
    by_example = bool(np.isfinite(plan.example_clip).any())
    rounds, start = (
        jax.tree.map(jnp.asarray, float32_rounds(plan)),
        jnp.zeros((len(plan.rounds), dim)),
    )
    sent = [
        transmitted(side.on_accelerator(1, 2.0**30, by_example), rounds, start).double
        for side in sides
    ]
    midpoint, weight = (sent[0] + sent[1]) / 2, mask[:, None] * (sent[0] - sent[1])
    size = np.sqrt(plan.noise_power * np.sum(weight**2))
    if not np.isfinite(size) or size == 0:
        raise InputError(
            "posterior",
            "this pair of data sets",
            "one whose gradients at θ = 0 are finite and differ",
        )
    mu = float(np.sqrt(2 * target.loss[mask, k].sum()))

    def side(key: jax.Array, which: int, first: int, count: int) -> Statistics:
        received, _ = _transcripts(key, sides[which], plan, first, count)
        return np.einsum("nsm,sm->n", received - midpoint, weight / size)[:, None]

    return _attack(
        [AttackQuestion(name, k, int(mask.sum()), mu, mu)],
        trials,
        len(plan.rounds) * max(2, dim),
        _apart(side),
    )


@jax.jit
def transmitted(posterior: Posterior, rounds: KernelRounds, theta: jax.Array) -> Sum:
    """Return the signal of every round at theta[S, m], before it is rounded.

    θ is an argument: of a product with zeros known at compile time, XLA for CPUs (jaxlib 0.10.2) makes a fused loop
    that reads beyond them from a few hundred rounds on.
    """

    def one(index: jax.Array, at: jax.Array) -> Sum:
        return transmit(posterior, at, rounds[index]).total

    return jax.vmap(one)(jnp.arange(len(theta)), theta)
