"""Models of NumPyro, Flax and Equinox as posteriors, each imported where it is used."""
