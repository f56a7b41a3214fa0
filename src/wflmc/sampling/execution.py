"""How chains are executed: memory, files, accelerators. Results are the same but for
float rounding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from wflmc.posterior.base import Posterior
from wflmc.sampling.chunks import (
    Partition,
    WorkLimits,
    Workload,
    block_operations,
    partition,
)
from wflmc.support.errors import InputError

MEMORY = 2 * 2**30
"""Bytes for chains and gradients unless the caller sets a limit; on an accelerator
`ACCELERATOR_MEMORY` times as much."""
ACCELERATOR_MEMORY = 8
"""How many times `MEMORY` an accelerator may take."""
SUMS_MEMORY = 1 / 4
"""Fraction of the memory that blocks of devices may take."""

ProgressCallback = Callable[[int, int], None]
"""Called with (rounds done, rounds in all)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Execution:
    """How `wflmc.sample` executes chains.

    Args:
        memory: bytes for chains and gradients at a time (2 GiB, on an accelerator 16
            GiB); less means smaller chunks, and changes results by float rounding
            alone. The draws themselves come on top, unless they are stored.
        store: a file that the draws go to block by block, for traces larger than
            memory; the trace reads from it. Not used where there is a checkpoint.
        checkpoint: a folder that progress and draws are kept in; a call with the same
            arguments continues from there, and ends with the same draws as one that
            was never stopped.
        accelerators: where chains are spread; by default over all that JAX sees.
        progress: called with (rounds done, rounds in all).

    Raises:
        InputError: if the memory is not above 0, or there is no accelerator.
    """

    memory: float | None = None
    store: str | Path | None = None
    checkpoint: str | Path | None = None
    accelerators: Sequence[jax.Device] | None = None
    progress: ProgressCallback | None = None

    def __post_init__(self) -> None:
        """Refuse what nothing can be executed with."""
        memory = self.memory
        if memory is not None and not (isinstance(memory, int | float) and memory > 0):
            raise InputError("memory", memory, "a number of bytes above 0")
        if self.accelerators is not None and not len(self.accelerators):
            raise InputError("accelerators", "none", "at least one of jax.devices()")


DEFAULT_EXECUTION = Execution()
"""All accelerators, the default memory, and nothing stored."""


def check_execution(execution: object) -> None:
    """Refuse what is no `Execution`, such as a number of bytes.

    The values within an `Execution` were checked when it was constructed.

    Args:
        execution: the argument of `wflmc.sample`.

    Raises:
        InputError: if it is of another type; the message names the type, never a value.
    """
    if not isinstance(execution, Execution):
        requirement = "wflmc.sampling.Execution(…)"
        raise InputError("execution", type(execution).__name__, requirement)


class Machine(NamedTuple):
    """What chains are run on, and how their work is cut."""

    posterior: Posterior
    """On the accelerators."""
    mesh: Mesh | None
    """Of the accelerators that share chains; None for JAX's default one."""
    partition: Partition

    def name(self, first_kept_round: int, transcript: bool) -> str:
        """Return a name for how sums are cut.

        A round that is repeated must repeat the same sum, or the difference of the two
        has no noise. So checkpoints carry this name, and one that was cut in another
        way is refused.

        Args:
            first_kept_round: index of the first round whose draws are kept.
            transcript: whether a transcript is kept.
        """
        partition = self.partition
        parts = [
            partition.chunk_chains,
            partition.block_rounds,
            first_kept_round,
            self.posterior.block,
            self.posterior.example_block,
            jax.default_backend(),
        ]
        if transcript:
            parts += ["transcript", partition.group_starts.size]
        return "-".join(map(str, parts))


def default_memory() -> int:
    """Return the limit of memory that applies where the caller sets none, in bytes.

    It is `MEMORY`, 2 GiB, on a CPU and 16 GiB on any accelerator, whatever memory the
    machine has. A larger limit makes chunks larger and so runs faster; it is set by
    `Execution(memory=…)`.
    """
    on_host = jax.default_backend() == "cpu"
    return MEMORY if on_host else ACCELERATOR_MEMORY * MEMORY


def prepare_machine(
    execution: Execution,
    posterior: Posterior,
    workload: Workload,
    by_example: bool,
) -> Machine:
    """Cut the work within the limits, and bring the posterior to the accelerators.

    A single accelerator that was not requested explicitly needs no mesh: JAX's default
    device is used.

    Args:
        execution: memory and accelerators.
        posterior: as the caller has it.
        workload: sizes of the run.
        by_example: whether gradients of single examples are clipped.

    Returns:
        The posterior with its data arranged for this many chains, the mesh, and the
        partition of the run.

    Raises:
        InputError: if not even one chain fits into the memory.
    """
    requested = execution.accelerators
    accelerators = list(jax.devices() if requested is None else requested)
    mesh = None
    if len(accelerators) > 1 or requested is not None:
        mesh = Mesh(np.array(accelerators), ("chain",))
    memory = execution.memory or default_memory()
    limits = WorkLimits(
        memory=memory,
        operations=block_operations(jax.default_backend()),
        accelerators=len(accelerators),
    )
    cut = partition(workload, limits)
    chains_per_accelerator = cut.chunk_chains // len(accelerators)
    arranged_posterior = posterior.on_accelerator(
        chains_per_accelerator,
        SUMS_MEMORY * memory,
        by_example,
    )
    return Machine(arranged_posterior, mesh, cut)
