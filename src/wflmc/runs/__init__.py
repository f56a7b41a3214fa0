"""Runs: plans of scenarios, the folders that `wflmc run` and `wflmc federate` write, and what may be published."""

from wflmc.runs.advice import diagnose_plan, solve_for
from wflmc.runs.documents import plan_document, summary_document
from wflmc.runs.planning import make_plan, read_plan
from wflmc.runs.publish import publish_run, statement_lines

__all__ = [
    "diagnose_plan",
    "make_plan",
    "plan_document",
    "publish_run",
    "read_plan",
    "solve_for",
    "statement_lines",
    "summary_document",
]
