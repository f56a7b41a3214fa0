"""What several commands share: options, and how results, notes and warnings are printed."""

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
    """Return an option for a command's signature; without names it is called like its parameter."""
    return typer.Option(
        *names, metavar=metavar, help=text, show_envvar=False
    )  # there is none for typer to name


def flag(name: str, text: str) -> OptionInfo:
    """Return an option without a value."""
    return option(None, text, name)


ENGINES = "Where points are computed: local, dask (workers on this machine), or dask:ADDRESS (a Dask scheduler)."
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
    """Return the bytes of --memory, a size such as 4GiB, 500MB or 1e9; None where it was not given."""
    if text is None:
        return None
    found = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)\s*([kmgt]?)(i?)b?", text.strip().lower()
    )
    if found is None or not float(found[1]) > 0:
        raise InputError("--memory", text, "a size above 0 such as 4GiB or 500MB")
    return float(found[1]) * (1024.0 if found[3] else 1000.0) ** (
        "kmgt".index(found[2]) + 1 if found[2] else 0
    )


@contextmanager
def needs_tables() -> Iterator[None]:
    """Say in one sentence which extra brings what tables need, where it is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("sklearn", "pandas", "pyarrow"):
            raise
        raise InputError(
            "TABLE", f"no {error.name}", "used with it: pip install 'wflmc[tables]'"
        ) from None


def points_folder(option: str | None) -> Path:
    """Return the folder for finished points: that of --cache, or the user's."""
    from wflmc.data.sets import cache_folder

    return writable_folder(option, "--cache") if option else cache_folder() / "studies"


def show(renderable: object) -> None:
    """Print for people, on stdout, wide enough not to fold when piped."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 140).print(renderable)


def print_json(document: object) -> None:
    """Print the result as one JSON object, on stdout."""
    from wflmc.scenario import to_json

    print(to_json(document))


def print_result(document: object, lines: Iterable[str], as_json: bool) -> None:
    """Print the result as one JSON object, or as lines for people."""
    if as_json:
        print_json(document)
    else:
        print("\n".join(lines))


def note(text: str) -> None:
    """Print a sentence on stderr."""
    print(f"wflmc: {text}", file=sys.stderr)


def warn(warnings: list[str]) -> None:
    """Print warnings on stderr, a line each."""
    for warning in warnings:
        print(f"wflmc: warning: {warning}", file=sys.stderr)


def cache_compilations() -> None:
    """Let JAX keep compiled loops in the user's cache folder, if it can be written and no other folder is set."""
    import jax

    from wflmc.data.sets import cache_folder

    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    with suppress(OSError, RuntimeError):
        folder = cache_folder() / "jax"
        folder.mkdir(parents=True, exist_ok=True)
        update = jax.config.update
        update("jax_compilation_cache_dir", str(folder))  # type: ignore[no-untyped-call]
        warnings.filterwarnings(
            "ignore", "Error (reading|writing) persistent compilation cache"
        )  # a full disk, say
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            update("jax_persistent_cache_min_compile_time_secs", 0.2)  # type: ignore[no-untyped-call]
