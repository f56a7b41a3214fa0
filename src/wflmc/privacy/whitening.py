r"""Private whitening: moments of the features, released once over the same channel.

Before the first round of a chain, devices send sums over their data: of their features
$u$; then, about the mean that the server has received, of the squared norms and of the
outer products $u u^\top$. The server receives each sum under channel noise, so that
each release is a Gaussian mechanism whose loss is taken from the budget of the
gradients. No fading is inverted: a device that arrives more weakly counts for less in
the average. The preconditioner that results changes how fast a chain mixes, not what
it samples.
"""

from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.channel import Link
from wflmc.posterior import whitening
from wflmc.posterior.regression import Regression
from wflmc.privacy import Privacy
from wflmc.privacy.promise import CLIPS
from wflmc.privacy.releases import ReleaseChannel, clip_rows
from wflmc.support.errors import InputError
from wflmc.support.keys import check_key, digest
from wflmc.support.storage import read_verified_arrays, replacing, write_arrays

Array = NDArray[np.float64]

UNCENTRED_RADIUS_FACTOR = 2.0
"""Rows are clipped to this many radii for their mean and for their squared norms, and
to a single one, about the released mean, for their products."""
MEAN_FRACTION = 0.2
"""The part of the release's loss, and of its rounds, that the mean takes."""
TRACE_FRACTION = 0.05
"""The part of the release's loss for the mean squared norm, which takes one round."""
MIN_RELEASE_ROUNDS = 3
"""One round for each of the three sums."""


class Release(NamedTuple):
    """A whitening matrix that was released, and its cost."""

    matrix: Array
    """W, for `posterior.whitened(matrix)`."""
    loss: Array
    """Privacy loss of every round and device, [rounds, K]."""
    name: str
    """A name for everything that was sent, under which a ledger is charged. A release
    with exact noise never has the name of another."""
    noise: str
    """A name for its noise."""
    noise_level: float
    """The largest eigenvalue that noise alone would give the covariance. Smaller
    eigenvalues are raised to it."""
    hidden: float
    """The fraction of the eigenvalues that are below `noise_level`."""

    @property
    def spent(self) -> Array:
        """The total privacy loss of each device, [K]."""
        return np.asarray(self.loss.sum(0))

    def summary(self, budget: Array) -> dict[str, Any]:
        """Return what documents report of a release, as plain data.

        Args:
            budget: the largest loss of each device, [K]; infinite without a promise.

        Returns:
            `rounds`, `spent` [K], `hidden`, and `share_of_budget`: the largest
            fraction of a budget that was spent, None where a budget is infinite.
        """
        share_of_budget = None
        if np.isfinite(budget).all():
            share_of_budget = float((self.spent / budget).max())
        return {
            "rounds": len(self.loss),
            "spent": self.spent,
            "share_of_budget": share_of_budget,
            "hidden": self.hidden,
        }

    def save(self, path: Path) -> None:
        """Write the release to a file for its owner alone: its name hashes the data.

        Args:
            path: of the file, which `load` reads.
        """
        arrays = {name: np.asarray(value) for name, value in self._asdict().items()}
        with replacing(path, mode=0o600) as file:
            write_arrays(file, arrays)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a release that `save` has written.

        Whoever needs the release again reads it: with exact noise, another one would
        have another matrix, and cost the devices again.

        Args:
            path: of the file.

        Raises:
            InputError: the file is missing, is damaged or has been changed.
        """
        requirement = "a release that this version has saved"
        arrays = read_verified_arrays(path, key="release", requirement=requirement)
        if set(arrays) != set(cls._fields):
            raise InputError("release", str(path), requirement)
        return cls(
            matrix=arrays["matrix"],
            loss=arrays["loss"],
            name=str(arrays["name"]),
            noise=str(arrays["noise"]),
            noise_level=float(arrays["noise_level"]),
            hidden=float(arrays["hidden"]),
        )


def release_whitening(
    key: jax.Array,
    posterior: Regression,
    link: Link,
    privacy: Privacy,
    *,
    clip: float | None = None,
    budget_fraction: float = 0.1,
    rounds: int = 16,
    prior_on: str = "parameters",
    start: int = 0,
    exact: bool = False,
) -> Release:
    """Release a matrix W that whitens the features.

    W comes from the mean and covariance that the server receives. The release keeps
    the promise of `privacy`, in its unit and adjacency: each device spends at most
    `budget_fraction` of its budget, and less where its power does not suffice. That
    loss has to be charged before sampling: pass `ledger=release.spent` to `plan`.
    Without an intercept the mean is not released, and moments are those about zero.
    Directions whose variance the noise hides are not stretched.

    Args:
        key: seeds the channel noise; simulated noise repeats with the key.
        posterior: whose features are whitened; in its own coordinates.
        link: the channel, whose rounds from `start` on are used.
        privacy: what devices are promised.
        clip: the radius b. Rows are clipped to 2b for the mean; about the released
            mean, to 2b for the squared norms and to b for the products. By default √d,
            which suits features of about unit size. It has to be public.
        budget_fraction: of every device's budget that may be spent, between 0 and 1.
        rounds: fading blocks of the link that the release takes, at least 3, of
            d(d + 1)/2 channel uses each, at the link's power per channel use.
        prior_on: where the prior is placed (see `posterior.whitened`); what the prior
            outweighs is not stretched.
        start: rounds of the link that came before.
        exact: draw noise on a lattice from the operating system's entropy, which
            protects real data, instead of simulating it.

    Returns:
        The matrix, its loss and the names under which it is charged.

    Raises:
        InputError: for a fraction, rounds or a radius out of range, and for a
            posterior that is whitened already.

    Examples:
        >>> import wflmc
        >>> posterior = wflmc.gaussian_regression(jax.random.key(0), devices=2)
        >>> link = Link(wflmc.channel.static(), snr_db=20)
        >>> privacy = Privacy(epsilon=8, delta=0.01)
        >>> release = release_whitening(jax.random.key(1), posterior, link, privacy)
        >>> release.loss.shape
        (16, 2)
    """
    check_key(key)
    _check_request(posterior, budget_fraction, rounds)
    rows = posterior.features[..., :-1] if posterior.intercept else posterior.features
    dim = rows.shape[-1]
    radius = dim**0.5 if clip is None else clip
    if not CLIPS.contains(np.asarray(radius)):
        raise InputError("whiten_clip", radius, str(CLIPS), section="posterior")
    is_real = np.arange(rows.shape[1]) < posterior.sizes[:, None]
    release_channel = ReleaseChannel(
        key,
        link,
        privacy,
        posterior.sizes,
        uses=dim * (dim + 1) // 2,
        rounds=range(start, start + rounds),
        settings=np.array([radius, budget_fraction, posterior.intercept]),
        exact=exact,
    )

    mean = np.zeros(dim)
    mean_rounds = 0
    product_fraction = 1 - TRACE_FRACTION
    if posterior.intercept:
        mean_rounds = max(1, round(MEAN_FRACTION * rounds))
        product_fraction -= MEAN_FRACTION
        wide_rows = clip_rows(rows, UNCENTRED_RADIUS_FACTOR * radius, is_real)
        mean = _release_mean(
            release_channel,
            wide_rows,
            radius=radius,
            rounds=mean_rounds,
            budget_fraction=MEAN_FRACTION * budget_fraction,
        )
    centred = rows - mean
    covariance, noise_level = _release_covariance(
        release_channel,
        centred,
        is_real,
        radius=radius,
        rounds=rounds - mean_rounds,
        trace_budget=TRACE_FRACTION * budget_fraction,
        product_budget=budget_fraction * product_fraction,
    )
    ridge = posterior.prior_ridge(prior_on)
    matrix = whitening(mean, covariance, posterior.intercept, noise_level, ridge)
    loss = np.concatenate(release_channel.losses)
    noise_name = release_channel.noise_name
    sent_name = digest(posterior.digest.encode(), noise_name.encode(), loss)
    return Release(
        matrix=matrix,
        loss=loss,
        name=f"whiten-{sent_name}",
        noise=f"whiten-{noise_name}",
        noise_level=noise_level,
        hidden=float(np.mean(np.linalg.eigvalsh(covariance) < noise_level)),
    )


def _check_request(posterior: Regression, budget_fraction: float, rounds: int) -> None:
    """Refuse a release that cannot be made."""
    if not 0 < budget_fraction < 1:
        raise InputError(
            "whiten_share", budget_fraction, "above 0 and below 1", section="posterior"
        )
    if rounds < MIN_RELEASE_ROUNDS:
        raise InputError(
            "whiten_rounds",
            rounds,
            f"at least {MIN_RELEASE_ROUNDS}",
            section="posterior",
        )
    if posterior.coordinates is not None:
        raise InputError(
            "preconditioner",
            "a posterior in other coordinates",
            "one in its own",
            section="posterior",
        )


def _release_mean(
    release_channel: ReleaseChannel,
    rows: Array,
    *,
    radius: float,
    rounds: int,
    budget_fraction: float,
) -> Array:
    """Return the mean of the features as the server receives it, [d].

    One row of norm c = 2b or less moves Σu by 2c if it is replaced, by c if left empty.
    """
    reach = UNCENTRED_RADIUS_FACTOR * radius
    is_emptied = release_channel.privacy.adjacency == "add-remove"
    received = release_channel.receive(
        rounds,
        rows.sum(1),
        reach=reach,
        moved_by=reach if is_emptied else 2 * reach,
        budget_fraction=budget_fraction,
    )
    return received.mean


def _release_covariance(
    release_channel: ReleaseChannel,
    centred: Array,
    is_real: NDArray[np.bool_],
    *,
    radius: float,
    rounds: int,
    trace_budget: float,
    product_budget: float,
) -> tuple[Array, float]:
    """Return the covariance [d, d] and the largest eigenvalue of its noise alone.

    Its trace comes from the squared norms (one round), its shape from the products;
    both are received as means over all examples.
    One row moves Σ‖u‖² by at most the square of its radius. It moves Σuuᵀ by
    √(‖u‖⁴ + ‖v‖⁴ − 2(uᵀv)²) ≤ √2 b² if it is replaced, by ‖u‖² ≤ b² if left empty.

    Args:
        release_channel: pays and adds noise.
        centred: rows about the released mean, [K, n, d].
        is_real: whether there is an example in a row, [K, n].
        radius: b, to which rows are clipped in the products.
        rounds: one for the trace, all others for the products.
        trace_budget: the fraction of every budget for the trace.
        product_budget: the fraction for the products.
    """
    wide_radius = UNCENTRED_RADIUS_FACTOR * radius
    wide_rows = clip_rows(centred, wide_radius, is_real)
    # By row first: the norm of a row is the same beside any others.
    squared_norms = (wide_rows**2).sum(2).sum(1, keepdims=True)
    received_trace = release_channel.receive(
        1,
        squared_norms,
        reach=wide_radius**2,
        moved_by=wide_radius**2,
        budget_fraction=trace_budget,
    )
    trace = received_trace.mean[0]

    dim = centred.shape[-1]
    near_rows = clip_rows(centred, radius, is_real)
    products = _packed(np.einsum("kni,knj->kij", near_rows, near_rows))
    is_emptied = release_channel.privacy.adjacency == "add-remove"
    # A device's products have a norm of at most N_k b², and of N_k b²/√d where all
    # directions are alike. Longer ones are clipped to that, by which only their scale
    # is lost: the trace restores it.
    received_products = release_channel.receive(
        rounds - 1,
        products,
        reach=radius**2 / dim**0.5,
        moved_by=radius**2 if is_emptied else 2**0.5 * radius**2,
        budget_fraction=product_budget,
    )
    shape = _unpacked(received_products.mean, dim)
    shape_trace = np.trace(shape)
    scale = 1.0
    if shape_trace > 0 and trace > received_trace.noise_std:
        scale = trace / shape_trace
    # The edge of the spectrum of a symmetric matrix of noise.
    noise_level = scale * (2 * dim) ** 0.5 * received_products.noise_std
    return scale * shape, noise_level


def _packed(matrices: Array) -> Array:
    """Return symmetric matrices[..., d, d] as vectors of the same Frobenius norm."""
    rows, columns = np.triu_indices(matrices.shape[-1])
    scale = np.where(rows == columns, 1.0, 2**0.5)
    return matrices[..., rows, columns] * scale


def _unpacked(vector: Array, dim: int) -> Array:
    """Return the symmetric matrix [d, d] of a packed vector."""
    rows, columns = np.triu_indices(dim)
    entries = vector * np.where(rows == columns, 1.0, 2**-0.5)
    matrix = np.zeros((dim, dim))
    matrix[rows, columns] = entries
    matrix[columns, rows] = entries
    return matrix
