"""Attacks on transcripts: neighbouring data sets through the real kernel or sampler.

Each attack computes transcripts of two neighbouring data sets, called + and −, and a
number of tests on them. A test is a statistic of a transcript: above a threshold the
server decides for +, below it for −. If all is as the plan claims, the statistic is
N(±μ/2, 1), and no test does better than the trade-off curve of μ.

Small attacks take two coordinates and the kernel alone; others go through whole runs of
`wflmc.sample`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.apps.audit.canary import Canary, Pair, TurningCanary, canary_pair, direction
from wflmc.apps.audit.target import (
    CANARY_NORM_OVER_CLIP,
    RoundMask,
    Target,
    acting_clips,
    largest_clip,
    window,
)
from wflmc.dynamics import Array, overdamped
from wflmc.planning.plan import Plan
from wflmc.posterior import Posterior, Regression
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

Statistics = NDArray[np.floating]
"""Of transcripts, [trial, test]."""
SideStatistics = tuple[Statistics, Statistics]
"""Of transcripts of + and of −."""
Run = Callable[[jax.Array, int, int], SideStatistics]
"""From a key, the first trial and the number of trials to statistics of both sides."""
SideRun = Callable[[jax.Array, int, int, int], Statistics]
"""From a key, a side (0 for +, 1 for −), the first trial and the number of trials to
the statistics of that side."""

MAIN_RISK_WEIGHT = 14.0
"""Part of the probability to be wrong that the main test has, where a test of the other
attacks has 1."""
CHUNK_NUMBERS = 2**22
"""Numbers of a round's transcripts that are computed at a time: 16 MiB of float32."""
MAIN_TRIALS_FACTOR = 4
"""How many times as many trials the main attack has as the other ones by the kernel;
it has so many chunks at least, so that all of them compile the same program."""
TEST_COLUMNS = 4
"""Number of tests that transcripts of one canary have room for; fixed, so that all of
them are compiled once."""
SUM_MEMORY = 2.0**30
"""Limit of the memory of sums whose posteriors are compared, in bytes."""


class AttackQuestion(NamedTuple):
    """A test: + or −, by a statistic that is N(±μ/2, 1) if all is as claimed."""

    name: str
    device: int
    rounds: int
    """Number of rounds that the statistic uses."""
    mu: float
    """μ that the plan claims of the device over these rounds, √(2 Σ loss)."""
    visible_mu: float
    """μ that this test sees of it; it only places the threshold for counting."""
    risk_weight: float = 1.0
    """Its part of the probability to be wrong, in proportion to the other tests."""


class FilteredTest(NamedTuple):
    """A test whose statistic is a weighted sum of what arrives."""

    question: AttackQuestion
    weight: Array
    """Of every round, [S]; not yet normalized."""


class Attack(NamedTuple):
    """Transcripts of both data sets, and the tests on them."""

    tests: tuple[AttackQuestion, ...]
    trials: int
    """Of each data set."""
    chunk: int
    """Number of trials that are computed at a time."""
    run: Run
    """Computes a chunk of both sides."""


def float32_rounds(plan: Plan) -> KernelRounds:
    """Return the rounds of a plan as the kernel takes them, in float32.

    These are the numbers that chains are simulated with: an attack by the kernel has to
    see the same gains, weights and clipping thresholds as a run of `wflmc.sample`.

    Args:
        plan: whose rounds are attacked.
    """
    return jax.tree.map(
        lambda values: np.asarray(values, np.float32), kernel_rounds(plan)
    )


def pairs(mask: RoundMask, first: int = 0) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return neighbours among the chosen rounds, two by two.

    Noise that is drawn once for two rounds shows in the difference of a pair. A round
    that is left over at the end belongs to no pair; neighbours need not be successive
    rounds where the mask leaves some out.

    Args:
        mask: of the chosen rounds, [S].
        first: how many of the chosen rounds are skipped: with 0, pairs begin with the
            first, with 1 with the second.

    Returns:
        The indices of the earlier and of the later rounds of all pairs.
    """
    rounds = np.flatnonzero(mask)[first:]
    pair_count = rounds.size // 2
    earlier = rounds[0 : 2 * pair_count : 2]
    later = rounds[1 : 2 * pair_count : 2]
    return earlier, later


def differences(
    signal: Array,
    mask: RoundMask,
    first: int = 0,
    gain: Array | None = None,
) -> Array:
    """Return the weights that see most of a signal and cancel noise common to pairs.

    Of a pair of rounds the weights are the projection of its signal on the line
    orthogonal to the common noise, so that they are their own matched filter: for the
    gains a and b of its rounds, (x b − y a)/(a² + b²) times (b, −a). Rounds without a
    pair have weight 0.

    Args:
        signal: what is looked for, [..., S].
        mask: of the chosen rounds, [S].
        first: with which of the chosen rounds pairs begin, as of `pairs`.
        gain: amplitude of the common noise in every round, [S]; None where it is the
            same in all of them.

    Returns:
        Weights [..., S].
    """
    earlier, later = pairs(mask, first)
    amplitude = np.ones(mask.size) if gain is None else gain
    earlier_amplitude = amplitude[earlier]
    later_amplitude = amplitude[later]
    earlier_part = signal[..., earlier] * later_amplitude
    later_part = signal[..., later] * earlier_amplitude
    squares = earlier_amplitude**2 + later_amplitude**2
    coefficient = (earlier_part - later_part) / squares
    weight = np.zeros(signal.shape)
    weight[..., earlier] = coefficient * later_amplitude
    weight[..., later] = -coefficient * earlier_amplitude
    return weight


def _chunked_attack(
    tests: list[AttackQuestion],
    trials: int,
    run: Run,
    *,
    numbers_per_trial: int,
    min_chunks: int = 1,
) -> Attack:
    """Return an attack in equal chunks, of at least as many trials as asked for.

    Args:
        tests: on the transcripts.
        trials: of each data set.
        run: computes a chunk.
        numbers_per_trial: numbers of one trial in one array of a round; chunks leave
            room for four such arrays.
        min_chunks: smallest number of chunks.
    """
    largest_chunk = max(1, CHUNK_NUMBERS // (4 * numbers_per_trial))
    chunk_count = max(min_chunks, -(-trials // largest_chunk))
    chunk = -(-trials // chunk_count)
    return Attack(tuple(tests), chunk_count * chunk, chunk, run)


def _run_sides(
    run_side: SideRun, key: jax.Array, first: int, count: int
) -> SideStatistics:
    """Compute transcripts of + and of −, each with a key of its own."""
    plus = run_side(named(key, "+"), 0, first, count)
    minus = run_side(named(key, "-"), 1, first, count)
    return plus, minus


def _unit_weight(weight: Array, noise_power: float) -> Array:
    """Return weights[..., S] scaled such that noise gets variance 1; zeros stay."""
    squares = np.sum(weight**2, axis=-1, keepdims=True)
    deviation = np.sqrt(noise_power * squares)
    zeros = np.zeros_like(weight)
    return np.divide(weight, deviation, out=zeros, where=deviation > 0)


def _expected_signal(signal: Array, gain: Array) -> Array:
    """Return what to look for, [S]: the signal, or the gain of a silent device."""
    return np.where(signal.any(0), signal, gain)


def _part_of_rounds(target: Target, mu_limit: float) -> RoundMask:
    """Return the rounds in which the attacked device has a μ within a limit."""
    return window(target.loss[:, target.device], mu_limit**2 / 2)


def _claimed_mu(target: Target, device: int, mask: RoundMask) -> float:
    """Return μ = √(2 Σ loss) that the plan claims of a device over some rounds."""
    return float(np.sqrt(2 * target.loss[mask, device].sum()))


def _question(
    name: str,
    target: Target,
    *,
    device: int,
    signal: Array,
    weight: Array,
    mask: RoundMask,
    risk_weight: float = 1.0,
) -> AttackQuestion:
    """Return the test of a device by a weighted sum of the rounds of a mask."""
    unit_weight = _unit_weight(weight, target.plan.noise_power)
    return AttackQuestion(
        name=name,
        device=device,
        rounds=int(mask.sum()),
        mu=_claimed_mu(target, device, mask),
        visible_mu=2 * float(signal @ unit_weight),
        risk_weight=risk_weight,
    )


@partial(jax.jit, static_argnames=("count",))
def _filtered_transcripts(
    key: jax.Array,
    canary: Canary,
    rounds: KernelRounds,
    signs: jax.Array,
    weight: jax.Array,
    first: int,
    count: int,
) -> jax.Array:
    """Return Σ_s weight[s] y[s] of transcripts by the kernel, round by round.

    Args:
        key: of the attack's side; trial n folds in `first` + n.
        canary: of the attacked side, + or −: arrays [K, m]; where weights are by
            coordinate [trial, K, m], each trial with its own.
        rounds: of the plan.
        signs: by which the canary's example and base alike are multiplied in every
            round, [S]: a pattern that the server knows, the same for both sides. They
            do not make + and −, the canary does.
        weight: with the signs in it, and scaled by the caller: [S, test], where all
            tests see the first coordinate, or [S, 1, m], with one test for each
            coordinate.
        first: number of the first trial.
        count: number of trials.

    Returns:
        Statistics [trial, test].
    """
    trial_numbers = first + jnp.arange(count)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, trial_numbers)
    dim = canary.example.shape[-1]
    device_rounds = jax.tree.map(jnp.asarray, rounds)
    by_coordinate = weight.ndim == 3
    canary_axis = 0 if by_coordinate else None
    run_step = jax.vmap(
        step, (0, canary_axis, CHAIN_AXES, None), out_axes=(CHAIN_AXES, 0)
    )

    def add_round(
        carry: tuple[State, jax.Array],
        inputs: tuple[jax.Array, ...],
    ) -> tuple[tuple[State, jax.Array], None]:
        state, total = carry
        index, sign, filters = inputs
        example = sign * canary.example
        base = sign * canary.base
        turned_canary = canary._replace(example=example, base=base)
        keys_of_round = round_keys(keys, index)
        state, info = run_step(
            keys_of_round, turned_canary, state, device_rounds[index]
        )
        received = info.received if by_coordinate else info.received[:, :1]
        return (state, total + received * filters), None

    velocity = None
    if device_rounds.constants.dynamics.has_velocity:
        velocity = jnp.zeros((count, dim))
    start = State(jnp.zeros((count, dim)), jnp.zeros((), jnp.int32), velocity)
    zero_total = jnp.zeros((count, weight.shape[-1]))
    scanned = (jnp.arange(weight.shape[0]), signs, weight)
    (_, total), _ = jax.lax.scan(add_round, (start, zero_total), scanned)
    return total


@dataclass(frozen=True, eq=False)
class _KernelSides:
    """Transcripts by the kernel, with a canary on one device."""

    canaries: tuple[Canary, Canary]
    """Of + and of −."""
    rounds: KernelRounds
    signs: NDArray[np.float32]
    """Of the canary in every round, [S]."""
    weight: NDArray[np.float32]
    """[S, TEST_COLUMNS], signs included; columns beyond the tests are 0."""
    midpoint: Array
    """What the statistics are half way between the sides, [TEST_COLUMNS]."""
    test_count: int

    def __call__(self, key: jax.Array, side: int, first: int, count: int) -> Statistics:
        """Return the statistics of one side, [trial, test], in the order of the tests."""
        canary = self.canaries[side]
        totals = _filtered_transcripts(
            key, canary, self.rounds, self.signs, self.weight, first, count
        )
        statistics = np.asarray(totals) - self.midpoint
        return statistics[:, : self.test_count]


def _attack_by_kernel(
    target: Target,
    tests: list[FilteredTest],
    trials: int,
    *,
    signs: Array | None = None,
    background: tuple[float, float] | None = None,
    min_chunks: int = 1,
) -> Attack:
    """Return an attack with a canary on one device; other devices send nothing.

    The canary lies along the first of two coordinates.

    Args:
        target: the plan and the device that is attacked.
        tests: at most `TEST_COLUMNS`.
        trials: of each data set.
        signs: of the canary in every round, [S]; None for +1.
        background: what known examples of the device add to both neighbours, in both
            coordinates; None for that of the target.
        min_chunks: smallest number of chunks.
    """
    plan = target.plan
    device = target.device
    if signs is None:
        signs = np.ones(len(plan.rounds))
    if background is None:
        background = (-target.background[device], 0)
    example = np.zeros((plan.devices, 2), np.float32)
    example[device, 0] = target.canary_norm
    base = np.zeros_like(example)
    base[device] = background
    plus = Canary(example, base)
    minus = Canary(np.float32(target.neighbour) * example, base)
    rounds = len(plan.rounds)
    weight = np.zeros((rounds, TEST_COLUMNS), np.float32)
    for column, test in enumerate(tests):
        weight[:, column] = _unit_weight(test.weight, plan.noise_power)
    signed_midpoint = signs * target.midpoint[:, device]
    run_side = _KernelSides(
        canaries=(plus, minus),
        rounds=float32_rounds(plan),
        signs=signs.astype(np.float32),
        weight=weight,
        midpoint=signed_midpoint @ weight,
        test_count=len(tests),
    )
    questions = [test.question for test in tests]
    return _chunked_attack(
        questions,
        trials,
        partial(_run_sides, run_side),
        numbers_per_trial=2,
        min_chunks=min_chunks,
    )


def constant(target: Target, trials: int, mu_limit: float) -> Attack:
    """Let the canary point one way in all rounds.

    This is the strongest attack on code that does what it claims. The main test is the
    matched filter of all rounds. Further ones take the part of the rounds about which
    so many trials can prove something, and the rounds in which the device is claimed to
    be silent, where any signal is a leak.

    Args:
        target: the plan and the device that is attacked.
        trials: of each data set.
        mu_limit: largest μ of the part of the rounds.

    Returns:
        An attack with one to three tests.
    """
    device = target.device
    gain = target.plan.gain
    signal = target.signal[:, device]
    is_active = target.plan.weight[:, device] > 0
    expected = _expected_signal(signal, gain)
    all_rounds = window(target.loss[:, device], np.inf)
    part = _part_of_rounds(target, mu_limit)
    question = partial(_question, target=target, device=device, signal=signal)
    main_weight = expected * all_rounds
    main = question(
        "matched filter",
        weight=main_weight,
        mask=all_rounds,
        risk_weight=MAIN_RISK_WEIGHT,
    )
    tests = [FilteredTest(main, main_weight)]
    if part.sum() < all_rounds.sum():
        name = "matched filter, part of the rounds"
        part_weight = expected * part
        part_question = question(name, weight=part_weight, mask=part)
        tests.append(FilteredTest(part_question, part_weight))
    if is_active.any() and not is_active.all():
        silent_weight = gain * ~is_active
        silence = question("rounds of silence", weight=silent_weight, mask=~is_active)
        tests.append(FilteredTest(silence, silent_weight))
    return _attack_by_kernel(target, tests, trials, min_chunks=MAIN_TRIALS_FACTOR)


def turning(key: jax.Array, target: Target, trials: int, mu_limit: float) -> Attack:
    """Change the sign of the canary from round to round, by a fixed random pattern.

    Noise that is drawn once and used in two rounds cannot hide such a canary: the two
    rounds of a pair have opposite signs, and their difference, with or without regard
    to the gains, cancels common noise.

    Args:
        key: seeds the pattern of signs.
        target: the plan and the device that is attacked.
        trials: of each data set.
        mu_limit: largest μ of the rounds that are used.

    Returns:
        An attack with one to three tests.
    """
    device = target.device
    gain = target.plan.gain
    mask = _part_of_rounds(target, mu_limit)
    both_signs = np.array([-1.0, 1.0])
    signs = host_generator(key, "signs").choice(both_signs, size=gain.size)
    earlier, later = pairs(mask)
    signs[later] = -signs[earlier]
    constant_signal = target.signal[:, device]
    signal = signs * constant_signal
    expected = signs * _expected_signal(constant_signal, gain)
    filters = {
        "signs that vary": expected * mask,
        "differences of rounds": differences(expected, mask),
        "scaled differences of rounds": differences(expected, mask, gain=gain),
    }
    tests = []
    for name, weight in filters.items():
        if weight.any():
            question = _question(
                name, target, device=device, signal=signal, weight=weight, mask=mask
            )
            tests.append(FilteredTest(question, weight))
    return _attack_by_kernel(target, tests, trials, signs=signs)


def full_device(target: Target, trials: int, mu_limit: float) -> Attack:
    """Attack one record on a device whose gradient is clipped as a whole.

    Other records, which the server knows, alone make twice the device's threshold ℓ, at
    a right angle to the canary. A gradient (±h, 2ℓ) clipped to ℓ moves by
    ℓ h/√(4ℓ² + h²) to either side, where h is half the distance of the neighbouring
    records; a device without the other records would move by min(ℓ, h).

    Args:
        target: the plan and the device that is attacked; records and devices have to be
            clipped.
        trials: of each data set.
        mu_limit: largest μ of the rounds that are used.

    Returns:
        An attack with one test.
    """
    device = target.device
    plan = target.plan
    mask = _part_of_rounds(target, mu_limit)
    clip = float(plan.clip[device])
    example_clip = float(plan.example_clip[device])
    half_distance = example_clip * (1 - target.neighbour) / 2
    # The signal of the target is that of a device without the other records, which
    # moves by min(ℓ, h).
    gradient_norm = np.hypot(2 * clip, half_distance)
    normalization = gradient_norm * min(clip, half_distance)
    signal = target.signal[:, device] * clip * half_distance / normalization
    weight = _expected_signal(signal, plan.gain) * mask
    question = _question(
        "record on a device that is clipped",
        target,
        device=device,
        signal=signal,
        weight=weight,
        mask=mask,
    )
    tests = [FilteredTest(question, weight)]
    # The first part centres the canary and its neighbour: together they make ±h.
    background = (half_distance - example_clip, 2 * clip)
    return _attack_by_kernel(target, tests, trials, background=background)


@dataclass(frozen=True, eq=False)
class _AllDevices:
    """Transcripts by the kernel with a canary on every device.

    In each trial the signs of all canaries are random, so that a transcript of + for
    one device is one of − for another.
    """

    target: Target
    rounds: KernelRounds
    weight: NDArray[np.float32]
    """[S, 1, K], the same for all trials."""
    midpoint: Array
    """[K]."""

    def __call__(self, key: jax.Array, first: int, count: int) -> SideStatistics:
        """Return the statistics of + and of −, [trial, K]."""
        target = self.target
        devices = target.plan.devices
        generator = host_generator(jax.random.fold_in(key, first), "signs")
        sign_values = np.array([-1, 1], np.float32)
        signs = generator.choice(sign_values, size=(count, devices))
        is_plus = signs > 0
        factors = np.where(is_plus, 1, target.neighbour)
        opposite_factors = np.where(is_plus, target.neighbour, 1)
        # Of each device, one of the two transcripts is of + and the other of −.
        drawn = self._statistics(named(key, "+"), factors, first)
        opposite = self._statistics(named(key, "-"), opposite_factors, first)
        plus = np.where(is_plus, drawn, opposite)
        minus = np.where(is_plus, opposite, drawn)
        return plus, minus

    def _statistics(
        self, key: jax.Array, factors: NDArray[np.float64], first: int
    ) -> Statistics:
        """Return the statistics of canaries times factors, [trial, K]."""
        background = -self.target.background.astype(np.float32)
        base = np.broadcast_to(background, factors.shape)
        example = self.target.canary_norm * factors
        canary = Canary(example.astype(np.float32), base)
        signs = np.ones(len(self.weight), np.float32)
        count = len(factors)
        totals = _filtered_transcripts(
            key, canary, self.rounds, signs, self.weight, first, count
        )
        return np.asarray(totals) - self.midpoint


def every_device(target: Target, trials: int, mu_limit: float) -> Attack:
    """Put a canary on every device at once.

    Each is in a coordinate of its own, and the signs of the canaries are independent
    random numbers, so that one transcript tests all devices, also those that the plan
    claims to lose less than the attacked one. The tests of all devices together have
    the risk of one.

    Args:
        target: the plan under attack.
        trials: of each data set.
        mu_limit: largest μ of the rounds that are used of a device.

    Returns:
        An attack with one test for each device.
    """
    plan = target.plan
    limit = mu_limit**2 / 2
    masks = np.stack([window(loss, limit) for loss in target.loss.T], axis=1)
    weights = _expected_signal(target.signal, plan.gain[:, None]) * masks
    tests = []
    unit_weights = []
    for device in range(plan.devices):
        weight = weights[:, device]
        question = _question(
            "every device",
            target,
            device=device,
            signal=target.signal[:, device],
            weight=weight,
            mask=masks[:, device],
            risk_weight=1 / plan.devices,
        )
        tests.append(question)
        unit_weights.append(_unit_weight(weight, plan.noise_power))
    unit = np.stack(unit_weights, axis=1)
    midpoint = np.sum(target.midpoint * unit, axis=0)
    run = _AllDevices(
        target=target,
        rounds=float32_rounds(plan),
        weight=unit.astype(np.float32)[:, None],
        midpoint=midpoint,
    )
    return _chunked_attack(tests, trials, run, numbers_per_trial=plan.devices)


def _slow_plan(target: Target, dim: int, reach: float) -> Plan:
    """Return a plan of runs from θ = 0 that stay close to it.

    θ then changes nothing of what is sent. Step sizes are the server's, as is the noise
    that it adds and knows: neither is in y. They are such that θ moves by the same
    multiple of y in all rounds, and float32 keeps every one of them. Steps are
    overdamped, whatever the plan's are: y can be read off them. Nothing is really sent,
    so no budget stands in the way.

    Args:
        target: the plan under attack.
        dim: m.
        reach: how far θ goes at most, unless the noise of all rounds is beyond six
            standard deviations.
    """
    plan = target.plan
    strength = 1.0 if plan.received is None else plan.received.max()
    total_clip = acting_clips(plan).sum()
    largest_signal = strength * total_clip * plan.gain
    largest_noise = 6 * np.sqrt(plan.noise_power)
    largest_received = np.sum(largest_signal + largest_noise)
    step_per_received = reach / float(largest_received)
    step_size = step_per_received * plan.gain / plan.scale
    server_noise = np.zeros(len(plan.rounds))
    slow = plan.with_rounds(step_size=step_size, server_noise=server_noise)
    context = replace(
        plan.context,
        burn_in=0,
        init="zero",
        dim=dim,
        enforced=False,
        dynamics=overdamped(),
    )
    return replace(slow, context=context)


class _Transcripts(NamedTuple):
    """What whole runs of `wflmc.sample` transmit."""

    received: Array
    """y[trial, S, m]."""
    before: Array
    """θ before each round, [trial, S, m]."""


def _transcripts(
    key: jax.Array, posterior: Posterior, plan: Plan, *, first: int, count: int
) -> _Transcripts:
    """Return transcripts of runs from θ = 0, computed from the trace of each run."""
    numbers = range(first, first + count)
    trace = sample(key, posterior, plan, count, numbers=numbers)
    after = np.asarray(trace.theta, dtype=np.float64)
    start = np.zeros_like(after[:, :1])
    before = np.concatenate([start, after[:, :-1]], axis=1)
    received_per_step = plan.gain / (plan.step_size * plan.scale)
    received = (before - after) * received_per_step[:, None]
    return _Transcripts(received, before)


@dataclass(frozen=True, eq=False)
class _SamplerSides:
    """Whole runs with a canary whose sign follows θ."""

    plan: Plan
    canaries: tuple[TurningCanary, TurningCanary]
    """Of + and of −."""
    expected: Array
    """What to look for, [S]."""
    mask: RoundMask
    midpoint: Array
    """Of what arrives from the attacked device, [S]."""
    offsets: list[int]
    """With which of the chosen rounds the pairs of each further test begin."""

    def __call__(self, key: jax.Array, side: int, first: int, count: int) -> Statistics:
        """Return the statistics of one side, [trial, test].

        The matched filter comes first, then the differences of rounds, in the order of
        the tests of `by_sampler`. The server knows θ, and works out the sign of the
        canary from it as the sampler did, which takes float32. Whatever is expected to
        arrive has that sign, the midpoint included.
        """
        canary = self.canaries[side]
        received, before = _transcripts(
            key, canary, self.plan, first=first, count=count
        )
        directions = direction(before.astype(np.float32), canary.turn)
        signs = directions.astype(np.float64)
        expected = self.expected * signs
        filters = [expected * self.mask]
        filters += [differences(expected, self.mask, first) for first in self.offsets]
        centred = received[..., 0] - signs * self.midpoint
        statistics = []
        for weight in filters:
            unit_weight = _unit_weight(weight, self.plan.noise_power)
            statistics.append(np.sum(unit_weight * centred, axis=1))
        return np.stack(statistics, axis=1)


def by_sampler(target: Target, trials: int, mu_limit: float) -> Attack:
    """Attack whole runs of `wflmc.sample`, keys and all.

    The sign of the canary follows θ, which the server knows: so it varies from round to
    round as in `turning`, but by what a run computes and not by a pattern of the audit.
    Differences of rounds show noise that the sampler draws once for two of them.

    Args:
        target: the plan and the device that is attacked.
        trials: of each data set.
        mu_limit: largest μ of the rounds that are used.

    Returns:
        An attack with one to three tests.
    """
    device = target.device
    plan = _slow_plan(target, 2, 1e-3)
    mask = _part_of_rounds(target, mu_limit)
    signal = target.signal[:, device]
    expected = _expected_signal(signal, plan.gain)
    noise_std = np.sqrt(plan.noise_power)
    noise_step = plan.step_size * plan.scale * noise_std / plan.gain
    turn = np.float32(np.min(noise_step))
    example = np.zeros(plan.devices, np.float32)
    example[device] = target.canary_norm
    base = np.where(example > 0, -target.background, 0.0).astype(np.float32)
    plus = TurningCanary(example, base, turn)
    neighbour = np.float32(target.neighbour)
    minus = TurningCanary(neighbour * example, base, turn)
    main = _question(
        "whole runs",
        target,
        device=device,
        signal=signal,
        weight=expected * mask,
        mask=mask,
    )
    names = [
        "whole runs, differences of rounds",
        "whole runs, differences beginning with the second",
    ]
    offsets = [first for first in (0, 1) if pairs(mask, first)[0].size]
    # Differences show nothing of a pair with equal signs, and half of the pairs have.
    visible_mu = main.visible_mu / 2**0.5
    tests = [main]
    for first in offsets:
        tests.append(main._replace(name=names[first], visible_mu=visible_mu))
    run_side = _SamplerSides(
        plan=plan,
        canaries=(plus, minus),
        expected=expected,
        mask=mask,
        midpoint=target.midpoint[:, device],
        offsets=offsets,
    )
    run = partial(_run_sides, run_side)
    return _chunked_attack(tests, trials, run, numbers_per_trial=len(plan.rounds))


def by_model(
    posterior: Regression, target: Target, trials: int, mu_limit: float
) -> Attack:
    """Attack whole runs on two canary data sets for a model of this kind.

    Here the gradients, the clipping of examples and of devices are the model's own
    code, on data as a user would pass it: one row of the attacked device is far beyond
    every threshold, with one sign or the other.

    Args:
        posterior: says which kind of model, and how many devices; its data are not
            used.
        target: the plan and the device that is attacked.
        trials: of each data set.
        mu_limit: largest μ of the rounds that are used.

    Returns:
        An attack with one test.
    """
    plan = target.plan
    device = target.device
    size = CANARY_NORM_OVER_CLIP * largest_clip(plan)
    background = float(target.background[device])
    sides = canary_pair(posterior, device, size, target.neighbour, background)
    model = type(posterior).__name__.removesuffix("Posterior").lower()
    # Even an unclipped canary must not go far enough to be learned.
    reach = 0.1 / (CANARY_NORM_OVER_CLIP * size)
    return by_pair(
        target,
        sides,
        reach=reach,
        trials=trials,
        mu_limit=mu_limit,
        name=f"{model} model",
    )


@dataclass(frozen=True, eq=False)
class _PairSides:
    """Whole runs of two neighbouring posteriors."""

    plan: Plan
    posteriors: Pair
    midpoint: Array
    """Half way between what both transmit at θ = 0, [S, m]."""
    unit_weight: Array
    """[S, m]."""

    def __call__(self, key: jax.Array, side: int, first: int, count: int) -> Statistics:
        """Return the statistic of one side, [trial, 1]."""
        posterior = self.posteriors[side]
        transcripts = _transcripts(key, posterior, self.plan, first=first, count=count)
        centred = transcripts.received - self.midpoint
        return np.einsum("nsm,sm->n", centred, self.unit_weight)[:, None]


def by_pair(
    target: Target,
    sides: Pair,
    *,
    reach: float,
    trials: int,
    mu_limit: float,
    name: str,
) -> Attack:
    """Attack whole runs of `wflmc.sample` on two neighbouring posteriors.

    They are distinguished by what they transmit at θ = 0: the statistic is the matched
    filter of that difference, in all coordinates.

    Args:
        target: the plan and the device in which the posteriors differ.
        sides: the posteriors + and −.
        reach: how far θ may go from 0; gradients should hardly change over this.
        trials: of each data set.
        mu_limit: largest μ of the rounds that are used.
        name: of the test.

    Returns:
        An attack with one test.

    Raises:
        InputError: if the gradients at θ = 0 do not differ, or are not finite.
    """
    dim = sides[0].dim
    plan = _slow_plan(target, dim, reach)
    mask = _part_of_rounds(target, mu_limit)
    by_example = bool(np.isfinite(plan.example_clip).any())
    rounds = jax.tree.map(jnp.asarray, float32_rounds(plan))
    start = jnp.zeros((len(plan.rounds), dim))
    signals = []
    for posterior in sides:
        ready = posterior.on_accelerator(1, SUM_MEMORY, by_example)
        signals.append(transmitted(ready, rounds, start).double)
    plus, minus = signals
    weight = mask[:, None] * (plus - minus)
    squares = np.sum(weight**2)
    deviation = np.sqrt(plan.noise_power * squares)
    if not np.isfinite(deviation) or deviation == 0:
        raise InputError(
            "posterior",
            "this pair of data sets",
            "one whose gradients at θ = 0 are finite and differ",
        )
    mu = _claimed_mu(target, target.device, mask)
    test = AttackQuestion(
        name=name,
        device=target.device,
        rounds=int(mask.sum()),
        mu=mu,
        visible_mu=mu,
    )
    run_side = _PairSides(
        plan=plan,
        posteriors=sides,
        midpoint=(plus + minus) / 2,
        unit_weight=weight / deviation,
    )
    run = partial(_run_sides, run_side)
    numbers_per_trial = len(plan.rounds) * max(2, dim)
    return _chunked_attack([test], trials, run, numbers_per_trial=numbers_per_trial)


@jax.jit
def transmitted(posterior: Posterior, rounds: KernelRounds, theta: jax.Array) -> Sum:
    """Return the signal α Σ_k r_k clip(g_k) of every round, before it is rounded.

    θ is an argument: of a product with zeros known at compile time, XLA for CPUs
    (jaxlib 0.10.2) makes a fused loop that reads beyond them from a few hundred rounds
    on.

    Args:
        posterior: as `on_accelerator` returns it.
        rounds: of the plan, as arrays of JAX.
        theta: θ in every round, [S, m].

    Returns:
        The sums of all rounds, without noise, [S, m].
    """

    def signal(index: jax.Array, position: jax.Array) -> Sum:
        return transmit(posterior, position, rounds[index]).total

    return jax.vmap(signal)(jnp.arange(len(theta)), theta)
