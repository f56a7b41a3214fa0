"""Settings that NumPy and JAX read when they are first imported, and that every process
started by a test inherits.
"""

import os
import signal
import sys
import tempfile

GPU = os.environ.get("WFLMC_GPU") == "1"
"""Whether tests may run on an accelerator; else all run on the CPU."""
CACHE = None
"""A folder of this run alone, in the process that made it: workers and their processes
share what was compiled.
"""

# A job in the background starts with Ctrl-C ignored, but tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Any number will do, as long as it is the same for all processes of a test.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Tests compile much and compute little, so these make XLA compile fast. `make test-machines` runs them without.
FAST = "--xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1"
# Only the JAX pinned for Python 3.11 knows this flag; a later one stops at it.
if sys.version_info < (3, 12):
    FAST += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", FAST)
if not GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
if "PYTEST_XDIST_WORKER" not in os.environ:
    CACHE = tempfile.mkdtemp(prefix="wflmc-tests-")
    os.environ["XDG_CACHE_HOME"] = CACHE
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{CACHE}/wflmc/jax"
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
