"""The kernel of one round, and the runner that compiles many rounds and chains into one call."""

from wflmc.sampling.kernel import Info, Kernel, State, broadcast, kernel, kernel_rounds, receive, step, transmit, update
from wflmc.sampling.payment import noise_name, run_name
from wflmc.sampling.runner import CHAINS, chain_keys, default_memory, packed, sample, starts, unpacked
from wflmc.sampling.trace import Trace
from wflmc.sampling.transcript import Transcript

__all__ = [
    "CHAINS", "Info", "Kernel", "State", "Trace", "Transcript", "broadcast", "chain_keys", "default_memory",
    "kernel", "kernel_rounds", "noise_name", "packed", "receive", "run_name", "sample", "starts", "step", "transmit",
    "unpacked", "update",
]  # fmt: skip
