"""What tests of plans share."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import wflmc


def with_context(plan: wflmc.Plan, **changes: Any) -> wflmc.Plan:
    """Return a plan with other values of some fields of its context."""
    return replace(plan, context=replace(plan.context, **changes))


def grouped(**settings):
    """Return arguments of `wflmc.plan` from settings that are all named at one level.

    Fields of `Sampler` and `Policy` become `sampler=` and `policy=`; other settings are
    returned as they are.
    """
    for name, kind in (("sampler", wflmc.Sampler), ("policy", wflmc.Policy)):
        members = {
            field.name: settings.pop(field.name)
            for field in fields(kind)
            if field.name in settings
        }
        if members:
            settings[name] = kind(**members)
    return settings
