"""The radio link: fading laws that give gains h[round, device], and the noisy superposition.

A fading law is a small frozen value with a `draw`; arrays from a channel simulator or a measurement enter
through `from_array`. Only |h| matters to the plan, because devices compensate the phase. `power` is always
the mean E|h|², whatever the correlation over rounds.

>>> Link(rayleigh(power=0.01), snr_db=20).gains(rounds=100, devices=30).shape
(100, 30)
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import chndtr, ndtr

from wflmc.support.declarations import Interval, NotInFiles, check_fields, documented
from wflmc.support.errors import Found, InputError, Shown, wrong_length
from wflmc.support.keys import seeded_generator
from wflmc.support.notices import Notice, NoticeCode
from wflmc.support.recursion import first_order

Gains = NDArray[Any]


@dataclass(frozen=True)
class GaussMarkov:
    """The law of h = √power (path + g) with g ~ CN(0, scatter) and correlation r between successive rounds.

    Devices are independent and differ in power alone. It says what to expect of rounds to come, and how good a
    channel is for the device that has it.
    """

    power: ArrayLike
    path: float
    scatter: float
    correlation: float = 0.0

    def draw_first(self, noise: Gains) -> Gains:
        """Return a first round, from CN(0, 1) draws noise[..., K]."""
        return _amplitude(self.power, noise.shape[-1]) * (
            self.path + np.sqrt(self.scatter) * noise
        )

    def draw_after(self, present: Gains, noise: Gains) -> Gains:
        """Return rounds 1..n after one with gains present[..., K], each drawn by itself: [..., n, K], as the noise."""
        amplitude = _amplitude(self.power, noise.shape[-1])
        memory = (self.correlation ** np.arange(1, noise.shape[-2] + 1))[:, None]
        known = memory * (present / amplitude - self.path)[..., None, :]
        return amplitude * (
            self.path + known + np.sqrt(self.scatter * (1 - memory**2)) * noise
        )

    def quality(self, gains: Gains) -> NDArray[np.float64]:
        """Return P(|h| ≤ what it is), given the device's round before: h[..., S, K] to u[..., S, K].

        Whatever the powers and the correlation, these are independent and uniform over devices and rounds. Where
        the next round is known from the last, nothing is left to be good or bad, and it is ½.
        """
        relative = gains / _amplitude(self.power, gains.shape[-1])
        mean = np.full(relative.shape, self.path, dtype=complex)
        mean[..., 1:, :] += self.correlation * (relative[..., :-1, :] - self.path)
        variance = np.full((relative.shape[-2], 1), self.scatter)
        variance[1:] *= 1 - self.correlation**2
        some = np.where(variance > 0, variance, 1.0)
        x, shift = 2 * np.abs(relative) ** 2 / some, 2 * np.abs(mean) ** 2 / some
        # A noncentral χ² law with two degrees of freedom; its root is nearly normal where the series gets long.
        near = np.asarray(chndtr(x, 2, np.minimum(shift, 1e4)))
        u = np.where(shift < 1e4, near, ndtr(np.sqrt(x) - np.sqrt(shift + 1)))
        return np.where(variance > 0, u, 0.5)


@dataclass(frozen=True)
class Fading:
    """A law of the gains: `draw(generator, rounds, devices)` gives h[round, device], real or complex."""

    name: str
    draw: Callable[[np.random.Generator, int, int], Gains]
    law: GaussMarkov | None = None
    """What may be expected of rounds to come; None where nothing is known but the rounds that were."""
    notices: tuple[Notice, ...] = ()
    """What its gains look like, if not like amplitudes."""


def _amplitude(power: ArrayLike, devices: int) -> NDArray[np.float64]:
    """Return √E|h|² per device, from one mean power or one per device (path loss)."""
    values = np.asarray(power, dtype=float)
    if values.ndim > 1 or values.size not in (1, devices):
        raise wrong_length("power", values.tolist(), devices, section="link")
    if not np.all((values > 0) & np.isfinite(values)):
        raise InputError("power", values.tolist(), "finite and above 0", section="link")
    return np.broadcast_to(np.sqrt(values).reshape(-1), (devices,))


def _gauss_markov(name: str, law: GaussMarkov) -> Fading:
    """Return fading with g[s] = r g[s−1] + √(1−r²) w[s], w ~ CN(0, scatter), stationary from the start."""
    if not 0 <= law.correlation <= 1:
        raise InputError(
            "correlation", law.correlation, "between 0 and 1", section="link"
        )

    def draw(generator: np.random.Generator, rounds: int, devices: int) -> Gains:
        parts = generator.standard_normal((rounds, devices, 2)) / np.sqrt(2)
        innovation = parts[..., 0] + 1j * parts[..., 1]
        innovation[1:] *= np.sqrt(1 - law.correlation**2)
        scattered = np.sqrt(law.scatter) * first_order(innovation, law.correlation)
        return _amplitude(law.power, devices) * (law.path + scattered)

    return Fading(name, draw, law)


def complex_normal(generator: np.random.Generator, *shape: int) -> Gains:
    """Return CN(0, 1) draws."""
    return generator.standard_normal((*shape, 2)).view(complex)[..., 0] / np.sqrt(2)


def past_ranks(gains: Gains) -> NDArray[np.float64]:
    """Return the share of a device's rounds so far that were worse than this one, [S, K].

    Where a device's rounds are independent and alike these ranks are independent too, and alike over devices.
    """
    size = np.abs(gains)
    worse = np.array([(size[:s] < size[s]).sum(0) for s in range(len(size))])
    return worse / np.arange(1, len(size) + 1)[:, None]


def static(power: ArrayLike = 1.0) -> Fading:
    """Return constant gains |h| = √power, one power or one per device."""

    def draw(generator: np.random.Generator, rounds: int, devices: int) -> Gains:
        return np.broadcast_to(_amplitude(power, devices), (rounds, devices))

    return Fading("static", draw, GaussMarkov(power, 1.0, 0.0))


def rayleigh(power: ArrayLike = 1.0, correlation: float = 0.0) -> Fading:
    """Return h ~ CN(0, power), with correlation r between successive rounds."""
    return _gauss_markov("rayleigh", GaussMarkov(power, 0.0, 1.0, correlation))


def rician(
    power: ArrayLike = 1.0, rician_k: float = 3.0, correlation: float = 0.0
) -> Fading:
    """Return a constant path and a scattered one whose powers are as rician_k : 1 and add up to `power`."""
    if not (rician_k >= 0 and np.isfinite(rician_k)):
        raise InputError("rician_k", rician_k, "finite and at least 0", section="link")
    path, scatter = np.sqrt(rician_k / (rician_k + 1)), 1 / (rician_k + 1)
    return _gauss_markov(
        "rician", GaussMarkov(power, float(path), scatter, correlation)
    )


def from_array(gains: ArrayLike, *, source: str = "") -> Fading:
    """Return a channel whose gains are given, measured or drawn by a simulator.

    The gains are those of a server with one antenna, or with one receiver behind a
    fixed combination of antennas. A server that records several antennas learns more
    than a plan for one of them, or for a beam, accounts for (`beam_loss_factor` says
    how much more).

    Args:
        gains: amplitudes (not dB), real or complex, [rounds, devices]; a run uses the
            first rounds.
        source: the file that they come from, for errors.

    Raises:
        InputError: they are not such an array, or not finite, or zero somewhere.
    """
    table = np.array(gains)
    of_source = f" in {source}" if source else ""
    if table.ndim != 2 or table.dtype.kind not in "fciu":
        allowed = "a numeric array [rounds, devices]"
        if table.ndim == 3:
            allowed += (
                ", for a server with one antenna: with several, privacy loss follows the sum of |h|² over them; see "
                "'Several antennas at the server' in docs/guides/gains.md"
            )
        given = f"{table.dtype} array of shape {table.shape}{of_source}"
        raise InputError("gains", given, allowed, section="link")
    wrong = ~((np.abs(table) > 1e-100) & (np.abs(table) < 1e100))
    if wrong.any():
        round_index, device = np.argwhere(wrong)[0]
        place = (
            f"for device {device} in round {round_index}{of_source} (counted from 0)"
        )
        first = f"is {table[round_index, device]:g} {place}"
        others = f", the first of {wrong.sum()} such values" if wrong.sum() > 1 else ""
        allowed = "finite and non-zero, 1e-100 to 1e100 in magnitude; give a dead channel a tiny gain, such as 1e-9"
        raise InputError("gains", Found(first + others), allowed, section="link")

    def draw(generator: np.random.Generator, rounds: int, devices: int) -> Gains:
        if table.shape[0] < rounds or table.shape[1] != devices:
            allowed = (
                f"an array of at least {rounds} rounds × exactly {devices} devices"
            )
            if table.shape[0] == devices and table.shape[1] >= rounds:
                allowed += "; rows are rounds: is it transposed?"
            given = f"array of shape {table.shape}{of_source}"
            raise InputError("gains", given, allowed, section="link")
        return table[:rounds]

    return Fading("file", draw, notices=_decibels(table))


def beam_loss_factor(gains: ArrayLike, weights: ArrayLike) -> NDArray[np.float64]:
    """Return how much larger losses are than a plan for a beam says.

    The antennas of a server receive y = Σ_k h_k x_k + n, n ~ CN(0, N0 I). A change dx
    of what device k sends costs ‖h_k‖²|dx|²/N0 against a server that can record y, and
    |fᴴh_k|²|dx|²/(‖f‖²N0) against one that has the beam's output fᴴy alone. Their ratio
    is ‖f‖²‖h_k‖²/|fᴴh_k|², which is 1 where the beam points at the device, and above 1
    elsewhere (docs/explanation/privacy.md, Several antennas).

    >>> beam_loss_factor([[[3.0], [4.0]]], [1.0, 0.0]).tolist()  # the first of two antennas
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
        raise InputError(
            "gains",
            f"{h.dtype} array of shape {h.shape}",
            "an array [rounds, antennas, devices]",
        )
    if f.shape not in (h.shape[1:2], h.shape[:2]) or f.dtype.kind not in "fciu":
        allowed = f"one for each of {h.shape[1]} antennas, or [{h.shape[0]} rounds, {h.shape[1]} antennas]"
        raise InputError("weights", f"{f.dtype} array of shape {f.shape}", allowed)
    beam = np.broadcast_to(f, h.shape[:2])
    received = np.abs(np.einsum("sa,sak->sk", beam.conj(), h)) ** 2
    available = (np.abs(beam) ** 2).sum(1)[:, None] * (np.abs(h) ** 2).sum(1)
    if not np.all((received > 0) & np.isfinite(available)):
        raise InputError(
            "weights",
            "a beam without some of the devices",
            "such that every device is received, finite",
        )
    return available / received


def drawn_once(fading: Fading) -> Fading:
    """Return the same fading, for many plans of one link: it keeps the gains it has drawn.

    A shorter run has the first rounds of a longer one, as those of a `Link` always are.

    Args:
        fading: whose gains are kept.
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


LARGE = 10.0
"""|h| that no amplitude has: a hundred times the power that was sent, where fading peaks at some three times √E|h|²."""


def _decibels(table: Gains) -> tuple[Notice, ...]:
    """Return a notice about real gains that only make sense in dB; complex ones have a phase, and are amplitudes."""
    negative = table.dtype.kind != "c" and np.all(table < 0)
    if table.dtype.kind == "c" or not (
        negative or np.min(table) < -LARGE or np.median(table) > LARGE
    ):
        return ()
    looks = (
        "all real and negative"
        if negative
        else f"real and as large as {np.abs(table).max():.3g}"
    )
    convert = "10**(dB/20) converts a gain in dB, 10**(-dB/20) a path loss"
    text = f"The link's gains are {looks}, as those in dB are, but are taken as amplitudes |h|: {convert}."
    return (Notice(NoticeCode.GAINS_IN_DECIBELS, text),)


@documented
@dataclass(frozen=True, repr=False)
class Link(Shown):
    """The uplink that all devices share: fading, signal-to-noise ratio and noise power.

    The channel realisation is a function of `seed` alone; asking for more rounds begins
    with the same ones.
    """

    fading: Annotated[
        Fading,
        NotInFiles(),
        "The law of the gains, such as `wflmc.channel.rayleigh(power=0.01)`.",
    ]
    snr_db: Annotated[
        ArrayLike,
        Interval(minimum=-300, maximum=300, per_device=True),
        "P/(m N0) in dB: one number, or one per device where their power limits P_k differ.",
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
        "Of the server's broadcast, where a position of the prior's mean square has full "
        "power: every device receives each coordinate with noise of its own, of the "
        "prior's variance over this ratio; inf where there is no noise.",
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
        law, usual = (
            self.fading.law,
            {"csi_error": 0.0, "downlink_snr_db": np.inf, "noise_power": 1.0},
        )
        facts = {
            "fading": self.fading.name,
            "power": law and law.power,
            "snr_db": self.snr_db,
        }
        facts |= {
            name: getattr(self, name)
            for name in usual
            if getattr(self, name) != usual[name]
        }
        return {**facts, "seed": self.seed}

    def snr(self, devices: int) -> NDArray[np.float64]:
        """Return P_k/(m N0) as a ratio, for every device."""
        levels = np.asarray(self.snr_db, dtype=float).reshape(-1)
        if levels.size not in (1, devices):
            raise wrong_length("snr_db", levels.tolist(), devices, section="link")
        return np.broadcast_to(10 ** (levels / 10), (devices,))

    @property
    def downlink_noise(self) -> float:
        """Power of the broadcast's noise over that of its signal."""
        return float(10 ** (-self.downlink_snr_db / 10))

    @property
    def uncertainty(self) -> float:
        """The largest |h/ĥ|, 1/(1 − e)."""
        return 1 / (1 - self.csi_error)

    def mismatch(self, rounds: int, devices: int) -> NDArray[np.float64] | None:
        """Return |h/ĥ|[round, device] of this link's seed, ĥ/h uniform between 1 − e and 1 + e; None where e = 0."""
        if self.csi_error == 0:
            return None
        generator = seeded_generator(self.seed, "csi")
        return 1 / (1 + self.csi_error * generator.uniform(-1, 1, (rounds, devices)))

    def gains(self, rounds: int, devices: int) -> Gains:
        """Return h[round, device] of this link's seed."""
        return self.fading.draw(seeded_generator(self.seed, "channel"), rounds, devices)

    def quality(self, known: Gains) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return how good every channel is for its own device, [round, device], and lots to decide between equals.

        Args:
            known: the gains as devices know them, from the first round on.
        """
        law = self.fading.law
        lots = seeded_generator(self.seed, "schedule").random(known.shape)
        return past_ranks(known) if law is None else law.quality(known), lots


def superpose(key: jax.Array, signal: jax.Array, noise_power: jax.Array) -> jax.Array:
    """Return what the server receives, y = Σ_k h_k x_k + z with z ~ N(0, N0 I) (Sec. II-C), given the sum signal[m]."""
    return signal + jnp.sqrt(noise_power) * jax.random.normal(
        key, signal.shape, signal.dtype
    )
