"""Solvers of the power problem: Theorem 1 in closed form, an interior point, and cvxpy as reference."""
