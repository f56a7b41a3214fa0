"""The radio link: fading laws that give gains h[round, device], and superposition.

A fading law is a small frozen value with a `draw`; arrays from a channel simulator or a
measurement enter through `from_array`. Only |h| matters to the plan, because devices
compensate the phase. `power` is always the mean E|h|², whatever the correlation over
rounds.

>>> Link(rayleigh(power=0.01), snr_db=20).gains(rounds=100, devices=30).shape
(100, 30)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import chndtr, ndtr

from wflmc.support.declarations import Interval, NotInFiles, check_fields, documented
from wflmc.support.errors import Fault, InputError, Shown, wrong_length
from wflmc.support.keys import seeded_generator
from wflmc.support.notices import Notice, NoticeCode
from wflmc.support.recursion import first_order

Gains = NDArray[Any]
"""h[round, device] or |h|, real or complex."""

LONGEST_SERIES_SHIFT = 1e4
"""Noncentrality up to which the series of the noncentral χ² law is evaluated.

Beyond it the root of the variable is normal to about six digits, and the series long.
"""
SMALLEST_GAIN = 1e-100
"""|h| of an array must be above this, so that squares are not 0."""
LARGEST_GAIN = 1e100
"""|h| of an array must be below this, so that squares are finite."""
LARGEST_AMPLITUDE = 10.0
"""|h| that no amplitude has: a hundred times the power that was sent.

Fading peaks at some three times √E|h|².
"""


@dataclass(frozen=True)
class GaussMarkov:
    """The law of h = √power (path + g) with correlated g ~ CN(0, scatter).

    g[s] = r g[s−1] + √(1 − r²) w[s], w ~ CN(0, scatter), is stationary from the start.
    Devices are independent and differ in power alone. The law says what to expect of
    later rounds, and how good a channel is for the device that has it.
    """

    power: ArrayLike
    """E|h|², a number or [K]."""
    path: float
    """The constant part of h/√power: 1 for static gains, 0 for Rayleigh fading."""
    scatter: float
    """E|g|²; path² + scatter = 1."""
    correlation: float = 0.0
    """r, between successive rounds."""

    def draw_first(self, noise: Gains) -> Gains:
        """Return gains of a first round, of which nothing is known but the law.

        h = √power (path + √scatter · w), drawn from the stationary law.

        Args:
            noise: w, independent CN(0, 1) draws, [..., K].

        Returns:
            h, of the noise's shape.
        """
        amplitude = _amplitude(self.power, noise.shape[-1])
        return amplitude * (self.path + np.sqrt(self.scatter) * noise)

    def draw_after(self, present: Gains, noise: Gains) -> Gains:
        """Return rounds 1..n after one with known gains, each drawn by itself.

        Round j has g[j] = r^j g[0] + √(1 − r^{2j}) w. Each has its right law given the
        present, but successive rounds are independent of each other: they serve for
        expectations of single rounds, not as paths.

        Args:
            present: h of the present round, [..., K].
            noise: w, independent CN(0, 1) draws, [..., n, K].

        Returns:
            h, [..., n, K].
        """
        amplitude = _amplitude(self.power, noise.shape[-1])
        steps = np.arange(1, noise.shape[-2] + 1)
        memory = (self.correlation**steps)[:, None]
        present_scatter = present / amplitude - self.path
        remembered = memory * present_scatter[..., None, :]
        spread = np.sqrt(self.scatter * (1 - memory**2))
        return amplitude * (self.path + remembered + spread * noise)

    def quality(self, gains: Gains) -> NDArray[np.float64]:
        """Return u = P(|h| ≤ the present |h|), given the device's round before.

        Whatever the powers and the correlation, these are independent and uniform over
        devices and rounds. Where a round follows from the one before it (static gains,
        correlation 1), nothing is left to be good or bad, and u is ½. 2|h|²/variance
        has a noncentral χ² law with two degrees of freedom.

        Args:
            gains: h of successive rounds, the first one drawn from the stationary law,
                [..., S, K].

        Returns:
            u, [..., S, K].
        """
        amplitude = _amplitude(self.power, gains.shape[-1])
        relative = gains / amplitude
        mean = np.full(relative.shape, self.path, dtype=complex)
        earlier_scatter = relative[..., :-1, :] - self.path
        mean[..., 1:, :] += self.correlation * earlier_scatter
        variance = np.full((relative.shape[-2], 1), self.scatter)
        variance[1:] *= 1 - self.correlation**2
        is_random = variance > 0
        divisor = np.where(is_random, variance, 1.0)
        x = 2 * np.abs(relative) ** 2 / divisor
        shift = 2 * np.abs(mean) ** 2 / divisor
        # Where the series gets long, the root of the variable is nearly normal.
        by_series = np.asarray(chndtr(x, 2, np.minimum(shift, LONGEST_SERIES_SHIFT)))
        by_root = ndtr(np.sqrt(x) - np.sqrt(shift + 1))
        u = np.where(shift < LONGEST_SERIES_SHIFT, by_series, by_root)
        return np.where(is_random, u, 0.5)


@dataclass(frozen=True)
class Fading:
    """A law of the gains."""

    name: str
    """Of the law, as scenarios have it."""
    draw: Callable[[np.random.Generator, int, int], Gains]
    """From a generator and the numbers of rounds and devices to h[round, device].

    More rounds must begin with those of fewer: plans that continue a run rely on it.
    """
    law: GaussMarkov | None = None
    """What may be expected of later rounds; None where only past rounds tell."""
    notices: tuple[Notice, ...] = ()
    """What its gains look like, if not like amplitudes."""


class ChannelRanking(NamedTuple):
    """How good channels are for their own devices, by which `unbiased` chooses."""

    quality: NDArray[np.float64]
    """P(|h| ≤ the present |h|) by the device's own law, [S, K]."""
    tie_breaks: NDArray[np.float64]
    """Random numbers that decide between equal qualities, [S, K]."""

    def last_rounds(self, count: int) -> "ChannelRanking":
        """Return the ranking of the last rounds alone.

        A plan that continues earlier rounds ranks all of them, because qualities
        depend on the rounds before, and uses its own.

        Args:
            count: the number of rounds, at least 1.

        Returns:
            Both fields, [count, K].
        """
        return ChannelRanking(self.quality[-count:], self.tie_breaks[-count:])


def _amplitude(power: ArrayLike, devices: int) -> NDArray[np.float64]:
    """Return √E|h|² per device, from one mean power or one per device (path loss)."""
    values = np.asarray(power, dtype=float)
    if values.ndim > 1 or values.size not in (1, devices):
        raise wrong_length("power", values.tolist(), devices, section="link")
    if not np.all((values > 0) & np.isfinite(values)):
        raise InputError("power", values.tolist(), "finite and above 0", section="link")
    return np.broadcast_to(np.sqrt(values).reshape(-1), (devices,))


def _gauss_markov(name: str, law: GaussMarkov) -> Fading:
    """Return fading by a law, whose correlation must be between 0 and 1."""
    if not 0 <= law.correlation <= 1:
        raise InputError(
            "correlation", law.correlation, "between 0 and 1", section="link"
        )

    return Fading(name, partial(_draw_gauss_markov, law), law)


def _draw_gauss_markov(
    law: GaussMarkov, generator: np.random.Generator, rounds: int, devices: int
) -> Gains:
    """Return h = √power (path + √scatter g), [round, device].

    g[s] = r g[s−1] + √(1 − r²) w[s] with w ~ CN(0, 1). The first round has g[0] = w[0],
    so that g is stationary from the start. Rayleigh and Rician fading draw by it. w is
    drawn round by round, so that more rounds begin with those of fewer.
    """
    parts = generator.standard_normal((rounds, devices, 2)) / np.sqrt(2)
    innovation = parts[..., 0] + 1j * parts[..., 1]
    innovation[1:] *= np.sqrt(1 - law.correlation**2)
    stationary = first_order(innovation, law.correlation)
    scattered = np.sqrt(law.scatter) * stationary
    amplitude = _amplitude(law.power, devices)
    return amplitude * (law.path + scattered)


def complex_normal(generator: np.random.Generator, *shape: int) -> Gains:
    """Return independent CN(0, 1) draws, of E|w|² = 1.

    Real and imaginary parts are independent and N(0, ½). The generator is advanced by
    two normal numbers for each draw, in the order of the array.

    Args:
        generator: the source of the draws.
        *shape: of the array.

    Returns:
        Complex numbers of that shape.
    """
    parts = generator.standard_normal((*shape, 2))
    return parts.view(complex)[..., 0] / np.sqrt(2)


def past_ranks(gains: Gains) -> NDArray[np.float64]:
    """Return the fraction of a device's rounds so far that were worse than this one.

    Where a device's rounds are independent and identically distributed these ranks are
    independent too, and alike over devices. They stand for `GaussMarkov.quality` where
    no law is known. The first round has rank 0.

    Args:
        gains: h of successive rounds, from the first one on, [S, K].

    Returns:
        The ranks, [S, K], from 0 to below 1.
    """
    size = np.abs(gains)
    rounds = len(size)
    worse = np.array([(size[:s] < size[s]).sum(0) for s in range(rounds)])
    return worse / np.arange(1, rounds + 1)[:, None]


def static(power: ArrayLike = 1.0) -> Fading:
    """Return constant gains |h| = √power.

    All rounds are alike: where one of them is kept, Theorem 1 gives the optimal power
    in closed form, and plans report their regime.

    Args:
        power: |h|², one number or one per device, [K] (path loss).

    Returns:
        The fading law, named "static".
    """
    law = GaussMarkov(power, path=1.0, scatter=0.0)
    return Fading("static", partial(_draw_constant, power), law)


def _draw_constant(
    power: ArrayLike, generator: np.random.Generator, rounds: int, devices: int
) -> Gains:
    """Return √power in every round; the generator is left alone."""
    return np.broadcast_to(_amplitude(power, devices), (rounds, devices))


def rayleigh(power: ArrayLike = 1.0, correlation: float = 0.0) -> Fading:
    """Return Rayleigh fading, h ~ CN(0, power).

    Devices are independent of each other. With correlation r between successive rounds,
    h[s] = r h[s−1] + √(1 − r²) w[s] with w ~ CN(0, power), stationary from the start.

    Args:
        power: E|h|², one number or one per device, [K] (path loss).
        correlation: r, from 0 (independent rounds) to 1 (one draw for all rounds).

    Returns:
        The fading law, named "rayleigh".

    Raises:
        InputError: the correlation is not between 0 and 1.
    """
    law = GaussMarkov(power, path=0.0, scatter=1.0, correlation=correlation)
    return _gauss_markov("rayleigh", law)


def rician(
    power: ArrayLike = 1.0, rician_k: float = 3.0, correlation: float = 0.0
) -> Fading:
    """Return Rician fading: a constant path and a scattered one.

    h = √power (√(k/(k+1)) + g) with g ~ CN(0, 1/(k+1)): the powers of both parts are as
    k : 1 and add up to `power`. With k = 0 it is Rayleigh fading.

    Args:
        power: E|h|², one number or one per device, [K] (path loss).
        rician_k: k, finite and at least 0.
        correlation: r of the scattered part, from 0 to 1.

    Returns:
        The fading law, named "rician".

    Raises:
        InputError: k or the correlation is out of range.
    """
    if not (rician_k >= 0 and np.isfinite(rician_k)):
        raise InputError("rician_k", rician_k, "finite and at least 0", section="link")
    path = float(np.sqrt(rician_k / (rician_k + 1)))
    scatter = 1 / (rician_k + 1)
    law = GaussMarkov(power, path=path, scatter=scatter, correlation=correlation)
    return _gauss_markov("rician", law)


def from_array(gains: ArrayLike, *, source: str = "") -> Fading:
    """Return a channel with known gains, measured or drawn by a simulator.

    The gains are those of a server with one antenna, or with one receiver behind a
    fixed combination of antennas. A server that records several antennas learns more
    than a plan for one of them, or for a beam, accounts for (`beam_loss_factor` says
    how much more).

    Args:
        gains: amplitudes (not dB), real or complex, [rounds, devices]; a run uses the
            first rounds.
        source: the file that they come from, for errors.

    Returns:
        The fading, named "file". Its `draw` raises an `InputError` where the array has
        too few rounds or another number of devices.

    Raises:
        InputError: they are not such an array, or not finite, or zero somewhere.
    """
    table = np.array(gains)
    of_source = f" in {source}" if source else ""
    _check_table(table, of_source)
    draw = partial(_first_rounds, table, of_source)
    return Fading("file", draw, notices=_decibel_notices(table))


def _first_rounds(
    table: Gains,
    of_source: str,
    generator: np.random.Generator,
    rounds: int,
    devices: int,
) -> Gains:
    """Return the first rounds of a table; the generator is left alone."""
    if table.shape[0] >= rounds and table.shape[1] == devices:
        return table[:rounds]
    expected = f"an array of at least {rounds} rounds × exactly {devices} devices"
    if table.shape[0] == devices and table.shape[1] >= rounds:
        expected += "; rows are rounds: is it transposed?"
    shape = f"array of shape {table.shape}{of_source}"
    raise InputError("gains", shape, expected, section="link")


def _check_table(table: Gains, of_source: str) -> None:
    """Refuse gains that are no table, or not finite, or zero somewhere.

    Args:
        table: as it was passed.
        of_source: where it comes from, for errors; empty where that is not known.
    """
    if table.ndim != 2 or table.dtype.kind not in "fciu":
        expected = "a numeric array [rounds, devices]"
        if table.ndim == 3:
            expected += (
                ", for a server with one antenna: with several, privacy loss follows "
                "the sum of |h|² over them; see 'Several antennas at the server' in "
                "docs/guides/gains.md"
            )
        shape = f"{table.dtype} array of shape {table.shape}{of_source}"
        raise InputError("gains", shape, expected, section="link")
    size = np.abs(table)
    is_wrong = ~((size > SMALLEST_GAIN) & (size < LARGEST_GAIN))
    if not is_wrong.any():
        return
    round_index, device = np.argwhere(is_wrong)[0]
    problem = (
        f"is {table[round_index, device]:g} for device {device} in round "
        f"{round_index}{of_source} (counted from 0)"
    )
    count = is_wrong.sum()
    if count > 1:
        problem += f", the first of {count} such values"
    expected = (
        "finite and non-zero, 1e-100 to 1e100 in magnitude; "
        "give a dead channel a tiny gain, such as 1e-9"
    )
    raise InputError("gains", Fault(problem), expected, section="link")


def beam_loss_factor(gains: ArrayLike, weights: ArrayLike) -> NDArray[np.float64]:
    """Return how much larger losses are than a plan for a beam says.

    The antennas of a server receive y = Σ_k h_k x_k + n, n ~ CN(0, N0 I). A change dx
    of what device k sends costs ‖h_k‖²|dx|²/N0 against a server that can record y, and
    |fᴴh_k|²|dx|²/(‖f‖²N0) against one that has the beam's output fᴴy alone. Their ratio
    is ‖f‖²‖h_k‖²/|fᴴh_k|², which is 1 where the beam points at the device, and above 1
    elsewhere (docs/explanation/privacy.md, Several antennas).

    >>> gains = [[[3.0], [4.0]]]  # a round, two antennas, a device
    >>> beam_loss_factor(gains, [1.0, 0.0]).tolist()  # the first antenna alone
    [[2.7777777777777777]]

    Args:
        gains: h of every antenna, [rounds, antennas, devices].
        weights: f, the same for all devices, [antennas] or [rounds, antennas].

    Returns:
        The factor of every round and device, [rounds, devices].

    Raises:
        InputError: shapes that do not belong together, or a device that the beam does
            not receive at all.
    """
    h = np.asarray(gains)
    f = np.asarray(weights)
    if h.ndim != 3 or h.dtype.kind not in "fciu":
        shape = f"{h.dtype} array of shape {h.shape}"
        raise InputError("gains", shape, "an array [rounds, antennas, devices]")
    rounds, antennas, _ = h.shape
    if f.shape not in ((antennas,), (rounds, antennas)) or f.dtype.kind not in "fciu":
        shape = f"{f.dtype} array of shape {f.shape}"
        expected = (
            f"one for each of {antennas} antennas, or "
            f"[{rounds} rounds, {antennas} antennas]"
        )
        raise InputError("weights", shape, expected)
    beam = np.broadcast_to(f, (rounds, antennas))
    output = np.einsum("sa,sak->sk", beam.conj(), h)
    received = np.abs(output) ** 2
    available = (np.abs(beam) ** 2).sum(1)[:, None] * (np.abs(h) ** 2).sum(1)
    if not np.all((received > 0) & np.isfinite(available)):
        raise InputError(
            "weights",
            "a beam without some of the devices",
            "such that every device is received, finite",
        )
    return available / received


def drawn_once(fading: Fading) -> Fading:
    """Return the same fading, which remembers the gains that it has drawn.

    It serves many plans of one link. Gains are remembered by the state of the generator
    and the number of devices; a shorter run has the first rounds of a longer one, as
    those of a `Link` always are. What is drawn does not change; a generator whose gains
    are remembered is left as it is.

    Args:
        fading: whose gains are remembered.

    Returns:
        The fading, equal in all but `draw`.
    """
    tables: dict[str, Gains] = {}

    def draw(generator: np.random.Generator, rounds: int, devices: int) -> Gains:
        name = f"{generator.bit_generator.state} {devices}"
        table = tables.get(name)
        if table is None or len(table) < rounds:
            table = fading.draw(generator, rounds, devices)
            tables[name] = table
        return table[:rounds]

    return replace(fading, draw=draw)


def _decibel_notices(table: Gains) -> tuple[Notice, ...]:
    """Return a notice about real gains that only make sense in dB.

    Complex ones have a phase, and are amplitudes.
    """
    if table.dtype.kind == "c":
        return ()
    if np.all(table < 0):
        appearance = "all real and negative"
    elif np.min(table) < -LARGEST_AMPLITUDE or np.median(table) > LARGEST_AMPLITUDE:
        appearance = f"real and as large as {np.abs(table).max():.3g}"
    else:
        return ()
    text = (
        f"The link's gains are {appearance}, as those in dB are, but are taken as "
        "amplitudes |h|: 10**(dB/20) converts a gain in dB, 10**(-dB/20) a path loss."
    )
    return (Notice(NoticeCode.GAINS_IN_DECIBELS, text),)


@documented
@dataclass(frozen=True, repr=False)
class Link(Shown):
    """The uplink that all devices share: fading, signal-to-noise ratio and noise power.

    The channel realisation follows from the fading law, the number of devices and
    `seed`; asking for more rounds begins with the same ones.
    """

    fading: Annotated[
        Fading,
        NotInFiles(),
        "The law of the gains, such as `wflmc.channel.rayleigh(power=0.01)`.",
    ]
    snr_db: Annotated[
        ArrayLike,
        Interval(minimum=-300, maximum=300, per_device=True),
        "P/(m N0) in dB: one number, or one per device where their power limits P_k "
        "differ.",
    ] = 20.0
    noise_power: Annotated[
        float,
        Interval(minimum=1e-30, maximum=1e30),  # chains are float32
        "N0, the variance of the receiver's noise in every coordinate.",
    ] = 1.0
    seed: Annotated[
        int,
        Interval(minimum=0, maximum=2**32 - 1),  # JAX keys hold no more
        "Of the channel realisation.",
    ] = 0
    csi_error: Annotated[
        float,
        Interval(minimum=0, below=1),
        "e, the relative error of what devices know of their channels: |ĥ/h − 1| ≤ e. "
        "What they send is made for ĥ and arrives h/ĥ times as strong, up to 1/(1 − e) "
        "times.",
    ] = 0.0
    downlink_snr_db: Annotated[
        float,
        Interval(minimum=-300),
        "Of the server's broadcast, where a position of the prior's mean square has "
        "full power: every device receives each coordinate with noise of its own, of "
        "that mean square over this ratio; inf where there is no noise.",
    ] = np.inf

    def __post_init__(self) -> None:
        if not isinstance(self.fading, Fading):
            raise InputError(
                "fading",
                self.fading,
                "a fading law, such as wflmc.channel.rayleigh(power=0.01)",
                section="link",
            )
        check_fields(self)

    def _facts(self) -> dict[str, Any]:
        law = self.fading.law
        facts = {
            "fading": self.fading.name,
            "power": law and law.power,
            "snr_db": self.snr_db,
        }
        defaults = {"csi_error": 0.0, "downlink_snr_db": np.inf, "noise_power": 1.0}
        for name, default in defaults.items():
            value = getattr(self, name)
            if value != default:
                facts[name] = value
        facts["seed"] = self.seed
        return facts

    def snr(self, devices: int) -> NDArray[np.float64]:
        """Return P_k/(m N0) of every device as a ratio, not in dB.

        The power limit of a round is ‖x_k‖² ≤ P_k over its m channel uses, and N0 is
        the noise in each of them. One `snr_db` stands for all devices.

        Args:
            devices: K.

        Returns:
            The ratios, [K].

        Raises:
            InputError: `snr_db` has another number of entries than 1 or K.
        """
        levels = np.asarray(self.snr_db, dtype=float).reshape(-1)
        if levels.size not in (1, devices):
            raise wrong_length("snr_db", levels.tolist(), devices, section="link")
        return np.broadcast_to(10 ** (levels / 10), (devices,))

    @property
    def downlink_noise(self) -> float:
        """Return the power of the broadcast's noise over that of its signal.

        It is 10^(−downlink_snr_db/10), and 0 for an ideal downlink. Times the prior's
        mean square it is the variance of the noise in every coordinate of θ.
        """
        return float(10 ** (-self.downlink_snr_db / 10))

    @property
    def uncertainty(self) -> float:
        """Return the largest |h/ĥ| that the error of channel knowledge allows.

        With |ĥ/h − 1| ≤ e it is 1/(1 − e). A device arrives at most this much more
        strongly than intended; plans pay for its square in privacy. It is 1 where
        channels are known exactly.
        """
        return 1 / (1 - self.csi_error)

    def mismatch(self, rounds: int, devices: int) -> NDArray[np.float64] | None:
        """Return |h/ĥ| of this link's seed, what arrives over what was intended.

        ĥ/h is uniform between 1 − e and 1 + e, independent over rounds and devices. The
        draws are a stream of their own, so that gains do not depend on e.

        Args:
            rounds: S.
            devices: K.

        Returns:
            |h/ĥ|[round, device]; None where e = 0 and both are equal.
        """
        if self.csi_error == 0:
            return None
        generator = seeded_generator(self.seed, "csi")
        error = self.csi_error * generator.uniform(-1, 1, (rounds, devices))
        return 1 / (1 + error)

    def gains(self, rounds: int, devices: int) -> Gains:
        """Return h[round, device] of this link's seed, real or complex.

        The same arguments always give the same gains, and more rounds begin with those
        of fewer.

        Args:
            rounds: S, counted from the first round of a run.
            devices: K.

        Returns:
            h[S, K].

        Raises:
            InputError: the fading law does not suit so many rounds or devices.
        """
        generator = seeded_generator(self.seed, "channel")
        return self.fading.draw(generator, rounds, devices)

    def ranking(self, known_gains: Gains) -> ChannelRanking:
        """Return how good every channel is for its own device.

        The quality is that of the fading law, `GaussMarkov.quality`; where no law is
        known, `past_ranks` of the rounds so far. Random numbers of this link's seed
        decide between equal qualities, as on static channels.

        Args:
            known_gains: h as devices know them, from the first round on, [S, K].

        Returns:
            Qualities and tie breaks, [S, K] each.
        """
        law = self.fading.law
        generator = seeded_generator(self.seed, "schedule")
        tie_breaks = generator.random(known_gains.shape)
        if law is None:
            return ChannelRanking(past_ranks(known_gains), tie_breaks)
        return ChannelRanking(law.quality(known_gains), tie_breaks)


def superpose(key: jax.Array, signal: jax.Array, noise_power: jax.Array) -> jax.Array:
    """Return what the server receives over the air (Sec. II-C).

    y = Σ_k h_k x_k + z with z ~ N(0, N0 I): all active devices transmit in the same m
    channel uses, and the channel adds their signals. With x_k = (α/h_k) clip(g_k) the
    sum is α Σ_k clip(g_k).

    Args:
        key: draws the receiver's noise z.
        signal: the sum Σ_k h_k x_k, [m].
        noise_power: N0.

    Returns:
        y[m], of the signal's dtype.
    """
    noise = jax.random.normal(key, signal.shape, signal.dtype)
    return signal + jnp.sqrt(noise_power) * noise
