"""The cache of results: one file per grid point, named by everything that decides it.

A name is a digest of the point's settings and data and of the software: the sources of
this package, the libraries and the settings of JAX. Whatever changes a result changes
the name.
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
JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_disable_jit",
)
"""Settings of JAX that change numbers."""
LIBRARIES = ("jax", "jaxlib", "numpy", "scipy", "arviz")
"""Libraries whose versions may change numbers."""
NOT_RESULTS = ("cli", "apps/report", "apps/diagnosis")
"""Parts of the package that do not change what a point computes."""
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables that set the number of BLAS threads; the first one takes precedence."""

Identity = dict[str, object]
"""Everything that decides a result: plain data that JSON can hold, by name."""
Warn = Callable[[str], None]
"""Called with a sentence for the user."""


def identity_of(setting: object, data: str) -> Identity:
    """Return everything that decides a study's results, as plain values.

    These are the fields of its setting. The one that holds the data, which may be a
    gigabyte, is replaced by a digest of all arrays in it, so that the same data in
    another file have the same identity.

    Args:
        setting: a dataclass whose other fields are plain values.
        data: the name of the field that holds the data.

    Returns:
        The fields by name.
    """
    arrays = jax.tree.leaves(getattr(setting, data))
    return {**vars(setting), data: digest(*arrays)}


@cache
def software() -> dict[str, str]:
    """Return what computes in this process.

    It has the versions of this package and of libraries, a digest of this package's
    sources, the kind of processor and accelerators, the flags of XLA, the number of
    BLAS threads and the settings of JAX. Two processes with the same values give the
    same numbers, except for rounding on different models of a processor.

    The result is computed once; `software.cache_clear()` is for whoever changes a
    setting.
    """
    sources = hashlib.sha256()
    not_results = tuple(f"{part}/" for part in NOT_RESULTS)
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(not_results):
            sources.update(name.encode() + path.read_bytes())
    libraries = {name: metadata.version(name) for name in LIBRARIES}
    settings = {name: str(getattr(jax.config, name)) for name in JAX_SETTINGS}
    hardware = {
        "machine": platform.machine(),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "kind": jax.default_backend(),
        "count": str(jax.device_count()),
        "BLAS threads": _blas_threads(),
    }
    package = {"wflmc": __version__, "sources": sources.hexdigest()}
    return {**package, **hardware, **libraries, **settings}


def _blas_threads() -> str:
    """Return the number of BLAS threads, on which the last bits of products depend."""
    for name in THREADS:
        if os.environ.get(name):
            return os.environ[name]
    if hasattr(os, "sched_getaffinity"):
        return str(len(os.sched_getaffinity(0)))
    return str(os.cpu_count())


def key_of(content: Identity) -> str:
    """Return the name of a result: the SHA-256 of its identity and of the software.

    Keys are sorted before they are digested, so that the order of settings makes no
    difference.

    Args:
        content: everything else that decides the result, plain data.
    """
    text = json.dumps({**content, "software": software()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load(folder: Path, key: str, warn: Warn) -> Any | None:
    """Return the result that is stored under a key.

    A checksum of key and result finds files that are damaged, and files under the name
    of another result. Such a file is left where it is; the point is computed again, and
    then replaces it.

    Args:
        folder: of the cache.
        key: the name of the result.
        warn: called where there is a file that cannot be used.

    Returns:
        The result, or None where there is none.
    """
    path = _path(folder, key)
    if not path.exists():
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(path.read_bytes())
        result = content["result"]
        if content["check"] == _check(key, result):
            return result
    warn(f"{path} is damaged or cannot be read; its point is computed again.")
    return None


def save(folder: Path, key: str, result: object, warn: Warn) -> None:
    """Store a result: the complete file or none.

    Neither an interrupt nor another process that writes the same file leaves a part of
    it. A disk that is full or cannot be written is no error: it costs a later run the
    time of this point.

    Args:
        folder: of the cache; made where there is none.
        key: the name of the result.
        result: plain data that JSON can hold.
        warn: called where the file cannot be written.
    """
    path = _path(folder, key)
    content = {"check": _check(key, result), "result": result}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, f".{uuid.uuid4().hex}.part") as file:
            file.write(json.dumps(content).encode())
    except OSError as error:
        warn(
            f"{path} cannot be written ({error.strerror}): this point would have to be "
            "computed again."
        )


def _path(folder: Path, key: str) -> Path:
    """Return the file of a result; folders are by the first two digits."""
    return folder / key[:2] / f"{key}.json"


def _check(key: str, result: object) -> str:
    """Return the checksum of a result under its key."""
    text = key + json.dumps(result, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
