"""What the examples share: a reference posterior by NUTS, and a table."""

import importlib

import jax
import numpy as np


def needs(module, package):
    """A module that only examples need, or a sentence that says how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SystemExit(
            f"This example needs {package}, which is not installed: pip install {package}"
        ) from None


def nuts(key, log_density, start, warmup=500, draws=1000, doublings=10):
    """theta[1, draw, m] of one chain of BlackJAX's No-U-Turn sampler, on all data in
    one place.

    A trajectory has at most 2 to the power of `doublings` steps.
    """
    blackjax = needs("blackjax", "blackjax")

    @jax.jit
    def run(key, start):
        first, second = jax.random.split(key)
        adaptation = blackjax.window_adaptation(
            blackjax.nuts, log_density, max_num_doublings=doublings
        )
        (state, tuned), _ = adaptation.run(first, start, warmup)
        kernel = blackjax.nuts(log_density, **tuned)

        def step(state, key):
            state, _ = kernel.step(key, state)
            return state, state.position

        return jax.lax.scan(step, state, jax.random.split(second, draws))[1]

    return np.asarray(run(key, start))[None]


def log_density(posterior, data):
    """log p(θ|D) of a posterior by `wflmc.posterior`, up to a constant, from all its
    data in one place.
    """
    model = posterior.model

    def of(theta):
        return (
            -model.prior_cost(theta)
            - jax.vmap(model.cost, (None, 0))(theta, data).sum()
        )

    return of


def with_error(values):
    """The mean over replicas and its standard error."""
    values = np.atleast_1d(values)
    if len(values) < 2:
        return f"{values[0]:.3f}"
    return f"{values.mean():.3f} ± {values.std(ddof=1) / len(values) ** 0.5:.3f}"


def table(heads, rows):
    """Print rows of text under their heads."""
    cells = [heads, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    for row in cells:
        print(
            "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip()
        )
    print()
