"""Models of other libraries as posteriors: NumPyro, Flax and Equinox, each imported where it is used."""
