"""The driver of interior-point methods: follow a path, and keep the best that it shows.

A path moves through the interior of a problem; its points need not meet every limit.
An incumbent turns such a point into a feasible plan and a proven lower bound, and keeps
the best of both. The proof rests on the incumbent alone, not on the path.
"""

from typing import Protocol, TypeVar


class InteriorPath(Protocol):
    """A primal-dual path towards the optimum."""

    @property
    def gap(self) -> float:
        """How far the present point would be from the optimum if it were feasible."""

    def step(self) -> bool:
        """Move along the path; False where rounding leaves no way forward."""


FollowedPath = TypeVar("FollowedPath", bound=InteriorPath, contravariant=True)


class Incumbent(Protocol[FollowedPath]):
    """The best feasible point and the best lower bound so far."""

    @property
    def gap(self) -> float:
        """The proven gap between both, relative to the value."""

    def is_worth_updating(self, path: FollowedPath) -> bool:
        """Return whether the path's present point is near enough to look at."""

    def update(self, path: FollowedPath) -> None:
        """Take the path's present point into account."""

    def has_stalled(self, path: FollowedPath) -> bool:
        """Return whether further steps would bring nothing."""


def follow_path(
    path: FollowedPath,
    incumbent: Incumbent[FollowedPath],
    tolerance: float,
    steps: int,
) -> None:
    """Improve an incumbent along a path until its gap is small or the path has ended.

    Args:
        path: to follow from where it is.
        incumbent: to improve.
        tolerance: the relative gap at which the search ends.
        steps: the most steps.
    """
    for steps_left in reversed(range(steps)):
        moved = path.step()
        is_last_point = steps_left == 0 or not moved
        if not is_last_point and not incumbent.is_worth_updating(path):
            continue
        incumbent.update(path)
        is_proven = incumbent.gap <= tolerance
        if is_proven or not moved or incumbent.has_stalled(path):
            return
