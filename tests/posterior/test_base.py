"""What a model must define, and how it learns that it does not."""

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
