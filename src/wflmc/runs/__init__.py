"""Run folders: what `wflmc run` and `wflmc federate` leave, and what of it may be shown."""

from wflmc.runs.publish import KINDS, publish_run, statement_lines

__all__ = ["KINDS", "publish_run", "statement_lines"]
