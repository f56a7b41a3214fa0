"""Bayesian multinomial logistic regression: the model of the paper's MNIST study."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import helmert, solve_triangular
from scipy.special import log_softmax, logsumexp

from wflmc.dynamics import Motion, Quadratic, Response, diagonal_response
from wflmc.posterior.base import STATIC, OptionalArray
from wflmc.posterior.coordinates import Coordinates
from wflmc.posterior.inputs import (
    Names,
    as_classes,
    check_counts,
    check_data,
    check_init,
    check_prior_mean,
    class_names,
    starts_at_point,
)
from wflmc.posterior.law import Gaussian, w2_squared
from wflmc.posterior.partition import spread_over_devices
from wflmc.posterior.regression import Regression, check_regression
from wflmc.sums import bound, softmax_classes, softmax_rows
from wflmc.sums import softmax as sums
from wflmc.sums.blocks import block_size, pad_to_blocks, split_blocks
from wflmc.sums.constants import (
    CPU_CACHE_BYTES,
    DEVICES_PER_FLOAT32_SUM,
    DEVICES_PER_LATTICE,
    LONGEST_VECTOR,
    MAX_ROWS_OF_SHORT_DEVICE,
    RECORDS_PER_FLOAT32_SUM,
    ROW_SUMS_PER_LATTICE,
    ROWS_PER_FLOAT32_SUM,
)
from wflmc.sums.devices import ClippedSum
from wflmc.sums.parts import part_size
from wflmc.sums.prior import DevicePrior
from wflmc.support.errors import Fault, InputError, without_data
from wflmc.support.keys import host_generator
from wflmc.support.trees import NumericArray

Array = NDArray[np.float64]
Labels = NDArray[np.intp]

MAX_PRODUCTS_PER_BLOCK = 8
"""Float32 sums of rows of one block of short devices, on a CPU."""
ROWS_PER_PRODUCT_ON_ACCELERATOR = 32
"""Rows of short devices per float32 sum of a block, on an accelerator."""
ROWS_PER_STEP = 512
"""Rows whose logits a CPU computes at a time. With 12,000 rows of 30 features in 10
classes, and 1 to 150 chains, 400 to 1,200 were the fastest."""
MIN_ROWS_PER_STEP = 128
"""Rows that a CPU computes at a time, however many chains share them."""
MIN_ROWS_OF_SINGLE_DEVICE = 128
"""Rows from which on the products of a device are computed by themselves: XLA's
products of several devices at a time are slower, unless one step has all devices."""
ROWS_PER_JOINT_STEP = 1024
"""Rows of devices with fewer rows that are computed at a time."""
MIN_JOINT_DEVICES = 5
"""Devices with fewer rows that are computed at a time however large their gradients
are, if memory allows: with 100 devices of 10 rows, 784 features and 50 chains a block of
1 took 1.6 times as long as one of 5, and one of all devices 5 times."""
MAX_ROWS_OF_WHOLE_DEVICE = 2048
"""Rows up to which a step of a CPU may have whole devices. Devices of 10,000 rows were
faster in steps."""
BYTES_OF_WHOLE_DEVICES = 2**21
"""Bytes of logits, features or gradients of whole devices in a step of a CPU. With 30
devices of 400 rows and 26 chains it was as fast as twice as many, and faster than half
as many."""
LOGITS_PER_FEATURE = 8
"""Logits of a row in all chains, per feature, from which on a CPU may take several steps
of whole devices. With fewer they were slower than one device at a time: 100 devices of
400 rows with 30 features, 10 classes and one chain took 1.5 times as long."""
FEATURE_ALIGNMENT = 8
"""Long rows are filled up to a multiple of this many features on an accelerator, which
are 32 bytes: with one chain and 60,000 rows of 3,969 features, both products of a round
took a fifth less time on an H200."""
MIN_ALIGNED_FEATURES = 512
"""Features from which on rows are filled up. The products of shorter rows take little
time, and `wflmc.sums.softmax_gpu` has a layout of its own for them."""
BYTES_PER_GRADIENT_ENTRY = 16
"""Bytes of a parameter while the gradients of a block of devices are clipped: four
float32 numbers."""
LOGIT_COPIES_BYTES = 128.0
"""Bytes of a logit while short devices are computed: several copies of each."""
OPERATIONS_PER_PARAMETER = 50
"""Operations of a device for each parameter beside products with its data, roughly:
norm, clipping and sum."""
LANCZOS_FEATURES = 2**26
"""Numbers of features above which Lanczos' method finds their largest curvature."""
LANCZOS_TOLERANCE = 1e-3
"""Relative error of a curvature that is found by Lanczos' method."""
PREDICTED_LOGITS_PER_BLOCK = 2**22
"""Logits that predictions compute at a time."""
MAX_PREDICTED_ROWS = 1024
"""Rows that predictions compute at a time."""


@without_data
class LaplaceVariances(NamedTuple):
    """The Laplace approximation of a softmax posterior, along its main directions."""

    mode: Array
    """[m]."""
    variances: Array
    """Along the main directions of the Hessian at the mode, [m]."""


class _Way(NamedTuple):
    """The way from the start of chains to the mode, mode − start."""

    of_contrasts: Array
    """Without what all classes have in common, [C, d]."""
    common: Array
    """What all classes have in common, [d]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class SoftmaxPosterior(Regression):
    """p(θ|D) for p(v = c|u) ∝ exp(θ_cᵀu) and prior N(θ₀, prior_std² I).

    θ is the C vectors θ_c one after the other. The gradient of device k in θ_c is
    Σ_n p(c|u_n) u_n − Σ_{n: v_n = c} u_n + (θ_c − θ₀_c)/(K prior_std²). μ is the smallest
    curvature of the prior, L the largest eigenvalue of Σ u uᵀ/2 and the prior's
    curvature (Böhning's bound).
    """

    labels: NDArray[np.intp]
    """Class of each row, [K, n]."""
    norms: NumericArray | None = None
    """‖u‖ of each row, [K, n], where chains need them."""
    example_block: int = field(default=0, metadata=STATIC)
    devices_together: bool = field(default=False, metadata=STATIC)
    """Whether a step has all rows of a block of devices, where rows are last."""
    own_theta_block: int = field(default=0, metadata=STATIC)
    """Devices of few rows at a time where each has received a θ of its own, as their
    gradients are written then; divides `block`. 0: as many as otherwise."""
    chains_last: bool = field(default=False, metadata=STATIC)
    """Whether chains are the last axis of gradients (`wflmc.sums.softmax`), as suits
    accelerators; else rows are (`wflmc.sums.softmax_classes`)."""
    feature_padding: int = field(default=0, metadata=STATIC)
    """How many of the features are zeros that fill up rows on an accelerator."""
    class_names: Names = field(default=(0, 1), metadata=STATIC)
    """The label of every class in the data; everything else counts classes from 0."""

    curvature = 0.5  # Böhning's bound
    start_is_estimate = True
    curvature_is_loose = True

    @property
    def dim(self) -> int:
        """Return m = C d, the number of parameters: one for every class and feature."""
        return self.classes * self.feature_count

    @property
    def feature_count(self) -> int:
        """Return d, the features that have parameters."""
        return int(self.features.shape[-1]) - self.feature_padding

    @property
    def outcomes(self) -> np.ndarray:
        """Return the labels as in the data, [K, n].

        Rows beyond a device's size only fill it up, with the first class.
        """
        return np.asarray(self.class_names)[self.labels]

    @property
    def _data(self) -> tuple[Array, Labels]:
        return self.features, self.labels

    def _with_data(
        self,
        features: Array,
        outcomes: np.ndarray,
        sizes: NDArray[np.intp],
        prior_std: float,
        prior_mean: Array | None,
        space: Coordinates | None,
    ) -> "SoftmaxPosterior":
        posterior = _assemble(
            features,
            outcomes,
            sizes,
            prior_std=prior_std,
            prior_mean=prior_mean,
            names=self.class_names,
            space=space,
        )
        return replace(posterior, intercept=self.intercept)

    def unrounded_sum(
        self,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        key: OptionalArray = None,
        example_clip: OptionalArray = None,
    ) -> ClippedSum:
        """Compute Σ_k w_k clip(g_k, ℓ_k) before it is rounded to float32.

        Under `vmap` all chains go through one matrix product after the other, a block
        of devices at a time: working memory does not grow with the number of devices.

        Args:
            theta: θ[m], or what each device received of it, [K, m].
            weight: w[K]; 0 for a device that does not transmit.
            clip: ℓ[K]; may be infinite.
            key: not used: there are no mini-batches.
            example_clip: c[K], to which every example's gradient is clipped first;
                None: examples are not clipped one by one.

        Returns:
            The sum [m] and the norms ‖g_k‖, [K].
        """
        by_rows = self._short_devices and theta.ndim == 1
        rows = self._rows(needs_norms=by_rows or example_clip is not None)
        if not by_rows and not self.chains_last:
            return self._sum_by_class(rows, theta, weight, clip, example_clip)
        prior = self._device_prior
        block = self.block if by_rows else self._block_of_gradients(theta)
        records = sums.LabelledRows(
            features=split_blocks(rows.features, block),
            labels=split_blocks(rows.labels, block),
            norms=None if rows.norms is None else split_blocks(rows.norms, block),
        )
        if example_clip is None:
            add_devices = (
                softmax_rows.device_clipped_sum
                if by_rows
                else sums.device_clipped_sum(self.feature_count)
            )
            return add_devices(records, prior, theta, weight, clip)
        add_records = (
            softmax_rows.record_clipped_sum
            if by_rows
            else sums.record_clipped_sum(self.feature_count)
        )
        return add_records(records, prior, theta, weight, clip, example_clip)

    def _rows(self, needs_norms: bool) -> sums.LabelledRows:
        """Return all rows [K', n]; with their norms where clipping needs these."""
        features = jnp.asarray(self.features)
        labels = jnp.asarray(self.labels)
        if not needs_norms:
            return sums.LabelledRows(features, labels)
        if self.norms is None:
            return sums.measured_rows(features, labels)
        return sums.LabelledRows(features, labels, jnp.asarray(self.norms))

    def _sum_by_class(
        self,
        data: sums.LabelledRows,
        theta: jax.Array,
        weight: jax.Array,
        clip: jax.Array,
        example_clip: OptionalArray,
    ) -> ClippedSum:
        """Return `unrounded_sum` of data[K', n] in the layout by class."""
        count = int(self.features.shape[1])
        limit = count if example_clip is None else RECORDS_PER_FLOAT32_SUM
        rows = self.example_block or part_size(count, limit)
        # Only a posterior that is not on the accelerator yet lacks rows.
        lacking_rows = -count % rows

        def filled_up(values: NumericArray) -> jax.Array:
            if not lacking_rows:
                return jnp.asarray(values)
            widths = _row_padding(values.ndim, lacking_rows)
            return jnp.pad(jnp.asarray(values), widths)

        prior = self._device_prior
        records = sums.LabelledRows(
            features=filled_up(data.features),
            labels=filled_up(data.labels),
            norms=None if data.norms is None else filled_up(data.norms),
        )
        steps = softmax_classes.Steps(
            block=self._block_of_gradients(theta),
            rows=rows,
            takes_devices_together=self.devices_together and rows >= count,
        )
        if example_clip is None:
            add_devices = softmax_classes.device_clipped_sum(steps)
            return add_devices(records, prior, theta, weight, clip)
        add_records = softmax_classes.record_clipped_sum(steps)
        return add_records(records, prior, theta, weight, clip, example_clip)

    def _block_of_gradients(self, theta: jax.Array) -> int:
        """Return how many devices' gradients are written at a time."""
        if theta.ndim == 2 and self.own_theta_block:
            return self.own_theta_block
        return self.block

    @property
    def _short_devices(self) -> bool:
        """Whether devices have so few rows that their norms come from row products."""
        return int(self.features.shape[1]) <= MAX_ROWS_OF_SHORT_DEVICE

    @property
    def _device_prior(self) -> DevicePrior:
        """Each device's share of the prior."""
        curvature: float | Array = 1 / (self.devices * self.prior_std**2)
        if self.coordinates is not None:
            curvature = self.coordinates.precision / self.devices
        return DevicePrior(curvature, self.prior_mean)  # type: ignore[arg-type]

    def rounding(self, clip: Array, example_clip: Array) -> bound.RoundingError:
        """Bound by how much float32 sums may raise the sensitivity.

        Norms of gradients are those of C × d matrices; devices of few rows have norms
        by products of their rows, with errors of their own.

        Args:
            clip: ℓ[K]; infinite where devices are not clipped.
            example_clip: c[K]; infinite where records are not clipped.

        Returns:
            The terms of `wflmc.sums.bound`; e is their `total`.
        """
        dim = self.feature_count
        norm_error = bound.matrix_norm_error(dim, self.classes)
        settings = bound.SumSettings(
            dim=self.dim,
            sizes=self.sizes,
            clip=clip,
            example_clip=example_clip,
            device_norm_error=norm_error,
            record_norm_error=norm_error,
        )
        if self._short_devices:
            settings = replace(
                settings,
                device_norm_error=bound.short_device_norm_error(dim, self.classes),
                row_product_error=bound.row_product_error(dim, self.classes),
            )
        return bound.rounding_error(settings)

    def working_bytes(self, chains: int, by_example: bool = False) -> float:
        """Estimate the memory that one device at a time needs for its part of a round.

        Two float32 numbers for every logit of its rows and for every parameter, per
        chain. CPUs take some rows of a device at a time, and up to four numbers for
        every parameter of a block of devices; the sums of a device's steps, which an
        accelerator with few chains computes together, are not counted either.

        Args:
            chains: chains that are run at the same time.
            by_example: makes no difference here.

        Returns:
            Bytes, without the data.
        """
        return 8.0 * chains * (self.features.shape[1] * self.classes + self.dim)

    def work(self, by_example: bool = False) -> float:
        """Estimate the number of operations of one chain in one round.

        Products of every device's n rows with m parameters, and what clipping a
        device takes.

        Args:
            by_example: makes no difference here.
        """
        operations_per_parameter = OPERATIONS_PER_PARAMETER + self.features.shape[1]
        return float(self.devices * self.dim * operations_per_parameter)

    def on_accelerator(
        self, chains: int, limit: float, by_example: bool = False
    ) -> Self:
        """Return the same posterior in float32, in the layout that suits these shapes.

        Devices of few rows, CPUs and accelerators each have their own layout and block
        sizes. Norms of rows are stored where clipping needs them;
        rows too long for float32 have an infinite norm, so that they add nothing. Long
        rows are filled up with zeros on an accelerator.

        Args:
            chains: chains that are run at the same time.
            limit: bytes that a block may use.
            by_example: whether examples are to be clipped one by one.
        """
        ready = self._laid_out(chains, limit, by_example)
        block = ready.block
        group = DEVICES_PER_FLOAT32_SUM
        if self._short_devices:
            group = softmax_rows.devices_on_lattice(block, self.features.shape[1])

        def padded(values: np.ndarray) -> np.ndarray:
            lacking_rows = -values.shape[1] % (ready.example_block or 1)
            if lacking_rows:
                values = np.pad(values, _row_padding(values.ndim, lacking_rows))
            # An array of JAX here, where hosts have one of NumPy.
            return pad_to_blocks(values, block, group)  # type: ignore[return-value]

        # A posterior may be laid out again: zeros that fill up rows are left out first.
        features = self.features[..., : self.feature_count]
        norms = None
        if by_example or self._short_devices:
            usable_norms = self._usable_norms()
            norms = padded(usable_norms)
            if np.any(np.isinf(usable_norms)):
                features = np.where(np.isinf(usable_norms)[..., None], 0.0, features)
        features = features.astype(np.float32, copy=False)
        if ready.feature_padding:
            features = np.pad(features, [(0, 0), (0, 0), (0, ready.feature_padding)])
        return replace(
            ready,
            features=padded(features),
            labels=padded(self.labels),
            norms=norms,
            # Programs are compiled for static fields: other data need no other one.
            subject="",
        )

    def _usable_norms(self) -> NDArray[np.float32]:
        """Return ‖u‖ of all rows, [K, n]; infinite where float32 could not use it."""
        features = self.features
        squares = np.einsum("knd,knd->kn", features, features, dtype=float)
        lengths = np.sqrt(squares)
        usable = np.where(lengths > LONGEST_VECTOR, np.inf, lengths)
        return usable.astype(np.float32)

    def _laid_out(self, chains: int, limit: float, by_example: bool) -> Self:
        """Return the posterior with the layout and the block sizes for these shapes.

        Args:
            chains: chains that are run at the same time.
            limit: bytes.
            by_example: whether examples are clipped one by one.
        """
        on_cpu = jax.default_backend() == "cpu"
        if self._short_devices:
            short_block = self._short_device_block(chains, limit)
            return replace(
                self,
                block=short_block,
                own_theta_block=self._own_theta_block(short_block, chains, limit),
                example_block=0,
                chains_last=not on_cpu,
                feature_padding=0,
            )
        if on_cpu:
            return self._in_steps(chains, limit, by_example)
        block = block_size(
            self.devices,
            bytes_per_device=self.working_bytes(chains),
            theta_bytes=4.0 * chains * self.dim,
            limit=limit,
        )
        rows = int(self.features.shape[1])
        step = part_size(rows, RECORDS_PER_FLOAT32_SUM) if by_example else 0
        features = self.feature_count
        is_long = features >= MIN_ALIGNED_FEATURES
        return replace(
            self,
            block=block,
            example_block=step,
            devices_together=False,
            chains_last=True,
            feature_padding=-features % FEATURE_ALIGNMENT if is_long else 0,
        )

    def _in_steps(self, chains: int, limit: float, by_example: bool) -> Self:
        """Return the posterior with as many rows at a time as a CPU's cache holds.

        Small data are one step. So are some devices of fewer than
        `MIN_ROWS_OF_SINGLE_DEVICE` rows, or of more rows with many chains. Others are
        taken one after the other, in steps of some of their rows.

        Args:
            chains: chains that are run at the same time.
            limit: bytes that a block may use.
            by_example: whether examples are clipped one by one.
        """
        rows = int(self.features.shape[1])
        row_bytes = 4 * max(self.classes * chains, self.feature_count)
        cache = min(limit, CPU_CACHE_BYTES)
        whole_rows = rows
        if by_example:
            # All float32 sums have equally many rows.
            part = part_size(rows, RECORDS_PER_FLOAT32_SUM)
            whole_rows = -(-rows // part) * part
        bytes_of_rows = whole_rows * row_bytes
        gradient_bytes = 4 * chains * self.dim
        all_bytes = self.devices * max(bytes_of_rows, gradient_bytes)
        step_bytes = min(limit, BYTES_OF_WHOLE_DEVICES)
        may_be_whole = rows <= MAX_ROWS_OF_WHOLE_DEVICE
        if may_be_whole and all_bytes <= step_bytes:
            return self._in_steps_of_devices(whole_rows, self.devices)
        if rows < MIN_ROWS_OF_SINGLE_DEVICE:
            affordable_rows = limit // (4 * chains * self.classes)
            joint_rows = int(min(affordable_rows, ROWS_PER_JOINT_STEP))
            # Residuals that are clipped take a part of the cache.
            cached = (step_bytes if by_example else cache) // gradient_bytes
            affordable = limit // (BYTES_PER_GRADIENT_ENTRY * chains * self.dim)
            joint_devices = min(max(cached, MIN_JOINT_DEVICES), affordable)
            largest = min(joint_rows // rows, int(joint_devices))
            return self._in_steps_of_devices(rows, largest)
        many_logits = self.classes * chains >= LOGITS_PER_FEATURE * self.feature_count
        if may_be_whole and many_logits and bytes_of_rows <= cache:
            device_bytes = max(bytes_of_rows, gradient_bytes)
            return self._in_steps_of_devices(
                whole_rows, int(step_bytes // device_bytes)
            )
        most_rows = RECORDS_PER_FLOAT32_SUM if by_example else ROWS_PER_STEP
        largest = int(np.clip(cache // row_bytes, MIN_ROWS_PER_STEP, most_rows))
        block = block_size(
            self.devices,
            bytes_per_device=float(BYTES_PER_GRADIENT_ENTRY * chains * self.dim),
            theta_bytes=np.inf,
            limit=cache,
        )
        return replace(
            self,
            block=block,
            example_block=part_size(rows, largest),
            chains_last=False,
            devices_together=False,
            feature_padding=0,
        )

    def _in_steps_of_devices(self, rows: int, largest: int) -> Self:
        """Return the posterior with all rows of several devices in a step.

        Args:
            rows: of a device, those that fill it up included.
            largest: the largest number of devices of a step.
        """
        block = block_size(
            self.devices, bytes_per_device=1.0, theta_bytes=np.inf, limit=largest
        )
        return replace(
            self,
            block=block,
            example_block=rows,
            chains_last=False,
            devices_together=True,
            feature_padding=0,
        )

    def _short_device_block(self, chains: int, limit: float) -> int:
        """Return how many devices of few rows are computed at a time.

        Args:
            chains: chains that are run at the same time.
            limit: bytes.
        """
        rows = self.features.shape[1]
        chain_count = softmax_rows.chains_together(chains)
        if jax.default_backend() == "cpu":
            # As many as one matrix product may add; a few times that where the cache
            # holds all these sums.
            sums_in_cache = CPU_CACHE_BYTES // (4 * self.dim * chain_count)
            products = int(np.clip(sums_in_cache, 1, MAX_PRODUCTS_PER_BLOCK))
            largest = products * ROWS_PER_FLOAT32_SUM // rows
        else:
            largest = ROW_SUMS_PER_LATTICE * ROWS_PER_PRODUCT_ON_ACCELERATOR // rows
        return block_size(
            self.devices,
            bytes_per_device=LOGIT_COPIES_BYTES * chain_count * rows * self.classes,
            theta_bytes=np.inf,
            limit=limit,
            largest=largest,
        )

    def _own_theta_block(self, block: int, chains: int, limit: float) -> int:
        """Return how many devices of few rows have their gradients written at a time.

        That is where each device received a θ of its own. All devices' data are in
        whole blocks, so that a part of a block must divide it. Blocks of rows may have
        more devices than one lattice adds (Sums, step 5), their parts not.

        Args:
            block: devices whose rows are computed at a time.
            chains: chains that are run at the same time.
            limit: bytes.
        """
        if jax.default_backend() == "cpu":
            limit = min(limit, CPU_CACHE_BYTES)
        affordable = limit // (BYTES_PER_GRADIENT_ENTRY * chains * self.dim)
        largest = max(1, min(affordable, DEVICES_PER_LATTICE))
        divisors = [size for size in range(1, block + 1) if block % size == 0]
        return max(size for size in divisors if size <= largest)

    def example_norms(self, theta: ArrayLike) -> Array:
        """Compute ‖p − 1[label]‖ ‖u‖, the norm of every example's gradient.

        Args:
            theta: parameters θ[..., m].

        Returns:
            [..., N], device after device, in the coordinates that chains move in.
        """
        features = self.real_rows(self.features)
        labels = self.real_rows(self.labels)
        phi = self.coordinates_of(np.asarray(theta, dtype=float))
        by_class = phi.reshape(*phi.shape[:-1], self.classes, -1)
        logits = by_class @ features.T
        residual = np.exp(logits - logsumexp(logits, axis=-2, keepdims=True))
        residual -= np.arange(self.classes)[:, None] == labels
        return np.linalg.norm(residual, axis=-2) * np.linalg.norm(features, axis=1)

    def gradients(self, theta: jax.Array) -> jax.Array:
        """Compute every device's gradient, unclipped and of all its examples.

        Devices are computed one after the other; for protocols that do not superpose
        signals, as the loop over rounds never holds all gradients.

        Args:
            theta: θ[m], in the coordinates that chains move in.

        Returns:
            [K, m].
        """
        prior = self._device_prior

        def gradient(device: tuple[jax.Array, jax.Array]) -> jax.Array:
            features, labels = device
            columns = sums.columns_of(theta[None], self.feature_count)
            block = sums.LabelledRows(features[None], labels[None])
            by_column = sums.device_gradients(block, prior, columns)
            return by_column[0].transpose(2, 1, 0).ravel()

        data = (jnp.asarray(self.features), jnp.asarray(self.labels))
        return jax.lax.map(gradient, data)[: self.devices]

    def predict(self, theta: ArrayLike, features: ArrayLike) -> NDArray[np.float32]:
        """Compute p(class|u) averaged over the draws of each chain.

        Args:
            theta: parameters θ[chain, draw, m].
            features: u[n, d], as in the data; where the model has an intercept, it adds
                the constant itself.

        Returns:
            Probabilities [chain, n, C], in the order of `class_names`.

        Raises:
            InputError: for features of another shape, or that are not finite.
        """
        rows = jnp.asarray(self.design_matrix(features))
        return np.asarray(_predict(jnp.asarray(theta), rows, self.classes))

    def classes_of(self, labels: ArrayLike) -> Labels:
        """Return the class, 0 to C − 1, of every label.

        Args:
            labels: as in the data, [n].

        Returns:
            [n], the positions of the labels in `class_names`.

        Raises:
            InputError: for a label that no class has.
        """
        return as_classes(labels, self.class_names)

    def _draw(
        self, generator: np.random.Generator, theta: Array, rows: Array
    ) -> np.ndarray:
        logits = theta.reshape(len(theta), self.classes, -1) @ rows.T
        # The largest of logits plus Gumbel noise is a draw from their softmax.
        noisy_logits = logits + generator.gumbel(size=logits.shape)
        classes = np.argmax(noisy_logits, axis=1)
        return np.asarray(self.class_names)[classes]

    def _log_likelihood(self, theta: Array, rows: Array, outcomes: np.ndarray) -> Array:
        logits = theta.reshape(len(theta), self.classes, -1) @ rows.T
        classes = self.classes_of(outcomes)
        logits_of_outcomes = logits[:, classes, np.arange(outcomes.size)]
        return logits_of_outcomes - logsumexp(logits, axis=1)

    @cached_property
    def laplace(self) -> LaplaceVariances:
        """Return the Laplace approximation of the posterior, along main directions.

        Where all classes move alike the likelihood does not change, and variances
        are the prior's; the C − 1 contrasts of classes are treated alike.

        Returns:
            The mode [m], and the variances [m] along the main directions of the Hessian
            there, in the coordinates that chains move in.
        """
        prior_values = np.linalg.eigvalsh(self.prior_precision)
        contrast_variances = np.linalg.eigvalsh(self._contrast_covariance)
        variances = [1 / prior_values, np.tile(contrast_variances, self.classes - 1)]
        return LaplaceVariances(self._mode, np.concatenate(variances))

    @property
    def mode(self) -> Array:
        """Return the parameters of the largest posterior density.

        Returns:
            θ[m], computed when it is first asked for.
        """
        return np.asarray(self.parameters(self._mode))

    @cached_property
    def _mode(self) -> Array:
        """Return φ[m] of the largest posterior density."""
        rows = self.features.reshape(-1, self.features.shape[-1])
        return _find_mode(
            rows,
            self.labels.ravel(),
            classes=self.classes,
            precision=self.prior_precision,
            prior_mean=self.prior_mean,
        )

    @cached_property
    def _contrast_covariance(self) -> Array:
        """Return the covariance of each of the C − 1 contrasts of classes, [d, d]."""
        rows = self.features.reshape(-1, self.features.shape[-1])
        by_class = self._mode.reshape(self.classes, -1)
        return _approximate_covariance(rows, by_class, self.prior_precision)

    def response(self, motion: Motion, burn_in: int) -> Response:
        """Compute how the law on the Laplace approximation depends on noise.

        All devices are taken to hold alike data. It is that of the coordinates that
        chains move in, along the main directions of the approximation.

        Args:
            motion: step sizes η[S], weights [S, K] and start, of one chain.
            burn_in: rounds that are discarded.

        Returns:
            The response of the rounds after burn-in.

        Raises:
            InputError: for kinetic dynamics, or if it would take too much memory.
        """
        mode = self._mode
        covariance = self._contrast_covariance
        contrasts = self.classes - 1
        variances, directions = np.linalg.eigh(covariance)
        way = self._way_from_start(mode, motion.init)
        way_sq = ((way.of_contrasts @ directions) ** 2).sum(0) / contrasts
        prior_covariance = np.linalg.inv(self.prior_precision)
        prior_variances, prior_directions = np.linalg.eigh(prior_covariance)
        common_sq = self.classes * (way.common @ prior_directions) ** 2
        prior_along = np.diagonal(directions.T @ prior_covariance @ directions)
        # The directions in which all classes move alike come first.
        variance = np.concatenate([prior_variances, np.tile(variances, contrasts)])
        mean_sq = np.concatenate([common_sq, np.tile(way_sq, contrasts)])
        start = np.concatenate([prior_variances, np.tile(prior_along, contrasts)])
        if starts_at_point(motion.init):
            start = np.zeros_like(start)
        return diagonal_response(1 / variance, mean_sq, start, motion, burn_in)

    def quadratic(self, init: str = "prior") -> Quadratic:
        """Return the cost around its mode, by the Laplace approximation.

        The directions in which all classes move alike are left out: no prediction
        depends on them.

        Args:
            init: the start: "prior"; or "prior-mean" or "zero", a point mass there.

        Returns:
            The quadratic along (C − 1) d directions.

        Raises:
            InputError: for another start.
        """
        check_init(init)
        mode = self._mode
        covariance = self._contrast_covariance
        contrasts = self.classes - 1
        variances, directions = np.linalg.eigh(covariance)
        way = self._way_from_start(mode, init)
        gradients = self._gradients_at(mode.reshape(self.classes, -1))
        contrast_matrix = helmert(self.classes)  # orthonormal contrasts, [C − 1, C]
        prior_covariance = np.linalg.inv(self.prior_precision)
        prior_along = np.einsum("ij,ik,kj->j", directions, prior_covariance, directions)
        if starts_at_point(init):
            prior_along = 0 * prior_along
        along_directions = contrast_matrix @ gradients @ directions
        return Quadratic(
            precision=np.tile(1 / variances, contrasts),
            start_mean=-(contrast_matrix @ way.of_contrasts @ directions).ravel(),
            start_variance=np.tile(prior_along, contrasts),
            gradients_at_mode=along_directions.reshape(self.devices, -1),
            mode=np.asarray(self.parameters(mode)),
        )

    def _way_from_start(self, mode: Array, init: str) -> _Way:
        """Return the way from the start of chains to the mode[m].

        The likelihood does not know what all classes have in common, so that the mode
        has it from the prior's mean.
        """
        start = self.start_mean(init)
        from_start_to_prior = self.start_mean("prior-mean") - start
        common = from_start_to_prior.reshape(self.classes, -1).mean(0)
        by_class = (mode - start).reshape(self.classes, -1)
        return _Way(of_contrasts=by_class - common, common=common)

    def _gradients_at(self, by_class: Array) -> Array:
        """Return every device's gradient at θ[C, d] in float64, [K, C, d]."""
        logits = self.features @ by_class.T
        probabilities = np.exp(log_softmax(logits, axis=-1))
        is_real = np.arange(self.labels.shape[1]) < self.sizes[:, None]
        one_hot = np.eye(self.classes)[self.labels]
        residual = (probabilities - one_hot) * is_real[..., None]
        from_prior_mean = by_class
        if self.prior_mean is not None:
            from_prior_mean = by_class - self.prior_mean.reshape(by_class.shape)
        prior_part = from_prior_mean @ self.prior_precision / self.devices
        return residual.swapaxes(1, 2) @ self.features + prior_part

    def downlink_error(self, weight: ArrayLike) -> Array:
        """Bound E‖Σ_k w_k (∇f_k(θ + e_k) − ∇f_k(θ))‖² for unit downlink noise e_k.

        The bound m (Σ_k w_k L_k)² has each device's own smoothness L_k, by Böhning's
        bound on its Hessian.

        Args:
            weight: w[..., K] of devices in the update.

        Returns:
            [...]; multiply it by the variance of the downlink noise.
        """
        moments = self.curvature * self.features.swapaxes(1, 2) @ self.features
        hessians = moments + self.prior_precision / self.devices
        smoothness = np.linalg.eigvalsh(hessians)[:, -1]
        weighted = np.asarray(weight, dtype=float) @ smoothness
        return np.asarray(self.dim * weighted**2)

    def initial_w2_sq(self, init: str = "prior") -> float:
        """Estimate W2² between the law of θ[0] and the posterior, by Laplace.

        Against the full Hessian, W2² to the prior was within 1 % in most cases tried,
        5 % in the worst.

        Args:
            init: the start: "prior"; or "prior-mean" or "zero", a point mass there.

        Raises:
            InputError: for another start.
        """
        covariance = self._contrast_covariance
        way = self._mode - self.start_mean(init)
        if starts_at_point(init):
            return float(way @ way + np.sum(self.laplace.variances))
        # What moves all classes alike is as in the prior, and adds nothing.
        centre = np.zeros(len(covariance))
        prior_covariance = np.asarray(np.linalg.inv(self.prior_precision), dtype=float)
        prior = Gaussian(centre, prior_covariance)
        distance = w2_squared(prior, Gaussian(centre, covariance))
        return float(way @ way + (self.classes - 1) * distance)


def _row_padding(axes: int, rows: int) -> list[tuple[int, int]]:
    """Return the widths that add rows of zeros to every device's, of [K, n, ...]."""
    return [(0, 0), (0, rows), *[(0, 0)] * (axes - 2)]


@partial(jax.jit, static_argnames=("classes",))
def _predict(theta: jax.Array, features: jax.Array, classes: int) -> jax.Array:
    """Return the mean of p(class|u) over draws, in blocks of rows."""
    count, dim = features.shape
    rows_in_cache = PREDICTED_LOGITS_PER_BLOCK // (classes * theta.shape[1])
    block = int(np.clip(rows_in_cache, 1, min(count, MAX_PREDICTED_ROWS)))
    padded = jnp.pad(features, ((0, -count % block), (0, 0)))
    blocks = padded.reshape(-1, block, dim)

    def of_chain(draws: jax.Array) -> jax.Array:
        columns = draws.reshape(-1, classes, dim).transpose(2, 1, 0)

        def of_block(rows: jax.Array) -> jax.Array:
            return sums.softmax(sums.product(rows, columns)).mean(-1)

        return jax.lax.map(of_block, blocks).reshape(-1, classes)[:count]

    return jax.lax.map(of_chain, theta)


def _assemble(
    features: Array,
    labels: Labels,
    sizes: NDArray[np.intp],
    *,
    prior_std: float,
    prior_mean: Array | None,
    names: Names,
    space: Coordinates | None = None,
) -> SoftmaxPosterior:
    """Return the posterior of data on devices.

    Args:
        features: u[K, n, d].
        labels: class of each row, [K, n].
        sizes: N_k, [K].
        prior_std: of the prior on every parameter.
        prior_mean: φ₀[m]; None: zero.
        names: the label of every class, [C].
        space: the coordinates that features and mean are in; None: the parameters.

    Raises:
        InputError: where squares of features overflow.
    """
    rows = features.reshape(-1, features.shape[-1])
    if space is None:
        mu = prior_std**-2
        L = _largest_curvature(rows, mu)
    else:
        mu = float(np.linalg.eigvalsh(space.precision)[0])
        L = _largest_curvature(rows, space.precision)
    if not np.isfinite(L):
        problem = "values whose squares overflow"
        raise InputError("data", problem, "scaled to moderate size")
    return SoftmaxPosterior(
        features=features,
        labels=labels,
        sizes=sizes,
        prior_std=prior_std,
        prior_mean=prior_mean,
        mu=mu,
        L=L,
        class_names=names,
        coordinates=space,
    )


def _largest_curvature(X: Array, precision: float | Array) -> float:
    """Return the largest eigenvalue of Σ u uᵀ/2 + precision.

    Args:
        X: features of all examples, [N, d].
        precision: the prior's, a number or a matrix [d, d].

    Returns:
        The eigenvalue; infinite where squares overflow.
    """
    if X.size > LANCZOS_FEATURES:
        return _largest_curvature_by_lanczos(X, precision)
    X = X.astype(float, copy=False)
    is_matrix = isinstance(precision, np.ndarray)
    # The smaller of the two has the same largest eigenvalue.
    by_row = X.shape[1] > len(X) and not is_matrix
    # What overflows is refused by the caller, in a sentence.
    with np.errstate(over="ignore", invalid="ignore"):
        moments = X @ X.T if by_row else X.T @ X
    if not np.all(np.isfinite(moments)):
        return np.inf
    if is_matrix:
        return float(np.linalg.eigvalsh(0.5 * moments + precision)[-1])
    return float(np.linalg.eigvalsh(0.5 * moments)[-1] + precision)


def _largest_curvature_by_lanczos(X: Array, precision: float | Array) -> float:
    """Return `_largest_curvature` from above, without the moments of the features."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    width = X.shape[1]

    def curved(vector: Array) -> Array:
        product = X.T @ (X @ vector.astype(X.dtype))
        half = 0.5 * product.astype(float)
        if isinstance(precision, np.ndarray):
            return np.asarray(half + precision @ vector)
        return np.asarray(half + precision * vector)

    operator = LinearOperator((width, width), matvec=curved, dtype=np.float64)
    start = np.ones(width)
    values, vectors = eigsh(operator, k=1, which="LA", tol=LANCZOS_TOLERANCE, v0=start)
    eigenvector = vectors[:, 0]
    error = np.linalg.norm(curved(eigenvector) - values[0] * eigenvector)
    return float(values[0] + error)


def _find_mode(
    X: Array,
    labels: Labels,
    *,
    classes: int,
    precision: Array,
    prior_mean: Array | None,
) -> Array:
    """Return the parameters of the largest posterior density, [m].

    Args:
        X: features of all examples, [N, d].
        labels: class of each, [N].
        classes: C.
        precision: the prior's curvature for one class, [d, d].
        prior_mean: of all classes one after the other, [m]; None: zero.
    """
    # It takes longer to import than most commands take to run.
    from scipy.optimize import minimize

    # Once: products of float32 features with float64 parameters would convert them in
    # every step, which takes ten times as long as the product.
    X = np.asarray(X, dtype=np.float64)
    linear = np.zeros((X.shape[1], classes))
    np.add.at(linear.T, labels, X)
    # In coordinates z in which Böhning's bound on the Hessian is the identity, the mode
    # is found in few steps.
    try:
        root = np.linalg.cholesky(0.5 * X.T @ X + precision).T
    except np.linalg.LinAlgError:
        problem = Fault("has features of so unlike size that no mode can be found")
        raise InputError("data", problem, "scaled to moderate size") from None
    shape = linear.shape
    centre = np.zeros(shape)
    if prior_mean is not None:
        centre = prior_mean.reshape(shape[::-1]).T

    def cost(z: Array) -> tuple[float, Array]:
        theta = solve_triangular(root, z.reshape(shape))
        logits = X @ theta
        log_totals = logsumexp(logits, axis=1)
        deviation = theta - centre
        pulled = precision @ deviation
        prior_cost = 0.5 * np.vdot(deviation, pulled)
        value = log_totals.sum() - np.vdot(linear, theta) + prior_cost
        probabilities = np.exp(logits - log_totals[:, None])
        gradient = X.T @ probabilities - linear + pulled
        return float(value), solve_triangular(root, gradient, trans="T").ravel()

    result = minimize(
        cost,
        (root @ centre).ravel(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 1000, "ftol": 1e-7},
    )
    theta = solve_triangular(root, result.x.reshape(shape))
    return np.asarray(theta.T.ravel())


def _approximate_covariance(X: Array, by_class: Array, precision: Array) -> Array:
    """Return the covariance of what tells one class from the others, [d, d].

    The Hessian Σ (diag(p) − p pᵀ) ⊗ u uᵀ is taken for (I − 1 1ᵀ/C) ⊗ M of the same
    trace: what moves all classes alike is known from the prior alone, and the classes
    are otherwise treated alike.

    Args:
        X: features of all examples, [N, d].
        by_class: the mode θ[C, d].
        precision: the prior's curvature for one class, [d, d].
    """
    logits = X @ by_class.T
    p = np.exp(log_softmax(logits, axis=1))
    total_curvature = 1 - (p**2).sum(1)
    curvature = total_curvature / (len(by_class) - 1)
    of_data = X.T @ (curvature[:, None] * X)
    covariance = np.linalg.inv(of_data + precision)
    return np.asarray(covariance, dtype=float)


def softmax_regression(  # noqa: PLR0913  # the data and the prior
    key: jax.Array,
    devices: int = 30,
    *,
    examples: int = 1200,
    dim: int = 5,
    classes: int | Sequence[int] | Sequence[str] | None = None,
    X: ArrayLike | None = None,
    y: ArrayLike | None = None,
    intercept: bool = False,
    partition: str | NDArray[np.intp] = "iid",
    prior_std: float = 1.0,
    prior_mean: ArrayLike | None = None,
) -> SoftmaxPosterior:
    """Return the posterior of a multinomial logistic regression on devices.

    The likelihood is p(v = c|u) ∝ exp(θ_cᵀu). Without X and y the data are those of
    `synthetic_labels`.

    Args:
        key: seeds data and partition, as two separate streams.
        devices: K.
        examples: N, of synthetic data.
        dim: the number of features, of synthetic data.
        classes: C, of labels 0 to C − 1, or the label of every class; by default 10
            synthetic ones, or with your own data every label that y has, sorted. That
            set is treated as public: declare it where it is not.
        X: features of your own data, [N, dim]; comes with `y`.
        y: labels of your own data, [N], whole numbers or text.
        intercept: whether to add a column of ones to X.
        partition: "iid", "blocks", "by-label" or "dirichlet:A", or the device of every
            row, [N]; see `wflmc.posterior.partition`.
        prior_std: s of the prior N(θ₀, s² I).
        prior_mean: θ₀[C, d] or [m], a row of d for each class, with the intercept's last
            where there is one; None: zero. ε covers nothing of it, so that it must not
            come from the private data.

    Returns:
        The posterior; its L is Böhning's bound.

    Raises:
        InputError: for bad sizes, data or a mean that are not finite or overflow,
            unknown labels, or X without y.

    Examples:
        >>> posterior = softmax_regression(jax.random.key(0), devices=4, classes=3)
        >>> posterior.class_names
        (0, 1, 2)
    """
    check_regression(devices, prior_std, X, y, examples=examples, dim=dim)
    if classes is not None and np.ndim(classes) == 0:
        check_counts(classes=classes)  # type: ignore[arg-type]
    if X is None or y is None:
        names = class_names((), 10 if classes is None else classes)
        features, labels = synthetic_labels(key, examples, dim, len(names))
    else:
        features, _ = check_data(X, np.zeros(np.shape(y)))
        names = class_names(y, classes)
        labels = as_classes(y, names)
    rows, classes_of_rows, sizes = spread_over_devices(
        key,
        features,
        labels,
        devices=devices,
        intercept=intercept,
        rule=partition,
    )
    posterior = _assemble(
        rows,
        classes_of_rows,
        sizes,
        prior_std=prior_std,
        prior_mean=check_prior_mean(prior_mean, len(names) * rows.shape[-1]),
        names=names,
    )
    return replace(posterior, intercept=intercept)


def synthetic_labels(
    key: jax.Array, examples: int, dim: int, classes: int = 10, stream: str = "data"
) -> tuple[Array, Labels]:
    """Draw u ~ N(0, I) and labels from the model itself, with parameters from N(0, I).

    Args:
        key: seeds the parameters and, as another stream, the examples.
        examples: N.
        dim: the number of features.
        classes: C.
        stream: another name gives other examples of the same parameters, as a test set
            needs.

    Returns:
        Features [N, dim], and classes of 0 to C − 1, [N].
    """
    parameters = host_generator(key, "truth").standard_normal((dim, classes))
    generator = host_generator(key, stream)
    features = generator.standard_normal((examples, dim))
    # The largest of logits plus Gumbel noise is a draw from their softmax.
    noise = generator.gumbel(size=(examples, classes))
    return features, np.argmax(features @ parameters + noise, axis=1)
