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
from typing import Any

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
    jax: dict[str, Any] = {"backend": None, "devices": [], "note": None}
    problems = []
    try:
        _try_core(jax)
    except Exception as error:  # drivers and libraries fail in many ways
        problems.append(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])
    return {
        "works": not problems,
        "problems": problems,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "wflmc": {"version": __version__, "folder": str(Path(__file__).parents[1])},
        "core": {package: _version(package) for package in CORE},
        "jax": jax,
        "features": [_feature(name, *needs) for name, needs in FEATURES.items()],
        **_folders(),
    }


def _try_core(found: dict[str, Any]) -> None:
    """Make a small plan; say in `found` what JAX computes on."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # take no GPU memory from other processes
    import jax

    import wflmc

    found["backend"] = jax.default_backend()
    found["devices"] = [f"{d.platform}:{d.id} ({d.device_kind})" for d in jax.devices()]
    if found["backend"] == "cpu" and shutil.which("nvidia-smi"):
        found["note"] = "There is a GPU that JAX does not see: pip install 'jax[cuda12]' (or cuda13)."
    if float(jax.numpy.arange(4.0).sum()) != 6:
        raise ArithmeticError("JAX computes wrongly")
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=3, examples=30)
    link, privacy = wflmc.Link(wflmc.channel.static(1e-4), snr_db=20), wflmc.Privacy(epsilon=8, delta=0.01, clip=30)
    step_size = 0.4 / (posterior.mu + posterior.L)
    spent = wflmc.plan(posterior, link, privacy, step_size=step_size, burn_in=5, samples=1).epsilon_spent
    if spent is None or spent > 8 * (1 + 1e-9):
        raise ArithmeticError(f"a plan for ε = 8 ({privacy.adjacency}) spends {spent}")


def _version(package: str) -> str | None:
    """Return the installed version; None where a package or its module is missing."""
    try:
        return metadata.version(package) if util.find_spec(MODULES.get(package, package)) else None
    except (metadata.PackageNotFoundError, ValueError):  # find_spec of a module that is switched off
        return None


def _feature(name: str, extra: str | None, packages: Sequence[str]) -> dict[str, Any]:
    versions = {package: _version(package) for package in packages}
    missing = [package for package, version in versions.items() if version is None]
    wanted = " ".join(missing) if extra is None else f"'wflmc[{extra}]'"
    return {"name": name, "packages": versions, "install": f"pip install {wanted}" if missing else None}


def _folders() -> dict[str, Any]:
    """Return where MNIST is or how to get it, and whether the cache can be written; no folder is created."""
    from wflmc.data.sets import VARIABLE, cache_folder, find

    try:
        cache, (mnist, missing) = cache_folder(), find("mnist")
    except RuntimeError:  # a user without a home
        get = f"let {VARIABLE} name a folder of its idx files"
        return {"mnist": {"folder": None, "found": False, "get": get}, "cache": {"folder": None, "writable": False}}
    get = f"a folder with {', '.join(missing)}, named by {VARIABLE}" if os.environ.get(VARIABLE) else "wflmc data mnist"
    nearest = next(path for path in (cache, *cache.parents) if path.exists())
    writable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    images = {"folder": str(mnist), "found": not missing, "get": get if missing else None}
    return {"mnist": images, "cache": {"folder": str(cache), "writable": writable}}


def as_text(found: dict[str, Any]) -> str:
    """Return the same for people."""
    mnist, cache = found["mnist"], found["cache"]
    rows = [(name, ", ".join(found[name.lower()].values())) for name in ("Python", "wflmc")]
    rows.append(("JAX computes on", ", ".join(found["jax"]["devices"]) or "no device"))
    for each in ({"name": "core", "packages": found["core"], "install": None}, *found["features"]):
        versions = ", ".join(f"{name} {version or 'missing'}" for name, version in each["packages"].items())
        rows.append((each["name"], f"{versions}: {each['install']}" if each["install"] else versions))
    rows += [
        ("MNIST", mnist["folder"] if mnist["found"] else f"not in {mnist['folder']}: {mnist['get']}"),
        ("cache", f"{cache['folder']}{'' if cache['writable'] else ': cannot be written, nothing is cached'}"),
        *(("note", note) for note in (found["jax"]["note"], *found["problems"]) if note),
    ]
    width = max(len(name) for name, _ in rows)
    verdict = "The core works." if found["works"] else "The core does not work."
    return "\n".join([*(f"{name:<{width}}  {text}" for name, text in rows), verdict])
