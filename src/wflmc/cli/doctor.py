"""`wflmc doctor`: what is installed, what works, and what to install for the rest.

The core is tried: JAX computes, and a small plan is made. Of other packages only the
version is read, and whether their module is there, because importing all of them takes
seconds.
"""

import json
import os
import platform
import shutil
import sys
from importlib import metadata, util
from pathlib import Path
from typing import NamedTuple, TypedDict

import typer

from wflmc.cli.shared import AsJson
from wflmc.version import __version__

CORE = ("jax", "jaxlib", "numpy", "scipy")


class Requirement(NamedTuple):
    """The packages beyond the core that a feature needs."""

    extra: str | None
    """Of wflmc, which brings them; None where they come with it."""
    packages: tuple[str, ...]


FEATURES = {
    "scenario files": Requirement(None, ("pydantic",)),
    "tables and progress": Requirement(None, ("rich",)),
    "traces, R-hat and ESS (ArviZ)": Requirement(
        None, ("arviz", "xarray", "h5netcdf", "h5py")
    ),
    "pictures": Requirement(None, ("matplotlib",)),
    "wflmc report": Requirement(None, ("plotly", "jinja2")),
    "folders with one writer": Requirement(None, ("filelock",)),
    "wflmc plan --solver cvxpy": Requirement("convex", ("cvxpy", "clarabel")),
    "ε by pld and rdp": Requirement("dp", ("dp-accounting",)),
    "--engine dask": Requirement("dask", ("distributed",)),
    "wflmc federate": Requirement("flower", ("flwr", "ray")),
    "data from OpenML": Requirement("openml", ("scikit-learn",)),
    "wflmc fit, predict, tune": Requirement(
        "tables", ("scikit-learn", "pandas", "pyarrow")
    ),
}
"""Parts of wflmc that need packages beyond the core."""
MODULES = {"dp-accounting": "dp_accounting", "scikit-learn": "sklearn"}
"""Modules that are not named like their package."""
MAX_PROBLEM_CHARACTERS = 300
"""Of an error's text in the report."""
TRIED_EPSILON = 8.0
"""ε of the plan that is tried."""
ROUNDING = 1e-9
"""Relative error up to which a plan may spend more than its ε."""


class JaxReport(TypedDict):
    """What JAX computes on."""

    backend: str | None
    devices: list[str]
    note: str | None


class FeatureReport(TypedDict):
    """A feature, its packages' versions, and how to install those that are missing."""

    name: str
    packages: dict[str, str | None]
    install: str | None


class DataReport(TypedDict):
    """Where MNIST is, or how to get it."""

    folder: str | None
    found: bool  # a key of the command's JSON
    get: str | None


class CacheReport(TypedDict):
    """Where results are cached."""

    folder: str | None
    writable: bool


class Report(TypedDict):
    """Everything that there is to say of an installation."""

    works: bool
    problems: list[str]
    python: dict[str, str]
    wflmc: dict[str, str]
    core: dict[str, str | None]
    jax: JaxReport
    features: list[FeatureReport]
    mnist: DataReport
    cache: CacheReport


def command(as_json: AsJson = False) -> None:
    """Say what is installed, what works, and what to install for the rest.

    Exit code 1 if planning or JAX itself does not work; optional packages may be
    missing.

    Example: wflmc doctor
    """
    report = examine()
    print(json.dumps(report, allow_nan=False) if as_json else as_text(report))
    if not report["works"]:
        raise typer.Exit(1)


def examine() -> Report:
    """Return everything that there is to say of the installation, as plain data.

    JAX computes and a small plan is made; what fails is listed in `problems`. Nothing
    is installed, downloaded or written.
    """
    jax: JaxReport = {"backend": None, "devices": [], "note": None}
    problems = []
    try:
        _try_core(jax)
    except Exception as error:  # drivers and libraries fail in many ways
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        problems.append(text[:MAX_PROBLEM_CHARACTERS])
    mnist, cache = _folders()
    return {
        "works": not problems,
        "problems": problems,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "wflmc": {"version": __version__, "folder": str(Path(__file__).parents[1])},
        "core": {package: _version(package) for package in CORE},
        "jax": jax,
        "features": [
            _feature(name, requirement) for name, requirement in FEATURES.items()
        ],
        "mnist": mnist,
        "cache": cache,
    }


def _try_core(report: JaxReport) -> None:
    """Make a small plan; say in `report` what JAX computes on."""
    # Take no GPU memory from other processes.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax

    import wflmc

    report["backend"] = jax.default_backend()
    report["devices"] = [
        f"{device.platform}:{device.id} ({device.device_kind})"
        for device in jax.devices()
    ]
    if report["backend"] == "cpu" and shutil.which("nvidia-smi"):
        report["note"] = (
            "There is a GPU that JAX does not see: pip install 'jax[cuda12]' (or "
            "cuda13)."
        )
    if float(jax.numpy.arange(4.0).sum()) != 6:
        raise ArithmeticError("JAX computes wrongly")
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
    link = wflmc.Link(wflmc.channel.static(1e-4), snr_db=20)
    privacy = wflmc.Privacy(epsilon=TRIED_EPSILON, delta=0.01, clip=30)
    plan = wflmc.plan(
        posterior,
        link,
        privacy,
        step_size=0.4 / (posterior.mu + posterior.L),
        burn_in=5,
        samples=1,
    )
    spent = plan.epsilon_spent
    if spent is None or spent > TRIED_EPSILON * (1 + ROUNDING):
        promise = f"ε = {TRIED_EPSILON:g} ({privacy.adjacency})"
        raise ArithmeticError(f"a plan for {promise} spends {spent}")


def _version(package: str) -> str | None:
    """Return the installed version; None where a package or its module is missing."""
    try:
        module = util.find_spec(MODULES.get(package, package))
        return metadata.version(package) if module else None
    except (metadata.PackageNotFoundError, ValueError):
        # `find_spec` raises ValueError for a module that is switched off.
        return None


def _feature(name: str, requirement: Requirement) -> FeatureReport:
    """Return the state of a feature."""
    versions = {package: _version(package) for package in requirement.packages}
    missing = [package for package, version in versions.items() if version is None]
    source = f"'wflmc[{requirement.extra}]'"
    if requirement.extra is None:
        source = " ".join(missing)
    return {
        "name": name,
        "packages": versions,
        "install": f"pip install {source}" if missing else None,
    }


def _folders() -> tuple[DataReport, CacheReport]:
    """Return where MNIST is or how to get it, and whether the cache can be written.

    No folder is created.
    """
    from wflmc.data.sets import VARIABLE, cache_folder, find

    images: DataReport
    try:
        cache = cache_folder()
        mnist, missing = find("mnist")
    except RuntimeError:  # a user without a home
        instruction = f"let {VARIABLE} name a folder of its idx files"
        images = {"folder": None, "found": False, "get": instruction}
        return images, {"folder": None, "writable": False}
    instruction = "wflmc data mnist"
    if os.environ.get(VARIABLE):
        instruction = f"a folder with {', '.join(missing)}, named by {VARIABLE}"
    images = {
        "folder": str(mnist),
        "found": not missing,
        "get": instruction if missing else None,
    }
    nearest = next(path for path in (cache, *cache.parents) if path.exists())
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return images, {"folder": str(cache), "writable": writable}


def as_text(report: Report) -> str:
    """Return a report for people, a line for each part and a verdict at the end.

    A missing package is followed by the command that installs it; problems and notes
    come last before the verdict.
    """
    core: FeatureReport = {"name": "core", "packages": report["core"], "install": None}
    rows = [
        ("Python", ", ".join(report["python"].values())),
        ("wflmc", ", ".join(report["wflmc"].values())),
        ("JAX computes on", ", ".join(report["jax"]["devices"]) or "no device"),
    ]
    for feature in (core, *report["features"]):
        rows.append((feature["name"], _feature_text(feature)))
    rows.append(("MNIST", _images_text(report["mnist"])))
    rows.append(("cache", _cache_text(report["cache"])))
    for text in (report["jax"]["note"], *report["problems"]):
        if text:
            rows.append(("note", text))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    verdict = "The core works." if report["works"] else "The core does not work."
    return "\n".join([*lines, verdict])


def _feature_text(feature: FeatureReport) -> str:
    versions = ", ".join(
        f"{name} {version or 'missing'}"
        for name, version in feature["packages"].items()
    )
    if feature["install"] is None:
        return versions
    return f"{versions}: {feature['install']}"


def _images_text(images: DataReport) -> str:
    if images["found"]:
        return str(images["folder"])
    return f"not in {images['folder']}: {images['get']}"


def _cache_text(cache: CacheReport) -> str:
    if cache["writable"]:
        return str(cache["folder"])
    return f"{cache['folder']}: cannot be written, nothing is cached"
