"""Public data sets and their features: images, scattering, and what whitens them."""

from wflmc.data.sets import (
    DATA_SETS,
    Features,
    Images,
    fetch,
    find,
    load,
    mnist_features,
)

__all__ = ["DATA_SETS", "Features", "Images", "fetch", "find", "load", "mnist_features"]
