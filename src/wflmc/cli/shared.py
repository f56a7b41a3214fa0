"""Options that several commands have, and how results and warnings are printed."""

import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from wflmc.support.errors import InputError
from wflmc.support.storage import writable_folder


def option(metavar: str | None, text: str, *names: str) -> OptionInfo:
    """Return an option for the annotation of a command's parameter.

    Args:
        metavar: stands for the value in the help; None for typer's own.
        text: the help.
        *names: such as `--set`; the name of the parameter by default.

    Returns:
        The metadata that typer reads. It names no environment variable, as there is
        none.
    """
    return typer.Option(*names, metavar=metavar, help=text, show_envvar=False)


def flag(name: str, text: str) -> OptionInfo:
    """Return an option without a value, for the annotation of a command's parameter.

    Args:
        name: such as `--json`.
        text: the help.

    Returns:
        The metadata that typer reads.
    """
    return option(None, text, name)


ENGINES = (
    "Where points are computed: local, dask (workers on this machine), or dask:ADDRESS "
    "(a Dask scheduler)."
)
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([kmgt]?)(i?)b?")
"""A number, and a unit in lower case: a prefix, and i for powers of 1024."""
UNIT_PREFIXES = "kmgt"
"""Of 1000 or 1024 to the powers 1 to 4."""
TABLE_MODULES = ("sklearn", "pandas", "pyarrow")
"""Modules that the extra `tables` brings."""
PIPED_WIDTH = 140
"""Characters of a line where output is no terminal, so that tables do not fold."""
MIN_CACHED_COMPILE_SECONDS = 0.2
"""Compilations that take longer are kept."""
ScenarioPath = Annotated[
    str,
    typer.Argument(
        help="Scenario file (TOML); docs/reference/scenario.md lists its keys."
    ),
]
Overrides = Annotated[
    list[str] | None,
    option("SECTION.KEY=VALUE", "Override a key; may repeat.", "--set"),
]
Memory = Annotated[
    str | None,
    option("SIZE", "Limit for chains and gradients, such as 4GiB; 2GiB by default."),
]
EngineName = Annotated[str, option("ENGINE", ENGINES)]
Workers = Annotated[
    int | None,
    option("N", "With --engine dask: number of workers; one per core by default."),
]
Cache = Annotated[
    str | None, option("DIR", "Folder for finished points; the user's by default.")
]
AsJson = Annotated[bool, flag("--json", "Print one JSON object on stdout.")]


def parse_bytes(text: str | None) -> float | None:
    """Return the bytes of --memory, a size such as 4GiB, 500MB or 1e9.

    Args:
        text: the value of the option; None where it was left out. Letters may be in
            upper or lower case.

    Returns:
        The number of bytes; None where the option was left out.

    Raises:
        InputError: the text is no size above 0.
    """
    if text is None:
        return None
    match = SIZE.fullmatch(text.strip().lower())
    if match is None or not float(match[1]) > 0:
        raise InputError("--memory", text, "a size above 0 such as 4GiB or 500MB")
    number, prefix, is_binary = match.groups()
    base = 1024.0 if is_binary else 1000.0
    exponent = UNIT_PREFIXES.index(prefix) + 1 if prefix else 0
    return float(number) * base**exponent


@contextmanager
def needs_tables() -> Iterator[None]:
    """Turn the error about a missing package for tables into one about its extra.

    Yields:
        Nothing, while modules may be imported.

    Raises:
        InputError: scikit-learn, pandas or pyarrow is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in TABLE_MODULES:
            raise
        requirement = "used with it: pip install 'wflmc[tables]'"
        raise InputError("TABLE", f"no {error.name}", requirement) from None


def points_folder(option: str | None) -> Path:
    """Return the folder for finished points of figures and sweeps.

    Args:
        option: the value of --cache, a folder that is created; None or empty for the
            folder `studies` of the user's cache.

    Returns:
        The folder, which need not exist in the user's cache.

    Raises:
        InputError: the folder of the option cannot be written.
    """
    from wflmc.data.sets import cache_folder

    if option:
        return writable_folder(option, "--cache")
    return cache_folder() / "studies"


def show(renderable: object) -> None:
    """Print a table or a text of rich for people, on stdout.

    On a terminal it is as wide as that; in a pipe, wide enough not to fold.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    Console(width=width).print(renderable)


def print_json(document: object) -> None:
    """Print the result as one JSON object, on stdout.

    Arrays become lists, and numbers that are not finite null.
    """
    from wflmc.scenario import to_json

    print(to_json(document))


def print_result(document: object, lines: Iterable[str], as_json: bool) -> None:
    """Print the result on stdout, as one JSON object or as lines for people.

    Args:
        document: the JSON object.
        lines: the same for people.
        as_json: whether the command has the option --json.
    """
    if as_json:
        print_json(document)
    else:
        print("\n".join(lines))


def note(text: str) -> None:
    """Print a sentence on stderr, after the name of the program.

    Notes and errors go there, so that stdout has nothing but the result.
    """
    print(f"wflmc: {text}", file=sys.stderr)


def warn(warnings: list[str]) -> None:
    """Print warnings on stderr, a line each, also where the result is JSON.

    Each is a complete sentence; none is printed for an empty list.
    """
    for warning in warnings:
        print(f"wflmc: warning: {warning}", file=sys.stderr)


def cache_compilations() -> None:
    """Let JAX keep compiled programs in the user's cache folder.

    Nothing happens where the environment names another folder, or where the user's
    cannot be created.
    """
    import jax

    from wflmc.data.sets import cache_folder

    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    with suppress(OSError, RuntimeError):
        folder = cache_folder() / "jax"
        folder.mkdir(parents=True, exist_ok=True)
        update = jax.config.update
        update("jax_compilation_cache_dir", str(folder))  # type: ignore[no-untyped-call]
        # Such as that of a full disk, which harms nothing.
        warnings.filterwarnings(
            "ignore", "Error (reading|writing) persistent compilation cache"
        )
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            update(  # type: ignore[no-untyped-call]
                "jax_persistent_cache_min_compile_time_secs",
                MIN_CACHED_COMPILE_SECONDS,
            )
