"""`wflmc.sample` with 1, 4 and 26 chains, against the best plain JAX without protocol.

    python -m benchmarks.few_chains [WORD …] [--chains 1 4 26] [--repeats 7]

A case is measured if its name has one of the words; without a word all of them are, but
the slow ones with few chains only.
All calls of a case are made in turns; every one keeps all draws and brings them to the
host.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import blackjax
import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
from rich.table import Table

import wflmc
from benchmarks import own_models
from benchmarks.timing import side_by_side
from wflmc import channel

Gradient = Callable[[Any, jax.Array], jax.Array]
"""From data and θ[chain, m] to the gradients of all chains, [chain, m]."""
Call = Callable[[], object]

CHAINS = (1, 4, 26)
SHORT_ROUNDS = 2
"""Rounds of the short call, from which the time of a call without rounds follows."""
CLIP = 1e4
EXAMPLE_CLIP = 0.5
MAX_CHAINS_OF_SLOW_CASE = 4
"""Of the convolutional network, whose 26 chains take ten minutes in plain JAX."""
MICROBATCHES = (50, 200, 1000)
"""Sizes that JAX-Privacy is tried with; its best one counts."""


class Rival(NamedTuple):
    """Gradients of plain JAX, and the data that they are of."""

    gradient: Gradient
    data: Any


class Case(NamedTuple):
    """A posterior, a promise, and gradients in plain JAX."""

    name: str
    posterior: Any
    privacy: wflmc.Privacy
    step_size: float
    rounds: int
    """Of the long call with one chain."""
    unclipped: dict[str, Rival]
    """Gradients of pooled data, without clipping."""
    clipped: dict[str, Rival]
    """Gradients with the same clipping, without protocol."""
    max_chains: int = max(CHAINS)
    """The most chains that it is measured with unless it is asked for by a word."""

    def rounds_of(self, chains: int) -> int:
        """Return the rounds of the long call: fewer with many chains."""
        return max(10, self.rounds // (1 if chains < 10 else 5))


def device_promise() -> wflmc.Privacy:
    """Return a promise to whole devices that hardly clips."""
    return wflmc.Privacy(epsilon=50.0, delta=0.1, clip=CLIP)


def record_promise(posterior: Any) -> wflmc.Privacy:
    """Return a promise to single records; their sums are never clipped."""
    return wflmc.Privacy(
        epsilon=50.0,
        delta=0.1,
        clip=EXAMPLE_CLIP * float(np.max(posterior.sizes)),
        unit="record",
        example_clip=EXAMPLE_CLIP,
    )


# Chains.


def our_call(case: Case, chains: int, rounds: int) -> Call:
    """Return a whole call of `wflmc.sample`."""
    link = wflmc.Link(channel.rayleigh(1e-4), snr_db=20)
    plan = wflmc.plan(
        case.posterior,
        link,
        case.privacy,
        step_size=case.step_size,
        burn_in=0,
        samples=rounds,
        policy=wflmc.Policy(objective="average"),
        initial_w2_sq=0.0,
    )
    key = jax.random.key(0)
    return lambda: wflmc.sample(key, case.posterior, plan, chains).theta


def plain_call(rival: Rival, case: Case, chains: int, rounds: int) -> Call:
    """Return Langevin steps in one compiled loop."""
    step_size = case.step_size

    @jax.jit
    def run(key: jax.Array, data: Any, theta: jax.Array) -> jax.Array:
        def one_round(
            theta: jax.Array,
            index: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            noise = jax.random.normal(jax.random.fold_in(key, index), theta.shape)
            gradient = rival.gradient(data, theta)
            moved = theta - step_size * gradient + (2 * step_size) ** 0.5 * noise
            return moved, moved

        return jax.lax.scan(one_round, theta, jnp.arange(rounds))[1]

    key = jax.random.key(0)
    start = 0.1 * jax.random.normal(key, (chains, case.posterior.dim))
    return lambda: np.asarray(run(key, rival.data, start))


def blackjax_call(rival: Rival, case: Case, chains: int, rounds: int) -> Call:
    """Return BlackJAX's overdamped Langevin kernel with all data as its batch."""

    def score(theta: jax.Array, data: Any) -> jax.Array:
        return -rival.gradient(data, theta[None])[0]

    sampler = blackjax.sgld(score)

    @jax.jit
    def run(key: jax.Array, data: Any, theta: jax.Array) -> jax.Array:
        def one_round(
            theta: jax.Array,
            index: jax.Array,
        ) -> tuple[jax.Array, jax.Array]:
            keys = jax.random.split(jax.random.fold_in(key, index), chains)
            step = partial(sampler.step, minibatch=data, step_size=case.step_size)
            moved = jax.vmap(step)(keys, theta)
            return moved, moved

        return jax.lax.scan(one_round, theta, jnp.arange(rounds))[1]

    key = jax.random.key(0)
    start = 0.1 * jax.random.normal(key, (chains, case.posterior.dim))
    return lambda: np.asarray(run(key, rival.data, start))


def by_vmap(gradient: Callable[[Any, jax.Array], jax.Array]) -> Gradient:
    """Return the gradients of chains side by side, of a gradient at θ[m]."""
    return lambda data, theta: jax.vmap(partial(gradient, data))(theta)


def by_loop(gradient: Callable[[Any, jax.Array], jax.Array]) -> Gradient:
    """Return the gradients of one chain after the other, of a gradient at θ[m]."""
    return lambda data, theta: jax.lax.map(partial(gradient, data), theta)


# Linear regression.


class LinearData(NamedTuple):
    """Rows of all devices, and second moments of each device."""

    features: jax.Array
    target: jax.Array
    lengths: jax.Array
    """‖u‖ of every row."""
    hessian: jax.Array
    """H[K, m, m], with the prior's share."""
    linear: jax.Array
    """b[K, m]."""


def linear_data(posterior: Any) -> LinearData:
    """Return the data of a linear regression."""
    features = posterior.features.reshape(-1, posterior.dim)
    arrays = (
        features,
        posterior.target.ravel(),
        np.linalg.norm(features, axis=1),
        posterior.hessian,
        posterior.linear,
    )
    return LinearData(*(jnp.asarray(values, jnp.float32) for values in arrays))


def linear_moments(data: LinearData, theta: jax.Array) -> jax.Array:
    """Return gradients by the second moments of all data."""
    return theta @ data.hessian.sum(0) - data.linear.sum(0)


def linear_rows(data: LinearData, theta: jax.Array) -> jax.Array:
    """Return gradients by all rows."""
    residuals = theta @ data.features.T - data.target
    return residuals @ data.features + theta


def linear_devices(data: LinearData, theta: jax.Array) -> jax.Array:
    """Return the sum of devices' gradients, each clipped."""
    rows = data.hessian.reshape(-1, theta.shape[1])
    products = (theta @ rows.T).reshape(len(theta), *data.linear.shape)
    gradients = products - data.linear
    norms = jnp.sqrt((gradients**2).sum(-1, keepdims=True))
    return (gradients * jnp.minimum(1.0, CLIP / norms)).sum(1)


def linear_records(data: LinearData, theta: jax.Array) -> jax.Array:
    """Return the sum of records' gradients, each clipped."""
    residuals = theta @ data.features.T - data.target
    limits = EXAMPLE_CLIP / data.lengths
    return jnp.clip(residuals, -limits, limits) @ data.features + theta


def gaussian_cases() -> Iterator[Case]:
    """Yield linear regressions of 5 and 30 features."""
    for features in (5, 30):
        posterior = wflmc.gaussian_regression(jax.random.key(0), 30, dim=features)
        data = linear_data(posterior)
        unclipped = {
            "moments": Rival(linear_moments, data),
            "rows": Rival(linear_rows, data),
        }
        for promise, gradient in (
            (device_promise(), linear_devices),
            (record_promise(posterior), linear_records),
        ):
            yield Case(
                name=f"gaussian {features} features {promise.unit}",
                posterior=posterior,
                privacy=promise,
                step_size=0.2 / (posterior.mu + posterior.L),
                rounds=1000,
                unclipped=unclipped,
                clipped={"clipped": Rival(gradient, data)},
            )


# Softmax regression on devices of few rows.


class LabelledData(NamedTuple):
    """Rows of all devices."""

    features: jax.Array
    """u[N, d]."""
    labels: jax.Array
    """Classes [N]."""
    lengths: jax.Array
    """‖u‖[N]."""


CLASSES = 10
ROWS = 8
"""Rows of a device."""
BLOCK = 400
"""Rows at a time of the layout in blocks."""


def residuals_of(data: LabelledData, theta: jax.Array) -> jax.Array:
    """Return p − 1[label], [chain, C, N]: rows along the last axis."""
    by_class = theta.reshape(-1, data.features.shape[1])
    logits = (by_class @ data.features.T).reshape(len(theta), CLASSES, -1)
    raised = jnp.exp(logits - logits.max(1, keepdims=True))
    p = raised / raised.sum(1, keepdims=True)
    return p - (jnp.arange(CLASSES)[:, None] == data.labels)


def weighted_rows(data: LabelledData, residuals: jax.Array) -> jax.Array:
    """Return Σ_n r_n u_nᵀ, [chain, m], of residuals[chain, C, N]."""
    flat = residuals.reshape(-1, residuals.shape[-1])
    return (flat @ data.features).reshape(len(residuals), -1)


def softmax_pooled(data: LabelledData, theta: jax.Array) -> jax.Array:
    """Return gradients of pooled rows."""
    return weighted_rows(data, residuals_of(data, theta)) + theta


def softmax_records(data: LabelledData, theta: jax.Array) -> jax.Array:
    """Return gradients with every record clipped, by ghost norms."""
    residuals = residuals_of(data, theta)
    norms = jnp.sqrt((residuals**2).sum(1)) * data.lengths
    factors = jnp.minimum(1.0, EXAMPLE_CLIP / norms)
    return weighted_rows(data, residuals * factors[:, None]) + theta


def softmax_devices(data: LabelledData, theta: jax.Array) -> jax.Array:
    """Return gradients with every device of 8 rows clipped."""
    chains = len(theta)
    devices = len(data.labels) // ROWS
    residuals = residuals_of(data, theta).reshape(-1, devices, ROWS)
    rows = data.features.reshape(devices, ROWS, -1)
    likelihood = jnp.einsum("xkn,knd->kxd", residuals, rows)
    gradients = likelihood.reshape(devices, chains, -1) + theta / devices
    norms = jnp.sqrt((gradients**2).sum(-1, keepdims=True))
    return (gradients * jnp.minimum(1.0, CLIP / norms)).sum(0)


def softmax_device_products(data: LabelledData, theta: jax.Array) -> jax.Array:
    """Return gradients with every device clipped, its norm by products of rows."""
    chains = len(theta)
    devices = len(data.labels) // ROWS
    residuals = residuals_of(data, theta).reshape(chains, CLASSES, devices, ROWS)
    rows = data.features.reshape(devices, ROWS, -1)
    products = jnp.einsum("kid,kjd->kij", rows, rows)
    inner = jnp.einsum("xcki,xckj->xkij", residuals, residuals)
    by_class = theta.reshape(chains, CLASSES, -1)
    pulls = jnp.einsum("xcd,knd->xckn", by_class, rows) / devices
    squares = (products * inner).sum((2, 3)) + 2 * (residuals * pulls).sum((1, 3))
    squares += (theta**2).sum(1, keepdims=True) / devices**2
    factors = jnp.minimum(1.0, CLIP / jnp.sqrt(squares))
    clipped = (residuals * factors[:, None, :, None]).reshape(chains, CLASSES, -1)
    share = theta * (factors.sum(1, keepdims=True) / devices)
    return weighted_rows(data, clipped) + share


def in_blocks(gradient: Gradient, devices: int) -> Gradient:
    """Return a gradient of pooled rows in blocks that the cache holds."""

    def blocked(data: LabelledData, theta: jax.Array) -> jax.Array:
        def add(total: jax.Array, block: Any) -> tuple[jax.Array, None]:
            return total + gradient(LabelledData(*block), theta) - theta, None

        def split(values: jax.Array) -> jax.Array:
            return values.reshape(-1, BLOCK, *values.shape[1:])

        blocks = tuple(split(values) for values in data)
        return jax.lax.scan(add, theta, blocks)[0]

    return blocked


def softmax_cases() -> Iterator[Case]:
    """Yield softmax regressions on 1,500 devices of 8 rows."""
    devices = 1500
    posterior = wflmc.softmax_regression(
        jax.random.key(0),
        devices,
        examples=devices * ROWS,
        dim=30,
        classes=CLASSES,
        partition="blocks",
    )
    features = posterior.features.reshape(devices * ROWS, -1)
    data = LabelledData(
        features=jnp.asarray(features, jnp.float32),
        labels=jnp.asarray(posterior.labels.ravel(), jnp.int32),
        lengths=jnp.asarray(np.linalg.norm(features, axis=1), jnp.float32),
    )
    unclipped = {
        "pooled": Rival(softmax_pooled, data),
        "pooled in blocks": Rival(in_blocks(softmax_pooled, devices), data),
    }
    by_device = {
        "gradients": Rival(softmax_devices, data),
        "products": Rival(softmax_device_products, data),
    }
    by_record = {
        "ghost": Rival(softmax_records, data),
        "ghost in blocks": Rival(in_blocks(softmax_records, devices), data),
    }
    for promise, clipped in (
        (device_promise(), by_device),
        (record_promise(posterior), by_record),
    ):
        yield Case(
            name=f"softmax 8 rows {promise.unit}",
            posterior=posterior,
            privacy=promise,
            step_size=0.2 / (posterior.mu + posterior.L),
            rounds=100,
            unclipped=unclipped,
            clipped=clipped,
        )


# Custom models.


def log_prior(parameters: Any) -> Any:
    """Return that of N(0, I)."""
    return -0.5 * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(parameters))


def flat_gradient(
    model: own_models.Model,
    gradient: Callable[[Any, Any], Any],
) -> Callable[[Any, jax.Array], jax.Array]:
    """Return the gradient at θ[m] of a gradient of (parameters, data)."""
    unflatten = jax.flatten_util.ravel_pytree(model.initial)[1]

    def flat(data: Any, theta: jax.Array) -> jax.Array:
        result = gradient(unflatten(theta), data)
        return jax.flatten_util.ravel_pytree(result)[0] + theta

    return flat


def total_gradient(model: own_models.Model) -> Callable[[Any, Any], Any]:
    """Return the gradient of the cost of all records, of (parameters, data)."""

    def cost(parameters: Any, data: Any) -> jax.Array:
        scores = jax.vmap(model.log_likelihood, (None, 0))(parameters, data)
        return -jnp.sum(scores)

    return jax.grad(cost)


def peer_gradient(
    model: own_models.Model, microbatch: int
) -> Callable[[Any, Any], Any]:
    """Return the sum of clipped gradients by JAX-Privacy."""

    def cost(parameters: Any, data: Any) -> jax.Array:
        scores = jax.vmap(model.log_likelihood, (None, 0))(parameters, data)
        return -jnp.mean(scores)

    gradient: Callable[[Any, Any], Any] = jax_privacy.clipped_grad(
        cost,
        l2_clip_norm=EXAMPLE_CLIP,
        microbatch_size=microbatch,
    )
    return gradient


def logistic_ghost(parameters: Any, data: Any) -> Any:
    """Return clipped gradients of the logistic regression, by ghost norms."""
    sign = 2.0 * data["y"] - 1
    logits = data["x"] @ parameters["w"] + parameters["b"]
    residuals = -sign * jax.nn.sigmoid(-sign * logits)
    lengths = jnp.sqrt((data["x"] ** 2).sum(1) + 1)
    limits = EXAMPLE_CLIP / lengths
    clipped = jnp.clip(residuals, -limits, limits)
    return {"w": clipped @ data["x"], "b": clipped.sum()}


def network_ghost(parameters: Any, data: Any) -> Any:
    """Return clipped gradients of the network of dense layers, by ghost norms."""
    hidden = jnp.tanh(data["x"] @ parameters["w1"] + parameters["b1"])
    logits = hidden @ parameters["w2"] + parameters["b2"]
    second = jax.nn.softmax(logits) - jax.nn.one_hot(data["y"], logits.shape[1])
    first = (second @ parameters["w2"].T) * (1 - hidden**2)
    squares = ((data["x"] ** 2).sum(1) + 1) * (first**2).sum(1)
    squares += ((hidden**2).sum(1) + 1) * (second**2).sum(1)
    factors = jnp.minimum(1.0, EXAMPLE_CLIP / jnp.sqrt(squares))[:, None]
    return {
        "w1": data["x"].T @ (factors * first),
        "b1": (factors * first).sum(0),
        "w2": hidden.T @ (factors * second),
        "b2": (factors * second).sum(0),
    }


def convolution_ghost(parameters: Any, data: Any) -> Any:
    """Return clipped gradients of the convolutional network, by patches of images."""
    kernel = parameters["k"]
    patches = jax.lax.conv_general_dilated_patches(
        data["x"][..., None],
        kernel.shape[:2],
        (2, 2),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    count, height, width, size = patches.shape
    patches = patches.reshape(count, height * width, size)
    flat_kernel = kernel.reshape(size, -1)
    seen = jnp.tanh(patches @ flat_kernel)
    hidden = seen.reshape(count, -1)
    logits = hidden @ parameters["w"] + parameters["b"]
    second = jax.nn.softmax(logits) - jax.nn.one_hot(data["y"], logits.shape[1])
    first = (second @ parameters["w"].T).reshape(seen.shape) * (1 - seen**2)
    of_kernel = jnp.einsum("nps,npo->nso", patches, first)
    squares = (of_kernel**2).sum((1, 2))
    squares += ((hidden**2).sum(1) + 1) * (second**2).sum(1)
    factors = jnp.minimum(1.0, EXAMPLE_CLIP / jnp.sqrt(squares))
    weighted = factors[:, None] * second
    return {
        "k": jnp.einsum("n,nso->so", factors, of_kernel).reshape(kernel.shape),
        "w": hidden.T @ weighted,
        "b": weighted.sum(0),
    }


GHOSTS = (network_ghost, logistic_ghost, convolution_ghost)
"""By hand, in the order of `own_models.models`."""
CUSTOM_ROUNDS = (100, 100, 20)
"""Of the long call, in the same order."""


def custom_cases() -> Iterator[Case]:
    """Yield the models of `benchmarks.own_models`."""
    models = own_models.models()
    for model, ghost, rounds in zip(models, GHOSTS, CUSTOM_ROUNDS, strict=True):
        posterior = wflmc.posterior_from(
            model.log_likelihood,
            log_prior,
            model.data,
            initial=model.initial,
            devices=own_models.DEVICES,
            mu=1.0,
            L=1e4,
        )
        data = jax.tree.map(jnp.asarray, model.data)
        plain = flat_gradient(model, total_gradient(model))
        unclipped = {
            "vmap": Rival(by_vmap(plain), data),
            "loop": Rival(by_loop(plain), data),
        }
        by_hand = flat_gradient(model, ghost)
        clipped = {
            "by hand, vmap": Rival(by_vmap(by_hand), data),
            "by hand, loop": Rival(by_loop(by_hand), data),
        }
        for size in MICROBATCHES:
            peer = flat_gradient(model, peer_gradient(model, size))
            clipped[f"JAX-Privacy {size}"] = Rival(by_loop(peer), data)
        name = model.name.split(",")[0].split()[0]
        is_slow = name == "convolution"
        for promise, rivals in (
            (device_promise(), {}),
            (record_promise(posterior), clipped),
        ):
            yield Case(
                name=f"custom {name} {promise.unit}",
                posterior=posterior,
                privacy=promise,
                step_size=1e-6,
                rounds=rounds,
                unclipped=unclipped,
                clipped=rivals,
                max_chains=MAX_CHAINS_OF_SLOW_CASE if is_slow else max(CHAINS),
            )


# Measurements.


def calls(case: Case, chains: int) -> dict[str, Call]:
    """Return what is timed of a case, by name."""
    rounds = case.rounds_of(chains)
    timed = {
        "ours": our_call(case, chains, rounds),
        "ours short": our_call(case, chains, SHORT_ROUNDS),
    }
    for name, rival in case.unclipped.items():
        timed[f"unclipped: {name}"] = plain_call(rival, case, chains, rounds)
    for name, rival in case.clipped.items():
        timed[f"clipped: {name}"] = plain_call(rival, case, chains, rounds)
    first = next(iter(case.unclipped.values()))
    timed["BlackJAX"] = blackjax_call(first, case, chains, rounds)
    return timed


def best(seconds: dict[str, float], prefix: str) -> float | None:
    """Return the shortest of the times whose names begin so."""
    times = [value for name, value in seconds.items() if name.startswith(prefix)]
    return min(times, default=None)


def add_row(table: Table, case: Case, chains: int, seconds: dict[str, float]) -> None:
    """Add times in µs per chain and round, and ratios to them."""
    rounds = case.rounds_of(chains)
    each = {name: 1e6 * value / (chains * rounds) for name, value in seconds.items()}
    by_round = (seconds["ours"] - seconds["ours short"]) / (rounds - SHORT_ROUNDS)
    per_call = seconds["ours short"] - SHORT_ROUNDS * by_round
    marginal = 1e6 * by_round / chains
    cells = [case.name, str(chains), str(rounds)]
    cells += [f"{each['ours']:.1f}", f"{marginal:.1f}", f"{1e3 * per_call:.1f}"]
    for prefix in ("unclipped", "clipped", "JAX-Privacy", "BlackJAX"):
        start = "clipped: JAX-Privacy" if prefix == "JAX-Privacy" else prefix
        rival = best(each, start)
        if rival is None:
            cells += ["", ""]
        else:
            cells += [f"{rival:.1f}", f"{marginal / rival:.2f}"]
    table.add_row(*cells)


COLUMNS = (
    "case",
    "chains",
    "rounds",
    "ours, µs",
    "without the call",
    "a call, ms",
    "unclipped",
    "ratio",
    "clipped",
    "ratio",
    "JAX-Privacy",
    "ratio",
    "BlackJAX",
    "ratio",
)


def few_chains(words: Sequence[str], chains: Sequence[int], repeats: int) -> Table:
    """Return times per chain and round, all of a case measured in turns.

    Args:
        words: a case is measured if its name has one of these; all where there is none,
            with `max_chains` of them at most.
        chains: numbers of chains.
        repeats: calls of each, of which the median counts.
    """
    table = Table(title="Few chains: µs per chain and round")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    cases = [*gaussian_cases(), *softmax_cases(), *custom_cases()]
    for case in cases:
        if words and not any(word in case.name for word in words):
            continue
        for number in chains:
            if number > case.max_chains and not words:
                continue
            print(f"{case.name}, {number} chains", file=sys.stderr, flush=True)
            timed = calls(case, number)
            seconds = side_by_side(*timed.values(), repeats=repeats)
            add_row(table, case, number, dict(zip(timed, seconds, strict=True)))
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="cases whose names have one of these")
    parser.add_argument("--chains", type=int, nargs="+", default=list(CHAINS))
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    from rich.console import Console

    console = Console(width=180)
    console.print(few_chains(options.words, options.chains, options.repeats))


if __name__ == "__main__":
    main()
