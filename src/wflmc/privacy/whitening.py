"""Whitening that is paid for: means and second moments of the features, released once over the same channel.

Before the first round of a chain the devices send sums over their data at full power, all at once: first of their
features, then, about the mean that the server has received, of their squared lengths and of their products. The server
receives each sum under channel noise: a Gaussian mechanism, whose loss is taken from the same budget as that of the
gradients. Nothing has to be inverted: a device that arrives more weakly than another counts for less in the average,
and a preconditioner does not mind (nor does it change what is sampled). Only the phase of a channel is made up for.
"""

from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from wflmc.channel import Link
from wflmc.posterior import whitening
from wflmc.posterior.regression import Regression
from wflmc.privacy import Privacy
from wflmc.privacy.releases import Air, within
from wflmc.support.errors import InputError
from wflmc.support.keys import check_key, digest

Array = NDArray[np.float64]

FIRST = 2.0
"""Features lie up to this many radii from zero, and one from their mean."""
MEAN_PART = 0.2
"""The mean's part of the loss and, at least one, of the rounds."""
SIZE_PART = 0.05
"""The part of the loss for the features' mean square length, which takes one round."""


class Release(NamedTuple):
    """What came out, and what it cost."""

    matrix: Array
    """W, for `posterior.whitened(matrix)`."""
    loss: Array
    """Privacy loss of every round and device, [rounds, K]."""
    name: str
    """A name for all that was sent, under which a ledger is charged."""
    noise: str
    """A name for its noise."""
    noise_level: float
    """The largest eigenvalue that noise alone would give the covariance; smaller ones are taken for it."""
    hidden: float
    """The share of the directions for which that is so."""

    @property
    def spent(self) -> Array:
        """Loss of each device, [K]."""
        return np.asarray(self.loss.sum(0))

    def summary(self, budget: Array) -> dict[str, Any]:
        """Return what to tell of it, as plain data."""
        share = (
            float((self.spent / budget).max()) if np.isfinite(budget).all() else None
        )
        return {
            "rounds": len(self.loss),
            "spent": self.spent,
            "share_of_budget": share,
            "hidden": self.hidden,
        }


def release_whitening(
    key: jax.Array,
    posterior: Regression,
    link: Link,
    privacy: Privacy,
    *,
    clip: float | None = None,
    share: float = 0.1,
    rounds: int = 16,
    prior_on: str = "parameters",
    start: int = 0,
    exact: bool = False,
) -> Release:
    """Release W that whitens the features, by the mean and covariance that the server receives.

    Args:
        key: seeds the channel noise.
        clip: b, rows of features further than this from zero, and then from the released mean, are brought there;
            √d by default, which suits features of about unit size. It has to be public.
        share: of every device's budget that may be spent on this.
        rounds: fading blocks of the link that it takes, of d(d + 1)/2 channel uses each, at the link's
            power per channel use.
        prior_on: where the prior is to be (see `posterior.whitened`); what it outweighs is not stretched.
        start: rounds of the link that came before.
        exact: draw noise that protects for real, on a lattice, from the operating system's entropy instead.
    """
    check_key(key)
    if not 0 < share < 1:
        raise InputError(
            "whiten_share", share, "above 0 and below 1", section="posterior"
        )
    if rounds < 3:
        raise InputError("whiten_rounds", rounds, "at least 3", section="posterior")
    if posterior.coordinates is not None:
        raise InputError(
            "preconditioner",
            "a posterior in other coordinates",
            "one in its own",
            section="posterior",
        )
    rows = posterior.features[..., :-1] if posterior.intercept else posterior.features
    size = rows.shape[-1]
    radius = size**0.5 if clip is None else clip
    if not 0 < radius < np.inf:
        raise InputError(
            "whiten_clip", radius, "finite and above 0", section="posterior"
        )
    real = np.arange(rows.shape[1]) < posterior.sizes[:, None]
    first = max(1, round(MEAN_PART * rounds)) if posterior.intercept else 0
    settings = np.array([radius, share, posterior.intercept])
    air = Air(
        key,
        link,
        privacy,
        posterior.sizes,
        size * (size + 1) // 2,
        rounds,
        settings,
        start,
        exact,
    )

    mean, wide = np.zeros(size), FIRST * radius
    # One row of length b or less, replaced or left empty, moves Σu by 2b or b, Σ‖u‖² by b² either way, and Σuuᵀ by
    # √(‖u‖⁴ + ‖v‖⁴ − 2(uᵀv)²) ≤ √2 b² or ‖u‖² ≤ b².
    empty = privacy.adjacency == "add-remove"
    if posterior.intercept:
        sums, moved = within(rows, wide, real).sum(1), wide if empty else 2 * wide
        mean, _ = air.receive(first, sums, wide, moved, MEAN_PART * share)
    lengths = (within(rows - mean, wide, real) ** 2).sum((1, 2))[:, None]
    length, length_noise = air.receive(1, lengths, wide**2, wide**2, SIZE_PART * share)
    away = within(rows - mean, radius, real)
    products = _packed(np.einsum("kni,knj->kij", away, away))
    # A device's products are at most N_k b² long, and N_k b²/√d where all directions are alike. Longer ones are
    # clipped, by which only their size is lost: it is known from the lengths.
    left = share * (1 - SIZE_PART - MEAN_PART * posterior.intercept)
    reach = radius**2 / size**0.5
    moved = radius**2 if empty else 2**0.5 * radius**2
    packed, noise = air.receive(rounds - first - 1, products, reach, moved, left)
    shape, trace = _unpacked(packed, size), length[0]
    scale = (
        trace / np.trace(shape) if np.trace(shape) > 0 and trace > length_noise else 1.0
    )
    level = scale * (2 * size) ** 0.5 * noise  # the edge of the spectrum of noise alone
    matrix = whitening(
        mean, scale * shape, posterior.intercept, level, posterior.prior_ridge(prior_on)
    )
    loss = np.concatenate(air.losses)
    sent = digest(posterior.digest.encode(), air.noise.encode(), loss)
    hidden = float(np.mean(np.linalg.eigvalsh(scale * shape) < level))
    return Release(matrix, loss, f"whiten-{sent}", f"whiten-{air.noise}", level, hidden)


def _packed(matrices: Array) -> Array:
    """Return symmetric matrices[..., d, d] as vectors of the same length (Frobenius norm)."""
    i, j = np.triu_indices(matrices.shape[-1])
    return matrices[..., i, j] * np.where(i == j, 1.0, 2**0.5)


def _unpacked(vector: Array, size: int) -> Array:
    """Return the symmetric matrix of a packed vector."""
    i, j = np.triu_indices(size)
    matrix = np.zeros((size, size))
    matrix[i, j] = matrix[j, i] = vector * np.where(i == j, 1.0, 2**-0.5)
    return matrix
