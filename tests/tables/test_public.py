"""Fits with public rows: what they take from these, what they spend, and what misleading rows can do."""

import json
from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from wflmc import PrivateClassifier, PrivateRegressor
from wflmc.apps.tables import choosing as chosen
from wflmc.apps.tables import public as public_rows
from wflmc.apps.tables.audit import audit_fit
from wflmc.apps.tables.public import (
    MAX_PRIOR_WEIGHT,
    check_distinct,
    learn_public_rows,
)
from wflmc.apps.tables.settings import Facts, Settings
from wflmc.posterior import softmax_regression
from wflmc.privacy import Privacy

from ..conftest import FULL, count
from ..error_tools import raises_input_error

PROMISE = Privacy(1.0, 1e-5, unit="record", example_clip=1.0)
SHORT_SETTINGS = Settings(
    clip=1.0, step_size=0.01, burn_in=10, samples=10, prior_std=0.3, whiten=True
)
pytestmark = pytest.mark.filterwarnings(
    "ignore::wflmc.apps.tables.estimators.PrivacyWarning"
)


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    """Have few candidates to choose from unless there is time."""
    monkeypatch.setattr(chosen, "_chosen", {})
    if not FULL:
        candidates = {
            "PUBLIC_CLIPS": (0.2,),
            "PUBLIC_TRAVELS": (0.1, 0.5),
            "PRIOR_WEIGHTS": (0.1,),
            "CLIPS": (0.4,),
            "TRAVELS": (0.25, 0.5),
            "PRIORS": (4.0,),
            "ROUNDS": (50,),
            "TEMPERATURES": (),
            "MAX_STAND_INS": 1,
        }
        for name, values in candidates.items():
            monkeypatch.setattr(chosen, name, values)
        monkeypatch.setattr(public_rows, "PRIOR_PREDICTIONS", (4.0,))


def draw_patients(rows: int, seed: int, labels=("no", "yes")):
    """Return three features of unlike sizes, and labels by a logistic law."""
    generator = np.random.default_rng(seed)
    Z = generator.standard_normal((rows, 3))
    Z[:, 1] += 0.8 * Z[:, 0]
    logits = 2 * Z[:, 0] - 1.5 * Z[:, 1] + 0.5
    is_second = generator.random(rows) < 1 / (1 + np.exp(-logits))
    return Z * [1.0, 20.0, 0.05] + [0, 300, 7], np.asarray(labels)[
        is_second.astype(int)
    ]


def draw_costs(rows: int, seed: int):
    """Return features, and numbers that are linear in them with a noise of 10."""
    generator = np.random.default_rng(seed)
    Z = generator.standard_normal((rows, 3))
    y = 500 + Z @ [40.0, -20.0, 0.0] + 10 * generator.standard_normal(rows)
    return Z * [1.0, 20.0, 0.05] + [0, 300, 7], y


def nll_of(model, X, y):
    """Return the mean of −log p(label)."""
    index = np.searchsorted(model.classes_, y)
    return -np.log(model.predict_proba(X)[np.arange(len(y)), index]).mean()


def test_all_of_epsilon_goes_into_sampling():
    X, y = draw_patients(200, 0)
    public = draw_patients(60, 1)
    with_public = PrivateClassifier(0.5, public=public, random_state=0).fit(X, y)
    assert set(with_public.privacy_.by_part) == {"sampling"}
    assert with_public.privacy_.epsilon <= 0.5
    assert with_public.privacy_.epsilon == pytest.approx(0.5, rel=1e-3)
    # Labels come from public rows, which is no leak.
    uncovered = {item.name for item in with_public.not_covered_}
    assert uncovered == {"refusals", "random_state"}
    without = PrivateClassifier(0.5, classes=["no", "yes"], random_state=0).fit(X, y)
    assert set(without.privacy_.by_part) > {"sampling"}
    X_test, y_test = draw_patients(1000, 2)
    assert nll_of(with_public, X_test, y_test) < nll_of(without, X_test, y_test)
    assert with_public.prior_distance_ > 0
    assert without.prior_distance_ is None
    assert clone(with_public).public is not None


def test_unlabelled_rows_give_scales_and_whitening_alone():
    X, y = draw_patients(200, 0)
    public = (draw_patients(60, 1)[0], None)
    model = PrivateClassifier(
        1.0, classes=["no", "yes"], public=public, random_state=0
    ).fit(X, y)
    assert "scaling" not in model.privacy_.by_part
    assert "whitening" not in model.privacy_.by_part
    assert model.facts_.prior_mean is None
    assert model.prior_distance_ is None
    assert np.array_equal(model.model_.scaling.center, public[0].mean(0))


@pytest.mark.parametrize("labelled", [True, False])
def test_intervals_of_numbers_stay_paid_for(labelled):
    X, y = draw_costs(400, 0)
    public_X, public_y = draw_costs(60, 1)
    public = (public_X, public_y if labelled else None)
    model = PrivateRegressor(3.0, public=public, random_state=0).fit(X, y)
    parts = {"sampling", "noise scale"}
    assert set(model.privacy_.by_part) == (parts if labelled else parts | {"scaling"})
    assert model.privacy_.epsilon <= 3.0
    X_test, y_test = draw_costs(1000, 2)
    lower, upper = model.predict_interval(X_test)
    assert 0.8 < np.mean((lower < y_test) & (y_test < upper)) <= 1
    if labelled:
        assert model.score(X_test, y_test) > 0.8


def test_intervals_hold_where_public_targets_have_less_noise():
    X, y = draw_costs(count(600, 2000), 0)
    public_X, public_y = draw_costs(60, 1)
    noisy = y + 60 * np.random.default_rng(3).standard_normal(len(y))
    model = PrivateRegressor(3.0, public=(public_X, public_y), random_state=0)
    model.fit(X[100:], noisy[100:])
    lower, upper = model.predict_interval(X[:100])
    assert np.mean((lower < noisy[:100]) & (noisy[:100] < upper)) > 0.75


def test_the_public_fit_is_that_of_scikit_learn():
    # On many rows, no prior matters.
    X, y = draw_patients(3000, 0, labels=(0, 1))
    public = learn_public_rows(X, y, 2)
    fitted = LogisticRegression(C=1e6, max_iter=1000).fit(public.Z, y)
    contrast = np.diff(public.prior_mean.reshape(2, -1), axis=0)[0]
    expected = np.append(fitted.coef_, fitted.intercept_)
    assert contrast == pytest.approx(expected, abs=0.03)
    X, y = draw_costs(3000, 0)
    public = learn_public_rows(X, y, 0)
    center, scale = public.scaling.center[-1], public.scaling.scale[-1]
    ridge = Ridge(alpha=1e-6).fit(public.Z, (y - center) / scale)
    assert public.prior_mean[:-1] == pytest.approx(ridge.coef_, abs=0.01)
    # 10 of noise beside a spread of √(40² + 20² + 10²)
    assert public.noise * scale**2 == pytest.approx(100, rel=0.1)


def test_whitened_public_rows_have_unit_moments():
    X, _ = draw_patients(5000, 0)
    public = learn_public_rows(X, None, 2)
    assert public.Z.mean(0) == pytest.approx(0, abs=0.01)
    whitened = np.column_stack([public.Z, np.ones(len(X))]) @ public.root
    assert np.cov(whitened[:, :3].T) == pytest.approx(np.eye(3), abs=0.05)
    generator = np.random.default_rng(0)
    drawn = public.draw_features(generator, 20_000)
    assert np.cov(drawn.T) == pytest.approx(np.eye(3), abs=0.1)
    scaled = public.scaled_features(generator, drawn, distortion=0.0)
    assert np.cov(scaled.T) == pytest.approx(np.cov(public.Z.T), abs=0.1)


@pytest.mark.parametrize(("rows", "constant"), [(2, False), (5, False), (40, True)])
def test_few_rows_and_constant_columns_will_do(rows, constant):
    X, y = draw_patients(rows, 0, labels=(0, 1))
    y[:2] = [0, 1]
    if constant:
        X[:, 1] = 0.0
    public = learn_public_rows(X, y, 2)
    numbers = (public.prior_mean, public.root, *public.scaling)
    assert all(np.isfinite(values).all() for values in numbers)
    assert np.all(public.scaling.scale > 0)


@pytest.mark.parametrize(("slope", "constant"), [(0.6, 0.0), (0.0, -2.5)])
def test_flipped_labels_are_undone(slope, constant):
    # Labels of a known law, flipped: the law is found again from what they look like.
    generator = np.random.default_rng(0)
    X = generator.standard_normal((60_000, 2))
    logits = X @ [slope, 0.0] + constant
    y = (generator.random(len(X)) < 1 / (1 + np.exp(-logits))).astype(int)
    flipped = np.where(generator.random(len(y)) < 0.2, 1 - y, y)
    laws = []
    for labels in (y, flipped):
        public = learn_public_rows(X, labels, 2)
        law = public.prior_mean.reshape(2, -1)
        laws.append(np.diff(law, axis=0)[0])
    seen = public._unflipped(law, 0.2)
    assert np.diff(seen, axis=0)[0] == pytest.approx(laws[0], rel=0.1, abs=0.08)
    assert np.abs(laws[1] - laws[0]).max() > 0.2


@pytest.mark.parametrize("off", [0.3, 1.0, 3.0])
def test_private_records_win_against_the_narrowest_prior(off):
    X, y = draw_patients(2000, 0, labels=(0, 1))
    public = learn_public_rows(*draw_patients(60, 1, labels=(0, 1)), 2)
    Z = public.feature_scaling(X)
    std = public.prior_std(len(y), MAX_PRIOR_WEIGHT)
    key = jax.random.key(0)
    modes = []
    moved = off * np.repeat([1.0, -1.0], 4)
    for prior_mean in (public.prior_mean, public.prior_mean + moved):
        posterior = softmax_regression(
            key, 1, X=Z, y=y, intercept=True, prior_std=std, prior_mean=prior_mean
        )
        modes.append(posterior.whitened(public.root, "whitened").mode)
    # A prior of a tenth of the rows moves the mode by a small part of its own way. The
    # part grows where rows are predicted for sure, and curve the cost less.
    assert np.linalg.norm(modes[1] - modes[0]) < 0.35 * np.linalg.norm(moved)


def test_no_candidate_has_a_narrower_prior():
    public = learn_public_rows(*draw_patients(60, 1, labels=(0, 1)), 2)
    facts = Facts(500, 3, 2, 1, PROMISE, 0.0, shares=public.shares, public=public)
    floor = public.prior_std(500, MAX_PRIOR_WEIGHT)
    candidates = list(chosen.candidates(facts))
    assert candidates
    assert min(settings.prior_std for settings in candidates) == pytest.approx(floor)
    # Half of the predictions are at even odds: a row then curves the cost by 1/2.
    even = replace(public, shares=(0.5, 0.5))
    assert even.prior_std(500, 0.1) == pytest.approx((0.1 * 500 * 0.5) ** -0.5)
    numbers = learn_public_rows(*draw_costs(60, 1), 0)
    assert numbers.prior_std(500, 0.1) == pytest.approx(50**-0.5)


def test_a_rare_class_among_several_is_not_outweighed_by_the_prior():
    # The Hessian of a row has this smallest eigenvalue for what tells classes apart.
    X, _ = draw_patients(400, 1)
    y = np.repeat([0, 1, 2], [198, 198, 4])
    public = learn_public_rows(X, y, 3)
    q = np.asarray(public.shares)
    pulls = []
    for direction in np.linalg.svd(np.eye(3) - 1 / 3)[0][:, :2].T:
        curvature = direction @ (np.diag(q) - np.outer(q, q)) @ direction
        precision = public.prior_std(1000, 0.1) ** -2
        pulls.append(precision / (precision + 1000 * curvature))
    assert max(pulls) <= 1 / 11 + 1e-9


def test_declared_ranges_count_in_place_of_public_ones():
    X, y = draw_costs(400, 0)
    public_X, public_y = draw_costs(60, 1)
    public_X = public_X * [1, 1, 0] + [0, 0, 7]  # constant among public rows
    ranges = np.array([[np.nan, np.nan], [np.nan, np.nan], [6.8, 7.2], [300.0, 700.0]])
    in_thousands = learn_public_rows(public_X, public_y / 1000, 0, ranges)
    assert in_thousands.scaling.center[2:] == pytest.approx([7.0, 500.0])
    # Half of the range, times the spread of the others within theirs.
    plain = learn_public_rows(public_X, public_y, 0)
    within = plain.scaling.scale[0] / (np.ptp(public_X[:, 0]) / 2)
    assert in_thousands.scaling.scale[2] == pytest.approx(0.2 * within, rel=0.2)
    model = PrivateRegressor(
        3.0,
        public=(public_X, public_y / 1000),
        ranges=ranges[:3],
        target_range=(300.0, 700.0),
        random_state=0,
    ).fit(X, y)
    lower, upper = model.predict_interval(X)
    assert np.mean((lower < y) & (y < upper)) > 0.8


def test_columns_of_frames_go_by_name():
    X, y = draw_patients(200, 0)
    frame = pd.DataFrame(X, columns=["age", "bmi", "ratio"])
    public_X, public_y = draw_patients(60, 1)
    public_frame = pd.DataFrame(public_X, columns=["age", "bmi", "ratio"])
    models = [
        PrivateClassifier(
            1.0, public=(rows, public_y), settings=SHORT_SETTINGS, random_state=0
        ).fit(frame, y)
        for rows in (public_X, public_frame[["ratio", "age", "bmi"]])
    ]
    assert np.array_equal(models[0].model_.theta, models[1].model_.theta)
    renamed = public_frame.rename(columns={"age": "years"})
    with raises_input_error("public", "age"):
        PrivateClassifier(1.0, public=(renamed, public_y)).fit(frame, y)


def test_nothing_private_decides_how_public_rows_are_used():
    public = draw_patients(60, 1)
    fits = []
    for seed, swap in ((0, False), (5, True)):
        X, y = draw_patients(200, seed)
        if swap:
            y = np.where(y == "yes", "no", "yes")
            X = 100 * X
        model = PrivateClassifier(1.0, public=public, random_state=0)
        fits.append(model.fit(X, y))
    first, second = fits
    assert first.settings_ == second.settings_
    assert first.candidates_ == second.candidates_
    assert np.array_equal(first.model_.scaling.scale, second.model_.scaling.scale)
    assert np.array_equal(first.plan_.loss, second.plan_.loss)
    assert np.array_equal(
        first.facts_.public.prior_mean, second.facts_.public.prior_mean
    )


def test_private_rows_outweigh_flipped_public_labels(monkeypatch):
    if not FULL:
        monkeypatch.setattr(chosen, "PUBLIC_CLIPS", (0.8,))
        monkeypatch.setattr(chosen, "PRIOR_WEIGHTS", (0.1, 0.01))
    X, y = draw_patients(count(1000, 2000), 0)
    X_test, y_test = draw_patients(1000, 2)
    public_X, public_y = draw_patients(60, 1)
    flipped = np.where(public_y == "yes", "no", "yes")
    model = PrivateClassifier(3.0, public=(public_X, flipped), random_state=0)
    reached = nll_of(model.fit(X, y), X_test, y_test)
    not_private = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, y)
    assert reached < nll_of(not_private, X_test, y_test) + 0.03
    assert model.prior_distance_ > 1


def test_the_distance_tells_of_public_rows_that_mislead():
    X, y = draw_patients(600, 0, labels=(0, 1))
    public_X, public_y = draw_patients(60, 1, labels=(0, 1))
    distances = []
    for labels in (public_y, 1 - public_y):
        model = PrivateClassifier(
            30.0, public=(public_X, labels), settings=SHORT_SETTINGS, random_state=0
        )
        distances.append(model.fit(X, y).prior_distance_)
    assert distances[1] > max(1.0, 1.5 * distances[0])


def test_private_selection_works_around_a_public_mean():
    X, y = draw_patients(200, 0)
    model = PrivateClassifier(
        2.0, public=draw_patients(60, 1), settings="private", random_state=0
    ).fit(X, y)
    assert set(model.privacy_.by_part) == {"tuning", "sampling"}
    assert model.prior_distance_ > 0


def test_protected_noise_starts_at_the_public_mean():
    X, y = draw_patients(200, 0)
    settings = replace(SHORT_SETTINGS, step_size=1e-9)
    model = PrivateClassifier(1.0, public=draw_patients(60, 1), settings=settings).fit(
        X, y
    )
    start = model.facts_.public.prior_mean
    assert model.model_.theta.mean(0) == pytest.approx(start, abs=0.01)
    assert model.prior_distance_ == pytest.approx(0, abs=0.05)


PRIVATE = draw_patients(30, 0)
PUBLIC = draw_patients(20, 1)


@pytest.mark.parametrize(
    ("public", "facts"),
    [
        (PUBLIC[0], ("(X, y)",)),
        ({"X": PUBLIC[0], "y": PUBLIC[1]}, ("(X, y)",)),
        (([[1.0, 2.0], [1.0]], None), ("no table",)),
        ((PRIVATE[0][:9], PRIVATE[1][:9]), ("rows of the table",)),
        ((PUBLIC[0][:, :2], PUBLIC[1]), ("2 features", "3 features")),
        ((PUBLIC[0], PUBLIC[1][:5]), ("labels of shape",)),
        ((PUBLIC[0][:1], PUBLIC[1][:1]), ("one",)),
        ((PUBLIC[0][:0], PUBLIC[1][:0]), ()),
        ((PUBLIC[0], np.full(20, "no")), ("one class",)),
        ((PUBLIC[0], np.full(20, "else")), ("unknown label",)),
        ((PUBLIC[0] * np.nan, None), ("nan",)),
        (PRIVATE, ("rows of the table",)),
        ((PRIVATE[0][::-1], PRIVATE[1][::-1]), ("rows of the table",)),
        ((PRIVATE[0], None), ("rows of the table",)),
    ],
)
def test_public_rows_that_will_not_do_are_one_sentence(public, facts):
    model = PrivateClassifier(1.0, classes=["no", "yes"], public=public)
    with raises_input_error("public", *facts):
        model.fit(*PRIVATE)


def test_other_rows_are_distinct():
    X, y = draw_patients(30, 0, labels=(0, 1))
    check_distinct(X, y, X + 1e-9, y)
    check_distinct(X, 1 - y, X, y)
    check_distinct(np.vstack([X[:5], X[5:6] + 1]), y[:6], X, y)
    # Among few categories, unlike people have equal rows.
    check_distinct(X[:9].round() * 0, y[:9], X.round() * 0, y)
    for part in (slice(None), slice(0, 7)):
        with raises_input_error("public", "rows of the table"):
            check_distinct(X[part][::-1], y[part][::-1], X, y)


ATTACKED = np.array([[1.0], [1], [-1], [-1], [1], [-1], [1], [-1]])
LABELS = np.arange(8) % 2
NEIGHBOUR = np.vstack([[[-1.0]], ATTACKED[1:]])
NEIGHBOURS = ((ATTACKED, LABELS, None), (NEIGHBOUR, LABELS, None))
ATTACK_PUBLIC = (np.array([[2.0], [1.5], [-1], [-2], [0.1]]), [1, 1, 0, 0, 1])


def test_an_attack_on_a_fit_with_public_rows_proves_no_more_than_epsilon(monkeypatch):
    monkeypatch.setattr(public_rows, "PRIOR_PREDICTIONS", (4.0,))

    def make(trial: int) -> PrivateClassifier:
        settings = replace(SHORT_SETTINGS, whiten=trial % 2 == 0)
        return PrivateClassifier(
            1.0, 1e-3, public=ATTACK_PUBLIC, settings=settings, random_state=trial
        )

    assert audit_fit(make, NEIGHBOURS, count(10, 1500)).consistent


@pytest.mark.skipif(not FULL, reason="make test-full: an attack that succeeds")
def test_the_attack_sees_what_differs_among_public_rows(monkeypatch):
    """Public rows are promised nothing: what differs in them is seen at once."""
    monkeypatch.setattr(public_rows, "PRIOR_PREDICTIONS", (4.0,))
    far_public = (-10 * ATTACK_PUBLIC[0], ATTACK_PUBLIC[1])

    class _Switched(PrivateClassifier):
        def fit(self, X, y, devices=None, *, ledger=None):
            is_neighbour = np.array_equal(X, NEIGHBOUR)
            self.public = far_public if is_neighbour else ATTACK_PUBLIC
            return super().fit(X, y, devices, ledger=ledger)

    def switching(trial: int) -> PrivateClassifier:
        return _Switched(
            1.0, 1e-3, classes=[0, 1], settings=SHORT_SETTINGS, random_state=trial
        )

    assert not audit_fit(switching, NEIGHBOURS, 40).consistent


def patients_table(rows: int, seed: int) -> pd.DataFrame:
    """Return a table with numbers, categories, a clinic and an id."""
    X, y = draw_patients(rows, seed)
    generator = np.random.default_rng(seed)
    frame = pd.DataFrame(X, columns=["age", "bmi", "ratio"])
    frame["sex"] = generator.choice(["f", "m"], rows)
    frame["clinic"] = generator.choice(["north", "south"], rows)
    frame["person"] = [f"p{seed}-{row}" for row in range(rows)]
    return frame.assign(state=y)


@pytest.fixture
def files(tmp_path):
    """A private table with an unknown category, and public rows without roles."""
    table = patients_table(160, 0)
    table.loc[3, "sex"] = "x"
    table.to_csv(tmp_path / "patients.csv", index=False)
    public = patients_table(60, 1).drop(columns=["clinic", "person"])
    public.to_csv(tmp_path / "registry.csv", index=False)
    return tmp_path


OPTIONS = ["--target", "state", "--device", "clinic", "--id", "person"]
OPTIONS += ["--epsilon", "1", "--delta", "1e-5"]


def test_from_two_files_to_predictions_and_a_page(call, files):
    model = files / "model"
    options = [*OPTIONS, "--public", files / "registry.csv", "--seed", "0"]
    fit = ["fit", files / "patients.csv", *options, "--out", model, "--json"]
    code, printed, errors = call(*fit)
    assert code == 0, errors
    document = json.loads(printed)
    spent = document["epsilon_spent"]
    assert document["epsilon_by_part"] == {"sampling": pytest.approx(spent)}
    assert document["public"]["rows"] == 60
    assert document["public"]["labelled"]
    assert document["public"]["source"] == "registry.csv"
    assert document["prior_distance"] > 0
    # Neither kinds nor categories nor classes were read off the private table.
    names = {item["name"] for item in document["not_covered"]}
    assert names == {"scores", "devices", "refusals", "random_state"}
    schema = json.loads((model / "schema.json").read_text())
    sex = next(column for column in schema["columns"] if column["name"] == "sex")
    assert sex["categories"] == ["f", "m"]
    assert schema["taken"] == []
    with np.load(model / "prior.npz") as prior:
        assert prior["mean"].shape == (12,)
        assert prior["std"] == document["settings"]["prior_std"]
        assert str(prior["sha256"]) == document["public"]["sha256"]
    assert call("report", model)[0] == 0
    page = (model / "report.html").read_text()
    assert "60 public rows of registry.csv" in page
    assert "distance from the public fit" in page
    out = files / "predictions.csv"
    assert call("predict", model, files / "patients.csv", "--out", out)[0] == 0
    assert len(pd.read_csv(out)) == 160
    tune = ["tune", files / "patients.csv", *OPTIONS]
    code, printed, _ = call(*tune, "--public", files / "registry.csv", "--json")
    assert code == 0
    assert json.loads(printed)["candidates"][0]["prior_std"] > 0


def test_numbers_of_two_files(call, tmp_path):
    for name, rows, seed in (("table", 200, 0), ("registry", 60, 1)):
        X, y = draw_costs(rows, seed)
        frame = pd.DataFrame(X, columns=["age", "bmi", "ratio"]).assign(cost=y)
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
    options = ["--target", "cost", "--epsilon", "3", "--delta", "1e-5", "--seed", "0"]
    options += ["--public", tmp_path / "registry.csv", "--out", tmp_path / "model"]
    code, printed, errors = call("fit", tmp_path / "table.csv", *options, "--json")
    assert code == 0, errors
    document = json.loads(printed)
    assert set(document["epsilon_by_part"]) == {"sampling", "noise scale"}
    assert document["r2"] > 0.8
    assert document["coverage_90"] > 0.7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows.drop(columns="age"), "--public has no column 'age'"),
        (lambda rows: rows.rename(columns={"state": "State"}), "'State'"),
        (lambda rows: rows.assign(extra=1), "'extra'"),
        (lambda rows: rows.assign(state="no"), "public rows: target 'state' has one"),
        (lambda rows: rows.assign(bmi=np.nan), "public rows: column 'bmi' has missing"),
        (lambda rows: rows[:0], "--public has no rows"),
        (lambda rows: rows.assign(bmi="high"), "column 'bmi'"),
        (lambda rows: rows.assign(sex=range(len(rows))), "has names in the table"),
    ],
)
def test_a_public_table_that_will_not_do_is_one_sentence(call, files, change, words):
    change(patients_table(60, 1)).to_csv(files / "bad.csv", index=False)
    options = [*OPTIONS, "--public", files / "bad.csv", "--out", files / "model"]
    code, _, errors = call("fit", files / "patients.csv", *options)
    assert code == 2
    assert words in errors
    assert len(errors.strip().splitlines()) == 1
    assert not (files / "model").exists()


def test_the_private_table_is_no_public_one(call, files):
    table = files / "patients.csv"
    (files / "link.csv").symlink_to(table)
    shuffled = pd.read_csv(table).sample(frac=1, random_state=0)
    shuffled.to_csv(files / "copy.csv", index=False, sep=";")
    for name in ("patients.csv", "link.csv", "copy.csv"):
        options = [*OPTIONS, "--public", files / name, "--out", files / "model"]
        code, _, errors = call("fit", table, *options)
        assert code == 2
        assert "--public has only rows of the table" in errors
