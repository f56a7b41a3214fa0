"""What a model must define, and how it learns that it does not."""

import jax
import pytest

import wflmc
from wflmc.posterior import Posterior


def test_a_model_that_forgets_a_member_is_not_made():
    """Else a plan would take what is missing for nothing, or a round would fail long after it was paid for."""

    class Forgetful(wflmc.posterior.GaussianPosterior):
        unrounded_sum = Posterior.unrounded_sum
        digest = Posterior.digest

    with pytest.raises(TypeError, match=r"digest.*unrounded_sum"):
        Forgetful()


@pytest.mark.parametrize(
    "posterior",
    [
        wflmc.gaussian_regression(jax.random.key(0), 2, examples=10, dim=2),
        wflmc.softmax_regression(jax.random.key(0), 2, examples=10, dim=2, classes=2),
    ],
    ids=["gaussian", "softmax"],
)
@pytest.mark.parametrize("method", ["initial_w2_sq", "quadratic"])
def test_a_start_that_does_not_exist_is_refused(posterior, method):
    with pytest.raises(wflmc.InputError) as refused:
        getattr(posterior, method)("nowhere")
    assert refused.value.key == "init"
