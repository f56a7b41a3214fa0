"""Advice: what keeps samples from the posterior, and which setting would help.

Advice is asked for: by `wflmc.advise`, `wflmc advise` and `wflmc plan`. It makes many
plans, with one setting changed at a time, and no other part of a run depends on it.
"""

from wflmc.apps.diagnosis.causes import advise, find_causes
from wflmc.apps.diagnosis.replanning import Replanner
from wflmc.apps.diagnosis.values import Cause, Change, Measured

__all__ = ["Cause", "Change", "Measured", "Replanner", "advise", "find_causes"]
