"""What results are computed from: by equations, whatever the values."""

import jax
import jax.numpy as jnp
import numpy as np

from wflmc.apps.adapters.dependence import Constant, all_sources, sources_of

TABLE = np.arange(3.0)
INPUTS = {
    "x": np.ones(3),
    "y": {"a": np.zeros(3), "b": np.zeros(())},
    "flag": np.zeros((), bool),
}


def results(inputs):
    x, y, flag = inputs["x"], inputs["y"], inputs["flag"]
    called, untouched = jax.jit(lambda a, b: (a + 1, b + 2))(x, y["a"])
    return {
        "sum": x + y["a"],
        "shape": jnp.zeros_like(x) + len(x),
        "times zero": 0.0 * x,
        "called": called,
        "untouched by the call": untouched,
        "loop": jax.lax.fori_loop(0, 3, lambda _, total: total + jnp.sum(x), y["b"]),
        "condition": jax.lax.cond(flag, lambda: x, lambda: y["a"]),
        "table": TABLE * y["b"],
        "table in a call": jax.jit(lambda b: TABLE * b)(y["b"]),
        "table in a loop": jax.lax.fori_loop(
            0, 3, lambda _, total: total + jnp.sum(jnp.sin(TABLE)), 0.0
        ),
        "number": 2.5,
    }


def test_sources_are_the_inputs_and_constants_of_the_equations():
    table = Constant((3,), "f")
    assert sources_of(results, INPUTS) == {
        "sum": {"x", "y"},
        "shape": set(),
        "times zero": {"x"},
        "called": {"x"},
        "untouched by the call": {"y"},
        "loop": {"x", "y"},
        "condition": {"x", "y", "flag"},
        "table": {"y", table},
        "table in a call": {"y", table},
        "table in a loop": {table},
        "number": set(),
    }


def test_sources_of_several_results_are_united():
    assert all_sources(
        sources_of(lambda inputs: {"a": [inputs["x"]], "b": inputs["flag"]}, INPUTS)
    ) == {"x", "flag"}
    assert all_sources([]) == set()
