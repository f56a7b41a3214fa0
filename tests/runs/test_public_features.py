"""Scenarios with public features and kept predictions: from a file to a published one, and what is refused."""

from __future__ import annotations

import h5netcdf
import numpy as np
import pytest

from wflmc.scenario import build, load_scenario, not_covered, validate

from ..cli_tools import strict
from ..error_tools import raises_input_error

FOREIGN = """
[posterior]
model = "softmax"
devices = 4
data = "private.npz"
whiten_from = "public.npz"
whiten_ridge = 0.01
intercept = true
classes = 2
L = 40.0
initial_w2_sq = 3.0
[privacy]
epsilon = 8.0
delta = 1e-3
clip = 20.0
unit = "record"
example_clip = 0.8
adjacency = "add-remove"
[sampler]
step_size = 0.02
burn_in = 3
samples = 8
chains = 2
init = "zero"
keep = "predictions"
seed = "secret"
"""


@pytest.fixture
def scenario(tmp_path):
    generator = np.random.default_rng(0)
    X = generator.normal(size=(90, 3)) * [1, 5, 20] + 4
    y = (X[:, 0] + X[:, 1] > 8).astype(int)
    np.savez(tmp_path / "private.npz", X=X[:60], y=y[:60], X_test=X[60:], y_test=y[60:])
    np.savez(
        tmp_path / "public.npz",
        X=generator.normal(size=(80, 3)) * [1, 4, 30],
        y=np.zeros(80),
    )
    (tmp_path / "s.toml").write_text(FOREIGN)
    return tmp_path / "s.toml"


def test_public_features_from_a_file_to_a_published_one(scenario, tmp_path, call):
    code, out, err = call("run", scenario, "--out", tmp_path / "run", "--json")
    assert code == 0, err
    summary = strict(out)
    assert summary["epsilon_spent"] <= 8
    assert call("report", tmp_path / "run", "--out", tmp_path / "run.html")[0] == 0
    with h5netcdf.File(tmp_path / "run" / "trace.nc") as file:
        probability, mean = (
            file["predictions/probability"][...],
            file["posterior/mean"][0],
        )
    # The noise has no seed, so which predictions are right varies.
    right = probability.argmax(-1) == np.load(tmp_path / "private.npz")["y_test"]
    assert right.shape == (2, 30)
    assert summary["accuracy"] == pytest.approx(right.mean())
    code, _, err = call("publish", tmp_path / "run", "--out", tmp_path / "draws.nc")
    assert (code, "moments" in err) == (2, True)
    code, _, err = call(
        "publish",
        tmp_path / "run",
        "--what",
        "moments",
        "--out",
        tmp_path / "moments.nc",
    )
    assert code == 0, err
    with h5netcdf.File(tmp_path / "moments.nc") as file:
        np.testing.assert_array_equal(file["moments/mean"][...], mean)
        assert "predictions" not in file
    code, _, err = call("run", "--resume", tmp_path / "run", "--more", "5")
    assert (code, "sampler.keep" in err) == (2, True)


def test_rows_are_as_long_as_public_ones_say(scenario):
    inputs = build(load_scenario(scenario))
    features = inputs.posterior.features
    assert features.dtype == np.float32
    assert features.shape[-1] == 4
    assert np.linalg.norm(features[..., :3], axis=-1).max() <= 1 + 1e-6
    # The constant is a feature, also in the test set.
    assert inputs.posterior.intercept is False
    assert inputs.test[0].shape == (30, 4)


@pytest.mark.parametrize(
    ("change", "key", "fact"),
    [
        ({"features": "scattering", "data": "private.npz"}, "features", "mnist"),
        ({"data": "mnist", "whiten_from": "fashion-mnist"}, "whiten_from", "features"),
        ({"data": "synthetic", "whiten_from": "public.npz"}, "whiten_from", "data"),
        ({"data": "mnist", "features": "scattering", "dim": 30}, "dim", 3969),
        ({"data": "fashion-mnist", "model": "gaussian"}, "data", "posterior.model"),
    ],
)
def test_what_does_not_go_together(change, key, fact):
    with raises_input_error(f"posterior.{key}", fact):
        validate({"posterior": {"model": "softmax", **change}})


def test_no_principal_directions_are_listed_for_public_features():
    def listed(**section):
        content = {"posterior": {"model": "softmax", "data": "mnist", **section}}
        return {
            item.name
            for item in not_covered(
                validate({**content, "privacy": {"epsilon": 1.0, "delta": 1e-5}})
            )
        }

    assert listed() - listed(features="scattering", whiten_from="fashion-mnist") == {
        "the principal directions of posterior.data"
    }


def test_predictions_need_a_test_set(tmp_path, call):
    (tmp_path / "s.toml").write_text(
        '[sampler]\nkeep = "predictions"\nburn_in = 2\nsamples = 4\nchains = 2\n'
    )
    code, _, err = call("run", tmp_path / "s.toml")
    assert (code, "sampler.keep" in err) == (2, True)
