"""`wflmc publish`, secret seeds, and the one list of what epsilon does not cover."""

from __future__ import annotations

import json
import re
import shutil
import stat
from dataclasses import replace

import h5netcdf
import jax
import numpy as np
import pytest

from wflmc.runs.documents import plan_document
from wflmc.runs.planning import load_plan, make_plan, plan_again
from wflmc.runs.publish import publish_run
from wflmc.scenario import build, load_scenario, not_covered, to_json, validate
from wflmc.scenario.coverage import FROM_DATA
from wflmc.support.errors import InputError

from ..cli_tools import strict
from ..conftest import FULL
from ..error_tools import missing_facts, names_key, raises_input_error, text_of
from ..report.report_tools import Page

SECRET = """
[posterior]
devices = 4
examples = 60
dim = 3
intercept = true
mu = 10.0
L = 60.0
initial_w2_sq = 3.0
[privacy]
epsilon = 8.0
delta = 0.01
clip = [30.0, 30.0, 30.0, 20.0]
[sampler]
burn_in = 3
samples = 8
chains = 2
seed = "secret"
"""


@pytest.fixture(scope="module")
def run_home(tmp_path_factory):
    return tmp_path_factory.mktemp("publish")


@pytest.fixture
def run(call, run_home, tmp_path):
    """A finished run with a secret seed, of one's own to spoil."""
    if not (run_home / "run").exists():
        (run_home / "s.toml").write_text(SECRET)
        code, _, err = call("run", run_home / "s.toml", "--out", run_home / "run")
        assert code == 0, err
    return shutil.copytree(run_home / "run", tmp_path / "run")


def edit(run, change):
    """Change plan.json."""
    plan = json.loads((run / "plan.json").read_text())
    change(plan)
    (run / "plan.json").write_text(json.dumps(plan))


def first_chain(run):
    with h5netcdf.File(run / "trace.nc") as file:
        return file["posterior"]["theta"][0].astype(float)


def values(file, group):
    with h5netcdf.File(file) as content:
        return {
            name: variable[...] for name, variable in content[group].variables.items()
        }, dict(content[group].attrs)


def test_moments_and_predictions_follow_from_the_first_chain(run, tmp_path, call):
    theta = first_chain(run)
    publish_run(run, tmp_path / "m.nc", kind="moments")
    published, attributes = values(tmp_path / "m.nc", "moments")
    np.testing.assert_allclose(published["mean"], theta.mean(0))
    np.testing.assert_allclose(published["covariance"], np.cov(theta.T))
    assert (attributes["unit"], attributes["adjacency"], attributes["accountant"]) == (
        "device",
        "replace",
        "exact",
    )

    X = np.random.default_rng(0).normal(size=(5, 3))
    np.savez(tmp_path / "x.npz", X=X)
    np.save(tmp_path / "x.npy", X)
    for number, name in enumerate(("x.npz", "x.npy")):
        publish_run(
            run,
            tmp_path / f"p{number}.nc",
            kind="predictions",
            features=tmp_path / name,
        )
        published, _ = values(tmp_path / f"p{number}.nc", "predictions")
        draws_of_mean = np.c_[X, np.ones(5)] @ theta.T
        np.testing.assert_allclose(published["mean"], draws_of_mean.mean(1))
        np.testing.assert_allclose(published["variance"], 1 + draws_of_mean.var(1))

    # With these two classes, each has two of the four numbers.
    edit(run, lambda plan: plan.update(classes=["no", "yes"]))
    code, out, err = call(
        "publish",
        run,
        "--what",
        "predictions",
        "--features",
        tmp_path / "x.npy",
        "--out",
        tmp_path / "c.nc",
    )
    assert (code, out) == (2, "")
    assert names_key(err, "--features", "rows of 1")
    np.save(tmp_path / "one.npy", X[:, :1])
    publish_run(
        run, tmp_path / "c.nc", kind="predictions", features=tmp_path / "one.npy"
    )
    published, attributes = values(tmp_path / "c.nc", "predictions")
    logits = np.einsum(
        "nd,scd->snc", np.c_[X[:, :1], np.ones(5)], theta.reshape(-1, 2, 2)
    )
    odds = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(published["probability"], odds.mean(0))
    assert json.loads(attributes["classes"]) == ["no", "yes"]


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (
            lambda plan: plan["scenario"].update(policy={"power": "no-dp"}),
            "policy.power = 'no-dp'",
        ),
        (lambda plan: plan["privacy"].update(spent=None), "clips"),
        (
            lambda plan: plan["scenario"]["privacy"].update(epsilon=None, delta=None),
            "privacy.epsilon",
        ),
        (
            lambda plan: plan["privacy"].update(spent_before=[0.0, 0.0, 99.0, 0.0]),
            "spent",
        ),
        (lambda plan: plan.pop("privacy"), "plan.json"),
        (lambda plan: plan.pop("not_covered"), "not_covered"),
    ],
)
def test_no_promise_no_file(run, tmp_path, change, fact):
    edit(run, change)
    with raises_input_error("RUN", fact):
        publish_run(run, tmp_path / "draws.nc")
    assert not (tmp_path / "draws.nc").exists()


def test_what_cannot_be_published(run, tmp_path, call):
    target = tmp_path / "draws.nc"
    for options, key, fact in (
        ({"chains": 3}, "--chains", "3 times"),
        ({"chains": 0}, "--chains", 1),
        ({"kind": "keys"}, "--what", "draws, predictions, moments"),
        ({"kind": "predictions"}, "--features", "missing"),
        (
            {"kind": "predictions", "features": run / "nothing"},
            "--features",
            run / "nothing",
        ),
        ({"features": run / "plan.json"}, "--features", "--what"),
        (
            {"kind": "predictions", "features": run / "plan.json"},
            "--features",
            "npy",
        ),
    ):
        with raises_input_error(key, fact) as caught:
            publish_run(run, target, **options)
        if options == {"chains": 3}:
            (epsilon,) = re.findall(r"ε = ([\d.]+)", str(caught.value))
            assert 10 < float(epsilon) < 20
    for name in ("draws.csv", "nowhere/draws.nc"):
        with raises_input_error("--out", ".nc"):
            publish_run(run, tmp_path / name)
    with raises_input_error("--out", run / "trace.nc"):
        publish_run(run, run / "trace.nc")
    (run / ".checkpoint").mkdir()
    (run / ".checkpoint" / "about.json").write_text("{}")
    code, _, err = call("publish", run, "--out", target)
    assert (code, target.exists()) == (2, False)
    assert names_key(err, "RUN", f"wflmc run --resume {run}")
    code, _, err = call("publish", tmp_path, "--out", target)
    assert code == 2
    assert names_key(err, "RUN", "plan.json", "summary.json", "trace.nc")


def test_statement_as_json(run, tmp_path, call):
    code, out, err = call("publish", run, "--out", tmp_path / "draws.nc", "--json")
    assert (code, err) == (0, "")
    statement = strict(out)
    assert (
        statement["epsilon"],
        statement["delta"],
        statement["what"],
        statement["not_covered"],
    ) == (
        8.0,
        0.01,
        "draws",
        [],
    )
    assert "(ε, δ) = (8, 0.01)" in statement["promise"]
    assert statement["file"] == str(tmp_path / "draws.nc")


def test_a_secret_key_lives_as_long_as_the_run(tmp_path, call, monkeypatch):
    """Its owner alone reads it, the run goes on with it, and nothing else ever has it; added rounds have another."""
    from wflmc.runs import execution as module
    from wflmc.sampling import chunks

    monkeypatch.setattr(chunks, "BLOCK_WORK", 1)
    scenario = tmp_path / "s.toml"
    folder = tmp_path / "o"
    whole = module.sample
    keys = []
    # Leaves budget for more rounds.
    scenario.write_text(SECRET.replace("epsilon = 8.0", "epsilon = 500.0"))
    secret = folder / ".checkpoint" / "secret"

    def watched(key, *arguments, execution, **keywords):
        keys.append(np.asarray(jax.random.key_data(key)).tobytes())

        def stop(done, work):
            if len(keys) == 1 and done > work / 2:
                raise InputError("stop", done, "what this test does")

        return whole(
            key, *arguments, **keywords, execution=replace(execution, progress=stop)
        )

    monkeypatch.setattr(module, "sample", watched)
    assert call("run", scenario, "--out", folder)[0] == 2
    assert stat.S_IMODE(secret.stat().st_mode) & 0o077 == 0
    assert secret.read_bytes() == keys[0]
    begun = np.load(folder / ".checkpoint" / "theta.npy")[:2].copy()

    code, _, err = call("run", scenario, "--out", folder)
    assert code == 0, err
    assert keys[1] == keys[0]
    np.testing.assert_array_equal(first_chain(folder)[:2], begun[:, 0])
    assert not secret.parent.exists()
    assert 'seed = "secret"' in (folder / "scenario.toml").read_text()

    code, _, err = call("run", "--resume", folder, "--more", "2")
    assert code == 0, err
    assert keys[2] != keys[0]
    content = b"".join(path.read_bytes() for path in folder.iterdir())
    assert not [key for key in keys if key in content or key.hex().encode() in content]
    with h5netcdf.File(folder / "trace.nc") as file:
        assert not {"key", "seed"} & set(file["posterior"].attrs)


def test_without_its_key_a_run_does_not_go_on(tmp_path, call, monkeypatch):
    from wflmc.runs import execution as module

    scenario, folder = tmp_path / "s.toml", tmp_path / "o"
    scenario.write_text(SECRET)

    def stop(*_, **__):
        raise InputError("stop", "here", "what this test does")

    with monkeypatch.context() as patch:
        patch.setattr(module, "sample", stop)
        call("run", scenario, "--out", folder)
    (folder / ".checkpoint" / "secret").unlink()
    code, _, err = call("run", "--resume", folder)
    assert code == 2
    assert names_key(err, "--resume", folder / ".checkpoint" / "secret")


def test_a_sweep_needs_a_number(tmp_path, call):
    (tmp_path / "s.toml").write_text(SECRET)
    arguments = (
        "--grid",
        "link.snr_db=10,20",
        "--out",
        tmp_path / "o",
        "--cache",
        tmp_path / "c",
    )
    code, _, err = call("sweep", tmp_path / "s.toml", *arguments)
    assert code == 2
    assert names_key(err, "sampler.seed", "secret", "sweep")
    assert not (tmp_path / "o").exists()


def test_a_simulated_federation_needs_a_number(tmp_path, call):
    pytest.importorskip("flwr", reason="pip install 'wflmc[flower]'")
    (tmp_path / "s.toml").write_text(SECRET)
    code, _, err = call(
        "federate", tmp_path / "s.toml", "--runtime", "process", "--out", tmp_path / "o"
    )
    assert code == 2
    assert names_key(err, "sampler.seed", "secret", "--noise channel")


def test_the_release_that_whitens_has_secret_noise_too(tmp_path):
    """The key of the run decides it, and a plan of such a run is not repeated without it."""
    (tmp_path / "s.toml").write_text(
        SECRET.replace("mu =", 'preconditioner = "private-whiten"\nmu =')
    )
    scenario = load_scenario(tmp_path / "s.toml")
    keys = jax.random.split(jax.random.key(0))
    first, again, other = (build(scenario, key) for key in (keys[0], keys[0], keys[1]))
    np.testing.assert_array_equal(first.release.matrix, again.release.matrix)
    assert first.release.noise == again.release.noise != other.release.noise
    assert not np.allclose(first.release.matrix, other.release.matrix)
    assert not np.allclose(
        build(scenario).release.matrix, build(scenario).release.matrix
    )
    plan = make_plan(scenario, first)
    plan.save(tmp_path / "plan.npz")
    (tmp_path / "plan.json").write_text(
        to_json(plan_document(scenario, first, plan, 0.0))
    )
    assert load_plan(tmp_path, keys[0]).inputs.posterior.L == first.posterior.L
    with raises_input_error("--plan: sampler.seed", "private-whiten"):
        load_plan(tmp_path)
    with raises_input_error("--plan: sampler.seed", "private-whiten"):
        plan_again(tmp_path / "plan.json")


def listed(**sections):
    """Names of what a published file would rest on."""
    base = {
        "posterior": {"mu": 1.0, "L": 2.0, "initial_w2_sq": 1.0},
        "privacy": {"epsilon": 1.0, "delta": 0.1},
    }
    base["sampler"] = {"seed": "secret", "chains": 1}
    content = {
        name: {**base.get(name, {}), **sections.get(name, {})}
        for name in {*base, *sections}
    }
    return [item.name for item in not_covered(validate(content)) if item.published]


@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({}, None),
        ({"posterior": {"model": "softmax", "data": "mnist"}}, FROM_DATA[0]),
        ({"posterior": {"model": "softmax", "data": "x.npz"}}, "posterior.classes"),
        (
            {"posterior": {"model": "softmax", "data": "x.csv", "examples": 9}},
            "posterior.classes",
        ),
        (
            {"posterior": {"model": "softmax", "data": "x.csv", "classes": 3}},
            "posterior.examples",
        ),
        ({"posterior": {"data": "x.csv"}}, "posterior.examples"),
        (
            {
                "posterior": {
                    "model": "softmax",
                    "data": "x.csv",
                    "examples": 9,
                    "classes": 3,
                }
            },
            None,
        ),
        ({"posterior": {"model": "softmax", "data": "x.npz", "classes": 3}}, None),
        ({"posterior": {"model": "softmax"}}, None),
        ({"posterior": {"partition": "by-label"}}, "posterior.partition"),
        ({"posterior": {"partition": "dirichlet:0.5"}}, "posterior.partition"),
        ({"posterior": {"partition": "blocks"}}, None),
        ({"posterior": {"preconditioner": "whiten"}}, "posterior.preconditioner"),
        ({"posterior": {"preconditioner": "private-whiten"}}, None),
        ({"posterior": {"mu": 0.0}}, "posterior.mu"),
        ({"posterior": {"L": 0.0}}, "posterior.L"),
        ({"posterior": {"initial_w2_sq": 0.0}}, "posterior.initial_w2_sq"),
        ({"sampler": {"burn_in": "auto"}}, "sampler.burn_in"),
        ({"link": {"downlink_snr_db": 10.0}}, "the effect of link.downlink_snr_db"),
        ({"policy": {"objective": "exact"}}, "policy.objective"),
        ({"sampler": {"seed": 2**32 - 1}}, "sampler.seed"),
        ({"sampler": {"seed": 0}, "privacy": {"epsilon": None, "delta": None}}, None),
    ],
)
def test_each_thing_that_a_published_file_would_rest_on(sections, name):
    assert listed(**sections) == ([] if name is None else [name])


def test_the_list_is_the_same_wherever_it_is_shown(run, run_home, call):
    plan, summary = (
        json.loads((run / f"{name}.json").read_text()) for name in ("plan", "summary")
    )
    names = [item["name"] for item in plan["not_covered"]]
    assert names == ["clip rates", "exact law", "chains", "refusals"]
    assert summary["not_covered"] == plan["not_covered"]
    assert next(iter(summary)) == "owner_only"
    assert call("report", run)[0] == 0
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    assert all(item["text"] in page.text for item in plan["not_covered"])
    assert page.text.index("owner") < page.text.index("Results of wflmc run")


def test_what_a_plan_has_settled_stays_on_its_list(tmp_path, plan_of):
    (tmp_path / "s.toml").write_text(
        SECRET.replace("burn_in = 3", 'burn_in = "auto"\nmax_burn_in = 200')
    )
    document = plan_of(tmp_path / "s.toml")
    assert "sampler.burn_in" in text_of(document, "data-constants")
    # As a run leaves it.
    document["scenario"]["sampler"]["burn_in"] = document["constants"]["burn_in"]
    (tmp_path / "plan.json").write_text(json.dumps(document))
    inputs = plan_again(tmp_path / "plan.json").inputs
    assert "sampler.burn_in" in [
        item.name for item in inputs.not_covered if item.published
    ]


def test_a_target_by_the_exact_law_is_on_the_list(tmp_path, call):
    (tmp_path / "s.toml").write_text(SECRET)
    solve_options = ("--solve-for", "privacy.epsilon", "--target", "1.0", "--metric")
    for metric, expected in (("exact", ["--solve-for privacy.epsilon"]), ("bound", [])):
        _, out, _ = call(
            "plan",
            tmp_path / "s.toml",
            *solve_options,
            metric,
            "--no-compare",
            "--json",
        )
        assert [
            item["name"] for item in strict(out)["not_covered"] if item["published"]
        ] == expected


def test_declared_classes(tmp_path, plan_of):
    """The number of parameters is that of the declared labels, whatever the data have."""
    generator = np.random.default_rng(0)
    rows = [
        f"{a:.3f},{b:.3f},{label}"
        for (a, b), label in zip(generator.normal(size=(40, 2)), "ab" * 20, strict=True)
    ]
    (tmp_path / "x.csv").write_text("\n".join(rows))
    (tmp_path / "s.toml").write_text(
        '[posterior]\nmodel = "softmax"\ndata = "x.csv"\ndevices = 4\nclasses = ["c", "b", "a"]\n[privacy]\n'
        "epsilon = 1.0\ndelta = 1e-3\n"
    )
    document = plan_of(tmp_path / "s.toml")
    assert (document["classes"], document["constants"]["dim"]) == (["c", "b", "a"], 6)
    assert "posterior.classes" not in " ".join(document["warnings"])
    assert not missing_facts(text_of(document, "empty-classes"), ("1 of 3",))


def test_warnings_about_public_constants_tell_no_private_ones(tmp_path, plan_of, call):
    (tmp_path / "s.toml").write_text(SECRET.replace("L = 60.0", "L = 11.0"))
    path = tmp_path / "s.toml"
    raw = validate(
        {"posterior": {"devices": 4, "examples": 60, "dim": 3, "intercept": True}}
    )
    private = build(raw).posterior
    document = plan_of(path)
    warnings = " ".join(document["warnings"])
    assert "posterior.L = 11" in text_of(document, "constant-too-small")
    assert f"{private.L:.3g}" not in warnings
    code, _, err = call(
        "plan", path, "--set", "posterior.L=0.0", "--set", "posterior.mu=1e6"
    )
    assert code == 2
    assert "at most L" in err
    assert f"{private.L:.3g}" not in err


def test_a_secret_run_is_not_overwritten(tmp_path, call):
    (tmp_path / "s.toml").write_text(SECRET)
    command = ("run", tmp_path / "s.toml", "--out", tmp_path / "o")
    assert call(*command)[0] == 0
    before = (tmp_path / "o" / "trace.nc").read_bytes()
    code, _, err = call(*command)
    assert (code, (tmp_path / "o" / "trace.nc").read_bytes()) == (2, before)
    assert names_key(err, "--out", "secret", "--ledger")


@pytest.mark.parametrize(
    "preconditioner", ["private-whiten", *(["none"] if FULL else [])]
)
def test_noise_of_a_lattice_can_be_published(tmp_path, call, preconditioner):
    """That of the release that whitens as well: anybody may know the scenario's seeds."""
    pytest.importorskip("flwr", reason="pip install 'wflmc[flower]'")
    text = SECRET.replace('seed = "secret"', "seed = 3")
    text = text.replace("mu =", f'preconditioner = "{preconditioner}"\nmu =')
    (tmp_path / "s.toml").write_text(text)
    seeded = build(load_scenario(tmp_path / "s.toml")).release
    for noise in ("channel", "simulated"):
        folder = tmp_path / noise
        arguments = ("--runtime", "process", "--noise", noise, "--out", folder)
        code, _, err = call("federate", tmp_path / "s.toml", *arguments)
        assert code == 0, err
        listed = [
            item["name"]
            for item in json.loads((folder / "plan.json").read_text())["not_covered"]
        ]
        assert ("sampler.seed" in listed) == (noise == "simulated")
        if seeded is not None:
            model = folder / "federation" / "device-0" / "model.json"
            matrix = json.loads(model.read_text())["whitening"]
            assert np.allclose(matrix, seeded.matrix) == (noise == "simulated")
        target = tmp_path / f"{noise}.nc"
        code, out, err = call(
            "publish", folder, "--out", target, "--accept-not-covered", "--json"
        )
        assert code == 0, err
        statement = strict(out)
        assert ("on a lattice" in statement["assumes"]) == (noise == "channel")
        assert ("can be guessed, it holds for nobody" in statement["promise"]) == (
            noise == "simulated"
        )
