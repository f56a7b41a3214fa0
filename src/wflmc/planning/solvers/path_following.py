"""The driver of interior-point methods: follow a path, and keep the best that it shows.

A path moves through the interior of a problem; its points need not meet every limit.
An incumbent turns such a point into a feasible plan and a proven lower bound, and keeps
the best of both. The proof rests on the incumbent alone, not on the path.
"""

from typing import Protocol, TypeVar

MAX_STEPS = 100
"""The most steps of one search along a path."""


class InteriorPath(Protocol):
    """A primal-dual path towards the optimum."""

    @property
    def gap(self) -> float:
        """Return how far the present point would be from the optimum.

        It is counted as if the point were feasible, and decides when points are worth a
        look. It proves nothing, because points of a path need not meet every limit.
        """

    def step(self) -> bool:
        """Move to the next point of the path.

        Returns:
            False where rounding leaves no way forward; the path then stays where it is.
        """


FollowedPath = TypeVar("FollowedPath", bound=InteriorPath, contravariant=True)


class Incumbent(Protocol[FollowedPath]):
    """The best feasible point and the best lower bound so far."""

    @property
    def gap(self) -> float:
        """Return the proven gap between both, relative to the value.

        The value is that of a feasible point and the bound holds for all of them, so
        that this is how much better an optimum could be. It is infinite before the
        first feasible point.
        """

    def is_worth_updating(self, path: FollowedPath) -> bool:
        """Return whether the path's present point is near enough to the optimum.

        Updates cost time and improve nothing far from it. The last point of a path is
        always looked at.

        Args:
            path: at the point.
        """

    def update(self, path: FollowedPath) -> None:
        """Take the path's present point into account.

        A feasible point and a lower bound are derived from it; each is kept if it is
        the best so far.

        Args:
            path: at the point.
        """

    def has_stalled(self, path: FollowedPath) -> bool:
        """Return whether further steps would improve nothing.

        It ends a search whose tolerance is below what rounding allows.

        Args:
            path: at its present point.
        """


def follow_path(
    path: FollowedPath,
    incumbent: Incumbent[FollowedPath],
    tolerance: float,
    steps: int,
) -> None:
    """Improve an incumbent along a path until its gap is small or the path has ended.

    The incumbent looks at points that are worth it, and at the last one in any case:
    where rounding stops the path, after the last step, or where it has stalled.

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
