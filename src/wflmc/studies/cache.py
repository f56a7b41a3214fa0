"""Where results of points are kept: files named by all that decides them.

A name is made of a point's settings and data, and of what computes: the sources of this package, the libraries and the
settings of JAX. Whatever changes a result changes the name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import time
import uuid
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from wflmc.version import __version__

ROOT = Path(__file__).parent.parent
JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_disable_jit",
)
LIBRARIES = ("jax", "jaxlib", "numpy", "scipy", "arviz")
NOT_RESULTS = ("cli", "report")
"""Parts of the package that do not change what a point computes."""
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
"""What says how many threads BLAS has, the first before the second."""

Say = Callable[[str], None]


def digest(*trees: Any) -> str:
    """SHA-256 of the numbers in some trees of arrays."""
    total = hashlib.sha256()
    for leaf in jax.tree.leaves(trees):
        array = np.ascontiguousarray(leaf)
        total.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return total.hexdigest()


@cache
def software() -> dict[str, str]:
    """What computes: versions, a digest of this package's sources, and the kind of processor."""
    total = hashlib.sha256()
    for path in sorted(ROOT.rglob("*.py")):
        if path.relative_to(ROOT).parts[0] not in NOT_RESULTS:
            total.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    libraries = {name: _version(name) for name in LIBRARIES}
    settings = {name: str(getattr(jax.config, name)) for name in JAX_SETTINGS}
    backend = {"kind": jax.default_backend(), "count": str(jax.device_count()), "BLAS threads": _blas_threads()}
    machine = {"machine": platform.machine(), "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    return {"wflmc": __version__, "sources": total.hexdigest(), **machine, **backend, **libraries, **settings}


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "none"


def _blas_threads() -> str:
    """How many there are of, which shows in the last bits of large matrix products."""
    said = [os.environ[name] for name in THREADS if os.environ.get(name)]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return said[0] if said else str(cores)


def key_of(content: dict[str, Any]) -> str:
    """The name of a result: a digest of its content, plain data, and of what computes."""
    text = json.dumps({**content, "software": software()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def path_of(folder: Path, key: str) -> Path:
    """The file of a result."""
    return folder / key[:2] / f"{key}.json"


def load(folder: Path, key: str, say: Say) -> Any | None:
    """The result kept under a key, or None where there is none or its file is damaged."""
    path = path_of(folder, key)
    try:
        content = json.loads(path.read_bytes())
        result = content["result"]
        if content["check"] != _check(key, result):
            raise ValueError("check sum")
        return result
    except FileNotFoundError:
        return None
    except OSError as error:
        say(f"{path} cannot be read ({error.strerror}); its point is computed again.")
        return None
    except (ValueError, KeyError, TypeError):
        say(f"{path} is damaged; its point is computed again.")
        return None


def save(folder: Path, key: str, result: Any, say: Say) -> None:
    """Write whole or not at all, so that neither an interrupt nor another run nor a full disk leaves half a file."""
    path = path_of(folder, key)
    part = path.with_suffix(f".{uuid.uuid4().hex}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{path.stem}.*.part"):  # of a run that was killed while it wrote
            with contextlib.suppress(FileNotFoundError):  # or of one that has just finished writing
                if time.time() - old.stat().st_mtime > 3600:
                    old.unlink()
        part.write_text(json.dumps({"check": _check(key, result), "result": result}), encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        say(f"{path} cannot be written ({error.strerror}): this point would have to be computed again.")


def _check(key: str, result: Any) -> str:
    return hashlib.sha256((key + json.dumps(result, sort_keys=True)).encode()).hexdigest()
