"""The scenario file: validated, turned into posterior, link and privacy, and into a plan."""

from wflmc.scenario.advice import diagnosis
from wflmc.scenario.build import Inputs, build, make_plan
from wflmc.scenario.coverage import OWNER_ONLY, NotCovered, not_covered
from wflmc.scenario.document import extend_plan, plan_document, read_plan, summary_document
from wflmc.scenario.files import load_data, load_scenario, to_json, to_toml
from wflmc.scenario.inverse import Answer, solve_for
from wflmc.scenario.schema import Scenario, validate

__all__ = [
    "OWNER_ONLY",
    "Answer",
    "Inputs",
    "NotCovered",
    "Scenario",
    "build",
    "diagnosis",
    "extend_plan",
    "load_data",
    "load_scenario",
    "make_plan",
    "not_covered",
    "plan_document",
    "read_plan",
    "solve_for",
    "summary_document",
    "to_json",
    "to_toml",
    "validate",
]
