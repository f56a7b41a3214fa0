"""Plans with other values of some fields."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import wflmc


def with_context(plan: wflmc.Plan, **changes: Any) -> wflmc.Plan:
    """Return a plan with other values of some fields of its context."""
    return replace(plan, context=replace(plan.context, **changes))
