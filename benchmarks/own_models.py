"""Clipped gradient sums of models of one's own, against JAX-Privacy's for one clip and
the plain gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
from rich.table import Table

import wflmc
from benchmarks.timing import side_by_side

DEVICES, CLIP, EXAMPLE_CLIP = 30, 1e6, 0.5
ROUNDS = 4
"""Of the loop in which gradients are taken too: XLA compiles what is in a loop, as
rounds are, in other ways.
"""
MICROBATCHES = (50, 200, 1000)
"""Sizes that JAX-Privacy is tried with; its best one counts."""


class Model(NamedTuple):
    """A model: log p(label|row, parameters), where its parameters start, and its data."""

    name: str
    log_likelihood: Callable[[Any, Any], Any]
    initial: Any
    data: dict[str, Any]


def _layer(generator: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(
        generator.normal(size=shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32
    )


def models() -> list[Model]:
    """Return a network of dense layers, a logistic regression, and a small
    convolutional network.
    """
    generator = np.random.default_rng(0)

    def dense(p: Any, one: Any) -> Any:
        hidden = jnp.tanh(one["x"] @ p["w1"] + p["b1"])
        return jax.nn.log_softmax(hidden @ p["w2"] + p["b2"])[one["y"]]

    def logistic(p: Any, one: Any) -> Any:
        return jax.nn.log_sigmoid((2 * one["y"] - 1) * (one["x"] @ p["w"] + p["b"]))

    def convolution(p: Any, one: Any) -> Any:
        image = one["x"][None, :, :, None]
        seen = jax.lax.conv_general_dilated(
            image, p["k"], (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.log_softmax(jnp.tanh(seen).ravel() @ p["w"] + p["b"])[one["y"]]

    def data(count: int, *shape: int, classes: int = 10) -> dict[str, Any]:
        rows = generator.normal(size=(count, *shape)).astype(np.float32)
        return {"x": rows, "y": generator.integers(0, classes, count).astype(np.int32)}

    network = {
        "w1": _layer(generator, 64, 64),
        "b1": jnp.zeros(64),
        "w2": _layer(generator, 64, 10),
        "b2": jnp.zeros(10),
    }
    kernels = {
        "k": _layer(generator, 5, 5, 1, 4),
        "w": _layer(generator, 576, 10),
        "b": jnp.zeros(10),
    }
    return [
        Model("network 64-64-10, 6,000 examples", dense, network, data(6000, 64)),
        Model("logistic, 30 features, 60,000 examples", logistic, {"w": _layer(generator, 30), "b": jnp.zeros(())},
              data(60_000, 30, classes=2)),
        Model("convolution 28 × 28 → 10, 3,000 examples", convolution, kernels, data(3000, 28, 28)),
    ]  # fmt: skip


def calls(model: Model) -> dict[str, Callable[[], Any]]:
    """Return what is timed: our two sums, JAX-Privacy's with several microbatches, the
    plain gradient, and loops.
    """

    def log_prior(p: Any) -> Any:
        return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(p))

    posterior = wflmc.posterior_from(
        model.log_likelihood,
        log_prior,
        model.data,
        initial=model.initial,
        devices=DEVICES,
        mu=1.0,
        L=1e4,
    )
    theta = jnp.concatenate(
        [jnp.ravel(leaf) for leaf in jax.tree.leaves(model.initial)]
    )
    weight, clip, example_clip = (
        jnp.full(DEVICES, value) for value in (1.0, CLIP, EXAMPLE_CLIP)
    )
    by_record, by_device = (
        posterior.on_accelerator(1, 2**29, one_by_one) for one_by_one in (True, False)
    )
    record = jax.jit(
        lambda held, at: held.unrounded_sum(at, weight, clip, example_clip=example_clip)
    )
    device = jax.jit(lambda held, at: held.unrounded_sum(at, weight, clip))
    rows = jax.tree.map(jnp.asarray, model.data)

    def loss(p: Any, batch: Any) -> Any:
        return -jnp.mean(jax.vmap(model.log_likelihood, (None, 0))(p, batch))

    total = jax.jit(jax.grad(lambda p, batch: len(model.data["y"]) * loss(p, batch)))

    def rounds(gradient: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a function that takes several rounds in one compiled loop, and gives
        where they lead to.
        """

        def one(at: Any, given: Any) -> Any:
            return jax.tree.map(lambda x, g: x - 1e-9 * g, at, gradient(at, given))

        return jax.jit(
            lambda at, given: jax.lax.fori_loop(
                0, ROUNDS, lambda _, x: one(x, given), at
            )
        )

    device_rounds = rounds(lambda at, held: device(held, at).total.rounded)
    plain_rounds = rounds(total)
    timed = {
        "record": lambda: record(by_record, theta),
        "device": lambda: device(by_device, theta),
        "plain": lambda: total(model.initial, rows),
        "device in a loop": lambda: device_rounds(theta, by_device),
        "plain in a loop": lambda: plain_rounds(model.initial, rows),
    }
    for size in MICROBATCHES:
        peer = jax.jit(
            jax_privacy.clipped_grad(
                loss, l2_clip_norm=EXAMPLE_CLIP, microbatch_size=size
            )
        )
        timed[f"peer {size}"] = lambda peer=peer: peer(model.initial, rows)
    return {
        name: lambda call=call: jax.block_until_ready(call())
        for name, call in timed.items()
    }


def own_models() -> Table:
    """Return our times and those beside them, all measured in turns."""
    table = Table(title="Models of one's own, one chain and round (30 devices)")
    names = (
        "model",
        "record clip",
        "JAX-Privacy",
        "ratio",
        "device clip",
        "plain gradient",
        "ratio ",
        "in a loop",
    )
    for name in names:
        table.add_column(name, justify="right")
    for model in models():
        timed = calls(model)
        seconds = dict(
            zip(timed, side_by_side(*timed.values(), repeats=11), strict=True)
        )
        peer = min(value for name, value in seconds.items() if name.startswith("peer"))
        numbers = seconds["record"], peer, seconds["device"], seconds["plain"]
        record, best, device, plain = (f"{1e3 * value:.2f} ms" for value in numbers)
        first, second = f"{numbers[0] / peer:.2f}", f"{numbers[2] / numbers[3]:.2f}"
        third = f"{seconds['device in a loop'] / seconds['plain in a loop']:.2f}"
        table.add_row(model.name, record, best, first, device, plain, second, third)
    return table


if __name__ == "__main__":
    from rich import print

    print(own_models())
