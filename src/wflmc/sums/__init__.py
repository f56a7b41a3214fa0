"""Clipped sums of gradients whose floating-point sensitivity is proven (docs/privacy.md, Sums)."""
