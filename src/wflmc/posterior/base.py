"""What a posterior is: the protocols that every model meets and that planning, sampling and evaluation are typed by.

A model derives from `Posterior`, which has defaults for everything that a model need not know. `HasLaw` and `Predicts`
are what some models can do beyond that; callers ask by `isinstance(posterior, HasLaw)`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.sums.bound import (
    RoundingError,
    SumSettings,
    rounding_error,
    vector_norm_error,
)
from wflmc.sums.devices import ClippedSum
from wflmc.support.errors import InputError, missing

if TYPE_CHECKING:
    from dataclasses import Field

    from wflmc.dynamics import Motion, Quadratic, Response
    from wflmc.posterior.coordinates import Coordinates, Points
    from wflmc.posterior.inputs import Names
    from wflmc.posterior.law import Gaussian, LinearChain

STATIC = {"static": True}
"""Metadata of a dataclass's field that JAX compiles for, rather than traces."""
Array = NDArray[np.float64]
Maybe = jax.Array | None


class SumsGradients(Protocol):
    """What a round asks of a posterior."""

    @property
    def batch(self) -> int | None:
        """Examples that each device draws for a round; None: all of them."""

    @abstractmethod
    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: Maybe = None,
        example_clip: Maybe = None,
    ) -> ClippedSum:
        """Return Σ_k weight_k g_k min(1, ℓ_k/‖g_k‖) before it is rounded to float32, and the norms ‖g_k‖, [K].

        Args:
            theta: θ[m], or what each device received of it, [K, m].
            weight: [K], 0 for a device that does not transmit.
            clip: ℓ[K], may be infinite.
            key: draws the mini-batches of models that have some.
            example_clip: c[K]: every example's gradient is clipped to it before the device's sum is.
        """


class Posterior(SumsGradients, Protocol):
    """p(θ|D) of data D that are spread over K devices, with the negative log-density f = Σ_k f_k as its cost.

    A model is a JAX dataclass (`jax.tree_util.register_dataclass`, with `STATIC` fields) that derives from this class
    and defines `mu`, `L`, `sizes`, `dim`, `digest`, `initial_w2_sq`, `draw_initial`, `unrounded_sum`, `gradients`,
    `example_norms`, `on_accelerator`, `working_bytes`, `work` and `device`. Everything else has a default.

    Chains may move in coordinates φ other than the parameters θ. Constants, gradients and starts are those of φ.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    """As every dataclass has them."""
    mu: float
    """Strong convexity of f: smallest eigenvalue of its Hessian."""
    L: float
    """Smoothness of f: largest eigenvalue of its Hessian."""
    sizes: NDArray[np.intp]
    """Examples of each device, N_k, [K]."""
    coordinates: Coordinates | None = None
    """The map between φ and θ; None where they are the same."""
    batch: int | None = None
    """Examples that each device draws for a round; None: all of them."""
    estimated: tuple[str, ...] = ()
    """Which of mu and L are estimates from the data."""
    columns: tuple[str, ...] = ()
    """The names of the features, where there are some."""
    start_is_estimate: bool = False
    """Whether `initial_w2_sq` is an estimate, as of posteriors without a closed form."""
    curvature_is_loose: bool = False
    """Whether L bounds the curvature everywhere, and that along a chain may be far smaller."""
    block: int = 1
    """Devices whose gradients are computed at a time."""
    example_block: int = 0
    """Examples of each of them at a time; 0: all."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """m, the number of parameters."""

    @property
    def devices(self) -> int:
        """K."""
        return int(self.sizes.shape[0])

    @property
    @abstractmethod
    def digest(self) -> str:
        """A hash of the data and of which device holds them."""

    @abstractmethod
    def initial_w2_sq(self, init: str = "prior") -> float:
        """W2² between the law of the start and the posterior."""

    @abstractmethod
    def draw_initial(self, key: jax.Array, init: str = "prior") -> jax.Array:
        """Draw the start of one chain, [m]."""

    def clipped_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: Maybe = None,
        example_clip: Maybe = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Return `unrounded_sum` rounded to float32, [m], and the norms ‖g_k‖ before clipping, [K]."""
        total, norms = self.unrounded_sum(theta, weight, clip, key, example_clip)
        return total.rounded, norms

    @abstractmethod
    def gradients(self, theta: jax.Array) -> jax.Array:
        """Return every device's own gradient, unclipped, [K, m]: for protocols that do not superpose."""

    @abstractmethod
    def example_norms(self, theta: ArrayLike) -> Array:
        """Return the norm of every example's gradient at theta[..., m], [..., N]."""

    @abstractmethod
    def on_accelerator(
        self, chains: int, limit: float, by_example: bool = False
    ) -> Self:
        """Return the same posterior in float32 on the accelerator, in blocks of devices that keep to a memory limit.

        Args:
            chains: that are run at the same time.
            limit: bytes.
            by_example: whether examples are to be clipped one by one.
        """

    @abstractmethod
    def working_bytes(self, chains: int, by_example: bool = False) -> float:
        """Return the memory that one device at a time needs for its part of a round, in bytes."""

    @abstractmethod
    def work(self, by_example: bool = False) -> float:
        """Return the number of operations of one chain in one round, roughly."""

    @abstractmethod
    def device(self, index: int) -> Self:
        """Return one device's part: its data and its share of the prior."""

    @property
    def prior_power(self) -> float:
        """Mean square of a coordinate under the prior."""
        return 1.0

    @property
    def not_covered(self) -> Mapping[str, str]:
        """What every device knows of the data beside its own, and ε does not cover: a sentence by name."""
        return {}

    def typical_example_norm(self) -> float | Array:
        """Return the norm that gradients of one example have, without a look at any example; or one per device, [K].

        Raises:
            InputError: where nothing is known of these norms, as of most models.
        """
        raise missing("example_clip", "with unit = 'record'", section="privacy")

    @property
    def feature_scales(self) -> Array | None:
        """Root mean square of every feature, [d]; None for models without features."""
        return None

    def parameters(self, phi: Points) -> Points:
        """Return θ[..., m] of the coordinates φ[..., m]."""
        return phi if self.coordinates is None else self.coordinates.parameters(phi)

    def coordinates_of(self, theta: Any) -> Any:
        """Return the coordinates φ[..., m] of θ[..., m]."""
        return theta if self.coordinates is None else self.coordinates.of(theta)

    def rounding(self, clip: Array, example_clip: Array) -> RoundingError:
        """Return by how much float32 sums may raise the sensitivity: e, by its terms.

        Args:
            clip: ℓ[K], the clipping thresholds of devices; infinite where there is none.
            example_clip: c[K], those of records; infinite where there is none.

        Returns:
            The terms of `wflmc.sums.bound`; e is their `total`.
        """
        settings = SumSettings(
            dim=self.dim,
            sizes=self.sizes,
            clip=clip,
            example_clip=example_clip,
            device_norm_error=vector_norm_error(self.dim),
            record_norm_error=vector_norm_error(self.dim),
        )
        return rounding_error(settings)

    def downlink_error(self, weight: ArrayLike) -> Array:
        """Bound E‖Σ_k w_k (∇f_k(θ + e_k) − ∇f_k(θ))‖² for unit downlink noise e_k, weight[..., K] -> [...]."""
        return np.asarray(
            self.dim * (np.sum(weight, axis=-1) * self.L) ** 2
        )  # no ∇f_k is less smooth than ∇f

    def expansion(self, step_size: float, weight: ArrayLike) -> float:
        """Return the largest factor by which one round of weight[S, K] can stretch an error of θ; 1 if unknown."""
        return 1.0

    def response(self, motion: Motion, burn_in: int) -> Response:
        """Return how the law of the rounds after burn-in depends on the noise of every round."""
        allowed = "worst or average, or given with a proxy: this model knows no law"
        raise InputError("objective", "exact", allowed, section="policy")

    def quadratic(self, init: str = "prior") -> Quadratic:
        """Return the cost as a quadratic around its mode."""
        raise InputError("posterior", type(self).__name__, "a model with a known mode")


@runtime_checkable
class HasLaw(Protocol):
    """A posterior whose law, and that of its chains while no gradient is clipped, is known exactly."""

    @property
    def coordinates(self) -> Coordinates | None:
        """The map between φ and θ; None where they are the same."""

    @property
    def exact(self) -> Gaussian:
        """The posterior of the parameters θ."""

    @property
    def exact_in_coordinates(self) -> Gaussian:
        """The posterior of the coordinates φ."""

    def chain(self, motion: Motion) -> LinearChain:
        """Return a chain that is never clipped, as a linear one."""


@runtime_checkable
class Predicts(Protocol):
    """A posterior that predicts the class of an example."""

    @property
    def class_names(self) -> Names:
        """The label of every class, [C]."""

    def predict(self, theta: ArrayLike, features: ArrayLike) -> NDArray[np.float32]:
        """Return p(class|u) averaged over the draws of each chain: theta[chain, draw, m], u[n, d] -> [chain, n, C]."""

    def classes_of(self, labels: ArrayLike) -> NDArray[np.intp]:
        """Return the class, 0 to C − 1, of every label."""


def check_posterior(posterior: object) -> None:
    """Refuse what does not derive from `Posterior`."""
    if Posterior not in type(posterior).__mro__:
        raise InputError(
            "posterior",
            type(posterior).__name__,
            "a posterior, such as that of wflmc.posterior_from(…)",
        )


def check_device(index: int, devices: int) -> None:
    """Refuse a device number that is not between 0 and K − 1."""
    if not 0 <= index < devices:
        raise InputError("device", index, f"between 0 and {devices - 1}")
