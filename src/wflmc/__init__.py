"""Bayesian federated learning over the air: plan it, sample with it, prove its privacy.

>>> import jax, wflmc
>>> posterior = wflmc.gaussian_regression(jax.random.key(0), devices=30)
>>> link = wflmc.Link(wflmc.channel.static(power=1e-4), snr_db=20)
>>> privacy = wflmc.Privacy(epsilon=15, delta=0.01, clip=30)
>>> step_size = 0.4 / (posterior.mu + posterior.L)
>>> plan = wflmc.plan(posterior, link, privacy, step_size=step_size, burn_in=50, samples=1)
>>> plan.regime
'power-limited'
"""

from importlib import import_module
from importlib.util import find_spec

from wflmc.version import __version__

TYPE_CHECKING = False  # type checkers know better; typing takes longer to import than all else here
if TYPE_CHECKING:
    from wflmc import adapters as adapters
    from wflmc import audit as audit
    from wflmc import baselines as baselines
    from wflmc import channel as channel
    from wflmc import data as data
    from wflmc import evaluation as evaluation
    from wflmc import planning as planning
    from wflmc import posterior as posterior
    from wflmc import privacy as privacy
    from wflmc import sampling as sampling
    from wflmc.adapters.modules import from_equinox, from_flax
    from wflmc.adapters.programs import from_numpyro
    from wflmc.channel import Link
    from wflmc.errors import InputError, SamplingError
    from wflmc.estimators.estimators import PrivateClassifier, PrivateRegressor
    from wflmc.evaluation import Moments, advise, evaluate, exact_w2_sq, noise_aware
    from wflmc.planning import Plan, Policy, Sampler, plan, plan_many
    from wflmc.posterior import gaussian_regression, posterior_from, softmax_regression
    from wflmc.preconditioning import release_whitening
    from wflmc.privacy import Privacy
    from wflmc.sampling import Trace, sample

__all__ = [
    "InputError", "Link", "Moments", "Plan", "Policy", "Privacy", "PrivateClassifier",
    "PrivateRegressor", "Sampler", "SamplingError", "Trace", "__version__", "advise",
    "channel", "evaluate", "exact_w2_sq", "from_equinox", "from_flax", "from_numpyro",
    "gaussian_regression", "noise_aware", "plan", "plan_many", "posterior_from",
    "release_whitening", "sample", "softmax_regression",
]  # fmt: skip

_HOMES = {
    "adapters.modules": ("from_equinox", "from_flax"),
    "adapters.programs": ("from_numpyro",),
    "channel": ("Link",),
    "errors": ("InputError", "SamplingError"),
    "estimators.estimators": ("PrivateClassifier", "PrivateRegressor"),
    "evaluation": ("Moments", "advise", "evaluate", "exact_w2_sq", "noise_aware"),
    "planning": ("Plan", "Policy", "Sampler", "plan", "plan_many"),
    "posterior": ("gaussian_regression", "posterior_from", "softmax_regression"),
    "preconditioning": ("release_whitening",),
    "privacy": ("Privacy",),
    "sampling": ("Trace", "sample"),
}
"""Where names are defined."""


if not TYPE_CHECKING:  # types are those of the imports above

    def __getattr__(name: str) -> object:
        """Import what is asked for when it is: JAX takes a second, which `wflmc --help` need not wait for."""
        for home, names in _HOMES.items():
            if name in names:
                found = globals()[name] = getattr(import_module(f"wflmc.{home}"), name)
                return found
        if name.startswith("_") or find_spec(f"wflmc.{name}") is None:
            raise AttributeError(f"module 'wflmc' has no attribute {name!r}")
        return import_module(f"wflmc.{name}")


def __dir__() -> list[str]:
    return __all__
