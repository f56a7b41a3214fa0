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

_HOMES = {
    "apps.adapters.modules": ("from_equinox", "from_flax"),
    "apps.adapters.programs": ("from_numpyro",),
    "apps.diagnosis": ("advise",),
    "channel": ("Link",),
    "support.errors": ("InputError", "SamplingError"),
    "apps.tables.estimators": ("PrivateClassifier", "PrivateRegressor"),
    "evaluation": ("Moments", "evaluate", "exact_w2_sq", "noise_aware"),
    "planning": ("Plan", "Policy", "Sampler", "plan", "plan_many"),
    "posterior": ("gaussian_regression", "posterior_from", "softmax_regression"),
    "privacy.whitening": ("release_whitening",),
    "privacy": ("Privacy",),
    "sampling": ("Trace", "sample"),
}
"""Where names are defined; `__init__.pyi` says the same to type checkers."""
_APPLICATIONS = ("adapters", "audit", "baselines")
"""Modules of `wflmc.apps` that users find at the top level."""
__all__ = [
    "__version__",
    "channel",
    *sorted(name for names in _HOMES.values() for name in names),
]


def __getattr__(name: str) -> object:
    """Import a name when it is first used.

    JAX takes a second to import, for which `wflmc --help` need not wait.
    """
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(f"wflmc.{home}"), name)
            globals()[name] = value  # found without this function from now on
            return value
    if name in _APPLICATIONS:
        return import_module(f"wflmc.apps.{name}")
    if name.startswith("_") or find_spec(f"wflmc.{name}") is None:
        raise AttributeError(f"module 'wflmc' has no attribute {name!r}")
    return import_module(f"wflmc.{name}")


def __dir__() -> list[str]:
    return __all__
