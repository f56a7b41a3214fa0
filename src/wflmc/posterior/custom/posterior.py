"""The posterior of any JAX model, with gradients by automatic differentiation.

`wflmc.posterior_from` makes it of a log-likelihood of one example, a log-prior, and
data spread over devices; clipped gradient sums are computed block by block of devices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import Motion, Quadratic, Response, diagonal_response
from wflmc.posterior.base import STATIC, OptionalArray, Posterior, check_device
from wflmc.posterior.coordinates import Affine
from wflmc.posterior.custom.geometry import eigenvalues, find_mode
from wflmc.posterior.custom.model import (
    ModelFunction,
    TracedModel,
    costs_and_norms,
    on_device,
    per_example,
    predictive_mean,
)
from wflmc.posterior.custom.precision import in_float32
from wflmc.posterior.inputs import check_init, starts_at_point
from wflmc.sums import bound
from wflmc.sums import custom as sums
from wflmc.sums.blocks import block_size
from wflmc.sums.constants import CPU_CACHE_BYTES, RECORDS_PER_FLOAT32_SUM
from wflmc.sums.devices import ClippedSum
from wflmc.sums.record_gradients import ArrayGradients, with_fast_convolutions
from wflmc.support.errors import (
    Fault,
    InputError,
    Shown,
    ShownValues,
    missing,
    without_data,
)
from wflmc.support.keys import digest
from wflmc.support.trees import ArrayTree, NumericArray

Array = NDArray[np.float64]

MAX_EXAMPLE_BYTES = 2**24
"""Bytes of a device's examples at a time, for one chain."""
LARGE_DEVICES_PER_CACHE = 16
"""A device keeps a CPU busy where fewer than so many fit into its cache, by the working
memory of one chain."""
CACHES_OF_SMALL_SUM = 4
"""Working memory of all devices up to which a loop over them would take longer than its
parts, in caches of a CPU."""


@without_data
class LaplaceMode(NamedTuple):
    """A mode of a posterior, and the curvature there."""

    mode: Array
    """[m]."""
    eigenvalues: Array
    """Of the Hessian: all, or of a large model the smallest and the largest."""


@dataclass(frozen=True, eq=False, repr=False)
class CustomPosterior(Shown, Posterior):
    """p(θ|D) of a model made by `wflmc.posterior_from`.

    θ is all parameters one after the other. The gradient of device k is that of
    −Σ_n log p(d_n|θ) − (1/K) log p(θ). Devices of unlike size are filled up with copies
    of their own examples, which are left out of every sum.
    """

    data: ArrayTree
    """Examples, a pytree of arrays [K, n, ...]."""
    sizes: NDArray[np.intp]
    """N_k, [K]."""
    start: Array
    """Where chains begin, in the coordinates that they move in, [m]."""
    initial_std: float
    """Standard deviation of the starts around that, in every parameter."""
    mu: float
    L: float
    model: TracedModel = field(metadata=STATIC)
    prior_devices: int = field(metadata=STATIC)
    """How many devices share the prior."""
    batch: int | None = field(default=None, metadata=STATIC)
    estimated: tuple[str, ...] = field(default=(), metadata=STATIC)
    """What depends on the data, in words for people: which of mu and L were not given,
    and the preconditioner, where it was found from these data. The constants are
    eigenvalues of the Hessian at the start and at a mode, or those that pilot chains
    met, no more than that."""
    block: int = field(default=1, metadata=STATIC)
    example_block: int = field(default=0, metadata=STATIC)
    coordinate_examples: int = field(default=0, metadata=STATIC)
    """How many examples have given the coordinates their covariance of I; 0 for
    coordinates of another kind."""
    first_device: int = 0
    """The number of the first device, by which mini-batches are drawn."""
    known_mode: LaplaceMode | None = None
    """The mode of all data, where it is known already; no part of the pytree."""

    start_is_estimate = True

    def _facts(self) -> ShownValues:
        return {
            "devices": self.devices,
            "examples": int(np.sum(self.sizes)),
            "parameters": self.dim,
            "batch": self.batch,
            "mu": self.mu,
            "L": self.L,
        }

    @property
    def coordinates(self) -> Affine | None:  # type: ignore[override]
        """Return the coordinates φ that chains move in, with θ = centre + W φ.

        None where chains move in the parameters, as with `preconditioner` = none.
        """
        return self.model.space

    @property
    def not_covered(self) -> Mapping[str, str]:
        """Return what devices know of the data beside their own and ε does not cover.

        Such as covariates of a NumPyro model that are not split over devices: a
        sentence for each, by name.
        """
        return self.model.sites.not_covered

    @property
    def dim(self) -> int:
        """Return m, the number of parameters in all arrays of the pytree."""
        return self.model.dim

    @property
    def digest(self) -> str:
        """Return a hash of the data and of which device holds them.

        The model's functions have no part in it; their name is `model.name`.
        """
        leaves, structure = jax.tree.flatten(self.data)
        return digest(repr(structure).encode(), *leaves, self.sizes)

    @property
    def _largest_size(self) -> int:
        """Examples of the largest device, n."""
        return int(jax.tree.leaves(self.data)[0].shape[1])

    def unflatten(self, theta: NumericArray) -> ArrayTree:
        """Return flat parameters as the pytree that the model's functions take.

        Parameters of a NumPyro model are by site, in the space of the site's support.

        Args:
            theta: θ[..., m], such as `trace.theta`.

        Returns:
            The pytree; every array has the same leading axes.

        Raises:
            InputError: for an array of another length than m.
        """
        self._check_theta(theta)
        return self.model.values(theta)

    def _check_theta(self, theta: ArrayLike, axes: str = "...") -> None:
        """Refuse what is not θ[axes, m]."""
        shape = np.shape(theta)
        has_axes = axes == "..." or len(shape) == 2 + axes.count(",")
        if not shape or shape[-1] != self.dim or not has_axes:
            requirement = f"theta[{axes}, m] with m = {self.dim} parameters"
            raise InputError("theta", Fault(f"has the shape {shape}"), requirement)

    def _checked_coordinates(self, theta: ArrayLike, axes: str = "...") -> NumericArray:
        """Return φ of θ[axes, m], refused where it has another shape."""
        self._check_theta(theta, axes)
        if isinstance(theta, jax.Array):
            return self.coordinates_of(theta)
        return self.coordinates_of(np.asarray(theta))

    def draw_initial(self, key: jax.Array, init: str = "prior") -> jax.Array:
        """Draw the start of one chain, in the coordinates that chains move in.

        A log-prior cannot be drawn from: "prior" means N(start, initial_std² I), and
        "prior-mean" the start.

        Args:
            key: of the draw.
            init: "prior"; or "prior-mean" or "zero" for a start at that point.

        Returns:
            φ[m].

        Raises:
            InputError: for another start.
        """
        mean, std = self._initial(init)
        draw = jax.random.normal(key, (self.dim,))
        return jnp.asarray(mean, draw.dtype) + std * draw

    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: OptionalArray = None,
        example_clip: OptionalArray = None,
    ) -> ClippedSum:
        """Compute Σ_k w_k clip(g_k, ℓ_k) before it is rounded to float32.

        On a CPU, records that keep it busy by themselves are clipped one chain after
        the other.

        Args:
            theta: θ[m], or what each device received of it, [K, m].
            weight: w[K]; 0 for a device that does not transmit.
            clip: ℓ[K]; may be infinite.
            key: draws the mini-batches of this round, N_k/batch times whose sum stands
                for all; without one there are none, and gradients are of all examples.
            example_clip: c[K]: what an example adds to the device's sum is clipped to
                it. Of a mini-batch that is N_k/batch times its gradient: c bounds the
                change of a record either way. None: examples are not clipped.

        Returns:
            The sum [m] and the norms ‖g_k‖, [K].
        """
        if example_clip is not None and self._is_large_device:
            return _one_chain_at_a_time(self, theta, weight, clip, key, example_clip)
        return self._sum(theta, weight, clip, key, example_clip)

    def _sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: OptionalArray,
        example_clip: OptionalArray,
    ) -> ClippedSum:
        """Return `unrounded_sum`; chains under `vmap` are computed together."""
        gradients = self._model_gradients
        records = self._device_records
        if example_clip is None:
            return sums.device_clipped_sum(gradients, records, theta, weight, clip, key)
        return sums.record_clipped_sum(
            gradients, records, theta, weight, clip, example_clip, key
        )

    @property
    def _device_records(self) -> sums.DeviceRecords:
        """The records of every device, [K', ...]: K, and copies that fill up a block."""
        padded_devices = jax.tree.leaves(self.data)[0].shape[0]
        padding = (0, padded_devices - self.devices)
        sizes = jnp.pad(jnp.asarray(self.sizes), padding, mode="edge")
        numbers = self.first_device + jnp.arange(padded_devices)
        return sums.DeviceRecords(self.data, sizes, numbers)

    @property
    def _model_gradients(self) -> sums.CustomGradients:
        """The functions and sizes that clipped sums are made of."""
        return sums.CustomGradients(
            costs=self._costs,
            record_gradients=self._record_gradients,
            prior_gradient=self._prior_gradient,
            devices=self.devices,
            block=self.block,
            batch=self.batch,
            records_per_block=self.example_block,
        )

    def _gradient(self, theta: jax.Array, device: sums.DeviceRecords) -> jax.Array:
        """Return one device's gradient at θ[m], unclipped and of all examples, [m]."""
        result = sums.device_gradient(self._model_gradients, theta, device)
        return result.gradient.rounded

    def _record_gradients(
        self,
        theta: jax.Array,
        examples: ArrayTree,
    ) -> list[ArrayGradients]:
        """Return the gradients of examples[n, ...] at θ[m], by array of parameters."""
        leaves = jax.tree.leaves(self.model.unflatten(theta))
        return self.model.record_gradient.of(leaves, examples)

    def _prior_gradient(self, theta: jax.Array) -> jax.Array:
        """Return a device's share of the prior's gradient at θ[m], [m]."""
        return jax.grad(self.model.prior_cost)(theta) / self.prior_devices

    def _costs(self, theta: jax.Array, examples: ArrayTree) -> jax.Array:
        """Return −log p(example|θ) of examples[n, ...], [n]."""
        batched_log_likelihood = self.model.sites.batched_log_likelihood
        if batched_log_likelihood is None:
            return jax.vmap(self.model.cost, (None, 0))(theta, examples)
        with in_float32(), jax.default_matmul_precision("highest"):
            parameters = self.model.unflatten(self.parameters(on_device(theta)))
            float32_examples = jax.tree.map(on_device, examples)
            costs = -batched_log_likelihood(parameters, float32_examples)
        return costs.astype(theta.dtype)

    def _examples_per_step(self, by_example: bool) -> int:
        """Return how many examples of a device to work on at a time, in equal parts.

        All of them where only a mini-batch is computed.
        """
        count = self._largest_size
        if self.batch is not None and self.batch < count:
            return count
        largest = min(count, RECORDS_PER_FLOAT32_SUM) if by_example else count
        affordable = MAX_EXAMPLE_BYTES // self._bytes_per_example(by_example)
        steps = -(-count // int(np.clip(affordable, 1, largest)))
        return -(-count // steps)

    def _bytes_per_example(self, by_example: bool) -> int:
        """Return the memory that one example takes."""
        gradient_size = self.model.record_gradient.size if by_example else 0
        return 4 * self.model.intermediate_size + 4 * gradient_size

    @property
    def _is_large_device(self) -> bool:
        """Whether the records of one device and chain keep a CPU busy."""
        if jax.default_backend() != "cpu":
            return False
        return self.working_bytes(1, True) > CPU_CACHE_BYTES // LARGE_DEVICES_PER_CACHE

    def rounding(self, clip: Array, example_clip: Array) -> bound.RoundingError:
        """Bound by how much float32 sums may raise the sensitivity.

        Norms of records are added up array by array of parameters, as the traced
        gradient has them.

        Args:
            clip: ℓ[K]; infinite where devices are not clipped.
            example_clip: c[K]; infinite where records are not clipped.

        Returns:
            The terms of `wflmc.sums.bound`; e is their `total`.
        """
        additions = self.model.record_gradient.additions
        arrays = len(self.model.shapes)
        settings = bound.SumSettings(
            dim=self.dim,
            sizes=self.sizes,
            clip=clip,
            example_clip=example_clip,
            device_norm_error=bound.vector_norm_error(self.dim),
            record_norm_error=bound.traced_norm_error(additions, arrays),
        )
        return bound.rounding_error(settings)

    def working_bytes(self, chains: int, by_example: bool = False) -> float:
        """Estimate the memory that one device at a time needs for its part of a round.

        The intermediate results of its examples, and four float32 numbers for every
        parameter, per chain.

        Args:
            chains: chains that are run at the same time.
            by_example: whether examples are clipped one by one, which needs their
                gradients.

        Returns:
            Bytes, without the data.
        """
        examples = self._examples_per_step(by_example)
        if self.batch is not None:
            examples = min(examples, self.batch)
        example_bytes = examples * self._bytes_per_example(by_example)
        return float(chains) * (example_bytes + 16 * self.dim)

    def work(self, by_example: bool = False) -> float:
        """Estimate the number of operations of one chain in one round.

        For every example of a device, or of its mini-batch, a few for each parameter
        and each intermediate result.

        Args:
            by_example: makes no difference here.
        """
        count = self._largest_size
        if self.batch is not None:
            count = min(count, self.batch)
        per_example = 6 * self.dim + 10 * self.model.intermediate_size
        return float(self.devices * (count * per_example + 50 * self.dim))

    def on_accelerator(
        self, chains: int, limit: float, by_example: bool = False
    ) -> Self:
        """Return the same posterior in float32, padded to whole blocks of devices.

        What fills up a block or a device are copies of real ones; they count in no
        sum.

        Args:
            chains: chains that are run at the same time.
            limit: bytes that a block may use.
            by_example: whether examples are to be clipped one by one.
        """
        device_bytes = self.working_bytes(chains, by_example)
        all_bytes = self.devices * device_bytes
        small_bytes = CACHES_OF_SMALL_SUM * CPU_CACHE_BYTES
        is_small = not by_example and all_bytes <= small_bytes
        theta_bytes = 4.0 * (CPU_CACHE_BYTES if is_small else chains * self.dim)
        block = block_size(
            self.devices,
            bytes_per_device=device_bytes,
            theta_bytes=theta_bytes,
            limit=limit,
        )
        if by_example and self._is_large_device:
            block = 1
        rows = self._examples_per_step(by_example)

        def padded(values: np.ndarray) -> jax.Array:
            lacking_devices = -values.shape[0] % block
            lacking_rows = -values.shape[1] % rows
            other_axes = [(0, 0)] * (values.ndim - 2)
            widths = [(0, lacking_devices), (0, lacking_rows), *other_axes]
            filled_up = np.pad(values, widths, mode="edge")
            return jax.device_put(on_device(filled_up))

        data = jax.tree.map(padded, self.data)
        return replace(self, data=data, block=block, example_block=rows)

    @property
    def _example_scale(self) -> Array:
        """How many times an example of each device counts, N_k/batch or 1, [K]."""
        if self.batch is None:
            return np.ones(self.devices)
        return np.maximum(self.sizes / self.batch, 1.0)

    def example_norms(self, theta: ArrayLike) -> Array:
        """Compute the norm of what every example adds to its device's gradient.

        With mini-batches that is N_k/batch times the norm of its gradient.

        Args:
            theta: parameters θ[..., m].

        Returns:
            [..., N], device after device, in the coordinates that chains move in.

        Raises:
            InputError: for an array of another length than m.
        """
        phi = np.asarray(self._checked_coordinates(theta), dtype=np.float32)
        examples, _ = self.observed
        block = self._examples_per_step(True)
        rows = []
        for point in phi.reshape(-1, self.dim):
            _, norms = costs_and_norms(self.model, examples, point, block)
            rows.append(norms)
        by_example = np.stack(rows).reshape(*phi.shape[:-1], -1)
        return by_example.astype(float) * np.repeat(self._example_scale, self.sizes)

    def typical_example_norm(
        self, public: "CustomPosterior | None" = None
    ) -> float | Array:
        r"""Return the root mean square norm of one example's gradient.

        It is found without a look at any example of this posterior. In coordinates in
        which the posterior has the covariance I, gradients g_n of examples that follow
        the model have E[Σ_n g_n g_nᵀ] = I minus the curvature of the prior (the
        information equality). So their root mean square is at most √(m/N), whatever
        the model and the scales of its data. N is the number of examples that gave the
        coordinates: of public data, where these are those of another posterior.

        Args:
            public: the posterior of the same model on public or simulated data. Then it
                is the root mean square of their norms at their mode, in the coordinates
                of this posterior, whatever those are.

        Returns:
            √(m/N), or that of the public examples. With mini-batches, where an example
            counts N_k/batch times, one number per device, [K].

        Raises:
            InputError: without public data, for a posterior in coordinates of another
                kind than those of `preconditioner` = laplace, pilot, or another
                posterior.
        """
        if public is not None:
            norm = self._norm_of_public_examples(public)
        elif self.coordinate_examples:
            norm = (self.dim / self.coordinate_examples) ** 0.5
        else:
            reason = (
                "with unit = 'record': for typical norms, see "
                "posterior.typical_example_norm(public)"
            )
            raise missing("example_clip", reason, section="privacy")
        return norm if self.batch is None else norm * self._example_scale

    def _norm_of_public_examples(self, public: "CustomPosterior") -> float:
        """Return the root mean square norm at their mode, in this one's coordinates."""
        mode = public.parameters(public.laplace.mode)
        in_own_coordinates = replace(
            public, model=self.model, batch=None, known_mode=None
        )
        norms = in_own_coordinates.example_norms(mode)
        return float(np.sqrt(np.mean(norms**2)))

    def gradients(self, theta: jax.Array) -> jax.Array:
        """Compute every device's gradient, unclipped and of all its examples.

        Devices are computed one after the other; for protocols that do not superpose
        signals, as the loop over rounds never holds all gradients.

        Args:
            theta: θ[m], in the coordinates that chains move in.

        Returns:
            [K, m].
        """
        records = jax.tree.map(jnp.asarray, self._device_records)

        def gradient(device: sums.DeviceRecords) -> jax.Array:
            return self._gradient(theta, device)

        return jax.lax.map(gradient, records)[: self.devices]

    def device(self, index: int) -> Self:
        """Return one device's part: its examples, and its share of the prior.

        μ and L are still those of all devices, and mini-batches those that the device
        draws among all others.

        Args:
            index: the device, 0 to K − 1.

        Raises:
            InputError: if there is no such device.
        """
        check_device(index, self.devices)
        size = self.sizes[index]
        devices = slice(index, index + 1)
        data = jax.tree.map(lambda values: values[devices, :size], self.data)
        return replace(
            self,
            data=data,
            sizes=self.sizes[devices],
            block=1,
            example_block=0,
            first_device=self.first_device + index,
            known_mode=None,
        )

    @property
    def observed(self) -> tuple[ArrayTree, NDArray[np.intp]]:
        """Return the data, and which device holds each example.

        Copies that only fill up devices are left out. Data on an accelerator come as
        they are there, in float32.

        Returns:
            Examples, device after device, a pytree of arrays [N, ...]; and the device
            of each, [N].
        """
        is_real = np.arange(self._largest_size) < self.sizes[:, None]
        examples = jax.tree.map(lambda values: values[is_real], self.data)
        owners = np.repeat(np.arange(self.devices), self.sizes)
        return examples, owners

    def predictive(
        self,
        function: ModelFunction,
        theta: ArrayLike,
        inputs: ArrayTree,
    ) -> ArrayTree:
        """Average a function of parameters and inputs over the draws of each chain.

        It is the posterior predictive mean of what the function returns, such as class
        probabilities.

        Args:
            function: a JAX function of (parameters, ONE input).
            theta: θ[chain, draw, m], such as `trace.theta`.
            inputs: a pytree of arrays [n, ...].

        Returns:
            The pytree that the function returns, of arrays [chain, n, ...].

        Raises:
            InputError: for θ of another shape, inputs that are no arrays, or a function
                that fails.
        """
        self._check_theta(theta, "chain, draw")
        return predictive_mean(self.model, function, jnp.asarray(theta), inputs)

    def apply(self, parameters: object, inputs: ArrayTree) -> ArrayTree:
        """Return a network's output for one input.

        For posteriors of Flax and Equinox modules, in functions for `predictive`.

        Args:
            parameters: of one draw, as `unflatten` returns them.
            inputs: one input of the network.

        Returns:
            What the module returns.

        Raises:
            InputError: for a posterior that is not of a module.
        """
        if self.model.sites.apply is None:
            requirement = "of wflmc.from_flax or wflmc.from_equinox, to apply a module"
            raise InputError("posterior", self, requirement)
        return self.model.sites.apply(parameters, inputs)

    def log_likelihood(self, theta: ArrayLike) -> Array:
        """Compute log p(example|θ) of every example.

        Normalised if the model's log-likelihood is, as scores such as WAIC and LOO need
        it.

        Args:
            theta: parameters θ[draw, m].

        Returns:
            [draw, N], in the order of `observed`; computed in float32.

        Raises:
            InputError: for θ of another shape.
        """
        phi = jnp.asarray(self._checked_coordinates(theta, "draw"), jnp.float32)
        examples, _ = self.observed
        costs = per_example(self.model.cost, phi, examples)
        return -np.asarray(costs, dtype=float)

    @cached_property
    def laplace(self) -> LaplaceMode:
        """Return a mode, and eigenvalues of the Hessian there.

        Searched for from the start, in the coordinates that chains move in, unless it
        is known already. Of a large model only the smallest and the largest eigenvalue
        are computed.

        Raises:
            InputError: if the search finds no mode; it says where it stopped.
        """
        if self.known_mode is not None:
            return self.known_mode

        def cost(theta: Array) -> tuple[float, Array]:
            value, gradient = _total_cost(self, np.asarray(theta, np.float32))
            return float(value), np.asarray(gradient, dtype=float)

        mode, trouble = find_mode(cost, self._hessian_product, self.start)
        if trouble:
            requirement = (
                "parameters from which −log p(θ|D) falls to a least value (is a sign "
                "wrong? is it nan nearby?): start elsewhere, or give mu, L and a "
                "plan's initial_w2_sq"
            )
            problem = Fault(f"leads to no mode: {trouble}")
            raise InputError("initial", problem, requirement)
        return LaplaceMode(mode, self.eigenvalues(mode))

    def eigenvalues(self, theta: Array) -> Array:
        """Compute eigenvalues of the Hessian of the whole cost.

        Args:
            theta: φ[m], in the coordinates that chains move in.

        Returns:
            All of them, [m], ascending; or of a large model the smallest and the
            largest, [2].
        """

        def product(vector: Array) -> Array:
            return self._hessian_product(theta, vector)

        return eigenvalues(product, self.dim)

    def _hessian_product(self, theta: Array, vector: Array) -> Array:
        """Return the Hessian of the cost at θ[m] times a vector[m], in float32."""
        float32_theta = np.asarray(theta, np.float32)
        float32_vector = np.asarray(vector, np.float32)
        product = _hessian_product(self, float32_theta, float32_vector)
        return np.asarray(product, dtype=float)

    def _initial(self, init: str) -> tuple[Array, float]:
        """Return mean[m] and standard deviation of the start."""
        check_init(init)
        if init == "zero":
            return 0.0 * self.start, 0.0
        std = 0.0 if starts_at_point(init) else self.initial_std
        return self.start, std

    def response(self, motion: Motion, burn_in: int) -> Response:
        """Compute how the law on the Laplace approximation depends on noise.

        All devices are taken to hold alike data, and the way from the start to the mode
        to be equally long in all directions.

        Args:
            motion: step sizes η[S], weights [S, K] and start, of one chain.
            burn_in: rounds that are discarded.

        Returns:
            The response of the rounds after burn-in.

        Raises:
            InputError: for kinetic dynamics, if it would take too much memory, or
                without a mode.
        """
        centre, std = self._initial(motion.init)
        mode, values = self.laplace
        curvatures = np.maximum(values, self.mu)
        precision = np.resize(curvatures, self.dim)
        distance_sq = np.mean((mode - centre) ** 2)
        mean_sq = np.full(self.dim, distance_sq)
        return diagonal_response(precision, mean_sq, std**2, motion, burn_in)

    def quadratic(self, init: str = "prior") -> Quadratic:
        """Return the cost around its mode, by the Laplace approximation.

        Which direction is which is not known, only how curved they are; of a large
        model half of its directions are taken to be at each end of the spectrum.

        Args:
            init: the start: "prior"; or "prior-mean" or "zero", a point mass there.

        Returns:
            The quadratic along m directions.

        Raises:
            InputError: without a mode.
        """
        centre, std = self._initial(init)
        mode, values = self.laplace
        curvatures = np.maximum(values, self.mu)
        precision = np.sort(np.resize(curvatures, self.dim))
        gradients = self.gradients(jnp.asarray(mode, jnp.float32))
        return Quadratic(
            precision=precision,
            start_mean=centre - mode,
            start_variance=np.full(self.dim, std**2),
            gradients_at_mode=np.asarray(gradients, dtype=float),
            mode=self.parameters(mode),
        )

    def initial_w2_sq(self, init: str = "prior") -> float:
        """Estimate W2² between the start and the posterior, by Laplace.

        Of a large model it is an estimate from above: all directions are taken to be as
        far apart as those at the worse end of the spectrum.

        Args:
            init: the start: "prior"; or "prior-mean" or "zero", a point mass there.

        Raises:
            InputError: if the cost is not convex at the mode, or without one.
        """
        centre, std = self._initial(init)
        mode, values = self.laplace
        if not np.all(values > 0):
            requirement = (
                "given to plan, as the cost is not convex at the mode that was found"
            )
            problem = Fault("cannot be estimated")
            raise InputError("initial_w2_sq", problem, requirement, section="posterior")
        squares = (values**-0.5 - std) ** 2
        has_all_values = values.size == self.dim
        spread_sq = squares.sum() if has_all_values else self.dim * squares.max()
        return float(np.sum((mode - centre) ** 2) + spread_sq)


_one_chain_at_a_time: Callable[..., ClippedSum]
_one_chain_at_a_time = jax.custom_batching.sequential_vmap(CustomPosterior._sum)  # type: ignore[no-untyped-call]


KNOWN_MODE = "known_mode"
"""The field that is no part of the pytree: a compiled program must not depend on it."""
_PYTREE_FIELDS = [
    entry for entry in fields(CustomPosterior) if entry.name != KNOWN_MODE
]
jax.tree_util.register_dataclass(
    CustomPosterior,
    data_fields=[entry.name for entry in _PYTREE_FIELDS if entry.metadata != STATIC],
    meta_fields=[entry.name for entry in _PYTREE_FIELDS if entry.metadata == STATIC],
    drop_fields=[KNOWN_MODE],
)


@jax.jit
def _total_cost(
    posterior: CustomPosterior, theta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return −log p(θ|D), up to a constant, and its gradient, device by device.

    The cost has the prior from the start of the sum; of the prior's gradient every
    device's gradient has a share.
    """

    def add(
        total: tuple[jax.Array, jax.Array],
        device: sums.DeviceRecords,
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        total_cost, total_gradient = total
        count = jax.tree.leaves(device.records)[0].shape[0]
        is_real = jnp.arange(count) < device.size
        costs = jax.vmap(posterior.model.cost, (None, 0))(theta, device.records)
        gradient = with_fast_convolutions(posterior._gradient)(theta, device)
        cost = jnp.sum(jnp.where(is_real, costs, 0.0))
        return (total_cost + cost, total_gradient + gradient), None

    start = (posterior.model.prior_cost(theta), jnp.zeros_like(theta))
    total, _ = jax.lax.scan(add, start, posterior._device_records)
    return total


@jax.jit
def _hessian_product(
    posterior: CustomPosterior, theta: jax.Array, vector: jax.Array
) -> jax.Array:
    """Return the Hessian of the whole cost at θ[m] times a vector[m]."""

    def gradient(point: jax.Array) -> jax.Array:
        _, total_gradient = _total_cost(posterior, point)
        return total_gradient

    _, product = jax.jvp(gradient, (theta,), (vector,))
    return product
