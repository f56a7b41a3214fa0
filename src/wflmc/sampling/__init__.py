"""The kernel of one round, and the runner that compiles many rounds and chains into one call."""

from wflmc.sampling.kernel import Info, Kernel, State, kernel, receive, transmit, update
from wflmc.sampling.payment import run_name
from wflmc.sampling.runner import default_memory, sample
from wflmc.sampling.trace import Trace

__all__ = [
    "Info",
    "Kernel",
    "State",
    "Trace",
    "default_memory",
    "kernel",
    "receive",
    "run_name",
    "sample",
    "transmit",
    "update",
]
