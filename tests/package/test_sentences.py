"""Sentences as users see them: a handful, whole. All other tests check kinds, keys, codes and facts."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import wflmc
from wflmc.support.errors import (
    Fault,
    InputError,
    OverspendError,
    conflict,
    missing,
    unknown,
    wrong_length,
)

from ..error_tools import text_of

ERRORS = [
    (
        InputError("snr_db", 400.0, "at most 300", section="link"),
        "snr_db = 400.0 was given, but it must be at most 300.",
    ),
    (
        InputError("key", np.zeros((2, 3)), "one key, such as jax.random.key(0)"),
        "key is an array of type float64 and shape (2, 3), but it must be one key, "
        "such as jax.random.key(0).",
    ),
    (
        InputError("data", Fault("has no arrays"), "arrays"),
        "data has no arrays, but it must be arrays.",
    ),
    (
        InputError("link.snrdb", 3, "a known key; did you mean link.snr_db?"),
        "link.snrdb = 3 was given, but it must be a known key; did you mean "
        "link.snr_db?",
    ),
    (
        missing("--target", "with --solve-for"),
        "--target is missing, but it must be given with --solve-for.",
    ),
    (
        unknown("solver", "best", ("own", "cvxpy")),
        "solver = 'best' was given, but it must be one of own, cvxpy.",
    ),
    (
        wrong_length("clip", [1.0, 2.0], 3),
        "clip = [1.0, 2.0] was given, but it must be one number, or one for each of "
        "the 3 devices.",
    ),
    (
        conflict("--more", 3, "or given with --resume DIR"),
        "--more = 3 was given, but it must be left out or given with --resume DIR.",
    ),
    (
        OverspendError(23, 1, 0.1620421, 0.1417871),
        "Round 24 would bring device 1 to a loss of 0.162042, above its budget of "
        "0.141787: not sent.",
    ),
]


@pytest.mark.parametrize(
    ("error", "sentence"), ERRORS, ids=[str(error)[:20] for error, _ in ERRORS]
)
def test_errors_are_whole_sentences(error, sentence):
    assert str(error) == sentence


def test_commands_name_the_keys_of_scenario_files(call, scenario):
    assert call("plan", scenario, "--set", "link.snr_db=400") == (
        2,
        "",
        "wflmc: link.snr_db = 400 was given, but it must be less than or equal to "
        "300.\n",
    )


def test_usage_errors_are_whole_sentences(call):
    assert call("plan", "x.toml", "--target", "much") == (
        2,
        "",
        "wflmc: Invalid value for '--target': 'much' is not a valid float. "
        "Try --help.\n",
    )


def test_notices_are_whole_sentences():
    posterior = wflmc.gaussian_regression(jax.random.key(0), devices=4, examples=40)
    link = wflmc.Link(wflmc.channel.static(1.0))
    privacy = wflmc.Privacy(8, 0.3, 30)
    step_size = 0.1 / posterior.L
    plan = wflmc.plan(
        posterior, link, privacy, step_size=step_size, burn_in=1, samples=1
    )
    assert text_of(plan, "delta-too-large") == (
        "delta = 0.3 is above 1/4, one over the number of devices. It should be far "
        "below that."
    )
