"""`wflmc doctor`: what is installed, what works, and what to install for the rest.

The core is tried: JAX computes, and a small plan is made. Of other packages only the version is read, and whether
their module is there, because importing all of them takes seconds.
"""

import json
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import TypedDict

import typer

from wflmc.cli.shared import AsJson
from wflmc.version import __version__

CORE = ("jax", "jaxlib", "numpy", "scipy")
FEATURES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "scenario files": (None, ("pydantic",)),
    "tables and progress": (None, ("rich",)),
    "traces, R-hat and ESS (ArviZ)": (None, ("arviz", "xarray", "h5netcdf", "h5py")),
    "pictures": (None, ("matplotlib",)),
    "wflmc report": (None, ("plotly",)),
    "wflmc plan --solver cvxpy": ("convex", ("cvxpy", "clarabel")),
    "ε by pld and rdp": ("dp", ("dp-accounting",)),
    "--engine dask": ("dask", ("distributed",)),
    "wflmc federate": ("flower", ("flwr", "ray")),
    "data from OpenML": ("openml", ("scikit-learn",)),
    "wflmc fit, predict, tune": ("tables", ("scikit-learn", "pandas", "pyarrow")),
}
"""What needs packages beyond the core: the extra of wflmc that brings them, None if they come with it, and they."""
MODULES = {"dp-accounting": "dp_accounting", "scikit-learn": "sklearn"}
"""Modules that are not named like their package."""


class JaxReport(TypedDict):
    """What JAX computes on."""

    backend: str | None
    devices: list[str]
    note: str | None


class FeatureReport(TypedDict):
    """A feature, the versions of its packages, and how to install those that are missing."""

    name: str
    packages: dict[str, str | None]
    install: str | None


class DataReport(TypedDict):
    """Where MNIST is, or how to get it."""

    folder: str | None
    found: bool
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

    Exit code 1 if planning or JAX itself does not work; optional packages may be missing.

    Example: wflmc doctor
    """
    report = examine()
    print(json.dumps(report, allow_nan=False) if as_json else as_text(report))
    if not report["works"]:
        raise typer.Exit(1)


def examine() -> Report:
    """Return everything that there is to say, as plain data."""
    jax: JaxReport = {"backend": None, "devices": [], "note": None}
    problems = []
    try:
        _try_core(jax)
    except Exception as error:  # drivers and libraries fail in many ways
        problems.append(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
    mnist, cache = _folders()
    return {
        "works": not problems,
        "problems": problems,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "wflmc": {"version": __version__, "folder": str(Path(__file__).parents[1])},
        "core": {package: _version(package) for package in CORE},
        "jax": jax,
        "features": [_feature(name, *needs) for name, needs in FEATURES.items()],
        "mnist": mnist,
        "cache": cache,
    }


def _try_core(report: JaxReport) -> None:
    """Make a small plan; say in `report` what JAX computes on."""
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # take no GPU memory from other processes
    import jax

    import wflmc

    report["backend"] = jax.default_backend()
    report["devices"] = [
        f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.devices()
    ]
    if report["backend"] == "cpu" and shutil.which("nvidia-smi"):
        report["note"] = (
            "There is a GPU that JAX does not see: pip install 'jax[cuda12]' (or cuda13)."
        )
    if float(jax.numpy.arange(4.0).sum()) != 6:
        raise ArithmeticError("JAX computes wrongly")
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
    link, privacy = (
        wflmc.Link(wflmc.channel.static(1e-4), snr_db=20),
        wflmc.Privacy(epsilon=8, delta=0.01, clip=30),
    )
    step_size = 0.4 / (posterior.mu + posterior.L)
    spent = wflmc.plan(
        posterior, link, privacy, step_size=step_size, burn_in=5, samples=1
    ).epsilon_spent
    if spent is None or spent > 8 * (1 + 1e-9):
        raise ArithmeticError(f"a plan for ε = 8 ({privacy.adjacency}) spends {spent}")


def _version(package: str) -> str | None:
    """Return the installed version; None where a package or its module is missing."""
    try:
        return (
            metadata.version(package)
            if util.find_spec(MODULES.get(package, package))
            else None
        )
    except (
        metadata.PackageNotFoundError,
        ValueError,
    ):  # find_spec of a module that is switched off
        return None


def _feature(name: str, extra: str | None, packages: Sequence[str]) -> FeatureReport:
    versions = {package: _version(package) for package in packages}
    missing = [package for package, version in versions.items() if version is None]
    wanted = " ".join(missing) if extra is None else f"'wflmc[{extra}]'"
    return {
        "name": name,
        "packages": versions,
        "install": f"pip install {wanted}" if missing else None,
    }


def _folders() -> tuple[DataReport, CacheReport]:
    """Return where MNIST is or how to get it, and whether the cache can be written; no folder is created."""
    from wflmc.data.sets import VARIABLE, cache_folder, find

    try:
        cache, (mnist, missing) = cache_folder(), find("mnist")
    except RuntimeError:  # a user without a home
        get = f"let {VARIABLE} name a folder of its idx files"
        return {"folder": None, "found": False, "get": get}, {
            "folder": None,
            "writable": False,
        }
    get = (
        f"a folder with {', '.join(missing)}, named by {VARIABLE}"
        if os.environ.get(VARIABLE)
        else "wflmc data mnist"
    )
    nearest = next(path for path in (cache, *cache.parents) if path.exists())
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    images: DataReport = {
        "folder": str(mnist),
        "found": not missing,
        "get": get if missing else None,
    }
    return images, {"folder": str(cache), "writable": writable}


def as_text(report: Report) -> str:
    """Return the same for people."""
    mnist = report["mnist"]
    cache = report["cache"]
    core: FeatureReport = {"name": "core", "packages": report["core"], "install": None}
    rows = [("Python", ", ".join(report["python"].values()))]
    rows.append(("wflmc", ", ".join(report["wflmc"].values())))
    rows.append(("JAX computes on", ", ".join(report["jax"]["devices"]) or "no device"))
    for feature in (core, *report["features"]):
        versions = ", ".join(
            f"{name} {version or 'missing'}"
            for name, version in feature["packages"].items()
        )
        rows.append(
            (
                feature["name"],
                f"{versions}: {feature['install']}" if feature["install"] else versions,
            )
        )
    rows += [
        (
            "MNIST",
            str(mnist["folder"])
            if mnist["found"]
            else f"not in {mnist['folder']}: {mnist['get']}",
        ),
        (
            "cache",
            f"{cache['folder']}{'' if cache['writable'] else ': cannot be written, nothing is cached'}",
        ),
        *(
            ("note", note)
            for note in (report["jax"]["note"], *report["problems"])
            if note
        ),
    ]
    width = max(len(name) for name, _ in rows)
    verdict = "The core works." if report["works"] else "The core does not work."
    return "\n".join([*(f"{name:<{width}}  {text}" for name, text in rows), verdict])
