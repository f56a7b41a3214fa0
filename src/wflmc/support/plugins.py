"""Policies, fading laws and models of other packages, and models in Python files.

A package declares entry points `[project.entry-points."wflmc.policies"]`,
`"wflmc.fading"` or `"wflmc.models"`, each a name and the object that it stands for: a
`PowerPolicy`; a function from the mean power to a `Fading`; a function that returns a
posterior. `docs/guides/extending.md` has a complete package as an example.
"""

import inspect
import runpy
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from wflmc.support.errors import Fault, InputError


def names(group: str) -> list[str]:
    """Return the names that installed packages have registered, in alphabetical order.

    A group is `policies`, `fading` or `models`, and its entry points are those of
    `wflmc.<group>`. Nothing is imported.
    """
    return sorted(entry_points(group=f"wflmc.{group}").names)


def load(
    group: str, name: str, key: str, builtin: Mapping[str, Any], section: str = ""
) -> Any:
    """Return the object that a name stands for, built in or of another package.

    A built-in name wins over one that a package has registered.

    Args:
        group: policies, fading or models.
        name: to look up.
        key: the argument or scenario key that has the name, for errors.
        builtin: the objects of this package, by name.
        section: of a scenario that has the key, for errors.

    Returns:
        The object; that of another package is imported.

    Raises:
        InputError: the name is not built in, and no installed package registers it.
    """
    if name in builtin:
        return builtin[name]
    if name not in names(group):
        raise InputError(key, name, describe_names(group, builtin), section)
    return entry_points(group=f"wflmc.{group}")[name].load()


def describe_names(group: str, builtin: Iterable[str]) -> str:
    """Return the valid names of a group, and how to register another one.

    Args:
        group: policies, fading or models.
        builtin: the names of this package.

    Returns:
        The end of a sentence "it must be ...". It has the built-in names first, then
        those of installed packages.

    >>> names, _, guide = describe_names("fading", ["static", "awgn"]).partition(" (")
    >>> print(names)
    'static', 'awgn' or a name that an installed package registers as wflmc.fading
    """
    quoted = ", ".join(f"'{name}'" for name in (*builtin, *names(group)))
    registered = (
        f"a name that an installed package registers as wflmc.{group} "
        "(see docs/guides/extending.md)"
    )
    return f"{quoted} or {registered}" if quoted else registered


def is_file_model(model: str) -> bool:
    """Return whether `posterior.model` names a function in a file, FILE.py:FUNCTION.

    The file need not exist; other texts are names of built-in or registered models.
    """
    return model.rpartition(":")[0].endswith(".py")


def build_custom_model(model: str, keys: Mapping[str, Any]) -> Any:
    """Return the posterior that a registered function, or one in a file, returns.

    This executes the file, or imports the package.

    Args:
        model: FILE.py:FUNCTION, or the name of a registered model.
        keys: of the scenario's section `posterior`; the function gets those that its
            parameters name.

    Returns:
        The result of the function.

    Raises:
        InputError: there is no such file, function or registered name.
    """
    key = "posterior.model"
    path, _, name = model.rpartition(":")
    if not path:
        function = load("models", model, key, {})
    elif Path(path).is_file():
        function = runpy.run_path(path).get(name)
    else:
        requirement = "the name of a Python file that is there, and a function in it"
        raise InputError(key, model, requirement)
    if not callable(function):
        raise InputError(key, Fault(f"has no function {name}"), "FILE.py:FUNCTION")
    parameters = inspect.signature(function).parameters
    arguments = {name: value for name, value in keys.items() if name in parameters}
    return function(**arguments)
