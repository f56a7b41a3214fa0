"""`--memory`: chunks and files instead of running out, with the same results."""

from __future__ import annotations

import numpy as np
import pytest
import xarray as xr

from wflmc.cli.shared import parse_bytes

from ..cli_tools import strict
from ..error_tools import names_key, raises_input_error


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 2**32),
        ("500MB", 5e8),
        ("1e9", 1e9),
        ("2k", 2000),
        ("1.5 KiB", 1536),
        ("3gb", 3e9),
        ("7B", 7),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GiB", "0", "4 apples", "1e", "nan", "1..2MB"]
)
def test_what_is_no_size(text):
    with raises_input_error("--memory", "4GiB", value=text):
        parse_bytes(text)


def test_a_run_within_little_memory(call, scenario, tmp_path):
    """Twenty chains of 40 samples go to a file and in chunks; the result is that of a run at ease."""
    keys = ["--set", "sampler.samples=40", "--json"]
    code, out, err = call("run", scenario, *keys, "--out", tmp_path / "easy")
    assert code == 0, err
    code, tight, err = call(
        "run", scenario, *keys, "--out", tmp_path / "tight", "--memory", "2kB"
    )
    assert code == 0, err
    easy, tight = strict(out), strict(tight)
    assert tight["w2_sq"]["worst"] == pytest.approx(easy["w2_sq"]["worst"], rel=1e-3)
    assert tight["clip_rate"]["burn_in"] == pytest.approx(
        easy["clip_rate"]["burn_in"], abs=1e-3
    )
    assert tight["ess_min"] == pytest.approx(easy["ess_min"], rel=1e-2)
    theta = [
        xr.open_datatree(tmp_path / name / "trace.nc")["posterior"]["theta"].values
        for name in ("easy", "tight")
    ]
    np.testing.assert_allclose(theta[0], theta[1], rtol=1e-3, atol=1e-4)
    assert sorted(path.name for path in (tmp_path / "tight").iterdir()) == [
        "digests.json", "ledger.jsonl", "ledger.jsonl.head", "plan.json", "plan.npz", "scenario.toml", "summary.json",
        "trace.nc",
    ]  # fmt: skip


def test_too_little_memory(call, scenario):
    code, _, err = call("run", scenario, "--memory", "10B")
    assert code == 2
    assert names_key(err, "memory", "10 bytes", "one chain")
    assert call("run", scenario, "--memory", "lots")[0] == 2
