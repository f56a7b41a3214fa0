"""The cache of results: one file per grid point, named by everything that decides its content.

A name is a digest of the point's settings and data and of the software: the sources of this package, the libraries and
the settings of JAX. Whatever changes a result changes the name.
"""

import hashlib
import json
import os
import platform
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from wflmc.support.keys import digest
from wflmc.support.storage import replacing
from wflmc.version import __version__

ROOT = Path(__file__).parents[2]
"""The package, on whose sources results depend."""
_SETTINGS = "enable_x64 default_prng_impl threefry_partitionable default_matmul_precision disable_jit"
JAX_SETTINGS = tuple(f"jax_{name}" for name in _SETTINGS.split())
LIBRARIES = ("jax", "jaxlib", "numpy", "scipy", "arviz")
NOT_RESULTS = ("cli", "apps/report", "apps/diagnosis")
"""Parts of the package that do not change what a point computes."""
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables that set the number of BLAS threads; the first one takes precedence."""

Identity = dict[str, object]
"""Everything that decides a result: plain data that JSON can hold, by name."""
Warn = Callable[[str], None]
"""Called with a sentence for the user."""


def identity_of(setting: object, data: str) -> Identity:
    """Return everything that decides a study's results, as plain values: its fields, of which `data` is digested."""
    return {**vars(setting), data: digest(*jax.tree.leaves(getattr(setting, data)))}


@cache
def software() -> dict[str, str]:
    """Return what computes: versions, a digest of this package's sources, and the kind of processor."""
    total = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(tuple(f"{part}/" for part in NOT_RESULTS)):
            total.update(name.encode() + path.read_bytes())
    return {
        "wflmc": __version__,
        "sources": total.hexdigest(),
        "machine": platform.machine(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "kind": jax.default_backend(),
        "count": str(jax.device_count()),
        "BLAS threads": _blas_threads(),
        **{name: metadata.version(name) for name in LIBRARIES},
        **{name: str(getattr(jax.config, name)) for name in JAX_SETTINGS},
    }


def _blas_threads() -> str:
    """Return the number of BLAS threads, which shows in the last bits of large matrix products."""
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    return next(
        (os.environ[name] for name in THREADS if os.environ.get(name)), str(cores)
    )


def key_of(content: Identity) -> str:
    """Return the name of a result: a digest of its content, plain data, and of the software."""
    text = json.dumps({**content, "software": software()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load(folder: Path, key: str, warn: Warn) -> Any | None:
    """Return the result stored under a key, or None where there is none or its file is damaged."""
    path = _path(folder, key)
    if not path.exists():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(path.read_bytes())
        if content["check"] == _check(key, content["result"]):
            return content["result"]
    warn(f"{path} is damaged or cannot be read; its point is computed again.")
    return None


def save(folder: Path, key: str, result: object, warn: Warn) -> None:
    """Store a result: the whole file or none, whatever interrupts the process and whoever writes the same file."""
    path = _path(folder, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, f".{uuid.uuid4().hex}.part") as file:
            file.write(
                json.dumps({"check": _check(key, result), "result": result}).encode()
            )
    except OSError as error:
        warn(
            f"{path} cannot be written ({error.strerror}): this point would have to be computed again."
        )


def _path(folder: Path, key: str) -> Path:
    return folder / key[:2] / f"{key}.json"


def _check(key: str, result: object) -> str:
    return hashlib.sha256(
        (key + json.dumps(result, sort_keys=True)).encode()
    ).hexdigest()
