"""The kernel of one round, and the runner that compiles many rounds and chains into one call."""

from wflmc.sampling.kernel import Info, Kernel, State, kernel, receive, transmit, update
from wflmc.sampling.runner import MEMORY, sample
from wflmc.sampling.trace import Trace

__all__ = ["MEMORY", "Info", "Kernel", "State", "Trace", "kernel", "receive", "sample", "transmit", "update"]
