"""Chains: the kernel of one round, the loop over rounds, and `sample`, which runs many
chains of a plan."""

from wflmc.sampling.execution import Execution, default_memory
from wflmc.sampling.kernel import (
    CHAIN_AXES,
    Info,
    Kernel,
    KernelRounds,
    State,
    broadcast,
    kernel,
    kernel_rounds,
    receive,
    step,
    transmit,
    update,
    zipped_kernel_rounds,
)
from wflmc.sampling.payment import noise_name, run_name
from wflmc.sampling.runner import sample
from wflmc.sampling.starts import Start, chain_keys, initial_states, round_keys
from wflmc.sampling.trace import Trace
from wflmc.sampling.transcript import Transcript

__all__ = [
    "CHAIN_AXES",
    "Execution",
    "Info",
    "Kernel",
    "KernelRounds",
    "Start",
    "State",
    "Trace",
    "Transcript",
    "broadcast",
    "chain_keys",
    "default_memory",
    "initial_states",
    "kernel",
    "kernel_rounds",
    "noise_name",
    "receive",
    "round_keys",
    "run_name",
    "sample",
    "step",
    "transmit",
    "update",
    "zipped_kernel_rounds",
]
