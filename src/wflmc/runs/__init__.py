"""Runs: plans of scenarios, run folders that `wflmc run` and `wflmc federate` write, and what of one may be shown."""

from wflmc.runs.diagnosis import diagnose
from wflmc.runs.documents import plan_document, summary_document
from wflmc.runs.inverse import Answer, solve_for
from wflmc.runs.planning import extend_plan, make_plan, read_plan
from wflmc.runs.publish import KINDS, publish_run, statement_lines

__all__ = [
    "KINDS",
    "Answer",
    "diagnose",
    "extend_plan",
    "make_plan",
    "plan_document",
    "publish_run",
    "read_plan",
    "solve_for",
    "statement_lines",
    "summary_document",
]
