"""Grids of points, the engines that compute them and their cache.

The paper's figures are here, and studies past the paper.
"""
