"""Linear recursions of short vectors, all steps at once, against a loop."""

from __future__ import annotations

import numpy as np
import pytest

from wflmc.support.recursion import BlockRecursion


def by_steps(matrix, increments, start, counts):
    """x[s+1] = A[s] x[s] + b[s], with A[g, S, n, n], b[i, S, n] and x[0] of [i, n]."""
    groups = np.repeat(np.arange(len(counts)), counts)
    path = [start]
    for s in range(increments.shape[1]):
        path.append(
            np.einsum("irc,ic->ir", matrix[groups, s], path[-1]) + increments[:, s]
        )
    return np.stack(path, axis=1)


def entries_of(matrix):
    size = matrix.shape[-1]
    return [[matrix[..., row, column] for column in range(size)] for row in range(size)]


def solved(matrix, increments, start, counts):
    recursion = BlockRecursion(counts, increments.shape[1], increments.shape[2])
    return recursion.solve(
        entries_of(matrix), list(np.moveaxis(increments, -1, 0)), start
    )


@pytest.mark.parametrize("steps", [1, 2, 50])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [2, 1, 3]])
def test_block_recursion_against_a_loop(counts, size, steps):
    rng = np.random.default_rng(size)
    matrix = rng.uniform(-0.5, 0.5, (len(counts), steps, size, size))
    increments = rng.standard_normal((sum(counts), steps, size))
    start = rng.standard_normal((sum(counts), size))
    actual = solved(matrix, increments, start, counts)
    np.testing.assert_allclose(
        actual, by_steps(matrix, increments, start, counts), rtol=1e-12, atol=1e-13
    )


def test_a_recursion_that_is_solved_again_has_forgotten_the_last_one():
    rng = np.random.default_rng(0)
    recursion = BlockRecursion([1, 1], 20, 1)
    for _ in range(2):
        matrix = rng.uniform(-0.9, 0.9, (2, 20, 1, 1))
        increments = rng.standard_normal((2, 20, 1))
        start = rng.standard_normal((2, 1))
        actual = recursion.solve([[matrix[..., 0, 0]]], [increments[..., 0]], start)
        np.testing.assert_allclose(
            actual, by_steps(matrix, increments, start, [1, 1]), rtol=1e-12, atol=1e-13
        )


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 2]])
def test_a_sequence_that_overflows_leaves_the_others_alone(counts):
    matrix = np.full((len(counts), 400, 1, 1), 0.5)
    matrix[0] = 10.0
    increments = np.ones((3, 400, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        actual = solved(matrix, increments, np.ones((3, 1)), counts)
        expected = by_steps(matrix, increments, np.ones((3, 1)), counts)
    assert not np.isfinite(actual[0, -1, 0])
    np.testing.assert_allclose(actual[1:], expected[1:], rtol=1e-12)
