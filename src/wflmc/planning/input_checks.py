"""Inputs that are allowed and yet look like a mistake: gains in dB, features as they came, a δ that promises little."""

from __future__ import annotations

from typing import Any

import numpy as np

from wflmc.channel import Link
from wflmc.privacy import Privacy

UNSCALED, UNLIKE = 30.0, 100.0
"""Size of a feature, and over the median of all, from which on it alone decides L, the step size and the clipping."""


UNSCALED_FEATURES = "Features are not scaled"


def input_warnings(posterior: Any, link: Link | None, privacy: Privacy) -> tuple[str, ...]:
    """What to look at before anything is sent; without a link, it is an ideal one."""
    fading = None if link is None else link.fading
    return (*getattr(fading, "warnings", ()), *_large_delta(posterior, privacy), *_unscaled(posterior))


def _large_delta(posterior: Any, privacy: Privacy) -> list[str]:
    """A mechanism that publishes one of N units in full, picked at random, is (0, 1/N)-private."""
    sizes = getattr(posterior, "sizes", None)
    if privacy.epsilon is None or privacy.delta is None or sizes is None:
        return []
    unit, count = ("example", int(np.sum(sizes))) if privacy.unit == "record" else ("device", len(sizes))
    delta = float(np.max(privacy.delta))
    if delta <= 1 / count:
        return []
    what = "an example" if unit == "example" else "all data of a device"
    return [
        f"delta = {delta:g} is above 1/{count}, one over the number of {unit}s: publishing {what} picked at random "
        "would keep such a promise. A delta far below that is usual."
    ]


def _unscaled(posterior: Any) -> list[str]:
    """Features of unlike or large size, by which chains move; sizes are only said to a power of ten."""
    scales = getattr(posterior, "feature_scales", None)
    if scales is None or not scales.any():
        return []
    largest, median = int(np.argmax(scales)), float(np.median(scales[scales > 0]))
    whitened = posterior.coordinates is not None
    unlike = scales[largest] > UNLIKE * median and not whitened
    if not unlike and scales[largest] <= UNSCALED:
        return []
    size = 10 ** round(np.log10(scales[largest] / (median if unlike else 1.0)))
    compared = "the median column" if unlike else "a standardised one"
    name = f" ({posterior.columns[largest]})" if posterior.columns else ""
    column = "after whitening a direction" if whitened else f"column {largest} of X{name}, counted from 0,"
    return [
        f"{UNSCALED_FEATURES}: {column} is some {size:,} times as large as {compared}. It alone decides L, the "
        "step size and what is clipped. Standardise all columns, by public means and scales."
    ]
