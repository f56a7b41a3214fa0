"""Solvers of the power problem: Theorem 1, an interior point method, and cvxpy."""
