"""Grids of points, the engines that compute them and their cache; the paper's figures,
and studies past the paper."""
