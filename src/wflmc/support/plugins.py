"""What other packages add: policies, fading laws and models by entry points, and models in files of one's own.

A package declares `[project.entry-points."wflmc.policies"]`, `"wflmc.fading"` or `"wflmc.models"`, each a name and what
it stands for: a `PowerPolicy`; a function from the mean power to a `Fading`; a function that returns a posterior.
`docs/guides/extending.md` has a whole package as an example.
"""

import inspect
import runpy
from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from wflmc.support.errors import Fault, InputError


def names(group: str) -> list[str]:
    """Return the names that packages have registered as `wflmc.<group>`."""
    return sorted(entry_points(group=f"wflmc.{group}").names)


def load(
    group: str, name: str, key: str, builtin: Mapping[str, Any], section: str = ""
) -> Any:
    """Return what a name stands for: one of our own, or that of a package.

    Args:
        group: policies, fading or models.
        name: to look up.
        key: the argument or scenario key that has the name, for errors.
        builtin: our own, by name.
        section: of a scenario that has the key, for errors.

    Returns:
        The value that the name stands for; that of a package is imported.

    Raises:
        InputError: if neither we nor an installed package know the name.
    """
    if name in builtin:
        return builtin[name]
    if name not in names(group):
        raise InputError(key, name, known_names(group, builtin), section)
    return entry_points(group=f"wflmc.{group}")[name].load()


def known_names(group: str, builtin: Iterable[str]) -> str:
    """Return the names that a key may have, and how to register another one, as the end of "it must be ...".

    >>> known_names("fading", ["static", "rayleigh"])
    "'static', 'rayleigh' or a name that an installed package registers as wflmc.fading (see docs/guides/extending.md)"
    """
    quoted = ", ".join(f"'{name}'" for name in (*builtin, *names(group)))
    register = f"a name that an installed package registers as wflmc.{group} (see docs/guides/extending.md)"
    return f"{quoted} or {register}" if quoted else register


def is_own_model(model: str) -> bool:
    """Return whether `posterior.model` names a function in a file, FILE.py:FUNCTION."""
    return model.rpartition(":")[0].endswith(".py")


def build_own_model(model: str, keys: Mapping[str, Any]) -> Any:
    """Return the posterior that a function in a file returns.

    This executes the file.

    Args:
        model: FILE.py:FUNCTION, or the name of a registered model.
        keys: of the scenario's section `posterior`; the function gets those that it names.
    """
    path, _, name = model.rpartition(":")
    if path and not Path(path).is_file():
        raise InputError(
            "posterior.model",
            model,
            "the name of a Python file that is there, and a function in it",
        )
    content = (
        runpy.run_path(path)
        if path
        else {name: load("models", model, "posterior.model", {})}
    )
    if not callable(function := content.get(name)):
        raise InputError(
            "posterior.model", Fault(f"has no function {name}"), "FILE.py:FUNCTION"
        )
    wanted = inspect.signature(function).parameters
    return function(**{key: value for key, value in keys.items() if key in wanted})
