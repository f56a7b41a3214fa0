"""Settings that NumPy and JAX read when they are first imported, and that every process started by a test inherits."""

import os
import tempfile

GPU = os.environ.get("WFLMC_GPU") == "1"
"""Whether tests may run on an accelerator; else all run on the CPU."""
CACHE = None
"""A folder of this run alone, in the process that made it: workers and their processes share what was compiled."""

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # any number will do, but the same for all processes of a test
# Tests compile much and compute little. `make test-machines` runs them with full optimisation.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=1")
if not GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
if "PYTEST_XDIST_WORKER" not in os.environ:
    CACHE = tempfile.mkdtemp(prefix="wflmc-tests-")
    os.environ["XDG_CACHE_HOME"] = CACHE
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{CACHE}/wflmc/jax"
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
