"""The posterior of any JAX model, made by `posterior_from` of a log-likelihood of one example, a log-prior, and data
spread over devices: clipped gradient sums by automatic differentiation, block by block of devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.dynamics import Motion, Quadratic, Response, diagonal_response
from wflmc.posterior.base import STATIC, OptionalArray, Posterior, check_device
from wflmc.posterior.coordinates import Affine
from wflmc.posterior.custom import model as traced
from wflmc.posterior.custom.geometry import (
    CoordinateSearch,
    GeometryError,
    NoModeError,
    eigenvalues,
    find_mode,
)
from wflmc.posterior.custom.precision import in_float32, in_float64
from wflmc.posterior.custom.start import StartCheck
from wflmc.posterior.inputs import check_counts, check_init, check_positive
from wflmc.posterior.partition import examples_by_device
from wflmc.sums import bound
from wflmc.sums import custom as sums
from wflmc.sums.blocks import block_size
from wflmc.sums.constants import CPU_CACHE_BYTES, RECORDS_PER_FLOAT32_SUM
from wflmc.sums.devices import ClippedSum
from wflmc.sums.record_gradients import ArrayGradients, in_order
from wflmc.support.compilation import Compiler
from wflmc.support.errors import Found, InputError, Shown, missing, without_data
from wflmc.support.keys import digest
from wflmc.support.trees import ArrayTree, NumericArray

Array = NDArray[np.float64]
Theta = TypeVar("Theta", bound=ArrayLike)
Preconditioner: TypeAlias = "str | ArrayLike | CustomPosterior"
"""The coordinates that chains move in: by a method's name, by scales[m], or those of
another posterior."""

EXAMPLE_BYTES = 2**24
"""Bytes of a device's examples at a time, for one chain."""
MOST_DENSE = 2048
"""Up to so many parameters a matrix of coordinates is looked for."""


@without_data
class LaplaceMode(NamedTuple):
    """A mode of a posterior, and the curvature there."""

    mode: Array
    """[m]."""
    eigenvalues: Array
    """Of the Hessian: all, or of a large model the smallest and the largest."""


@dataclass(frozen=True, eq=False, repr=False)
class CustomPosterior(Shown, Posterior):
    """p(θ|D) of a model made by `wflmc.posterior_from`; θ is all parameters one after the other.

    The gradient of device k is that of −Σ_n log p(d_n|θ) − (1/K) log p(θ). Devices of unlike size are filled up with
    copies of their own examples, which are left out of every sum.
    """

    data: ArrayTree
    """Examples, a pytree of arrays [K, n, ...]."""
    sizes: NDArray[np.intp]
    """N_k, [K]."""
    start: Array
    """Where chains begin, [m]."""
    initial_std: float
    """Standard deviation of the starts around that, in every parameter."""
    mu: float
    L: float
    model: traced.TracedModel = field(metadata=STATIC)
    prior_devices: int = field(metadata=STATIC)
    """How many devices share the prior."""
    batch: int | None = field(default=None, metadata=STATIC)
    estimated: tuple[str, ...] = field(default=(), metadata=STATIC)
    """Which of mu and L were not given: eigenvalues of the Hessian at the start and at a mode, no more than that."""
    block: int = field(default=1, metadata=STATIC)
    example_block: int = field(default=0, metadata=STATIC)
    coordinates_by: int = field(default=0, metadata=STATIC)
    """How many examples have given the coordinates their covariance of I; 0 for coordinates of another kind."""
    first: int = 0
    """The number of the first device, by which mini-batches are drawn."""
    known_mode: LaplaceMode | None = None
    """The mode of all data, where it is known already; no part of the pytree."""

    start_is_estimate = True

    def _facts(self) -> dict[str, int | float | None]:
        facts = {
            "devices": self.devices,
            "examples": int(np.sum(self.sizes)),
            "parameters": self.dim,
        }
        return {**facts, "batch": self.batch, "mu": self.mu, "L": self.L}

    @property
    def coordinates(self) -> Affine | None:  # type: ignore[override]
        """Those that chains move in."""
        return self.model.space

    @property
    def not_covered(self) -> Mapping[str, str]:
        """What every device knows beside its own examples, and ε does not cover: a sentence by name."""
        return self.model.sites.not_covered

    @property
    def dim(self) -> int:
        """m, the number of parameters."""
        return self.model.dim

    @property
    def digest(self) -> str:
        """A hash of the data and of which device holds them."""
        leaves, structure = jax.tree.flatten(self.data)
        return digest(repr(structure).encode(), *leaves, self.sizes)

    @property
    def _longest(self) -> int:
        """Examples of the largest device, n."""
        return int(jax.tree.leaves(self.data)[0].shape[1])

    def unflatten(self, theta: NumericArray) -> ArrayTree:
        """Return θ[..., m], such as `trace.theta`, as the parameters; every leaf has the same leading axes.

        Parameters of a NumPyro model are by site, in the space of the site's support.
        """
        return self.model.values(self._checked(theta))

    def _checked(self, theta: Theta, axes: str = "...") -> Theta:
        """Refuse what is not θ[axes, m]."""
        shape = np.shape(theta)
        if (
            not shape
            or shape[-1] != self.dim
            or (axes != "..." and len(shape) != 2 + axes.count(","))
        ):
            wanted = f"theta[{axes}, m] with m = {self.dim} parameters"
            raise InputError("theta", Found(f"has the shape {shape}"), wanted)
        return theta

    def _coordinates_of(self, theta: ArrayLike, axes: str = "...") -> NumericArray:
        """Return φ of θ[axes, m], refused where it has another shape."""
        checked = self._checked(theta, axes)
        if isinstance(checked, jax.Array):
            return self.coordinates_of(checked)
        return self.coordinates_of(np.asarray(checked))

    def draw_initial(self, key: jax.Array, init: str = "prior") -> jax.Array:
        """Draw a start, [m]: around `initial` ("prior"; a log-prior cannot be drawn from), or at zero."""
        check_init(init)
        draw = jax.random.normal(key, (self.dim,))
        return (
            0.0 * draw
            if init == "zero"
            else jnp.asarray(self.start, draw.dtype) + self.initial_std * draw
        )

    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: OptionalArray = None,
        example_clip: OptionalArray = None,
    ) -> ClippedSum:
        """Return `clipped_sum` before it is rounded.

        Args:
            key: draws the mini-batches of this round, N_k/batch times whose sum stands for all; without one there are
                none, and gradients are of all examples.
            example_clip: what an example adds to the device's sum is clipped to it. Of a mini-batch that is N_k/batch
                times its gradient: c bounds the change of a record either way.
        """
        if example_clip is not None and self._alone:
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
        if example_clip is None:
            return sums.device_clipped_sum(
                self._model_gradients, self._held, theta, weight, clip, key
            )
        return sums.record_clipped_sum(
            self._model_gradients, self._held, theta, weight, clip, example_clip, key
        )

    @property
    def _held(self) -> sums.DeviceRecords:
        """The records of every device, [K', ...]."""
        padded = jax.tree.leaves(self.data)[0].shape[0]
        sizes = jnp.pad(
            jnp.asarray(self.sizes), (0, padded - self.devices), mode="edge"
        )
        return sums.DeviceRecords(self.data, sizes, self.first + jnp.arange(padded))

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
        """Return one device's gradient at θ[m], unclipped and of all its examples, [m]."""
        return sums.device_gradient(
            self._model_gradients, theta, device
        ).gradient.rounded

    def _record_gradients(
        self,
        theta: jax.Array,
        examples: ArrayTree,
    ) -> list[ArrayGradients]:
        """Return the gradients of examples[n, ...] at θ[m], by array of parameters."""
        leaves = jax.tree.leaves(self.model.unflatten(theta))
        return self.model.record.of(leaves, examples)

    def _prior_gradient(self, theta: jax.Array) -> jax.Array:
        """Return a device's share of the prior's gradient at θ[m], [m]."""
        return jax.grad(self.model.prior_cost)(theta) / self.prior_devices

    def _costs(self, theta: jax.Array, examples: ArrayTree) -> jax.Array:
        """Return −log p(example|θ) of examples[n, ...], [n]."""
        together = self.model.sites.together
        if together is None:
            return jax.vmap(self.model.cost, (None, 0))(theta, examples)
        with in_float32(), jax.default_matmul_precision("highest"):
            parameters = self.model.unflatten(self.parameters(traced.on_device(theta)))
            costs = -together(parameters, jax.tree.map(traced.on_device, examples))
        return costs.astype(theta.dtype)

    def _at_a_time(self, by_example: bool) -> int:
        """Return how many examples of a device to work on at a time, in equal parts."""
        count = self._longest
        if self.batch is not None and self.batch < count:
            return count  # only a mini-batch of them is
        largest = min(count, RECORDS_PER_FLOAT32_SUM) if by_example else count
        most = int(np.clip(EXAMPLE_BYTES // self._bytes(by_example), 1, largest))
        return -(-count // -(-count // most))

    def _bytes(self, by_example: bool) -> int:
        """Return the memory that one example takes."""
        return 4 * self.model.numbers + (
            4 * self.model.record.size if by_example else 0
        )

    @property
    def _alone(self) -> bool:
        """Whether the records of one device and chain keep a CPU busy: then these come one after the other."""
        return (
            jax.default_backend() == "cpu"
            and self.working_bytes(1, True) > CPU_CACHE_BYTES // 16
        )

    def rounding(self, clip: Array, example_clip: Array) -> bound.RoundingError:
        """Return e by its terms; see `Posterior.rounding`."""
        arrays = len(self.model.shapes)
        settings = bound.SumSettings(
            dim=self.dim,
            sizes=self.sizes,
            clip=clip,
            example_clip=example_clip,
            device_norm_error=bound.vector_norm_error(self.dim),
            record_norm_error=bound.traced_norm_error(
                self.model.record.additions, arrays
            ),
        )
        return bound.rounding_error(settings)

    def working_bytes(self, chains: int, by_example: bool = False) -> float:
        """Return the memory that one device at a time needs for its part of a round, in bytes."""
        at_a_time = min(self._at_a_time(by_example), self.batch or 2**62)
        return float(chains) * (at_a_time * self._bytes(by_example) + 16 * self.dim)

    def work(self, by_example: bool = False) -> float:
        """Return the number of operations of one chain in one round, roughly."""
        count = min(self._longest, self.batch or 2**62)
        return float(
            self.devices
            * (count * (6 * self.dim + 10 * self.model.numbers) + 50 * self.dim)
        )

    def on_accelerator(
        self, chains: int, limit: float, by_example: bool = False
    ) -> Self:
        """Return the same posterior in float32 on the accelerator, in blocks of devices that keep to a limit of bytes.

        See `Posterior.on_accelerator`.
        """
        per_device = self.working_bytes(chains, by_example)
        # A loop over small devices would take longer than its parts.
        small = not by_example and self.devices * per_device <= 4 * CPU_CACHE_BYTES
        room = 4.0 * (CPU_CACHE_BYTES if small else chains * self.dim)
        block = block_size(
            self.devices, bytes_per_device=per_device, theta_bytes=room, limit=limit
        )
        if by_example and self._alone:
            block = 1
        rows = self._at_a_time(by_example)

        def padded(values: np.ndarray) -> jax.Array:
            missing = (0, -values.shape[0] % block), (0, -values.shape[1] % rows)
            whole = np.pad(
                values, [*missing, *[(0, 0)] * (values.ndim - 2)], mode="edge"
            )
            return jax.device_put(traced.on_device(whole))

        return replace(
            self, data=jax.tree.map(padded, self.data), block=block, example_block=rows
        )

    def example_norms(self, theta: ArrayLike) -> Array:
        """Return the norm of what every example adds to its device's gradient at theta[..., m], [..., N]."""
        given = np.asarray(self._coordinates_of(theta), dtype=np.float32)
        examples, at_a_time = self.observed[0], self._at_a_time(True)
        norms = [
            traced.costs_and_norms(self.model, examples, at, at_a_time)[1]
            for at in given.reshape(-1, self.dim)
        ]
        scale = (
            np.ones(self.devices)
            if self.batch is None
            else np.maximum(self.sizes / self.batch, 1.0)
        )
        return np.stack(norms).reshape(*given.shape[:-1], -1).astype(float) * np.repeat(
            scale, self.sizes
        )

    def typical_example_norm(
        self, public: "CustomPosterior | None" = None
    ) -> float | Array:
        r"""Return the root mean square norm of one example's gradient, without a look at any example of this posterior.

        In coordinates in which the posterior has the covariance I, gradients g_n of examples that follow the model have
        E[Σ_n g_n g_nᵀ] = I minus the curvature of the prior (the information equality). So their root mean square is
        at most √(m/N), whatever the model and the scales of its data. N is the number of examples that gave the
        coordinates: of public data, where these are those of another posterior.

        Args:
            public: the posterior of the same model on public or simulated data. Then it is the root mean square of
                their norms at their mode, in the coordinates of this posterior, whatever those are.

        Returns:
            √(m/N), or that of the public examples. With mini-batches, where an example counts N_k/batch times, one
            number per device, [K].

        Raises:
            InputError: without public data, for a posterior in coordinates of another kind than those of
                `preconditioner` = laplace, pilot, or another posterior.
        """
        if public is not None:
            mode = public.parameters(public.laplace[0])
            public_examples = replace(
                public, model=self.model, batch=None, known_mode=None
            )
            norm = float(np.sqrt(np.mean(public_examples.example_norms(mode) ** 2)))
        elif self.coordinates_by:
            norm = (self.dim / self.coordinates_by) ** 0.5
        else:
            allowed = "with unit = 'record': for typical norms, see posterior.typical_example_norm(public)"
            raise missing("example_clip", allowed, section="privacy")
        return (
            norm
            if self.batch is None
            else norm * np.maximum(self.sizes / self.batch, 1.0)
        )

    def gradients(self, theta: jax.Array) -> jax.Array:
        """Return every device's own gradient, unclipped and of all examples, [K, m]."""
        held = jax.tree.map(jnp.asarray, self._held)
        return jax.lax.map(lambda device: self._gradient(theta, device), held)[
            : self.devices
        ]

    def device(self, index: int) -> Self:
        """Return one device's part, with its own share of the prior; mu and L are still those of all devices."""
        check_device(index, self.devices)
        at, rows = slice(index, index + 1), slice(self.sizes[index])
        held = jax.tree.map(lambda values: values[at, rows], self.data)
        return replace(
            self,
            data=held,
            sizes=self.sizes[at],
            block=1,
            example_block=0,
            first=self.first + index,
            known_mode=None,
        )

    @property
    def observed(self) -> tuple[ArrayTree, NDArray[np.intp]]:
        """The data, device after device, a pytree of arrays [N, ...], and which device holds each example, [N]."""
        real = np.arange(self._longest) < self.sizes[:, None]
        return jax.tree.map(lambda values: values[real], self.data), np.repeat(
            np.arange(self.devices), self.sizes
        )

    def predictive(
        self,
        function: traced.ModelFunction,
        theta: ArrayLike,
        inputs: ArrayTree,
    ) -> ArrayTree:
        """Average function(parameters, input) over draws: theta[chain, draw, m], inputs[n, ...] -> [chain, n, ...]."""
        return traced.predictive_mean(
            self.model,
            function,
            jnp.asarray(self._checked(theta, "chain, draw")),
            inputs,
        )

    def apply(self, parameters: object, given: ArrayTree) -> ArrayTree:
        """Return a network's output for one input, where the posterior is that of a module of Flax or Equinox."""
        if self.model.sites.apply is None:
            raise InputError(
                "posterior",
                self,
                "of wflmc.from_flax or wflmc.from_equinox, to apply a module",
            )
        return self.model.sites.apply(parameters, given)

    def log_likelihood(self, theta: ArrayLike) -> Array:
        """Return log p(example|θ) of every example, in the order of `observed`: theta[draw, m] -> [draw, N]."""
        draws = jnp.asarray(self._coordinates_of(theta, "draw"), jnp.float32)
        return -np.asarray(
            traced.per_example(self.model.cost, draws, self.observed[0]), dtype=float
        )

    @cached_property
    def laplace(self) -> LaplaceMode:
        """A mode, and eigenvalues of the Hessian there."""
        if self.known_mode is not None:
            return self.known_mode

        def cost(theta: Array) -> tuple[float, Array]:
            value, gradient = _total_cost(self, np.asarray(theta, np.float32))
            return float(value), np.asarray(gradient, dtype=float)

        mode, trouble = find_mode(cost, self._hessian_product, self.start)
        if trouble:
            wanted = "parameters from which −log p(θ|D) falls to a least value (is a sign wrong? is it nan nearby?)"
            instead = "start elsewhere, or give mu, L and a plan's initial_w2_sq"
            raise InputError(
                "initial", Found(f"leads to no mode: {trouble}"), f"{wanted}: {instead}"
            )
        return LaplaceMode(mode, self.eigenvalues(mode))

    def eigenvalues(self, theta: Array) -> Array:
        """Return those of the Hessian of the whole cost at θ[m], as of `laplace`."""
        return eigenvalues(
            lambda vector: self._hessian_product(theta, vector), self.dim
        )

    def _hessian_product(self, theta: Array, vector: Array) -> Array:
        """Return the Hessian of the whole cost at θ[m] times a vector[m], by float32."""
        return np.asarray(
            _hessian_product(self, *np.asarray([theta, vector], np.float32)),
            dtype=float,
        )

    def _initial(self, init: str) -> tuple[Array, float]:
        """Return mean[m] and standard deviation of the start."""
        check_init(init)
        return (
            (self.start, self.initial_std)
            if init == "prior"
            else (0.0 * self.start, 0.0)
        )

    def response(self, motion: Motion, burn_in: int) -> Response:
        """Return how the law of a chain on the Laplace approximation depends on noise, if all devices hold alike data.

        The way from the start to the mode is taken to be equally long in all directions.
        """
        (centre, std), (mode, values) = self._initial(motion.init), self.laplace
        precision = np.resize(np.maximum(values, self.mu), self.dim)
        apart = np.full(self.dim, np.mean((mode - centre) ** 2))
        return diagonal_response(precision, apart, std**2, motion, burn_in)

    def quadratic(self, init: str = "prior") -> Quadratic:
        """Return the cost around its mode; of a large model as if half of its directions were at each end."""
        (centre, std), (mode, values) = self._initial(init), self.laplace
        precision = np.sort(np.resize(np.maximum(values, self.mu), self.dim))
        # Which direction is which is not known, only how curved they are.
        pull = np.asarray(self.gradients(jnp.asarray(mode, jnp.float32)), dtype=float)
        return Quadratic(
            precision,
            centre - mode,
            np.full(self.dim, std**2),
            pull,
            self.parameters(mode),
        )

    def initial_w2_sq(self, init: str = "prior") -> float:
        """Return W2² between the start and the Laplace estimate of the posterior, from above where m is large."""
        (centre, std), (mode, values) = self._initial(init), self.laplace
        if not np.all(values > 0):
            wanted = (
                "given to plan, as the cost is not convex at the mode that was found"
            )
            raise InputError(
                "initial_w2_sq",
                Found("cannot be estimated"),
                wanted,
                section="posterior",
            )
        spread = (values**-0.5 - std) ** 2
        apart = spread.sum() if values.size == self.dim else self.dim * spread.max()
        return float(np.sum((mode - centre) ** 2) + apart)


_one_chain_at_a_time: Callable[..., ClippedSum]
_one_chain_at_a_time = jax.custom_batching.sequential_vmap(CustomPosterior._sum)  # type: ignore[no-untyped-call]


KNOWN_MODE = "known_mode"
_PYTREE_FIELDS = [one for one in fields(CustomPosterior) if one.name != KNOWN_MODE]
jax.tree_util.register_dataclass(
    CustomPosterior,
    data_fields=[one.name for one in _PYTREE_FIELDS if one.metadata != STATIC],
    meta_fields=[one.name for one in _PYTREE_FIELDS if one.metadata == STATIC],
    drop_fields=[KNOWN_MODE],
)


@jax.jit
def _total_cost(
    posterior: CustomPosterior, theta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the cost and its gradient over all examples of all devices, one device at a time."""

    def body(
        total: tuple[jax.Array, jax.Array],
        one: sums.DeviceRecords,
    ) -> tuple[tuple[jax.Array, jax.Array], None]:
        real = jnp.arange(jax.tree.leaves(one.records)[0].shape[0]) < one.size
        costs = jax.vmap(posterior.model.cost, (None, 0))(theta, one.records)
        gradient = in_order(posterior._gradient)(theta, one)
        return (
            total[0] + jnp.sum(jnp.where(real, costs, 0.0)),
            total[1] + gradient,
        ), None

    return jax.lax.scan(
        body,
        (posterior.model.prior_cost(theta), jnp.zeros_like(theta)),
        posterior._held,
    )[0]


@jax.jit
def _hessian_product(
    posterior: CustomPosterior, theta: jax.Array, vector: jax.Array
) -> jax.Array:
    return jax.jvp(lambda at: _total_cost(posterior, at)[1], (theta,), (vector,))[1]


def posterior_from(
    log_likelihood: traced.LogLikelihood,
    log_prior: traced.LogPrior,
    data: ArrayTree,
    *,
    initial: object,
    devices: int | ArrayLike | Sequence[ArrayLike],
    initial_std: float = 0.0,
    mu: float | None = None,
    L: float | None = None,
    batch: int | None = None,
    preconditioner: Preconditioner = "none",
    **assignment: Any,
) -> CustomPosterior:
    """Return the posterior of any JAX model whose examples are spread over devices.

    Args:
        log_likelihood: of parameters and ONE example, a number.
        log_prior: of parameters, up to a constant.
        data: a pytree of arrays [N, ...] with the examples along their first axis.
        initial: parameters to start chains at, any pytree of floating-point arrays: it says what parameters there are,
            which the functions alone cannot.
        devices: how many; or the device of every example, [N]; or a list of each one's examples.
        initial_std: standard deviation of the starts around `initial`, the same for all parameters.
        mu, L: strong convexity and smoothness of −log p(θ|D), where public values are known. Else they are estimated by
            the Hessian at `initial` and at a mode, which depends on the data: no promise of privacy covers that.
        batch: examples that each device draws for a round, all by default and where no device has more. Gradients are
            then noisier than the bound knows, and no privacy is claimed for an example not being drawn.
        preconditioner: in which coordinates chains move, and start from N(0, I) in them. none: in the parameters;
            laplace: by a mode and the Hessian there; pilot: by pilot chains from there, with mu and L as well; another
            posterior: in its coordinates, as of public data; an array [m]: scales of the parameters around `initial`,
            as known in public. What laplace and pilot tell of the data is not covered by any promise of privacy.
        assignment: where `devices` is a number, `partition` is iid (default) or blocks, and `key` seeds iid
            (jax.random.key(0) unless given); `functions` of the parameters, such as predictions, by name: `evaluate`
            gives their R-hat and ESS.
    """
    examples, count = traced.checked_arrays("data", data)
    start, structure, shapes = traced.checked_parameters(initial)
    sites = assignment.pop("sites", traced.Sites())._replace(
        functions=assignment.pop("functions", {})
    )
    layout = traced.ParameterLayout(structure, shapes, sites)
    pooled = partial(_pooled, log_likelihood, log_prior, layout, examples)
    with Compiler() as compiler:
        begin = partial(_begin_search, compiler, preconditioner, pooled, start.size)
        # Functions of NumPyro's adapter are checked already; what is wrong with others, `trace_model` is to say.
        search = begin() if sites.together is not None else None
        with in_float32():
            model = traced.trace_model(log_likelihood, log_prior, layout, examples)
        search = search or begin()
        start_check = StartCheck(model, examples)
        if search is not None:
            start_check.compile(compiler)
        space, found = _coordinates(preconditioner, start, search, layout)
        if space is not None:
            start, initial_std = 0 * start, 1.0
        known = {
            name: value for name, value in (("mu", mu), ("L", L)) if value is not None
        }
        _check_constants(known, initial_std, batch)
        start_check.refuse(
            space, start
        )  # before the compiler ends, which gives up what nobody has waited for
    if space is not None:
        model = model.moved(space)
    parts = examples_by_device(devices, count, **assignment)
    sizes = np.array([part.size for part in parts])
    # A device's first example fills it up: one of zeros might have no likelihood at all.
    places = np.stack(
        [np.append(part, np.full(sizes.max() - part.size, part[0])) for part in parts]
    )
    held = jax.tree.map(lambda values: values[places], examples)
    batch = None if batch is None or batch >= sizes.max() else int(batch)
    estimated = tuple(name for name in ("mu", "L") if name not in known)
    coordinates_by = 0
    if isinstance(preconditioner, CustomPosterior):
        estimated = ()
        coordinates_by = preconditioner.coordinates_by
    elif found:
        estimated = (*estimated, "the preconditioner")
        coordinates_by = count
    mu, L = (float((found | known).get(name, np.nan)) for name in ("mu", "L"))
    posterior = CustomPosterior(
        held,
        sizes,
        start,
        float(initial_std),
        mu,
        L,
        model,
        prior_devices=len(parts),
        batch=batch,
        estimated=estimated,
        coordinates_by=coordinates_by,
        # In coordinates by its own moments the posterior is N(0, I).
        known_mode=LaplaceMode(start, np.ones_like(start)) if found else None,
    )
    return _with_estimates(posterior) if np.isnan(mu + L) else posterior


def _check_constants(
    known: Mapping[str, float], initial_std: float, batch: int | None
) -> None:
    """Refuse constants of a posterior that are out of range.

    Args:
        known: mu and L, where they are given.
        initial_std: standard deviation of the starts.
        batch: examples that a device draws for a round; None: all.
    """
    check_positive(known)
    check_positive({"initial_std": initial_std}, or_zero=True)
    if "mu" in known and "L" in known and known["mu"] > known["L"]:
        raise InputError("mu", known["mu"], f"at most L = {known['L']:g}")
    if batch is not None:
        check_counts(batch=batch)


def _pooled(
    log_likelihood: traced.LogLikelihood,
    log_prior: traced.LogPrior,
    layout: traced.ParameterLayout,
    examples: ArrayTree,
    theta: jax.Array,
) -> jax.Array:
    """Return −log p(θ|D) of all examples in one place, in the precision of θ[m]."""
    together = layout.sites.together or jax.vmap(log_likelihood, (None, 0))
    parameters = layout.unflatten(theta)
    return -jnp.sum(together(parameters, examples)) - log_prior(parameters)


def _begin_search(
    compiler: Compiler,
    given: Preconditioner,
    cost: Callable[[jax.Array], jax.Array],
    dim: int,
) -> CoordinateSearch | None:
    """Return the search for coordinates that `preconditioner` asks for; None where it asks for none."""
    if (
        not isinstance(given, str)
        or given not in ("laplace", "pilot")
        or dim > MOST_DENSE
    ):
        return None
    with in_float64():
        return CoordinateSearch(compiler, cost, dim, by_pilot=given == "pilot")


def _coordinates(
    given: Preconditioner,
    start: Array,
    search: CoordinateSearch | None,
    layout: traced.ParameterLayout,
) -> tuple[Affine | None, dict[str, float]]:
    """Return the coordinates that `preconditioner` asks for, and mu and L in them where these are known."""
    if (
        isinstance(given, CustomPosterior)
        and given.coordinates is not None
        and given.dim == start.size
    ):
        return given.coordinates, {"mu": given.mu, "L": given.L}
    if search is not None:
        free = layout.unflatten(np.ones(layout.dim))
        if isinstance(free, dict):  # as of every model that has sites
            free |= {name: 0 * free[name] for name in layout.sites.scales}
        try:
            with in_float64():
                flat = np.concatenate(
                    [np.ravel(part) for part in jax.tree.leaves(free)]
                )
                space, L = search.find(start, flat)
            return space, {"mu": 1.0, "L": L}
        except GeometryError as error:
            raise _without_coordinates(error, layout) from error
    if (
        not isinstance(given, str | CustomPosterior)
        and np.shape(given) == start.shape
        and np.all(np.asarray(given) > 0)
    ):
        return Affine(start, np.asarray(given, dtype=float)), {}
    if not (isinstance(given, str) and given == "none"):
        wanted = f"none; a preconditioned posterior of {start.size} parameters, or a scale for each; laplace or pilot"
        raise InputError(
            "preconditioner", given, f"{wanted} (up to {MOST_DENSE} parameters)"
        )
    return None, {}


def _without_coordinates(
    error: GeometryError,
    layout: traced.ParameterLayout,
) -> InputError:
    """Return the sentence that names the parameter along which no coordinates were found."""
    sizes = jax.tree.map(
        lambda part: float(np.abs(part).max()),
        layout.unflatten(np.asarray(error.direction)),
    )
    path = max(jax.tree_util.tree_leaves_with_path(sizes), key=lambda leaf: leaf[1])[0]
    name = jax.tree_util.keystr(path, simple=True, separator=".") or "parameters"
    if (
        layout.sites.dims
    ):  # of such a model, sites were written with offsets where that may help
        return InputError(f"site {name}", Found(error.problem), error.remedy)
    remedy = error.remedy
    if isinstance(
        error, NoModeError
    ):  # other errors say by themselves whether offsets would help
        remedy += "; or a hierarchy written as mean + scale * offset"
    return InputError(name, Found(error.problem), remedy)


def _with_estimates(posterior: CustomPosterior) -> CustomPosterior:
    """Estimate mu and L by the Hessian at the start and at a mode; mu at the mode alone where need be."""
    mu, L, estimated = posterior.mu, posterior.L, posterior.estimated
    at_start = posterior.eigenvalues(posterior.start)
    # A network has no one mode to look for.
    known_mode = (
        LaplaceMode(posterior.start, at_start)
        if posterior.model.sites.symmetric
        else posterior.laplace
    )
    at_mode = known_mode.eigenvalues
    values, least = np.concatenate([at_start, at_mode]), at_start.min()
    if not np.all(np.isfinite(values)) or ("mu" in estimated and at_mode.min() <= 0):
        where = f"least eigenvalue {at_mode.min():.3g} at the mode found and {least:.3g} at `initial`"
        wanted = f"a number above 0: none can be estimated, as the cost is not convex ({where}); is a sign wrong?"
        raise InputError(estimated[0], Found("was not given"), wanted)
    if "mu" in estimated:
        mu = float(values.min() if least > 0 else at_mode.min())
        if least <= 0:
            mode_only = f"mu (at the mode alone: at the start the least eigenvalue is {least:.3g}, not convex)"
            estimated = (mode_only, *estimated[1:])
    L = float(np.abs(values).max()) if "L" in estimated else L
    if mu > L * (
        1 + 1e-3
    ):  # float32 may put an estimate a little beside the other constant
        raise InputError(
            "mu",
            mu,
            f"at most L = {L:.6g} ({' and '.join(posterior.estimated)} is an estimate)",
        )
    L = max(mu, L) if "L" in estimated else L
    return replace(
        posterior, mu=min(mu, L), L=L, estimated=estimated, known_mode=known_mode
    )
