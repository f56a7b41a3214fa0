"""Scenarios whose prior is fitted to public rows: from files to runs, federations and published draws."""

from __future__ import annotations

import os

import h5netcdf
import numpy as np
import pytest

from wflmc.scenario import build, load_scenario, validate

from ..cli_tools import strict
from ..error_tools import raises_input_error

SCENARIO = """
[posterior]
model = "softmax"
devices = 4
data = "private.npz"
prior_from = "public.npz"
prior_std = 0.5
intercept = true
classes = 2
L = 400.0
initial_w2_sq = 3.0
[privacy]
epsilon = 8.0
delta = 1e-3
clip = 20.0
[sampler]
step_size = 0.002
burn_in = 4
samples = 6
chains = 2
init = "prior-mean"
seed = "secret"
"""
COLUMNS = ("age", "dose", "weight")


def draw_rows(generator, count):
    X = generator.normal(size=(count, 3))
    y = (X @ [2.0, -1.0, 0.5] + 0.5 + generator.logistic(size=count) > 0).astype(int)
    return X, y


@pytest.fixture
def scenario(tmp_path):
    generator = np.random.default_rng(0)
    for name, count in (("private", 80), ("public", 300)):
        X, y = draw_rows(generator, count)
        np.savez(tmp_path / f"{name}.npz", X=X, y=y)
    (tmp_path / "s.toml").write_text(SCENARIO)
    return tmp_path / "s.toml"


def write_csv(path, columns, X, y):
    lines = [",".join([*columns, "y"])]
    lines += [
        ",".join(map(str, [*row, label])) for row, label in zip(X, y, strict=True)
    ]
    path.write_text("\n".join(lines) + "\n")


def test_the_prior_is_the_mode_on_the_public_rows(scenario, tmp_path):
    sklearn = pytest.importorskip("sklearn.linear_model")
    posterior = build(load_scenario(scenario)).posterior
    with np.load(tmp_path / "public.npz") as public:
        X = np.column_stack([public["X"], np.ones(300)])
        # Two classes with a prior N(0, s²) each differ by N(0, 2 s²).
        fit = sklearn.LogisticRegression(
            C=2 * 0.5**2, fit_intercept=False, tol=1e-8, max_iter=1000
        ).fit(X, public["y"])
    expected = np.array([-0.5, 0.5])[:, None] * fit.coef_
    mean = posterior.prior_mean.reshape(2, 4)
    np.testing.assert_allclose(mean, expected, atol=1e-3)
    zero = build(load_scenario(scenario, ["posterior.prior_from="])).posterior
    assert zero.prior_mean is None


def test_a_run_stores_its_prior_and_publishes_its_draws(scenario, tmp_path, call):
    run = tmp_path / "run"
    code, out, err = call("run", scenario, "--out", run, "--json")
    assert code == 0, err
    assert strict(out)["epsilon_spent"] <= 8
    posterior = build(load_scenario(scenario)).posterior
    with np.load(run / "prior.npz") as prior:
        np.testing.assert_array_equal(prior["mean"], posterior.prior_mean)
        assert (prior["std"], prior["source"]) == (0.5, "public.npz")
        assert prior["prior_on"] == "parameters"
        digest = str(prior["sha256"])
    plan = strict((run / "plan.json").read_text())
    assert plan["files"] == {"posterior.prior_from": digest}
    page = tmp_path / "run.html"
    assert call("report", run, "--out", page)[0] == 0
    text = page.read_text(encoding="utf-8")
    assert "public.npz" in text
    distance = strict((run / "summary.json").read_text())["prior_distance"]
    assert 0 < distance < 5
    assert f'data-key="summary.prior_distance" data-value="{distance}"' in text
    code, _, err = call("publish", run, "--out", tmp_path / "draws.nc")
    assert code == 0, err
    with h5netcdf.File(tmp_path / "draws.nc") as file:
        assert file["posterior/theta"].shape == (1, 6, 8)
        text = str(dict(file.attrs))
    assert digest not in text


def test_a_plan_of_other_public_rows_is_refused(scenario, tmp_path, call):
    folder = tmp_path / "plan"
    assert call("plan", scenario, "--out", folder)[0] == 0
    X, y = draw_rows(np.random.default_rng(9), 40)
    np.savez(tmp_path / "public.npz", X=X, y=y)
    code, _, err = call("run", "--plan", folder, "--out", tmp_path / "run")
    assert (code, "posterior.prior_from" in err) == (2, True)


def test_private_rows_are_not_taken_for_public_ones(scenario):
    change = 'posterior.whiten_from=["public.npz", "private.npz"]'
    with raises_input_error("whiten_from", "private.npz", section="posterior"):
        build(load_scenario(scenario, [change]))


def test_columns_are_matched_by_name(tmp_path):
    generator = np.random.default_rng(1)
    X, y = draw_rows(generator, 60)
    write_csv(tmp_path / "private.csv", COLUMNS, X[:20], y[:20])
    write_csv(tmp_path / "public.csv", COLUMNS, X[20:], y[20:])
    order = [2, 0, 1]
    reordered = [COLUMNS[i] for i in order]
    write_csv(tmp_path / "other_order.csv", reordered, X[20:, order], y[20:])
    renamed = ("age", "dose", "size")
    write_csv(tmp_path / "renamed.csv", renamed, X[20:], y[20:])

    def prior_mean(public):
        section = {
            "data": str(tmp_path / "private.csv"),
            "prior_from": str(tmp_path / public),
            "devices": 2,
        }
        return build(validate({"posterior": section})).posterior.prior_mean

    np.testing.assert_allclose(
        prior_mean("other_order.csv"), prior_mean("public.csv"), rtol=1e-12
    )
    with raises_input_error("prior_from", "size", section="posterior"):
        prior_mean("renamed.csv")


def test_features_that_whiten_need_no_labels(tmp_path):
    """Columns are matched by name; y may be missing, or be text."""
    generator = np.random.default_rng(6)
    X, y = draw_rows(generator, 60)
    write_csv(tmp_path / "private.csv", COLUMNS, X[:20], y[:20])
    order = [2, 0, 1]
    words = np.where(y > 0, "yes", "no")
    write_csv(tmp_path / "words.csv", [COLUMNS[i] for i in order], X[:, order], words)
    lines = (tmp_path / "words.csv").read_text().splitlines()
    unlabelled = "\n".join(line.rpartition(",")[0] for line in lines)
    (tmp_path / "unlabelled.csv").write_text(unlabelled + "\n")
    (tmp_path / "bare.csv").write_text("\n".join(unlabelled.split("\n")[1:]) + "\n")
    np.savez(tmp_path / "features.npz", X=X)

    def features(*public):
        section = {
            "data": str(tmp_path / "private.csv"),
            "whiten_from": [str(tmp_path / name) for name in public],
            "devices": 2,
        }
        return build(validate({"posterior": section})).posterior.features

    expected = features("features.npz")
    for name in ("words.csv", "unlabelled.csv"):
        np.testing.assert_allclose(features(name), expected, atol=1e-5)
    # Without names, columns are taken in their order.
    assert not np.allclose(features("bare.csv"), expected, atol=0.1)
    write_csv(tmp_path / "other.csv", ("age", "dose", "size"), X, y)
    np.savez(tmp_path / "huge.npz", X=1e30 * X)
    np.savez(tmp_path / "wide.npz", X=np.ones((5, 4)))
    for name, facts in {
        "other.csv": ("size",),
        "huge.npz": (),
        "wide.npz": (3, 4),
        "missing.csv": ("missing.csv",),
    }.items():
        with raises_input_error("whiten_from", *facts, section="posterior"):
            features("features.npz", name)


def test_fits_of_absurd_size_are_refused(tmp_path):
    """Chains would start where products with features overflow."""
    X, _ = draw_rows(np.random.default_rng(8), 30)
    np.savez(tmp_path / "private.npz", X=X, y=X[:, 0])
    np.savez(tmp_path / "public.npz", X=1e-3 * X, y=3e12 * X[:, 1])
    section = {"data": str(tmp_path / "private.npz"), "prior_std": 1e6}
    section |= {"prior_from": str(tmp_path / "public.npz"), "devices": 2}
    with raises_input_error("prior_from", "1e+09", section="posterior"):
        build(validate({"posterior": section}))


def test_columns_that_are_repeated_are_refused(tmp_path):
    X, y = draw_rows(np.random.default_rng(7), 30)
    write_csv(tmp_path / "private.csv", ("a", "b", "c"), X[:10], y[:10])
    write_csv(tmp_path / "public.csv", ("a", "b", "a"), X, y)
    section = {"data": str(tmp_path / "private.csv"), "devices": 2}
    section["prior_from"] = str(tmp_path / "public.csv")
    with raises_input_error("prior_from", "a", section="posterior"):
        build(validate({"posterior": section}))


def test_a_folder_keeps_no_prior_of_an_earlier_run(scenario, tmp_path, call):
    run = tmp_path / "run"
    quick = ("--set", "sampler.seed=1", "--set", "sampler.samples=2")
    assert call("run", scenario, "--out", run, *quick)[0] == 0
    assert (run / "prior.npz").exists()
    without = ("--set", "posterior.prior_from=", "--set", "sampler.init=zero")
    other_seed = ("--set", "sampler.seed=2", "--set", "sampler.samples=2")
    code, _, err = call("run", scenario, "--out", run, *other_seed, *without)
    assert code == 0, err
    assert not (run / "prior.npz").exists()


def test_noise_aware_draws_know_the_mean_of_the_prior(tmp_path, call):
    """Unless the public moments have another one."""
    generator = np.random.default_rng(10)
    for name, count in (("private", 60), ("public", 40)):
        X, _ = draw_rows(generator, count)
        np.savez(tmp_path / f"{name}.npz", X=X, y=X @ [30.0, -20.0, 10.0])
    text = SCENARIO.replace('model = "softmax"', "").replace("classes = 2", "mu = 1.0")
    text = text.replace("[sampler]", "[sampler]\ntranscript = true")
    text = text.replace("chains = 2", "chains = 1")
    (tmp_path / "g.toml").write_text(text)
    run = tmp_path / "run"
    code, _, err = call("run", tmp_path / "g.toml", "--out", run)
    assert code == 0, err
    posterior = build(load_scenario(tmp_path / "g.toml")).posterior
    prior = np.asarray(posterior.prior_precision)
    moments = {"gram": 60 * np.eye(4), "prior": prior, "examples": 60}
    linear = prior @ posterior.prior_mean
    means = {}
    for name, added in {
        "of the run": {},
        "the same": {"prior_linear": linear},
        "zero": {"prior_linear": 0 * linear},
    }.items():
        np.savez(tmp_path / "moments.npz", **moments, **added)
        published = tmp_path / f"{len(means)}.nc"
        options = ("--what", "noise-aware", "--features", tmp_path / "moments.npz")
        code, _, err = call("publish", run, *options, "--out", published)
        assert code == 0, err
        with h5netcdf.File(published) as file:
            means[name] = file["posterior/theta"][0].mean(0)
    np.testing.assert_allclose(means["of the run"], means["the same"], rtol=1e-5)
    assert np.abs(means["of the run"] - means["zero"]).max() > 1


def test_the_deviation_of_a_prior_may_be_left_out(scenario, call):
    scenario.write_text(SCENARIO.replace("prior_std = 0.5\n", ""))
    code, out, err = call("plan", scenario)
    assert code == 0, err
    assert "public.npz" in out


def test_public_rows_are_whitened_as_the_data_are(scenario, tmp_path):
    """The fit of whitened rows is in the coordinates of the whitened features."""
    generator = np.random.default_rng(3)
    others = generator.normal(size=(50, 3)) * [1, 3, 9]
    np.savez(tmp_path / "moments.npz", X=others, y=np.zeros(50))
    whitened = build(
        load_scenario(scenario, ["posterior.whiten_from=moments.npz"])
    ).posterior
    assert whitened.features.shape[-1] == 4
    assert whitened.prior_mean.shape == (8,)
    # Most public rows are of the class that their own features predict.
    with np.load(tmp_path / "private.npz") as private:
        labels = private["y"]
    rows = whitened.real_rows(whitened.features)
    logits = rows @ whitened.prior_mean.reshape(2, 4).T
    owners = whitened.real_rows(whitened.labels)
    assert np.mean(logits.argmax(1) == owners) > 0.75
    assert sorted(owners) == sorted(labels)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ("prior_from=elsewhere.npz", ("elsewhere.npz",)),
        ("prior_from=mnist", ("mnist",)),
        ("prior_from=private.npz", ("private.npz",)),
        ("prior_from=narrow.npz", (2, 3)),
        ("prior_from=classes.npz", (0, 1)),
        ("prior_from=holes.npz", ()),
        ("prior_from=copy.npz", ("copy.npz",)),
        ("prior_from=linked.npz", ("linked.npz",)),
    ],
)
def test_rows_that_do_not_fit_are_refused(scenario, tmp_path, change, facts):
    X, y = draw_rows(np.random.default_rng(4), 30)
    np.savez(tmp_path / "narrow.npz", X=X[:, :2], y=y)
    np.savez(tmp_path / "classes.npz", X=X, y=y + 3)
    np.savez(tmp_path / "holes.npz", X=np.where(X > 1, np.nan, X), y=y)
    private = tmp_path / "private.npz"
    (tmp_path / "copy.npz").write_bytes(private.read_bytes())
    os.link(private, tmp_path / "linked.npz")
    with raises_input_error("prior_from", *facts, section="posterior"):
        build(load_scenario(scenario, [f"posterior.{change}"]))


@pytest.mark.parametrize(
    "section",
    [
        {"model": "softmax", "data": "mnist"},
        {"model": "model.py:build"},
    ],
)
def test_models_without_such_a_prior_refuse_it(section):
    with raises_input_error("posterior.prior_from"):
        validate({"posterior": {"prior_from": "public.npz", **section}})
