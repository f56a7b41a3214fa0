"""The scenario file: validated, and turned into posterior, link and privacy."""

from wflmc.scenario.build import Inputs, build
from wflmc.scenario.coverage import NotCovered, not_covered
from wflmc.scenario.files import load_data, load_scenario, to_json, to_toml
from wflmc.scenario.schema import Scenario, validate

__all__ = [
    "Inputs",
    "NotCovered",
    "Scenario",
    "build",
    "load_data",
    "load_scenario",
    "not_covered",
    "to_json",
    "to_toml",
    "validate",
]
