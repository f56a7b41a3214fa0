"""Models of other libraries as posteriors: NumPyro, Flax and Equinox, each imported where it is used."""

from wflmc.adapters.modules import from_equinox, from_flax
from wflmc.adapters.programs import from_numpyro

__all__ = ["from_equinox", "from_flax", "from_numpyro"]
