"""The driver of interior-point paths, on a path that halves its gap in every step."""

from __future__ import annotations

import pytest

from wflmc.planning.solvers.path_following import follow_path


class HalvingPath:
    """Stops to move after some steps."""

    def __init__(self, last_step: int = 1000) -> None:
        self.gap = 1.0
        self.steps = 0
        self.last_step = last_step

    def step(self) -> bool:
        if self.steps == self.last_step:
            return False
        self.steps += 1
        self.gap /= 2
        return True


class RecordingIncumbent:
    """Is as good as the path; looks at points below `near` alone."""

    def __init__(self, near: float = 2.0, stalls_at: int = 1000) -> None:
        self.gap = 1.0
        self.updates = []
        self.near = near
        self.stalls_at = stalls_at

    def is_worth_updating(self, path: HalvingPath) -> bool:
        return path.gap < self.near

    def update(self, path: HalvingPath) -> None:
        self.gap = path.gap
        self.updates.append(path.steps)

    def has_stalled(self, path: HalvingPath) -> bool:
        return len(self.updates) >= self.stalls_at


@pytest.mark.parametrize(
    ("path", "incumbent", "steps", "updates"),
    [
        (HalvingPath(), RecordingIncumbent(), 100, [1, 2, 3, 4]),
        (HalvingPath(), RecordingIncumbent(near=0.2), 100, [3, 4]),
        (HalvingPath(), RecordingIncumbent(near=0.0), 3, [3]),
        (HalvingPath(last_step=2), RecordingIncumbent(near=0.0), 100, [2]),
        (HalvingPath(), RecordingIncumbent(stalls_at=2), 100, [1, 2]),
    ],
    ids=["proven", "near points alone", "no steps left", "path ends", "stalled"],
)
def test_a_path_is_followed_until_it_brings_no_more(path, incumbent, steps, updates):
    follow_path(path, incumbent, tolerance=0.1, steps=steps)
    assert incumbent.updates == updates
