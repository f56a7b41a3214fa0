"""Kinetic dynamics by the command line."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc.support.errors import InputError

from ..cli_tools import strict
from ..error_tools import names_key, text_of
from ..sampling.kinetic_tools import kinetic_plan

SCENARIO = """
[posterior]
devices = 6
examples = 120
[link]
fading = "static"
power = 1.0
snr_db = 60.0
[privacy]
epsilon = 1000.0
delta = 0.01
[sampler]
dynamics = "kinetic"
friction = "2*mu**0.5"
burn_in = 6
samples = 5
chains = 20
[policy]
power = "equal"
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kinetic.toml"
    path.write_text(SCENARIO)
    return path


def test_plan_command(plan_of, call, file, tmp_path):
    document = plan_of(file)
    constants = document["constants"]
    assert constants["step_size"] == pytest.approx(constants["L"] ** -0.5)
    assert constants["friction"] == pytest.approx(2 * constants["mu"] ** 0.5)
    assert constants["dynamics"] == "kinetic"
    assert [
        document[name] for name in ("bound", "objective", "lower_bound", "gap")
    ] == [None] * 4
    assert constants["initial_w2_sq"] > 0
    assert len(document["exact_w2_sq"]) == 11
    assert (
        plan_of(file, "--set", "sampler.friction=7.5")["constants"]["friction"] == 7.5
    )
    assert (
        plan_of(file, "--set", "sampler.step_size=0.01")["constants"]["step_size"]
        == 0.01
    )
    assert plan_of(file, "--set", "sampler.burn_in=auto")["constants"]["burn_in"] > 0
    idle = plan_of(file, "--set", "sampler.dynamics=overdamped")
    assert "friction" not in idle["constants"]
    assert text_of(idle, "no-effect").startswith("sampler.friction ")
    code, out, _ = call("plan", file, "--plot", tmp_path / "plan.png")
    assert code == 0
    assert "kinetic dynamics" in out
    assert (tmp_path / "plan.png").exists()
    for arguments, key in (
        (("--set", "policy.power=optimized"), "policy.objective"),
        (("--set", "sampler.step_size=1.0"), "sampler.step_size"),
        (("--set", "sampler.friction=-1"), "sampler.friction"),
        (("--set", "sampler.friction=mu-mu"), "sampler.friction"),
        (("--set", "sampler.friction=nu"), "sampler.friction"),
        (("--solve-for", "link.snr_db", "--target", "1"), "--metric"),
    ):
        code, _, err = call("plan", file, *arguments)
        assert code == 2
        assert names_key(err, key), err
    code, out, _ = call(
        "plan",
        file,
        "--solve-for",
        "link.snr_db",
        "--target",
        "0.5",
        "--metric",
        "exact",
        "--json",
    )
    assert code == 0
    assert strict(out)["solve_for"]["reachable"]


def samples_in(folder):
    import h5netcdf

    with h5netcdf.File(folder / "trace.nc") as content:
        return content["posterior"]["theta"][...], content["sample_stats"][
            "last_velocity"
        ][...]


def test_run_command_goes_on_as_if_it_had_never_ended(
    call, file, tmp_path, monkeypatch
):
    """At its caps a plan has the same gains whatever the number of rounds: more rounds are those of a longer run."""
    from wflmc.runs import execution

    caps = ("--set", "policy.power=no-dp")
    assert (
        call(
            "run",
            file,
            *caps,
            "--out",
            tmp_path / "long",
            "--set",
            "sampler.samples=12",
        )[0]
        == 0
    )
    folder = tmp_path / "short"
    assert call("run", file, *caps, "--out", folder)[0] == 0
    whole = execution.sample

    def crash(*_, **__):
        raise InputError("stop", "here", "what this test does")

    # Stopped after its trace was written, before its checkpoint was removed.
    with monkeypatch.context() as patch:
        patch.setattr(execution.shutil, "rmtree", crash)
        assert call("run", "--resume", folder, "--more", "7")[0] == 2
    assert samples_in(folder)[0].shape[1] == 12
    assert (folder / ".checkpoint").exists()
    code, out, err = call("run", "--resume", folder, "--json")
    assert code == 0, err
    assert strict(out)["w2_sq"] is not None
    for ours, theirs in zip(
        samples_in(folder), samples_in(tmp_path / "long"), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert execution.sample is whole


def test_a_saved_plan_is_run_as_it_stands(call, file, tmp_path):
    _, out, _ = call("plan", file, "--json")
    (tmp_path / "plan.json").write_text(out)
    assert (
        call("run", "--plan", tmp_path / "plan.json", "--out", tmp_path / "saved")[0]
        == 0
    )
    assert call("run", file, "--out", tmp_path / "direct")[0] == 0
    for ours, theirs in zip(
        samples_in(tmp_path / "saved"), samples_in(tmp_path / "direct"), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    again = json.loads((tmp_path / "saved" / "plan.json").read_text())
    assert again["constants"]["friction"] == strict(out)["constants"]["friction"]
    summary = json.loads((tmp_path / "saved" / "summary.json").read_text())
    assert not [text for text in summary["warnings"] if "bound" in text]


def test_softmax_chains_move_too():
    """Any model: only the law is Gaussian's."""
    posterior = wflmc.softmax_regression(jax.random.key(0), 4, examples=60, dim=2)
    plan = kinetic_plan(
        posterior,
        "equal",
        privacy=wflmc.Privacy(clip=50.0),
        initial_w2_sq=1.0,
        samples=3,
    )
    trace = wflmc.sample(jax.random.key(1), posterior, plan, 5)
    assert jnp.all(jnp.isfinite(trace.theta))
    assert wflmc.evaluate(trace, posterior).bound is None
