"""Compiled once: calls that would otherwise be compiled operation by operation, and a
count of compilations.
"""

from __future__ import annotations

import jax

from wflmc.sampling import simulation

clipped_sum = jax.jit(
    lambda posterior, *arguments, **limit: posterior.clipped_sum(*arguments, **limit)
)
clipped_sums = jax.jit(
    lambda posterior, *arguments: jax.vmap(posterior.clipped_sum)(*arguments)
)
gradients = jax.jit(lambda posterior, theta: posterior.gradients(theta))


def count_compilations(monkeypatch) -> list[None]:
    """Return a list that grows whenever the loop over rounds is traced, which JAX does
    once for each compilation.

    The loop is wrapped anew, so that code compiled by earlier tests hides no
    compilation from the count.
    """
    loop = simulation.advance_block
    traced = []

    def counted(*arguments, **keywords):
        traced.append(None)
        return loop(*arguments, **keywords)

    monkeypatch.setattr(
        simulation,
        "advance_block",
        jax.jit(counted, static_argnames=("program", "mesh")),
    )
    return traced
