"""Every option is declared once: the Python API and scenario files check it by the same declaration."""

from __future__ import annotations

import inspect
import math
import pickle
from dataclasses import MISSING, dataclass, replace
from typing import Annotated

import numpy as np
import pytest
from pydantic import ValidationError

import wflmc
from wflmc.scenario import Scenario, validate
from wflmc.scenario.sections import core_value, section_of
from wflmc.support.declarations import (
    Choices,
    Interval,
    NotInFiles,
    check_fields,
    declared_fields,
    documented,
)
from wflmc.support.errors import InputError, renamed_keys

from ..error_tools import missing_facts, raises_input_error

CORE = {
    "link": wflmc.Link(wflmc.channel.static()),
    "privacy": wflmc.Privacy(),
    "sampler": wflmc.Sampler(),
    "policy": wflmc.Policy(),
}
IN_FILES = [
    (section, field)
    for section, value in CORE.items()
    for field in declared_fields(type(value))
    if field.in_files
]
OTHERWISE = {"friction", "max_round_noise"}
"""Keys for which files also have a text."""


@documented
@dataclass(frozen=True)
class Toy:
    """A toy."""

    gain: Annotated[float, Interval(above=0, maximum=10), "How loud it is."] = 1.0
    parts: Annotated[int, Interval(minimum=1)] = 3
    mood: Annotated[str, Choices(("calm", "wild"))] = "calm"
    weights: Annotated[float | None, Interval(minimum=0, per_device=True)] = None
    owner: Annotated[object, NotInFiles(), "Who has it."] = None

    def __post_init__(self):
        check_fields(self)


@pytest.mark.parametrize(
    ("name", "value", "facts"),
    [
        ("gain", 0, (10,)),
        ("gain", 11.0, (10,)),
        ("gain", math.nan, (10,)),
        ("gain", "2", (10,)),
        ("gain", [1.0, 2.0], (10,)),
        ("gain", True, (10,)),
        ("parts", 0, ("whole", 1)),
        ("parts", 2.0, ("whole", 1)),
        ("mood", "sad", ("calm", "wild")),
        ("mood", 3, ("calm", "wild")),
        ("weights", [1.0, -1.0], (0, "device")),
        ("weights", [], (0, "device")),
        ("weights", [[1.0]], (0, "device")),
    ],
)
def test_values_are_checked_by_their_declaration(name, value, facts):
    with raises_input_error(name, section="toy") as caught:
        Toy(**{name: value})
    assert not missing_facts(caught.value.requirement, facts)
    with pytest.raises(ValidationError):
        section_of(Toy)(**{name: value})


def test_what_is_allowed_is_allowed_on_both_sides():
    for values in (
        {"gain": 10},
        {"parts": 1},
        {"mood": "wild"},
        {"weights": [0.0, 2.0]},
        {"weights": None},
    ):
        section = section_of(Toy)(**values)
        assert core_value(Toy, section) == Toy(**values)
    assert core_value(Toy, section_of(Toy)(), owner="me") == Toy(owner="me")
    assert Toy(gain=np.float32(2), parts=np.int64(4), weights=np.ones(3)).parts == 4
    assert "owner" not in section_of(Toy).model_fields


def test_descriptions_are_in_docstrings():
    assert "gain: How loud it is." in inspect.getdoc(Toy)
    for value in CORE.values():
        fields = declared_fields(type(value))
        text = " ".join(inspect.getdoc(type(value)).split())
        assert all(
            f"{field.name}: {' '.join(field.description.split())}" in text
            for field in fields
        )
        assert all(field.description for field in fields)


@pytest.mark.parametrize(
    ("section", "field"), IN_FILES, ids=lambda part: getattr(part, "name", part)
)
def test_a_key_has_the_default_of_its_field(section, field):
    key = Scenario.model_fields[section].annotation.model_fields[field.name]
    assert key.default == field.default
    assert field.default is not MISSING


@pytest.mark.parametrize(
    ("section", "field"), IN_FILES, ids=lambda part: getattr(part, "name", part)
)
def test_a_key_has_the_limits_of_its_field(section, field):
    """A value at a limit is allowed in a file as it is in Python; one beyond it in neither."""

    def refused(call, *arguments):
        try:
            call(*arguments)
        except InputError as error:
            return error.scenario_key
        return None

    tried = ["no such name"] if field.name not in OTHERWISE else []
    if field.interval is not None:
        limits = field.interval
        step = 1 if field.kind is int else 1e-6
        for end in {limits.minimum, limits.maximum, limits.above, limits.below} - {
            None
        }:
            away = step * max(1, abs(end))
            tried += [end, end - away, end + away]
        tried += [math.nan, [], [field.default], [math.nan]]
    if field.choices is not None:
        tried += list(field.choices.names)
    in_files = [refused(validate, {section: {field.name: value}}) for value in tried]
    assert in_files == [refused(field.check, value, section) for value in tried]
    assert set(in_files) == {None, f"{section}.{field.name}"}


def test_errors_name_the_argument_in_python_and_the_key_in_a_scenario():
    with pytest.raises(InputError) as caught:
        wflmc.Link(wflmc.channel.static(), snr_db=400)
    error = pickle.loads(pickle.dumps(caught.value))  # as from a worker
    assert str(error).startswith("snr_db = 400 was given")
    assert error.in_scenario.startswith("link.snr_db = 400 was given")
    assert error.of_section("posterior", ["snr_db"]) is error
    plain = InputError("partition", "x", "a rule")
    assert plain.scenario_key == "partition"
    assert (
        plain.of_section("posterior", ["partition"]).scenario_key
        == "posterior.partition"
    )
    assert plain.of_section("posterior", ["devices"]) is plain


def test_options_of_commands_take_the_place_of_arguments():
    for names in ({"snr_db": "--snr"}, {"link.snr_db": "--snr"}):
        with pytest.raises(InputError) as caught, renamed_keys(names):
            raise InputError("snr_db", 400, "less", section="link")
        assert caught.value.in_scenario.startswith("--snr = 400")
    with pytest.raises(InputError) as caught, renamed_keys({"power": "--power"}):
        raise InputError("snr_db", 400, "less", section="link")
    assert caught.value.scenario_key == "link.snr_db"


def test_a_request_changes_by_the_keys_of_a_scenario():
    request = wflmc.planning.PlanRequest(
        CORE["link"], CORE["privacy"], step_size=0.1, burn_in=3, samples=2
    )
    values = {
        "link.snr_db": 5.0,
        "sampler.burn_in": 7,
        "sampler.init": "zero",
        "policy.power": "equal",
    }
    other = request.with_values({**values, "privacy.clip": 3.0})
    assert other.link.snr_db == 5.0
    assert (other.burn_in, other.rounds, other.sampler.init) == (7, 9, "zero")
    assert (other.policy.power, other.privacy.clip) == ("equal", 3.0)
    assert other.with_values({}) == other
    assert request.with_values({"link.snr_db": 20.0}) == request
    with pytest.raises(InputError) as caught:
        request.with_values({"link.csi_error": 2.0})
    assert caught.value.scenario_key == "link.csi_error"
    with pytest.raises(InputError):
        replace(request, samples=0)
