"""The scenario file: validated, and turned into what planning starts from."""

from wflmc.scenario.build import (
    THESE_DATA,
    Inputs,
    build,
    build_link,
    build_policy,
    build_posterior,
    build_privacy,
    build_sampler,
    plan_request,
    step_sizes,
)
from wflmc.scenario.coverage import OWNER_ONLY, NotCovered, data_notices, not_covered
from wflmc.scenario.files import (
    file_digests,
    load_data,
    load_scenario,
    plain,
    to_json,
    to_toml,
)
from wflmc.scenario.schema import Scenario, irrelevant, validate, with_values

__all__ = [
    "OWNER_ONLY",
    "THESE_DATA",
    "Inputs",
    "NotCovered",
    "Scenario",
    "build",
    "build_link",
    "build_policy",
    "build_posterior",
    "build_privacy",
    "build_sampler",
    "data_notices",
    "file_digests",
    "irrelevant",
    "load_data",
    "load_scenario",
    "not_covered",
    "plain",
    "plan_request",
    "step_sizes",
    "to_json",
    "to_toml",
    "validate",
    "with_values",
]
