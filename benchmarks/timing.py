"""Timing side by side: two functions in turns, so that a busy machine slows both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def side_by_side(*calls: Callable[[], object], repeats: int = 5) -> list[float]:
    """Median seconds of each function, called in turns after one warm-up each."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(repeats):
        for call, seconds in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return [statistics.median(seconds) for seconds in times]
