"""Sections of a scenario file, made from the dataclasses of the core that they become.

A field of `Link`, `Privacy`, `Sampler` or `Policy` is a key of the section of the same
name, with the default and the limits that its annotation declares
(`wflmc.support.declarations`). What only a file has is declared in
`wflmc.scenario.schema`.
"""

from collections.abc import Callable
from dataclasses import MISSING
from typing import Annotated, Any, Literal, Optional, TypeVar

from pydantic import AfterValidator, BaseModel, Field, create_model
from pydantic_core import PydanticCustomError

from wflmc.support.declarations import Choices, DeclaredField, Interval, declared_fields
from wflmc.support.plugins import describe_names, is_file_model, names

T = TypeVar("T")


class ScenarioSection(BaseModel, strict=True, extra="forbid", frozen=True):
    """A section of a scenario: unknown keys and wrong types are refused."""


def section_of(core: type) -> type[ScenarioSection]:
    """Return the section with a key for every field that files may give.

    Args:
        core: a dataclass whose fields are declared with `Interval` or `Choices`.

    Returns:
        A class `<name of core>Keys`, with the defaults, limits and descriptions that
        the fields declare.
    """
    keys: dict[str, Any] = {}
    for field in declared_fields(core):
        if field.in_files:
            default = ... if field.default is MISSING else field.default
            keys[field.name] = (
                _type_of(field),
                Field(default, description=field.description),
            )
    return create_model(f"{core.__name__}Keys", __base__=ScenarioSection, **keys)


def core_value(core: Callable[..., T], section: BaseModel, **values: object) -> T:
    """Return the value of the core that a section stands for.

    Args:
        core: the dataclass.
        section: that was made from it; keys that only files have are left out.
        values: of fields that files give otherwise, or not at all.

    Returns:
        The value.

    Raises:
        InputError: fields contradict each other.
    """
    assert isinstance(core, type)
    fields = [field.name for field in declared_fields(core) if field.in_files]
    return core(**{name: getattr(section, name) for name in fields} | values)


def key_type(core: type, name: str, text: Any) -> Any:
    """Return the type of a key for which files also have a text, such as an expression.

    Args:
        core: the dataclass that declares the field.
        name: of the field.
        text: the type of the text.

    Returns:
        The union of the declared type and that of the text.
    """
    (field,) = (field for field in declared_fields(core) if field.name == name)
    return _type_of(field) | text


def _type_of(field: DeclaredField) -> Any:
    """Return the type that pydantic checks a key by."""
    kind = field.kind
    if field.choices is not None:
        kind = _name_type(field.choices)
    elif field.interval is not None:
        kind = number_type(float if field.kind is not int else int, field.interval)
    return Optional[kind] if field.optional else kind  # noqa: UP045


def number_type(kind: type, interval: Interval) -> Any:
    """Return the type of a number, or of a list of them where devices may differ.

    Args:
        kind: int or float.
        interval: the limits of every number, and whether a list is allowed.

    Returns:
        A type that pydantic checks; a list must not be empty.
    """
    number = Annotated[
        kind,  # type: ignore[valid-type]
        Field(
            ge=interval.minimum,
            le=interval.maximum,
            gt=interval.above,
            lt=interval.below,
        ),
    ]
    if not interval.per_device:
        return number
    return number | Annotated[list[number], Field(min_length=1)]


def registered_name(group: str, *builtin: str) -> Any:
    """Return the type of a name, built in or registered by another package.

    Models may also be functions in files, FILE.py:FUNCTION.

    Args:
        group: of entry points, `wflmc.<group>`.
        *builtin: the names of this package.

    Returns:
        A type that pydantic checks; its error lists the valid names.
    """

    def check(name: str) -> str:
        if name in builtin or name in names(group):
            return name
        if group == "models" and is_file_model(name):
            return name
        files = ("FILE.py:FUNCTION",) if group == "models" else ()
        valid_names = describe_names(group, (*builtin, *files))
        raise PydanticCustomError("unknown_name", f"Input should be {valid_names}")

    return Annotated[str, AfterValidator(check)]


def _name_type(choices: Choices) -> Any:
    """Return the type of one of several names."""
    if choices.group:
        return registered_name(choices.group, *choices.names)
    return Literal[choices.names]
