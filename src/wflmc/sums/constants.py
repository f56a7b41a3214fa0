"""Constants of the proof in docs/explanation/privacy.md, "Sums in floating point".

Each one is a choice that the code of this package keeps to and that the bound of
`wflmc.sums.bound` is computed from. Changing one changes both.
"""

UNIT_ROUNDOFF = 2.0**-24
"""u, the relative error of one float32 operation."""

RECORDS_PER_FLOAT32_SUM = 256
"""Clipped records that float32 adds before a pair takes their sum over (step 1).

The error grows with its square: 256² u = 0.39 % of a record's clipping threshold.
"""

DEVICES_PER_FLOAT32_SUM = 128
"""Clipped devices that float32 adds where whole devices are protected (step 5).

Sums over no more devices than this need no pairs at all.
"""

DEVICES_PER_LATTICE = 4096
"""Devices that are added on one lattice, and the largest block of devices (step 5)."""

ROWS_PER_FLOAT32_SUM = 128
"""Rows of many short devices that float32 adds (step 6)."""

ROW_SUMS_PER_LATTICE = 256
"""Float32 sums of rows that are added on one lattice (step 6)."""

MAX_ROWS_OF_SHORT_DEVICE = 8
"""Rows up to which a device's norm is computed from products of its rows (step 6)."""

MAX_CANCELLATION = 4.0
"""How far the rows of a short device may cancel (step 6).

The device is clipped as if its norm were at least the sum of its rows' norms over this.
"""

PRIOR_FACTOR_REACH = 16.0
"""Bound on a short device's factor times its prior share's norm, over ℓ (step 6)."""

MAX_RECORDS_CLIPPED_IN_FLOAT32 = 1024
"""Records of a device above which its clipping is computed in pairs (step 4)."""

SQUARES_PER_STAGE = 32
"""Squares of a device's norm that float32 adds; their sums are added again (step 3)."""

RECORD_SQUARES_PER_STAGE = 4096
"""The same for the norm of a custom model's record (step 3).

It may be larger: unlike that of a device's norm, the error of a record's norm is not
multiplied by ℓ/c.
"""

PAIR_CLIP_ERROR = 2.0**-40
"""Relative error of `wflmc.sums.clipping.clip_pairs` (step 4)."""

LOST_SQUARE = 2.0**-124
"""More than float32 loses of one square that is too small for it (step 8).

Numbers below 2⁻¹²⁶ are zero on many processors, and so are sums of them.
"""

LOST_NORM = 2.0**-117
"""More than is added to a squared norm per parameter for lost squares (step 8).

It also covers norms that are computed from products of rows.
"""

LONGEST_VECTOR = 2.0**60
"""The longest row of features or gradient whose norm is used; longer ones add nothing.

Float32 holds its square, and the quotient of the smallest clipping threshold and it.
"""

LONGEST_RECORD_SUM = 2.0**58
"""The longest prior share, and the longest sum of clipped records beside it (step 8).

Their sum is then below `LONGEST_VECTOR`, where a record could silence its device.
"""

LONGEST_ROW_PER_CLIP = 2.0**45
"""A clipped row of a short device that is longer than this times c adds nothing.

Its residual would be too small for the products that the device's norm is made of.
"""

SMALLEST_COORDINATE = 2.0**-100
"""Vectors without a larger coordinate count as zero: nothing beside any threshold."""

CPU_CACHE_BYTES = 2**22
"""Bytes of gradients at a time on a CPU, so that its cache holds them.

It has no part in the proof: blocks may have any size up to `DEVICES_PER_LATTICE`.
"""
