"""Solvers of the power problem: Theorem 1 in closed form, water-filling, an interior point, and cvxpy as reference."""
