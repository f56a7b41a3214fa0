"""What a posterior is: the protocols that planning, sampling and evaluation rely on.

A model derives from `Posterior`, which has defaults for everything that a model need
not know. `HasLaw` and `Predicts` are what some models can do beyond that; callers ask
by `isinstance(posterior, HasLaw)`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, runtime_checkable

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
OptionalArray = jax.Array | None


class SumsGradients(Protocol):
    """What a round asks of a posterior: the clipped sum of its devices' gradients."""

    @property
    def batch(self) -> int | None:
        """Return how many examples each device draws for a round; None: all of them.

        Gradients of mini-batches need a key in `unrounded_sum`; without one they are
        of all examples.
        """

    @abstractmethod
    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: OptionalArray = None,
        example_clip: OptionalArray = None,
    ) -> ClippedSum:
        """Compute Σ_k w_k g_k min(1, ℓ_k/‖g_k‖) before it is rounded to float32.

        The gradient g_k is that of f_k = −log p(D_k|θ) − (1/K) log p(θ), the paper's
        equation 6. Its norm is that before the device is clipped, but after its
        examples are.

        Args:
            theta: θ[m], or what each device received of it, [K, m].
            weight: w[K]; 0 for a device that does not transmit.
            clip: ℓ[K], the clipping thresholds of devices; may be infinite.
            key: draws the mini-batches of models that have them.
            example_clip: c[K], to which every example's gradient is clipped before
                the device's sum is; None: examples are not clipped one by one.

        Returns:
            The sum [m] and the norms ‖g_k‖, [K].
        """


class Posterior(SumsGradients, Protocol):
    """p(θ|D) of data D on K devices, with the cost f = Σ_k f_k = −log p(θ|D) + const.

    A model is a JAX dataclass (`jax.tree_util.register_dataclass`, with `STATIC`
    fields) that derives from this class and defines `mu`, `L`, `sizes`, `dim`,
    `digest`, `initial_w2_sq`, `draw_initial`, `unrounded_sum`, `gradients`,
    `example_norms`, `on_accelerator`, `working_bytes`, `work` and `device`. Everything
    else has a default.

    Chains may move in coordinates φ other than the parameters θ. Constants, gradients
    and starts are those of φ.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[object]]]
    """As every dataclass has them."""
    mu: float
    """Strong convexity of f: no eigenvalue of its Hessian is smaller, at any θ."""
    L: float
    """Smoothness of f: no eigenvalue of its Hessian is larger, at any θ."""
    sizes: NDArray[np.intp]
    """Examples of each device, N_k, [K]."""
    coordinates: Coordinates | None = None
    """The map between φ and θ; None where they are the same."""
    batch: int | None = None
    """Examples that each device draws for a round; None: all of them."""
    estimated: tuple[str, ...] = ()
    """Which of mu and L are estimates from the data, for which the above need not hold;
    of custom models also other choices that depend on the data. Texts for people."""
    columns: tuple[str, ...] = ()
    """The names of the features; empty where they have none."""
    start_is_estimate: bool = False
    """Whether `initial_w2_sq` is an estimate, as without a closed form."""
    curvature_is_loose: bool = False
    """Whether L is a bound that may be far above the curvature along a chain."""
    block: int = 1
    """Devices whose gradients are computed at a time."""
    example_block: int = 0
    """Examples of each of them at a time; 0: all."""

    @property
    @abstractmethod
    def dim(self) -> int:
        """Return m, the number of parameters."""

    @property
    def devices(self) -> int:
        """Return K, the number of devices, without those that only fill up a block."""
        return int(self.sizes.shape[0])

    @property
    @abstractmethod
    def digest(self) -> str:
        """Return a hash of the data and of which device holds them.

        Run folders, checkpoints and ledgers recognise the data by it. It is the same
        whatever coordinates chains move in, and does not depend on the model.
        """

    @abstractmethod
    def initial_w2_sq(self, init: str = "prior") -> float:
        """Compute W2² between the law of θ[0] and the posterior, B[0] of the bound.

        Distances are those of the coordinates that chains move in.

        Args:
            init: the start: "prior"; or "prior-mean" or "zero", a point mass there.

        Returns:
            The squared Wasserstein distance; an estimate where `start_is_estimate`.
        """

    @abstractmethod
    def draw_initial(self, key: jax.Array, init: str = "prior") -> jax.Array:
        """Draw the start of one chain, in the coordinates that chains move in.

        Args:
            key: of the draw.
            init: "prior"; or "prior-mean" or "zero" for a start at that point.

        Returns:
            φ[m].
        """

    def clipped_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: OptionalArray = None,
        example_clip: OptionalArray = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Compute Σ_k w_k g_k min(1, ℓ_k/‖g_k‖), rounded to float32.

        It is what a noiseless channel brings to the server in a round; see
        `unrounded_sum` for the same before rounding.

        Args:
            theta: θ[m], or what each device received of it, [K, m].
            weight: w[K]; 0 for a device that does not transmit.
            clip: ℓ[K], the clipping thresholds of devices; may be infinite.
            key: draws the mini-batches of models that have them.
            example_clip: c[K], to which every example's gradient is clipped first;
                None: examples are not clipped one by one.

        Returns:
            The sum [m], and the norms ‖g_k‖ before devices are clipped, [K].
        """
        total, norms = self.unrounded_sum(theta, weight, clip, key, example_clip)
        return total.rounded, norms

    @abstractmethod
    def gradients(self, theta: jax.Array) -> jax.Array:
        """Compute every device's gradient ∇f_k(θ), unclipped and of all its examples.

        For protocols that do not superpose signals, and for tests: it holds an array
        of K m numbers, which the loop over rounds never does.

        Args:
            theta: θ[m].

        Returns:
            [K, m].
        """

    @abstractmethod
    def example_norms(self, theta: ArrayLike) -> Array:
        """Compute the norm of every example's gradient, without the prior's share.

        Args:
            theta: parameters θ[..., m].

        Returns:
            [..., N], device after device; norms are those of the coordinates that
            chains move in.
        """

    @abstractmethod
    def on_accelerator(
        self, chains: int, limit: float, by_example: bool = False
    ) -> Self:
        """Return the same posterior in float32, ready for compiled rounds.

        Data are padded to whole blocks of devices whose working memory keeps to a
        limit. Devices that only fill up a block count in no sum.

        Args:
            chains: chains that are run at the same time.
            limit: bytes that a block may use.
            by_example: whether examples are to be clipped one by one.
        """

    @abstractmethod
    def working_bytes(self, chains: int, by_example: bool = False) -> float:
        """Estimate the memory that one device at a time needs for its part of a round.

        Args:
            chains: chains that are run at the same time.
            by_example: whether examples are clipped one by one.

        Returns:
            Bytes, without the data.
        """

    @abstractmethod
    def work(self, by_example: bool = False) -> float:
        """Estimate the number of operations of one chain in one round.

        A rough figure, by which `wflmc.sample` chooses how chains are run.

        Args:
            by_example: whether examples are clipped one by one.
        """

    @abstractmethod
    def device(self, index: int) -> Self:
        """Return one device's part: its data and its share of the prior.

        Its cost is f_k, so that gradients of all parts add up to that of the whole.

        Args:
            index: the device, 0 to K − 1.

        Raises:
            InputError: if there is no such device.
        """

    @property
    def prior_power(self) -> float:
        """Return the mean square of a coordinate under the prior.

        A link states its downlink noise relative to it; 1 for models whose prior has
        no known variance.
        """
        return 1.0

    @property
    def not_covered(self) -> Mapping[str, str]:
        """Return what devices know of the data beside their own and ε does not cover.

        A sentence for each piece of such knowledge, by its name; empty for models
        that share nothing.
        """
        return {}

    def typical_example_norm(self) -> float | Array:
        """Return the norm of a typical example's gradient, without a look at any.

        It suggests a clipping threshold c that costs no privacy.

        Returns:
            One norm, or one per device, [K].

        Raises:
            InputError: where nothing is known of these norms, as of most models.
        """
        raise missing("example_clip", "with unit = 'record'", section="privacy")

    @property
    def feature_scales(self) -> Array | None:
        """Return the root mean square of every feature, [d]; None without features."""
        return None

    def parameters(self, phi: Points) -> Points:
        """Map coordinates to parameters.

        Args:
            phi: φ[..., m], an array of JAX or NumPy.

        Returns:
            θ[..., m], of the same kind; `phi` itself where chains move in θ.
        """
        return phi if self.coordinates is None else self.coordinates.parameters(phi)

    def coordinates_of(self, theta: Points) -> Points:
        """Map parameters to the coordinates that chains move in.

        Args:
            theta: θ[..., m], an array of JAX or NumPy.

        Returns:
            φ[..., m], of the same kind; `theta` itself where chains move in θ.
        """
        return theta if self.coordinates is None else self.coordinates.of(theta)

    def rounding(self, clip: Array, example_clip: Array) -> RoundingError:
        """Bound by how much float32 sums may raise the sensitivity.

        Clipping acts at ℓ/(1 + e) and c/(1 + e), so that sums change by no more than
        what a plan pays for.

        Args:
            clip: ℓ[K], the clipping thresholds of devices; infinite where there are
                none.
            example_clip: c[K], those of records; infinite where there are none.

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
        """Bound E‖Σ_k w_k (∇f_k(θ + e_k) − ∇f_k(θ))‖² for unit downlink noise e_k.

        The default m (L Σ_k w_k)² holds for all models whose f_k are convex, as no
        ∇f_k is less smooth than ∇f then.

        Args:
            weight: w[..., K] of devices in the update.

        Returns:
            The bound, [...]; multiply it by the variance of the downlink noise.
        """
        total_weight = np.sum(np.asarray(weight), axis=-1)
        return np.asarray(self.dim * (total_weight * self.L) ** 2)

    def expansion(self, step_size: float, weight: ArrayLike) -> float:
        """Return the largest factor by which one round can stretch an error of θ.

        Args:
            step_size: η.
            weight: w[S, K] of devices in the update.

        Returns:
            The factor over all rounds; 1 for models of which it is not known.
        """
        return 1.0

    def response(self, motion: Motion, burn_in: int) -> Response:
        """Compute how the law of a chain depends on the noise of every round.

        Planning by the objective "exact" chooses the noise by it. The default is that
        of models whose law is not known.

        Args:
            motion: step sizes, weights and start, for one chain.
            burn_in: rounds that are discarded.

        Returns:
            The response of the rounds after burn-in.

        Raises:
            InputError: for a model whose law is not known.
        """
        requirement = (
            "worst or average, or come with a proxy: the law of chains on this model "
            "is not known"
        )
        raise InputError("objective", "exact", requirement, section="policy")

    def quadratic(self, init: str = "prior") -> Quadratic:
        """Return the cost as a quadratic around its mode.

        Advice and diagnosis forecast the course of a chain by it, from the start to the
        posterior, without running one.

        Args:
            init: the start: "prior"; or "prior-mean" or "zero", a point mass there.

        Returns:
            Its curvatures, start and the devices' gradients at the mode, along the main
            directions of the Hessian there.

        Raises:
            InputError: for a model without a known mode.
        """
        raise InputError("posterior", type(self).__name__, "a model with a known mode")


@runtime_checkable
class HasLaw(Protocol):
    """A posterior whose law, and that of unclipped chains on it, is known exactly."""

    @property
    def coordinates(self) -> Coordinates | None:
        """Return the map between φ and θ; None where they are the same."""

    @property
    def exact(self) -> Gaussian:
        """Return the posterior of the parameters θ, mean[m] and covariance[m, m]."""

    @property
    def exact_in_coordinates(self) -> Gaussian:
        """Return the posterior of the coordinates φ that chains move in."""

    def chain(self, motion: Motion) -> LinearChain:
        """Return a chain that is never clipped, as a linear recursion.

        Gradients must be affine in θ, so that the law of the chain stays Gaussian. A
        leading axis of the arguments is one of different plans.

        Args:
            motion: step sizes η[..., S], weights [..., S, K], start and dynamics.

        Returns:
            The recursion, whose `law` is that of the parameters.
        """


@runtime_checkable
class Predicts(Protocol):
    """A posterior that predicts the class of an example."""

    @property
    def class_names(self) -> Names:
        """Return the label of every class, [C]."""

    def predict(self, theta: ArrayLike, features: ArrayLike) -> NDArray[np.float32]:
        """Compute p(class|u) averaged over the draws of each chain.

        Args:
            theta: parameters θ[chain, draw, m].
            features: u[n, d], as in the data.

        Returns:
            Probabilities [chain, n, C].
        """

    def classes_of(self, labels: ArrayLike) -> NDArray[np.intp]:
        """Return the class, 0 to C − 1, of every label.

        Args:
            labels: as in the data, [n].

        Raises:
            InputError: for a label that no class has.
        """


def check_posterior(posterior: object) -> None:
    """Refuse what does not derive from `Posterior`.

    Args:
        posterior: what a caller passed for one.

    Raises:
        InputError: names the type that was passed instead.
    """
    if Posterior not in type(posterior).__mro__:
        raise InputError(
            "posterior",
            type(posterior).__name__,
            "a posterior, such as that of wflmc.posterior_from(…)",
        )


def check_device(index: int, devices: int) -> None:
    """Refuse the number of a device that does not exist.

    Args:
        index: the device's number, counted from 0.
        devices: K.

    Raises:
        InputError: unless 0 ≤ index < K.
    """
    if not 0 <= index < devices:
        raise InputError("device", index, f"between 0 and {devices - 1}")
