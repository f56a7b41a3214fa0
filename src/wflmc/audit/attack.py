"""Attacks on transcripts: neighbouring data sets through the real kernel or sampler, and the tests between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.audit.canary import Canary, Flock, Weathercock, direction
from wflmc.audit.target import Array, Mask, Target, differences, matched, pairs, scaled_differences, window
from wflmc.errors import InputError
from wflmc.keys import host_generator, named
from wflmc.planning import Plan
from wflmc.posterior.summation import Sum, as_pair
from wflmc.sampling import sample
from wflmc.sampling.kernel import Rounds, rounds_of, step, transmit

Statistics = NDArray[Any]

CHUNK = 2**22
"""Numbers of a round's transcripts that are worked out at a time."""
PARTS = 4
"""How many times as many trials the main attack has as the other ones by the kernel, and so many chunks at least."""
COLUMNS = 4
"""Tests that transcripts of one canary have room for; a fixed number, so that all of them are compiled once."""


class Question(NamedTuple):
    """One question to a transcript: + or −, by a statistic with mean ±reach/2 and variance 1 if all is as claimed."""

    name: str
    device: int
    rounds: int
    mu: float
    """What the plan claims of the device over these rounds."""
    reach: float
    """μ that this test sees of it."""
    share: float = 1.0
    """Of the probability to be wrong, in proportion to the other tests."""


class Attack(NamedTuple):
    """Transcripts of both data sets, and the tests on them."""

    tests: tuple[Question, ...]
    trials: int
    """Of each data set."""
    chunk: int
    """Of them at a time."""
    run: Callable[[jax.Array, int, int], tuple[Statistics, Statistics]]
    """(key, first trial, count) -> statistics [count, test] of the transcripts of + and of −."""


def in_chunks(trials: int, numbers: int, least: int = 1) -> tuple[int, int]:
    """Trials and how many at a time, in equal chunks and at least so many, where one takes so many numbers a round."""
    chunks = max(least, -(-trials // max(1, CHUNK // (4 * numbers))))
    size = -(-trials // chunks)
    return chunks * size, size


def _unit(weight: Array, noise_power: float) -> Array:
    """Weights[..., S] that give noise of variance 1."""
    size = np.sqrt(noise_power * np.sum(weight**2, axis=-1, keepdims=True))
    return np.divide(weight, size, out=np.zeros_like(weight), where=size > 0)


@partial(jax.jit, static_argnames=("count",))
def _listen(
    key: jax.Array, posterior: Any, rounds: Rounds, signs: jax.Array, weight: jax.Array, first: Any, count: int
) -> jax.Array:
    """Σ_s weight[s] y[s] of `count` transcripts by the kernel, round by round.

    With weight[S, test] all tests hear the first coordinate, with weight[S, 1, m] there is one for each coordinate; a
    posterior may differ from trial to trial. It turns with signs[S].
    """
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, first + jnp.arange(count))
    dim = posterior.example.shape[-1]
    own = weight.ndim == 3
    here = jax.tree.map(jnp.asarray, rounds)
    axis = 0 if own else None

    def body(carry: tuple[jax.Array, jax.Array], at: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, jax.Array], None]:
        theta, total = carry
        index, sign, filters = at
        now = here.at(index)
        turned = posterior._replace(example=sign * posterior.example, base=sign * posterior.base)
        round_keys = jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        theta, info = jax.vmap(step, (0, axis, 0, None))(round_keys, turned, theta, now)
        heard = info.received if own else info.received[:, :1]
        return (theta, total + heard * filters), None

    width = dim if rounds.friction is None else 2 * dim  # a velocity as well
    start = jnp.zeros((count, width)), jnp.zeros((count, weight.shape[-1]))
    (_, total), _ = jax.lax.scan(body, start, (jnp.arange(weight.shape[0]), signs, weight))
    return total


def _in_float32(rounds: Rounds) -> Rounds:
    return jax.tree.map(lambda values: np.asarray(values, np.float32), rounds)


def _by_kernel(
    target: Target,
    sides: tuple[Canary, Canary],
    signs: Array,
    tests: list[tuple[Question, Array]],
    trials: int,
    chunks: int = 1,
) -> Attack:
    """Attacks with one canary and its neighbour, whose signs go by signs[S]."""
    weight = np.zeros((target.plan.rounds, COLUMNS), np.float32)
    for column, (_, values) in enumerate(tests):
        weight[:, column] = _unit(values, target.plan.noise_power)
    middle = (signs * target.middle[:, target.device]) @ weight
    rounds, turns = _in_float32(target.rounds), signs.astype(np.float32)
    total, chunk = in_chunks(trials, 2, chunks)

    def run(key: jax.Array, first: int, count: int) -> tuple[Statistics, Statistics]:
        heard = [
            np.asarray(_listen(named(key, name), side, rounds, turns, weight, first, count)) - middle
            for name, side in zip("+-", sides, strict=True)
        ]
        return heard[0][:, : len(tests)], heard[1][:, : len(tests)]

    return Attack(tuple(test for test, _ in tests), total, chunk, run)


def _canaries(target: Target, others: tuple[float, float] | None = None) -> tuple[Canary, Canary]:
    """One device with a raw canary along the first of two coordinates, and its neighbour; others send nothing.

    Args:
        others: what known examples of the device add to both.
    """
    example, k = np.zeros((target.plan.devices, 2), np.float32), target.device
    base = np.zeros_like(example)
    example[k, 0], base[k] = target.raw, (-target.others[k], 0) if others is None else others
    return Canary(example, base), Canary(np.float32(target.away) * example, base)


def _test(
    name: str, target: Target, device: int, signal: Array, weight: Array, mask: Mask, share: float = 1.0
) -> Question:
    mu = float(np.sqrt(2 * target.loss[mask, device].sum()))
    reach = 2 * float(signal @ _unit(weight, target.plan.noise_power))
    return Question(name, device, int(mask.sum()), mu, reach, share)


def constant(target: Target, trials: int, mu_limit: float, share: float) -> Attack:
    """The canary points one way in all rounds: the strongest attack on code that does what it says."""
    k, gain = target.device, target.plan.gain
    signal, loss = target.signal[:, k], target.loss[:, k]
    sends = target.plan.weight[:, k] > 0
    everywhere, part = window(loss, np.inf), window(loss, mu_limit**2 / 2)
    chosen = [("matched filter", everywhere, share)]
    if part.sum() < everywhere.sum():
        chosen.append(("matched filter, part of the rounds", part, 1.0))
    tests = []
    for name, mask, portion in chosen:
        weight = matched(np.where(signal.any(), signal, gain), mask)
        tests.append((_test(name, target, k, signal, weight, mask, portion), weight))
    if sends.any() and not sends.all():
        weight = gain * ~sends
        tests.append((_test("rounds of silence", target, k, signal, weight, ~sends), weight))
    return _by_kernel(target, _canaries(target), np.ones(gain.size), tests, trials, chunks=PARTS)


def turning(key: jax.Array, target: Target, trials: int, mu_limit: float) -> Attack:
    """Its sign changes from round to round by a fixed pattern: noise that is used twice cannot hide it."""
    k, gain = target.device, target.plan.gain
    mask = window(target.loss[:, k], mu_limit**2 / 2)
    signs = host_generator(key, "signs").choice([-1.0, 1.0], size=gain.size)
    one, two = pairs(mask)
    signs[two] = -signs[one]
    size = target.signal[:, k]
    signal = signs * size
    shown = signs * np.where(size.any(), size, gain)
    filters = {
        "signs that vary": matched(shown, mask),
        "differences of rounds": differences(shown, mask),
        "scaled differences of rounds": scaled_differences(shown, mask, gain),
    }
    tests = [(_test(name, target, k, signal, w, mask), w) for name, w in filters.items() if w.any()]
    return _by_kernel(target, _canaries(target), signs, tests, trials)


def full_device(target: Target, trials: int, mu_limit: float) -> Attack:
    """One record beside others that are known and alone make twice the device's clip, which then bites."""
    k = target.device
    mask = window(target.loss[:, k], mu_limit**2 / 2)
    size, half = float(target.plan.clip[k]), float(target.plan.example_clip[k]) * (1 - target.away) / 2
    signal = target.signal[:, k] * size * half / (np.hypot(2 * size, half) * min(size, half))
    weight = matched(np.where(signal.any(), signal, target.plan.gain), mask)
    tests = [(_test("record on a device that is clipped", target, k, signal, weight, mask), weight)]
    sides = _canaries(target, (half - float(target.plan.example_clip[k]), 2 * size))
    return _by_kernel(target, sides, np.ones(weight.size), tests, trials)


def every_device(target: Target, trials: int, mu_limit: float) -> Attack:
    """A canary on every device at once, each in a coordinate of its own and with signs of its own."""
    plan, gain = target.plan, target.plan.gain
    masks = [window(target.loss[:, k], mu_limit**2 / 2) for k in range(plan.devices)]
    shown = np.where(target.signal.any(0), target.signal, gain[:, None])
    weights = [matched(shown[:, k], mask) for k, mask in enumerate(masks)]
    tests = tuple(
        _test("every device", target, k, target.signal[:, k], weights[k], mask, 1 / plan.devices)
        for k, mask in enumerate(masks)
    )
    unit = np.stack([_unit(weight, plan.noise_power) for weight in weights], axis=1)
    weight = unit.astype(np.float32)[:, None]
    rounds, same = _in_float32(target.rounds), np.ones(gain.size, np.float32)
    middle = np.sum(target.middle * unit, axis=0)
    total, chunk = in_chunks(trials, plan.devices)

    def run(key: jax.Array, first: int, count: int) -> tuple[Statistics, Statistics]:
        generator = host_generator(jax.random.fold_in(key, first), "signs")
        signs = generator.choice(np.array([-1, 1], np.float32), size=(count, plan.devices))
        base = np.broadcast_to(-target.others.astype(np.float32), signs.shape)
        factors = np.where(signs > 0, 1, target.away), np.where(signs > 0, target.away, 1)
        one, two = (
            np.asarray(_listen(named(key, name), Flock(loud, base), rounds, same, weight, first, count)) - middle
            for name, loud in zip("+-", (target.raw * np.stack(factors)).astype(np.float32), strict=True)
        )
        return np.where(signs > 0, one, two), np.where(signs > 0, two, one)

    return Attack(tests, total, chunk, run)


def _still(target: Target, dim: int, reach: float) -> Plan:
    """The plan for a run from θ = 0 that goes no further than `reach`, so that θ changes nothing of what is sent.

    Step sizes are the server's, as is the noise that it adds and knows: neither is in y. They are such that θ moves
    by the same share of y in all rounds, and float32 keeps every one of them. Steps are overdamped, whatever the plan's
    are: y can be read off them. Nothing is really sent, so no budget stands in the way.
    """
    plan = target.plan
    strength = 1.0 if plan.received is None else plan.received.max()
    together = np.where(np.isfinite(plan.clip), plan.clip, plan.example_clip).sum()
    share = reach / float(np.sum(strength * together * plan.gain + 6 * np.sqrt(plan.noise_power)))
    return dataclasses.replace(
        plan,
        step_size=share * plan.gain / plan.scale,
        server_noise=np.zeros(plan.rounds),
        burn_in=0,
        init="zero",
        dim=dim,
        enforced=False,
        friction=None,
    )


def _transcripts(key: jax.Array, posterior: Any, plan: Plan, first: int, count: int) -> tuple[Array, Array]:
    """y[trial, S, m] and θ before each round, from what `wflmc.sample` returns: a run that starts at 0."""
    trace = sample(key, posterior, plan, count, numbers=range(first, first + count))
    after = np.asarray(trace.theta, dtype=np.float64)
    before = np.concatenate([np.zeros_like(after[:, :1]), after[:, :-1]], axis=1)
    return (before - after) * (plan.gain / (plan.step_size * plan.scale))[:, None], before


def by_sampler(target: Target, trials: int, mu_limit: float) -> Attack:
    """Whole runs of `wflmc.sample`, keys and all, with a canary whose sign follows θ, which the server knows."""
    k, plan = target.device, _still(target, 2, 1e-3)
    mask = window(target.loss[:, k], mu_limit**2 / 2)
    size = target.signal[:, k]
    shown = np.where(size.any(), size, plan.gain)
    turn = np.float32(np.min(plan.step_size * plan.scale * np.sqrt(plan.noise_power) / plan.gain))
    example = np.zeros(plan.devices, np.float32)
    example[k] = target.raw
    base = np.where(example > 0, -target.others, 0.0).astype(np.float32)
    whole = _test("whole runs", target, k, size, matched(shown, mask), mask)
    offsets = [first for first in (0, 1) if pairs(mask, first)[0].size]
    reach = whole.reach / 2**0.5  # every second pair of signs is of no use
    names = ["whole runs, differences of rounds", "whole runs, differences beginning with the second"]
    tests = [whole, *(whole._replace(name=names[first], reach=reach) for first in offsets)]
    total, chunk = in_chunks(trials, plan.rounds)

    def side(key: jax.Array, factor: float, first: int, count: int) -> Statistics:
        canary = Weathercock(np.float32(factor) * example, base, turn)
        heard, before = _transcripts(key, canary, plan, first, count)
        signs = direction(before.astype(np.float32), turn).astype(np.float64)
        filters = [matched(shown * signs, mask), *(differences(shown * signs, mask, first) for first in offsets)]
        from_middle = heard[..., 0] - signs * target.middle[:, k]
        return np.stack([np.sum(_unit(w, plan.noise_power) * from_middle, axis=1) for w in filters], axis=1)

    def run(key: jax.Array, first: int, count: int) -> tuple[Statistics, Statistics]:
        return side(named(key, "+"), 1.0, first, count), side(named(key, "-"), target.away, first, count)

    return Attack(tuple(tests), total, chunk, run)


def by_model(target: Target, plus: Any, minus: Any, reach: float, trials: int, mu_limit: float, name: str) -> Attack:
    """Whole runs of `wflmc.sample` on two neighbouring posteriors, told apart by what they send at θ = 0."""
    k, plan = target.device, _still(target, plus.dim, reach)
    mask = window(target.loss[:, k], mu_limit**2 / 2)
    by_example = bool(np.isfinite(plan.example_clip).any())
    sent = [_sent(side.on_accelerator(1, 2.0**30, by_example), plan) for side in (plus, minus)]
    middle, weight = (sent[0] + sent[1]) / 2, mask[:, None] * (sent[0] - sent[1])
    size = np.sqrt(plan.noise_power * np.sum(weight**2))
    if not np.isfinite(size):
        raise InputError(
            "posterior", "a model whose gradients at θ = 0 are not finite", "one with finite gradients there"
        )
    if size == 0:
        raise InputError("posterior", "two data sets that send the same", "a pair whose gradients differ at θ = 0")
    mu = float(np.sqrt(2 * target.loss[mask, k].sum()))
    test = Question(name, k, int(mask.sum()), mu, mu)
    total, chunk = in_chunks(trials, plan.rounds * max(2, plus.dim))

    def side(key: jax.Array, posterior: Any, first: int, count: int) -> Statistics:
        heard, _ = _transcripts(key, posterior, plan, first, count)
        return np.einsum("nsm,sm->n", heard - middle, weight / size)[:, None]

    def run(key: jax.Array, first: int, count: int) -> tuple[Statistics, Statistics]:
        return side(named(key, "+"), plus, first, count), side(named(key, "-"), minus, first, count)

    return Attack((test,), total, chunk, run)


def _sent(posterior: Any, plan: Plan) -> Array:
    """What reaches the server at θ = 0, without noise, [S, m]."""
    rounds, start = jax.tree.map(jnp.asarray, _in_float32(rounds_of(plan))), jnp.zeros((plan.rounds, plan.dim))
    return transmitted(posterior, rounds, start).double


@jax.jit
def transmitted(posterior: Any, rounds: Rounds, theta: jax.Array) -> Sum:
    """The signal of every round at theta[S, m], as a pair.

    θ is an argument: of a product with zeros known at compile time, XLA for CPUs (jaxlib 0.10.2) makes a fused loop
    that reads beyond them from a few hundred rounds on.
    """

    def one(index: jax.Array, at: jax.Array) -> Sum:
        return as_pair(transmit(posterior, at, rounds.at(index))[0])

    return jax.vmap(one)(jnp.arange(len(theta)), theta)
