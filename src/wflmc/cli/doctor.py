"""`wflmc doctor`: what is installed, what works, and what to install for the rest.

The core is tried: JAX computes, and a small plan is made. Of other packages only the version is read, and whether
their module is there, because importing all of them takes seconds.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any, NamedTuple

import typer

from wflmc.cli.shared import AsJson
from wflmc.version import __version__


class Feature(NamedTuple):
    """Something that needs packages beyond the core; `extra` of wflmc brings them, None if they come with wflmc."""

    name: str
    packages: tuple[str, ...]
    extra: str | None = None


CORE = ("jax", "jaxlib", "numpy", "scipy")
FEATURES = (
    Feature("scenario files", ("pydantic",)),
    Feature("tables and progress", ("rich",)),
    Feature("traces, R-hat and ESS (ArviZ)", ("arviz", "xarray", "h5netcdf", "h5py")),
    Feature("pictures", ("matplotlib",)),
    Feature("wflmc report", ("plotly",)),
    Feature("wflmc plan --solver cvxpy", ("cvxpy", "clarabel"), "convex"),
    Feature("ε by pld and rdp", ("dp-accounting",), "dp"),
    Feature("--engine dask", ("distributed",), "dask"),
    Feature("wflmc federate", ("flwr", "ray"), "flower"),
    Feature("data from OpenML", ("scikit-learn",), "openml"),
)
MODULES = {"dp-accounting": "dp_accounting", "scikit-learn": "sklearn"}
"""Modules that are not named like their package."""


def command(as_json: AsJson = False) -> None:
    """Say what is installed, what works, and what to install for the rest.

    Exit code 1 if planning or JAX itself does not work; optional packages may be missing.

    Example: wflmc doctor
    """
    found = examine()
    print(json.dumps(found, allow_nan=False) if as_json else as_text(found))
    if not found["works"]:
        raise typer.Exit(1)


def examine() -> dict[str, Any]:
    """Return everything that there is to say, as plain data."""
    jax, problems = _try_jax()
    if not problems:
        problems = _try_planning()
    return {
        "works": not problems,
        "problems": problems,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "wflmc": {"version": __version__, "folder": str(Path(__file__).parents[1])},
        "core": {name: _version(name) for name in CORE},
        "jax": jax,
        "features": [_feature(feature) for feature in FEATURES],
        "mnist": _mnist(),
        "cache": _cache(),
    }


def _try_jax() -> tuple[dict[str, Any], list[str]]:
    """Return what JAX computes on, and what does not work."""
    found: dict[str, Any] = {"backend": None, "devices": [], "note": None}
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # take no GPU memory from other processes
    try:
        import jax

        found["backend"] = jax.default_backend()
        found["devices"] = [f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.devices()]
        total = float(jax.numpy.arange(4.0).sum())
    except Exception as error:  # drivers and libraries fail in many ways
        return found, [f"JAX does not compute: {_short(error)}"]
    if found["backend"] == "cpu" and shutil.which("nvidia-smi"):
        found["note"] = "There is a GPU that JAX does not see: pip install 'jax[cuda12]' (or cuda13)."
    return found, [] if total == 6 else ["JAX computes wrongly."]


def _try_planning() -> list[str]:
    """Make a small plan; return what does not work."""
    import jax

    try:
        import wflmc

        posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
        link, privacy = wflmc.Link(wflmc.channel.static(1e-4), snr_db=20), wflmc.Privacy(epsilon=8, delta=0.01, clip=30)
        step_size = 0.4 / (posterior.mu + posterior.L)
        spent = wflmc.plan(posterior, link, privacy, step_size=step_size, burn_in=5, samples=1).epsilon_spent
    except Exception as error:
        return [f"Planning fails: {_short(error)}"]
    return [] if spent is not None and spent <= 8 * (1 + 1e-9) else [f"A plan for ε = 8 spends {spent}."]


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _version(package: str) -> str | None:
    """Return the installed version; None where the package or its module is missing."""
    try:
        installed = util.find_spec(MODULES.get(package, package)) is not None
        return metadata.version(package) if installed else None
    except (metadata.PackageNotFoundError, ValueError):  # find_spec of a module that is switched off
        return None


def _feature(feature: Feature) -> dict[str, Any]:
    versions = {name: _version(name) for name in feature.packages}
    missing = [name for name, version in versions.items() if version is None]
    wanted = " ".join(missing) if feature.extra is None else f"'wflmc[{feature.extra}]'"
    return {"name": feature.name, "packages": versions, "install": f"pip install {wanted}" if missing else None}


def _mnist() -> dict[str, Any]:
    """Return where MNIST is, or how to get it."""
    from wflmc.data import VARIABLE, find_mnist

    try:
        folder, missing = find_mnist()
    except RuntimeError:  # a user without a home
        return {"folder": None, "found": False, "get": f"let {VARIABLE} name a folder of its idx files"}
    get = f"a folder with {', '.join(missing)}, named by {VARIABLE}" if os.environ.get(VARIABLE) else "wflmc data mnist"
    return {"folder": str(folder), "found": not missing, "get": get if missing else None}


def _cache() -> dict[str, Any]:
    """Return whether the cache can be written, judged by the nearest folder that exists: none is created."""
    from wflmc.data import cache_folder

    try:
        folder = cache_folder()
    except RuntimeError:
        return {"folder": None, "writable": False}
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    return {"folder": str(folder), "writable": nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)}


def as_text(found: dict[str, Any]) -> str:
    """Return the same for people."""
    jax, mnist, cache = found["jax"], found["mnist"], found["cache"]
    rows = [
        ("Python", f"{found['python']['version']}, {found['python']['executable']}"),
        ("wflmc", f"{found['wflmc']['version']}, {found['wflmc']['folder']}"),
        ("core", _versions(found["core"])),
        ("JAX computes on", ", ".join(jax["devices"]) or "no device"),
        *((each["name"], _versions(each["packages"], each["install"])) for each in found["features"]),
        ("MNIST", mnist["folder"] if mnist["found"] else f"not in {mnist['folder']}: {mnist['get']}"),
        ("cache", f"{cache['folder']}{'' if cache['writable'] else ': cannot be written, nothing is cached'}"),
    ]
    rows += [("note", jax["note"])] if jax["note"] else []
    rows += [("broken", problem) for problem in found["problems"]]
    width = max(len(name) for name, _ in rows)
    verdict = "The core works." if found["works"] else "The core does not work."
    return "\n".join([*(f"{name:<{width}}  {text}" for name, text in rows), verdict])


def _versions(versions: dict[str, str | None], install: str | None = None) -> str:
    listed = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    return f"{listed}: {install}" if install else listed
