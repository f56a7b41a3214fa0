"""The parts of NumPyro that this package uses, as types: NumPyro itself declares none.

`library` is the one place where its untyped modules come in.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Protocol, TypeAlias, TypedDict

import jax
import numpy as np
from jax.typing import ArrayLike

from wflmc.support import keys
from wflmc.support.trees import Values

Model: TypeAlias = Callable[..., object]
"""A NumPyro model: a function that visits sites. What it returns is not used."""
Arrays: TypeAlias = dict[str, jax.Array]
"""Arrays by the names of sites, or of examples by their paths."""

KEYED_SITES = ("sample", "prng_key", "plate", "control_flow")
"""Types of sites that `numpyro.handlers.seed` gives a random key."""


class Support(Protocol):
    """The set of values that a distribution can have."""

    @property
    def is_discrete(self) -> bool:
        """Whether its values can be counted."""


class Distribution(Protocol):
    """The law of a sample site."""

    @property
    def support(self) -> Support:
        """The values that it can have."""

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one draw of one independent variable."""

    @property
    def has_enumerate_support(self) -> bool:
        """Whether `enumerate_support` can list its values."""

    def shape(self) -> tuple[int, ...]:
        """Return the shape of a draw, [batch..., event...], without a sample shape."""

    def log_prob(self, value: ArrayLike) -> jax.Array:
        """Return the log-densities of draws, [batch...]."""

    def enumerate_support(self, expand: bool) -> jax.Array:
        """Return all values of a discrete law, along a first axis."""


class Bijection(Protocol):
    """A map from unconstrained space to the support of a law."""

    def __call__(self, x: ArrayLike) -> jax.Array:
        """Return the value of the site for unconstrained x."""

    def inv(self, y: ArrayLike) -> jax.Array:
        """Return the unconstrained value for y of the support."""

    def inverse_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the unconstrained shape for a shape of the support."""

    def log_abs_det_jacobian(self, x: ArrayLike, y: ArrayLike) -> jax.Array:
        """Return log |det dy/dx|."""


class PlateFrame(Protocol):
    """A plate that a site is in."""

    @property
    def name(self) -> str:
        """Of the plate."""

    @property
    def dim(self) -> int:
        """Its batch axis, counted from the last: -1, -2, ..."""

    @property
    def size(self) -> int:
        """How many independent variables it holds."""


class Site(TypedDict, total=False):
    """One entry of a trace; which keys there are depends on `type`."""

    name: str
    type: str
    value: jax.Array
    fn: Distribution
    scale: jax.Array | float | None
    """By which `numpyro.handlers.scale`, or a plate, multiplies the log-density."""
    is_observed: bool
    cond_indep_stack: Sequence[PlateFrame]
    kwargs: dict[str, jax.Array | None]
    """Of a site that may draw: `rng_key`, its random key."""
    args: tuple[int, int | None]
    """Of a plate: its size, and the size of its mini-batches."""


def library() -> ModuleType:
    """Import NumPyro, when a model needs it.

    Returns:
        The module `numpyro`, whose attributes have no types.
    """
    import numpyro

    return numpyro


def bijection(site: Site) -> Bijection:
    """Return the map from unconstrained space to the support of a sample site.

    It is NumPyro's `biject_to`, the same for all sites with equal supports; a site
    whose values are real numbers has the identity.
    """
    return library().distributions.biject_to(site["fn"].support)


def visit(model: Model, values: Callable[[Site], ArrayLike | None]) -> dict[str, Site]:
    """Run a model without arguments and return its sites by name.

    Args:
        model: seeded, so that it needs no random key.
        values: the value that a site is to have; None for its own.

    Returns:
        The sites by name, in the order in which the model visits them.
    """
    handlers = library().handlers
    substituted = handlers.substitute(model, substitute_fn=values)
    return dict(handlers.trace(substituted).get_trace())


def visit_at(model: Model, values: Values) -> dict[str, Site]:
    """Run a model without arguments where its sites have some values.

    Sites without a value draw one, with the key of the model; deterministic sites are
    computed.

    Args:
        model: seeded, so that it needs no random key.
        values: constrained, by site.

    Returns:
        The sites by name.
    """
    handlers = library().handlers
    return dict(handlers.trace(handlers.substitute(model, values)).get_trace())


def constrain(
    model: Model,
    parameters: Values,
    deterministic: bool = False,
) -> Arrays:
    """Return the values of the latent sites of a model without arguments.

    A support may depend on sites before it, so that the model itself runs.

    Args:
        model: seeded.
        parameters: unconstrained values by site.
        deterministic: whether deterministic sites are returned as well.

    Returns:
        Values by site, in the space of the sites.
    """
    constrain_fn = library().infer.util.constrain_fn
    return dict(
        constrain_fn(model, (), {}, parameters, return_deterministic=deterministic)
    )


def seeded(model: Model) -> Model:
    """Return a model that draws with a fixed random key, that of seed 0.

    Sites without a value draw one then, the same in every run. Densities at substituted
    values do not depend on the key, unless the model itself uses it. JAX can trace the
    model.
    """
    return library().handlers.seed(model, 0)


def seeded_on_host(model: Model) -> Model:
    """Return a model that draws with the keys of `seeded`, which NumPy makes.

    A model that is not traced compiles a program for every operation, also for those
    on keys that nothing is drawn with.

    Args:
        model: without random keys.

    Returns:
        A model that needs none.
    """
    messenger = library().primitives.Messenger

    class HostKeys(messenger):  # type: ignore[misc, valid-type]
        """Give every site that asks for a key the next one."""

        def __init__(self, model: Model) -> None:
            self.key = keys.seeded(0)
            super().__init__(model)

        def process_message(self, site: Site) -> None:
            wants_key = site["type"] in KEYED_SITES and site["value"] is None
            if wants_key and site["kwargs"]["rng_key"] is None:
                self.key, site["kwargs"]["rng_key"] = keys.split(self.key)

    return HostKeys(model)


def location_and_scale(law: Distribution) -> tuple[jax.Array, jax.Array] | None:
    """Return the location and the scale of a law that has both.

    Transformed, independent and masked laws are reduced to their base first.

    Args:
        law: of a sample site.

    Returns:
        Location and scale; None for a law that lacks one of them, or whose values are
        not real numbers.
    """
    base = law
    while hasattr(base, "base_dist"):
        base = base.base_dist
    if not hasattr(base, "loc") or not hasattr(base, "scale"):
        return None
    is_real = "Real" in type(base.support).__name__
    return (base.loc, base.scale) if is_real else None


def values_of(law: Distribution) -> np.ndarray:
    """Return all values of a discrete law, [values], of type int32.

    They are those of one independent variable, in the order in which NumPyro lists
    them. The law has to have finitely many of them (`has_enumerate_support`); NumPyro
    raises NotImplementedError for others.
    """
    values = law.enumerate_support(expand=False)
    return np.asarray(values, dtype=np.int32).ravel()
