r"""The rounding bound: by how much float32 may raise the sensitivity of a clipped sum.

Clipping acts at ℓ/(1 + e) and c/(1 + e); then a sum in float32 changes by at most what
the plan pays for, 2s. e is the sum of the terms below. Each is a function named like
its field of `RoundingError`, and cites its step of the proof in
docs/explanation/privacy.md, "Sums in floating point".

Notation: u = 2⁻²⁴; K devices of N_k records and m parameters; ℓ_k and c_k the clipping
thresholds of a device and of its records; s_k = min(c_k, ℓ_k). What is added together
counts with the largest ℓ and the smallest s.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.sums.constants import (
    DEVICES_PER_FLOAT32_SUM,
    DEVICES_PER_LATTICE,
    LONGEST_RECORD_SUM,
    LOST_NORM,
    MAX_CANCELLATION,
    MAX_RECORDS_CLIPPED_IN_FLOAT32,
    MAX_ROWS_OF_SHORT_DEVICE,
    PAIR_CLIP_ERROR,
    PRIOR_FACTOR_REACH,
    RECORDS_PER_FLOAT32_SUM,
    ROW_SUMS_PER_LATTICE,
    ROWS_PER_FLOAT32_SUM,
    UNIT_ROUNDOFF,
)
from wflmc.sums.norms import additions
from wflmc.support.errors import InputError

Array = NDArray[np.float64]

LARGEST_ROUNDING = 0.05
"""The largest e that a plan accepts."""
HIGHER_ORDER = 1.01
"""Covers products of the terms, which are all small."""
ROW_PRODUCT_FACTOR = 208
"""Error of a short device's clipping factor, over that of its squared norm (step 6)."""
PRODUCTS_PER_SHORT_ROW = 2
"""Rounded products of a row's residuals: by its own factor and its device's (step 6)."""
PRODUCTS_PER_SHORT_DEVICE = 2
"""Rounded operations of a short device's clipping factor: ℓ/‖g‖, times w (step 6)."""


class RoundingError(NamedTuple):
    """e by its terms, each relative to s; a term that does not apply is 0."""

    device_norm: float = 0.0
    """Clipping of a device by a rounded norm (step 4)."""
    device_lattice: float = 0.0
    """Sum over devices on lattices and in pairs (step 5)."""
    record_norm: float = 0.0
    """Clipping of a record by a rounded norm (step 3)."""
    row_products: float = 0.0
    """Norms of short devices by products of their rows (step 6)."""
    record_sum: float = 0.0
    """Float32 sum of a block of records (step 1)."""
    record_pairs: float = 0.0
    """Sum of blocks of records in pairs (step 2)."""
    underflow: float = 0.0
    """What is added to squared norms for lost squares (step 8)."""
    device_sum: float = 0.0
    """Float32 sum of devices that are protected as a whole (step 5)."""
    row_sum: float = 0.0
    """Float32 sum of rows of many short devices (step 6)."""
    row_lattice: float = 0.0
    """Sum of these sums on lattices (step 6)."""

    @property
    def total(self) -> float:
        """Return e, the sum of the terms, with 1 % on top for their products.

        Clipping acts at ℓ/(1 + e) and c/(1 + e). It is 0 where no device is clipped; a
        plan is refused where it exceeds `LARGEST_ROUNDING`.
        """
        records = self.record_norm + self.row_products
        records = records + self.record_sum + self.record_pairs
        total = self.device_norm + self.device_lattice
        total += records
        total += self.underflow
        total += self.device_sum
        total += self.row_sum
        total += self.row_lattice
        return float(HIGHER_ORDER * total)


@dataclass(frozen=True)
class SumSettings:
    """What the rounding of a clipped sum depends on; all of it is public."""

    dim: int
    """m."""
    sizes: NDArray[np.intp]
    """N_k, [K]."""
    clip: Array
    """ℓ_k, [K]; infinite where a device is not clipped."""
    example_clip: Array
    """c_k, [K]; infinite where records are not clipped."""
    device_norm_error: float
    """ν: relative rounding of what a device sends, by its norm and what follows."""
    record_norm_error: float
    """ν: relative rounding of a record's norm."""
    row_product_error: float = 0.0
    """Relative rounding of a short device's squared norm; 0 of other devices."""

    @property
    def devices(self) -> int:
        """Return K, the number of devices, clipped or not.

        Every one of them may transmit in a round, so that the error of a sum over
        devices is bounded for all of them together, whatever a plan's schedule says.
        """
        return len(self.clip)

    @property
    def clipped(self) -> NDArray[np.bool_]:
        """Return which devices are clipped, [K].

        Those with an infinite threshold promise nothing: no term of e is for them, and
        the extremes over devices leave them out.
        """
        return np.isfinite(self.clip)

    @property
    def by_record(self) -> bool:
        """Return whether records are clipped one by one.

        Then one record of a device is what may change. Sums over devices are pairs on
        lattices throughout, and the terms of records apply; otherwise a whole device
        may change.
        """
        return bool(np.isfinite(self.example_clip).any())

    @property
    def short_devices(self) -> bool:
        """Return whether rows of many devices are added to one another (Sums, step 6).

        So it is for softmax models whose devices have at most eight rows each. Their
        norms come from products of rows, whose error `row_product_error` is then above
        0.
        """
        return self.row_product_error > 0

    @property
    def sensitivity(self) -> Array:
        """Return s_k = min(c_k, ℓ_k), half the change that the plan pays for, [K].

        It is infinite where a device is not clipped, even if its records are: nothing
        is promised of such a device, and it must not be the smallest.
        """
        smaller = np.minimum(self.clip, self.example_clip)
        return np.where(self.clipped, smaller, np.inf)

    @property
    def clip_ratio(self) -> float:
        """Return the largest ℓ over the smallest s, of all clipped devices.

        Devices are added together, so the longest of what they send decides the
        rounding, and the device that is allowed the least change decides how much it
        matters. It is 1 where whole devices with equal thresholds are protected.
        """
        largest_clip = np.max(self.clip[self.clipped])
        return float(largest_clip / np.min(self.sensitivity))

    @property
    def largest_size(self) -> int:
        """Return N, the number of records of the largest device.

        The errors of sums over records grow with it: with its square as far as pairs
        add, and up to 256 records as far as float32 does.
        """
        return int(np.max(self.sizes))


def rounding_error(settings: SumSettings) -> RoundingError:
    """Return the terms of e: clipping at ℓ/(1 + e) and c/(1 + e) makes up for float32.

    Args:
        settings: of a clipped sum.

    Returns:
        The terms; all 0 where no device is clipped.

    Raises:
        InputError: where a sum of clipped records may be too long for a float32 norm.
    """
    if not settings.clipped.any():
        return RoundingError()
    check_record_sums(settings)
    return RoundingError(
        device_norm=device_norm(settings),
        device_lattice=device_lattice(settings),
        record_norm=record_norm(settings),
        row_products=row_products(settings),
        record_sum=record_sum(settings),
        record_pairs=record_pairs(settings),
        underflow=underflow(settings),
        device_sum=device_sum(settings),
        row_sum=row_sum(settings),
        row_lattice=row_lattice(settings),
    )


# Terms.


def record_sum(settings: SumSettings) -> float:
    r"""Return the float32 sum of a block of records (Sums, step 1).

    $$\frac{T}{s}\,n^2 u,\quad n = \min(N, 256),\quad T/s = \min(c/s, 2).$$

    Only the block of the changed record differs. Where c > 2ℓ the projection on the
    ball of radius ℓ bounds the change whatever the records add.

    Args:
        settings: of a clipped sum.

    Returns:
        The term of e; 0 where records are not clipped.
    """
    if not settings.by_record:
        return 0.0
    with np.errstate(invalid="ignore"):  # of devices that are not clipped
        ratio = settings.example_clip / settings.sensitivity
    longest = np.max(np.where(settings.clipped, np.minimum(ratio, 2.0), 1.0))
    count = min(settings.largest_size, RECORDS_PER_FLOAT32_SUM)
    return float(longest * count**2 * UNIT_ROUNDOFF)


def record_pairs(settings: SumSettings) -> float:
    """Return the sum of blocks of records in pairs, N² 2⁻⁴⁵ (Sums, step 2).

    Two pairs are added with an error below 2⁻⁴⁶ of the larger. A device of 100,000
    records has an e of 0.03 % by this term.

    Args:
        settings: of a clipped sum.

    Returns:
        The term of e; 0 where records are not clipped.
    """
    if not settings.by_record:
        return 0.0
    return float(settings.largest_size**2 * 2.0**-45)


def record_norm(settings: SumSettings) -> float:
    """Return the relative rounding ν of a record's norm (Sums, step 3).

    A record that is clipped by a norm that is too small by ν is longer than c by as
    much. How large ν is depends on how a model computes norms: `vector_norm_error`,
    `matrix_norm_error` and `traced_norm_error` bound it.

    Args:
        settings: of a clipped sum.

    Returns:
        The term of e; 0 where records are not clipped.
    """
    return settings.record_norm_error if settings.by_record else 0.0


def device_norm(settings: SumSettings) -> float:
    """Return the clipping of a device by a rounded norm, (ℓ/s) ν (Sums, step 4).

    Where records are protected, devices of more than 1,024 of them are clipped in
    pairs, and ν is 2⁻⁴⁰. The device with the largest product decides.

    Args:
        settings: of a clipped sum.

    Returns:
        The term of e.
    """
    many_records = settings.sizes > MAX_RECORDS_CLIPPED_IN_FLOAT32
    in_pairs = settings.by_record & many_records
    error = np.where(in_pairs, PAIR_CLIP_ERROR, settings.device_norm_error)
    with np.errstate(invalid="ignore"):  # of devices that are not clipped
        of_device = settings.clip / settings.sensitivity * error
    return float(np.max(np.where(settings.clipped, of_device, 0.0)))


def device_lattice(settings: SumSettings) -> float:
    r"""Return the sum over devices on lattices and in pairs (Sums, step 5).

    $$\frac{\ell}{s}\left(n^2\sqrt m\,2^{-45} + K^2 2^{-44}\right),\quad
      n = \min(K, 4096);$$

    16 times as much for short devices, whose clipping factors are added so (step 6).

    Args:
        settings: of a clipped sum.

    Returns:
        The term of e.
    """
    count = min(settings.devices, DEVICES_PER_LATTICE)
    on_lattice = count**2 * settings.dim**0.5 * 2.0**-45
    in_pairs = settings.devices**2 * 2.0**-44
    reach = PRIOR_FACTOR_REACH if settings.short_devices else 1.0
    return float(settings.clip_ratio * (on_lattice + in_pairs) * reach)


def device_sum(settings: SumSettings) -> float:
    r"""Return the float32 sum of devices that are protected as a whole (Sums, step 5).

    $$\frac{\ell}{s}\left(n^2 + 4\cdot128\,[K\le128]\right)u,\quad n = \min(K, 128).$$

    The second part is for sums that are never pairs: their rounding before noise.

    Args:
        settings: of a clipped sum.

    Returns:
        The term of e; 0 where records are clipped, as float32 then adds no devices.
    """
    if settings.by_record:
        return 0.0
    count = min(settings.devices, DEVICES_PER_FLOAT32_SUM)
    never_pairs = settings.devices <= DEVICES_PER_FLOAT32_SUM
    before_noise = 4 * DEVICES_PER_FLOAT32_SUM * never_pairs
    return float(settings.clip_ratio * (count**2 + before_noise) * UNIT_ROUNDOFF)


def row_products(settings: SumSettings) -> float:
    """Return the norms of short devices by products of rows (Sums, step 6).

    The clipping factor of a device with c < ℓ is off by at most 208 (d + C + 48) u c/ℓ,
    which is multiplied by ℓ/c.

    Args:
        settings: of a clipped sum.

    Returns:
        The term of e; 0 where records are not clipped, and for other than short
        devices.
    """
    if not settings.by_record:
        return 0.0
    return ROW_PRODUCT_FACTOR * settings.row_product_error


def row_sum(settings: SumSettings) -> float:
    r"""Return the float32 sum of rows of many short devices (Sums, step 6).

    $$\frac{T}{s}\,128^2 u,\quad T = c \text{ if } c < \ell, \text{ else } 4\ell.$$

    T bounds a row of a device that is clipped as a whole, whose rows may cancel.

    Args:
        settings: of a clipped sum.

    Returns:
        The term of e; 0 for other than short devices.
    """
    if not settings.short_devices:
        return 0.0
    clipped_row = settings.example_clip < settings.clip
    uncancelled = MAX_CANCELLATION * settings.clip
    longest_row = np.where(clipped_row, settings.example_clip, uncancelled)
    largest = np.max(longest_row[settings.clipped])
    ratio = largest / np.min(settings.sensitivity)
    return float(ratio * ROWS_PER_FLOAT32_SUM**2 * UNIT_ROUNDOFF)


def row_lattice(settings: SumSettings) -> float:
    r"""Return the sum of float32 sums of rows on lattices (Sums, step 6).

    $$\frac{\ell}{s}\,4\cdot128\,n^2\sqrt m\,2^{-46},\quad n = \min(K, 256).$$

    A float32 sum has up to 128 rows of at most 4ℓ each, and n of them share a lattice.

    Args:
        settings: of a clipped sum.

    Returns:
        The term of e; 0 for other than short devices.
    """
    if not settings.short_devices:
        return 0.0
    longest = settings.clip_ratio * MAX_CANCELLATION * ROWS_PER_FLOAT32_SUM
    count = min(settings.devices, ROW_SUMS_PER_LATTICE)
    return float(longest * count**2 * settings.dim**0.5 * 2.0**-46)


def underflow(settings: SumSettings) -> float:
    r"""Return what is added to squared norms, $m\,2^{-117}/(\ell s)$ (Sums, step 8).

    Squares that float32 loses must not make a norm too small, so that more than may be
    lost is added to it. This term is tiny unless clipping thresholds are.

    Args:
        settings: of a clipped sum.

    Returns:
        The term of e; 0 where records are not clipped.
    """
    if not settings.by_record:
        return 0.0
    added = settings.dim * LOST_NORM / (settings.clip * settings.sensitivity)
    return float(np.max(np.where(settings.clipped, added, 0.0)))


def check_record_sums(settings: SumSettings) -> None:
    """Refuse records whose sum could silence their device (Sums, step 8).

    A gradient whose squared norm overflows adds nothing. If one record could make its
    device's gradient so long, the sum would change by more than the plan pays for.

    Args:
        settings: of a clipped sum.

    Raises:
        InputError: where N_k c_k > 2⁵⁸ and c_k < ℓ_k < ∞.
    """
    if not settings.by_record:
        return
    clip = settings.clip
    example_clip = settings.example_clip
    matters = settings.clipped & (example_clip < clip)
    with np.errstate(invalid="ignore"):
        longest = np.where(matters, settings.sizes * example_clip, 0.0)
    if np.max(longest) > LONGEST_RECORD_SUM:
        size = settings.largest_size
        largest_clip = LONGEST_RECORD_SUM / size
        requirement = f"at most {largest_clip:.3g}, for devices of {size} examples"
        largest = float(np.max(example_clip[example_clip < clip]))
        raise InputError("example_clip", largest, requirement, section="privacy")


# Relative rounding of norms.


def vector_norm_error(dim: int) -> float:
    """Return ν of the norm of m parameters, by `sum_squares` (Sums, step 3).

    ν ≤ (a/2 + 8) u, where a square goes through a additions: about 32 log₃₂ m of them,
    not m, as squares are added in stages.

    Args:
        dim: m.

    Returns:
        The relative rounding error of the norm.
    """
    return (additions(dim) / 2 + 8) * UNIT_ROUNDOFF


def matrix_norm_error(dim: int, classes: int) -> float:
    """Return ν of the norm of C vectors of d parameters (Sums, step 3).

    Squares are added along the features in stages, and the C sums of the classes in
    any order after that: ν ≤ ((a + C)/2 + 8) u.

    Args:
        dim: d.
        classes: C.

    Returns:
        The relative rounding error of the norm.
    """
    return ((additions(dim) + classes) / 2 + 8) * UNIT_ROUNDOFF


def traced_norm_error(longest_sum: int, arrays: int) -> float:
    """Return ν of the norm of a custom model's record (Sums, step 3).

    It is larger than that of other models by 6 u, for the units of the clipping
    threshold that norms are computed in and for products of two vectors.

    Args:
        longest_sum: additions that a term of an array's squares goes through.
        arrays: arrays of parameters, whose squares are added at the end.

    Returns:
        The relative rounding error of the norm.
    """
    return ((longest_sum + arrays) / 2 + 14) * UNIT_ROUNDOFF


def short_device_norm_error(dim: int, classes: int) -> float:
    """Return ν of what a short device sends, by its rows (Sums, step 6).

    It is `matrix_norm_error` plus 18 u: a device's clipping factor is multiplied with
    the residuals of its rows, not with its gradient. Two products of each of at most 8
    rows are rounded, its residuals times their own clipping factor and times the
    device's, and two of the device: its quotient ℓ/‖g‖ and that times w. Rows are
    together no longer than 8 c ≤ 8 ℓ, or 4 ℓ where c is not the smaller, so that each
    of these counts with u at most.

    Args:
        dim: d.
        classes: C.

    Returns:
        The relative rounding error of what the device sends.
    """
    products = PRODUCTS_PER_SHORT_ROW * MAX_ROWS_OF_SHORT_DEVICE
    products += PRODUCTS_PER_SHORT_DEVICE
    return matrix_norm_error(dim, classes) + products * UNIT_ROUNDOFF


def row_product_error(dim: int, classes: int) -> float:
    """Return the rounding of a short device's squared norm (Sums, step 6).

    The squared norm is Σ_ij (u_i·u_j)(r_i·r_j) over pairs of rows, in which large terms
    may cancel. The error is relative to the square of the sum of the rows' norms, and
    as much is added before clipping.

    Args:
        dim: d.
        classes: C.

    Returns:
        (d + C + 48) u.
    """
    return (dim + classes + 48) * UNIT_ROUNDOFF
