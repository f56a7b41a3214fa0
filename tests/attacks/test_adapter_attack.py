"""Models that hide a way from one record to another: in state, in types, in names, and in operations on many records.

The attacker writes the model, as anybody does, and replaces one record. Nothing but that record's own density may
change, unless `not_covered` lists what does, or the model is refused.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import wflmc

from ..conftest import FULL

numpyro = pytest.importorskip("numpyro", reason="pip install numpyro")
dist = pytest.importorskip("numpyro.distributions")
N = 8
LAST = N - 1
RNG = np.random.default_rng(0)
Y, W = RNG.normal(size=N), RNG.normal(size=N)
KNOWN = {
    "mu": 1.0,
    "L": 100.0,
    "preconditioner": "none",
    "devices": 2,
    "partition": "blocks",
}


def observe(y, mean):
    with numpyro.plate("records", len(y)):
        numpyro.sample("y", dist.Normal(mean, 1), obs=y)


def remembers_a_mean():
    """Return a model whose prior is around the mean of the first data that it was given."""
    memory = {}

    def model(y):
        if not memory:
            memory["mean"] = float(np.mean(y))
        observe(y, numpyro.sample("mean", dist.Normal(memory["mean"], 1)))

    return model


def remembers_a_scale():
    """Return a model that standardises by the first data that it was given."""
    memory = {}

    def model(y):
        if not memory:
            memory["scale"] = float(1 + np.max(np.abs(y)))
        observe(y / memory["scale"], numpyro.sample("mean", dist.Normal(0, 1)))

    return model


def remembers_by_length():
    """Return a model with a table of means by the number of records, as a cache may have."""
    means = {}

    def model(y):
        prior_mean = means.setdefault(
            len(y), y[0] if isinstance(y, np.ndarray) else 0.0
        )
        observe(y, numpyro.sample("mean", dist.Normal(prior_mean, 1)))

    return model


def name_or_refusal(model, y):
    """Return the name of the traced prior and likelihood, with their constants; or what a refusal names."""
    try:
        return wflmc.from_numpyro(model, {"y": y}, **KNOWN).model.name
    except wflmc.InputError as error:
        return error.key


STATEFUL = (remembers_a_mean, remembers_a_scale, remembers_by_length)


@pytest.mark.parametrize(
    "make_model", STATEFUL if FULL else STATEFUL[:1], ids=lambda make: make.__name__
)
def test_a_model_that_remembers_its_first_data_remembers_no_record(make_model):
    changed = Y.copy()
    changed[0] = 30.0
    assert name_or_refusal(make_model(), Y) == name_or_refusal(make_model(), changed)


class Table:
    """An object that no library can look into."""

    def __init__(self, mean):
        self.mean = mean


def knows_more(y, total, table):
    observe(y**3, numpyro.sample("mean", dist.Normal(total + table.mean, 1)))


def test_whole_numbers_objects_and_types_of_lists_are_listed():
    data = {"y": [*range(N)], "total": 7, "table": Table(0.5)}
    listed = wflmc.from_numpyro(knows_more, data, **KNOWN).not_covered
    names = {name: text.partition(": ")[2] for name, text in listed.items()}
    assert names == {"arguments of the model": "total, table.", "types of lists": "y."}


def named_as_the_index(y, _example):
    observe(y, _example * numpyro.sample("mean", dist.Normal(0, 1)))


def two_of_one_path(y, more):
    observe(
        y,
        more["a.b"] * numpyro.sample("mean", dist.Normal(0, 1))
        + jnp.sum(more["a"]["b"]),
    )


AMBIGUOUS = (
    (named_as_the_index, {"y": Y, "_example": W}, "data[_example]"),
    (
        two_of_one_path,
        {"y": Y, "more": {"a.b": W, "a": {"b": np.ones(3)}}},
        "data[more.a.b]",
    ),
)


@pytest.mark.parametrize(("model", "data", "key"), AMBIGUOUS, ids=["index", "path"])
def test_arguments_that_take_the_place_of_others_are_refused(model, data, key):
    with pytest.raises(wflmc.InputError) as caught:
        wflmc.from_numpyro(model, data, **KNOWN)
    assert caught.value.key == key


INITIAL = {
    "w": 0.3 * RNG.normal(size=6),
    "kernel": 0.3 * RNG.normal(size=(6, 4)),
    "out": 0.3 * RNG.normal(size=(4, 3)),
}
EXAMPLES = {"x": RNG.normal(size=(N, 6)), "place": RNG.integers(0, 3, size=(N, 3))}


def convolutions(p, e):
    """Batched over records, these are convolutions of groups."""
    image = e["x"].reshape(1, 2, 3, 1)
    kernels = [
        jnp.tile(w.reshape(2, 2, 1, 1), (1, 1, 1, 3)) for w in (p["w"][:4], p["w"][2:])
    ]
    layout = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    hidden = lax.conv_general_dilated(image, kernels[0], (1, 1), **layout)
    outputs = lax.conv_general_dilated(
        jnp.sin(hidden), kernels[1], (1, 1), feature_group_count=3, **layout
    )
    return -jnp.sum(outputs**2 * image)


def places_out_of_bounds(p, e):
    products = p["w"] * e["x"]
    products = products.at[e["place"]].add(
        p["w"][:3], mode="promise_in_bounds", unique_indices=True
    )
    return -jnp.sum(products.at[e["place"]].get(mode="promise_in_bounds") ** 2)


def network(p, e):
    return -jnp.sum((jnp.tanh(e["x"] @ p["kernel"]) @ p["out"] - 1) ** 2)


def loop_by_data(p, e):
    start = 0, jnp.sum(e["x"])
    _, reduced = lax.while_loop(
        lambda c: (c[0] < 20) & (jnp.abs(c[1]) > 1),
        lambda c: (c[0] + 1, 0.5 * c[1]),
        start,
    )
    return -jnp.sum((p["w"] * reduced - 1) ** 2)


def cholesky(p, e):
    covariance = jnp.outer(e["x"], e["x"]) + jnp.diag(jnp.exp(p["w"]))
    return -jnp.sum(jnp.log(jnp.diag(jnp.linalg.cholesky(covariance))))


def triangular(p, e):
    lower = jnp.tril(jnp.outer(p["w"], p["w"])) + 3 * jnp.eye(6)
    return -jnp.sum(jax.scipy.linalg.solve_triangular(lower, e["x"], lower=True) ** 2)


def eigenvalues(p, e):
    matrix = jnp.outer(e["x"], p["w"])
    return -jnp.sum(
        jnp.linalg.eigvalsh(matrix + matrix.T + jnp.diag(jnp.arange(6.0))) ** 2
    )


def conjugate_gradients(p, e):
    def product(v):
        return v * jnp.exp(p["w"]) + 0.1 * e["x"] * jnp.vdot(e["x"], v)

    return -jnp.sum(jax.scipy.sparse.linalg.cg(product, e["x"], maxiter=10)[0] ** 2)


def cumulative(p, e):
    products = p["w"] * e["x"]
    return -jnp.sum(lax.cumsum(products, reverse=True) ** 2) + jnp.sum(
        lax.cumlogsumexp(products)
    )


def fourier(p, e):
    return -jnp.sum(jnp.abs(jnp.fft.rfft(p["w"] * e["x"]) + 1) ** 2)


def sorted_and_largest(p, e):
    return (
        jnp.sum(jnp.sort(p["w"] * e["x"]) * jnp.arange(6.0))
        - lax.top_k(p["w"] * e["x"], 2)[0].sum()
    )


def half_precision(p, e):
    return -jnp.sum((p["w"].astype(jnp.float16) * e["x"].astype(jnp.float16)) ** 2)


def attention(p, e):
    values = (e["x"] * p["w"]).reshape(1, 3, 1, 2)
    length = e["place"][:1].astype(jnp.int32)
    return -jnp.sum(
        jax.nn.dot_product_attention(
            values, values, values, key_value_seq_lengths=length
        )
        ** 2
    )


@jax.custom_vjp
def product_sum(w, x):
    return jnp.sum(w * x)


product_sum.defvjp(
    lambda w, x: (product_sum(w, x), (w, x)),
    lambda saved, g: (1e3 * g * saved[0] * saved[1], saved[1]),
)


def gradient_of_its_own(p, e):
    """The rule of the gradient is not the function's: clips are of what the rule returns."""
    return -product_sum(p["w"], e["x"])


class Replacement(NamedTuple):
    """Values of one record that is put in another's place."""

    x: float
    place: int


MODELS = (
    network, convolutions, places_out_of_bounds, gradient_of_its_own, loop_by_data, cholesky, triangular, eigenvalues,
    conjugate_gradients, cumulative, fourier, sorted_and_largest, half_precision, attention,
)  # fmt: skip
REPLACEMENTS = (
    Replacement(1e30, 2**30),
    Replacement(np.nan, 0),
    Replacement(-3.0, -5),
    Replacement(np.inf, 1),
    Replacement(0.0, 100),
    Replacement(1e-40, 2),
)
EXAMPLE_CLIP = 0.5


def log_prior(p):
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in p.values())


def clipped_gradients(log_likelihood: Callable[[Any, Any], Any]) -> np.ndarray:
    """Return the gradients of all examples by float64, one after the other, each clipped by hand, [N, m]."""
    rows = []
    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(lambda p, e: -log_likelihood(p, e)))
        for row in range(N):
            parts = gradient(
                INITIAL, {name: values[row] for name, values in EXAMPLES.items()}
            )
            rows.append(
                np.concatenate([np.ravel(part) for part in jax.tree.leaves(parts)])
            )
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.stack(rows) * np.minimum(1, EXAMPLE_CLIP / np.maximum(norms, 1e-300))


@pytest.mark.parametrize(
    "log_likelihood", MODELS if FULL else MODELS[:1], ids=lambda model: model.__name__
)
def test_no_record_moves_what_another_adds(log_likelihood):
    """Clipped sums are those of float64, and a record moves them by its clip at most, also where it is not finite."""
    device = np.zeros(N, int)
    settings = {"initial": INITIAL, "devices": device, "mu": 1.0, "L": 100.0}
    posterior = wflmc.posterior_from(
        log_likelihood, log_prior, EXAMPLES, **settings
    ).on_accelerator(1, 2**30, True)
    theta = np.asarray(posterior.start, np.float32)
    limits = jnp.ones(1), jnp.full(1, 1e3), None, jnp.full(1, EXAMPLE_CLIP)

    @jax.jit
    def results(data):
        changed = posterior.__class__(**{**vars(posterior), "data": data})
        leaves = jax.tree.leaves(posterior.model.unflatten(theta))
        rows = posterior.model.record_gradient.of(
            leaves, jax.tree.map(lambda values: values[0], jax.tree.leaves(data))
        )
        return changed.clipped_sum(theta, *limits)[0], [
            (part.left, part.right) for part in rows
        ]

    added = clipped_gradients(log_likelihood)
    total, rows = results(posterior.data)
    prior = np.concatenate([np.ravel(INITIAL[name]) for name in sorted(INITIAL)])
    precision = 0.02 if log_likelihood is half_precision else 1e-4
    np.testing.assert_allclose(
        total, added.sum(0) + prior, atol=precision * N * EXAMPLE_CLIP
    )
    for row in (0, LAST) if FULL else (0,):
        for replacement in REPLACEMENTS:
            data = {name: np.array(values) for name, values in posterior.data.items()}
            data["x"][0, row], data["place"][0, row] = replacement
            moved, others = results(data)
            for before, after in zip(
                jax.tree.leaves(rows), jax.tree.leaves(others), strict=True
            ):
                np.testing.assert_array_equal(
                    np.delete(before, row, 0), np.delete(after, row, 0)
                )
            moved_by = np.linalg.norm(
                np.asarray(moved, float) - np.delete(added, row, 0).sum(0) - prior
            )
            assert moved_by <= EXAMPLE_CLIP * (1 + precision * N)
