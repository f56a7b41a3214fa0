"""Private estimators of scikit-learn: what they keep, what they spend, what they cannot do."""

import pickle
import warnings
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, make_friedman1
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import wflmc
from wflmc import PrivateClassifier, PrivateRegressor, channel
from wflmc.apps.tables import choosing as chosen
from wflmc.apps.tables import estimators, folder, scaling, selection, stand_ins
from wflmc.apps.tables.audit import audit_fit
from wflmc.apps.tables.protected import protected_chain
from wflmc.apps.tables.settings import WHITENING_FRACTION, Facts, Settings
from wflmc.privacy import Ledger, Privacy, releases
from wflmc.privacy.lattice import Lattice
from wflmc.runs.documents import FitFile

from ..conftest import FULL, count
from ..error_tools import raises_input_error

PROMISE = Privacy(3.0, 1e-5, unit="record", example_clip=1.0)
SHORT_SETTINGS = Settings(
    clip=1.0, step_size=0.01, burn_in=10, samples=10, prior_std=1.0
)

COLD_SETTINGS = replace(SHORT_SETTINGS, step_size=0.002, burn_in_temperature=0.05)
"""Steps so short that kept rounds leave something of every budget in these tests."""
ALL_CLIPS = chosen.CLIPS
"""Those that users choose from, where tests have fewer."""
AGAIN = pytest.mark.filterwarnings(
    "ignore::wflmc.apps.tables.estimators.PrivacyWarning"
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Have few candidates to choose from unless there is time."""
    monkeypatch.setattr(chosen, "_chosen", {})
    if not FULL:
        candidates = {
            "CLIPS": (0.4,),
            "TRAVELS": (0.25, 0.5),
            "PRIORS": (4.0,),
            "ROUNDS": (50,),
            "TEMPERATURES": (),
            "MAX_STAND_INS": 1,
            "MAX_MOMENTS": 0,
        }
        for name, values in candidates.items():
            monkeypatch.setattr(chosen, name, values)


def two_clusters(rows: int = 400, names=("no", "yes"), seed: int = 0):
    g = np.random.default_rng(seed)
    side = g.integers(0, 2, rows)
    X = (
        g.standard_normal((rows, 3)) * [1.0, 20.0, 0.05]
        + np.outer(2 * side - 1, [1.5, 30.0, 0.0])
        + [0, 300, 7]
    )
    return X, np.asarray(names)[side]


def test_a_table_of_clinics_is_learned_within_its_budget():
    X, y = load_breast_cancer(return_X_y=True)
    a, b, ya, yb = train_test_split(X, y, random_state=0, stratify=y)
    model = PrivateClassifier(classes=[0, 1], random_state=0).fit(
        a, ya, np.arange(len(a)) % 20
    )
    p = model.predict_proba(b)
    assert p.sum(1) == pytest.approx(1.0)
    assert model.score(b, yb) > 0.9  # a constant has .63; 20 splits have .96 on average
    assert -np.log(p[np.arange(len(yb)), yb]).mean() < 0.25
    spent = model.privacy_
    assert spent.epsilon <= 3.0
    assert sum(spent.by_part.values()) == pytest.approx(spent.epsilon)
    total = sum(spent.loss.values())
    assert spent.epsilon == pytest.approx(
        PROMISE.epsilon_spent(np.array([total])), rel=1e-6
    )
    assert set(spent.loss) == {"scaling", "class counts", "sampling"}
    assert "adjacency = replace" in str(spent)


def test_labels_keep_their_names_and_chance_is_beaten():
    X, y = two_clusters()
    model = PrivateClassifier(classes=["no", "yes"], random_state=1).fit(X, y)
    assert list(model.classes_) == ["no", "yes"]
    assert set(model.predict(X)) == {"no", "yes"}
    assert model.score(*two_clusters(seed=1)) > 0.85


def test_a_fitted_estimator_holds_no_records_and_no_key():
    X, y = two_clusters(60)
    model = PrivateClassifier(
        classes=["no", "yes"], settings=SHORT_SETTINGS, random_state=5
    ).fit(X, y, np.arange(60) % 4)
    content = pickle.dumps(model)
    for row in X:
        for value in row:
            assert np.float64(value).tobytes() not in content
    assert model.trace_.key is None
    assert np.isnan(model.trace_.clip_rate).all()
    words = np.asarray(jax.random.key_data(jax.random.key(5)))
    scaled = model.model_.scaling(X).astype(np.float32)
    assert not any(value.tobytes() in content for value in scaled.ravel())
    assert words.tobytes() not in content
    again = pickle.loads(content)
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))


@AGAIN
def test_a_seed_repeats_and_secret_noise_does_not():
    X, y = two_clusters(80)
    fits = [
        PrivateClassifier(settings=SHORT_SETTINGS, random_state=seed)
        .fit(X, y)
        .predict_proba(X)
        for seed in (3, 3, None, None)
    ]
    assert np.array_equal(fits[0], fits[1])
    assert not np.array_equal(fits[2], fits[3])


@AGAIN
def test_what_epsilon_does_not_cover_is_listed():
    X, y = two_clusters(80)
    names = {
        item.name
        for item in PrivateClassifier(settings=SHORT_SETTINGS, random_state=0)
        .fit(X, y)
        .not_covered_
    }
    assert names == {"refusals", "random_state", "classes"}
    secret = (
        PrivateClassifier(settings=SHORT_SETTINGS, classes=["no", "yes"])
        .fit(X, y)
        .not_covered_
    )
    assert not [item for item in secret if item.published]


def test_every_further_fit_warns_that_it_spends_again():
    X, y = two_clusters(60)
    model = PrivateClassifier(settings=SHORT_SETTINGS, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, y)
    with pytest.warns(estimators.PrivacyWarning, match=r"\b2\b"):
        clone(model).fit(X, y)
    with pytest.warns(estimators.PrivacyWarning, match=r"\b3 .*ε = 3\b"):
        model.fit(X, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # An estimator of its own, with its own budget.
        PrivateClassifier(settings=SHORT_SETTINGS, random_state=0).fit(X, y)


def test_a_large_delta_and_a_useless_model_are_said(monkeypatch):
    monkeypatch.setattr(folder, "value_of_more", lambda *_: {})
    X, y = two_clusters(60)
    with pytest.warns(estimators.PrivacyWarning, match=r"delta = 0\.1\b.*1/60"):
        model = PrivateClassifier(
            delta=0.1, settings=SHORT_SETTINGS, classes=["no", "yes"], random_state=0
        ).fit(X, y)
    fit = folder.describe(model, folder.TableRows(X[:0], y[:0], np.zeros(0, int), []))
    assert not folder.prediction_warnings(fit)
    assert (
        "guessing" in folder.prediction_warnings(fit.model_copy(update={"nll": 0.7}))[0]
    )
    assert (
        "constant" in folder.prediction_warnings(fit.model_copy(update={"r2": -0.1}))[0]
    )


@AGAIN
def test_pipelines_and_cross_validation_work_around_it():
    X, y = two_clusters(300)
    model = make_pipeline(
        FunctionTransformer(),
        PrivateClassifier(settings=SHORT_SETTINGS, random_state=0),
    )
    assert cross_val_score(model, X, y, cv=2).mean() > 0.6
    assert model.get_params()["privateclassifier__epsilon"] == 3.0
    with pytest.raises(NotFittedError):
        PrivateClassifier().predict(X)
    with pytest.raises(NotFittedError):
        PrivateClassifier().report_html_()


@pytest.mark.parametrize("settings", [SHORT_SETTINGS, COLD_SETTINGS])
def test_plans_and_settings_do_not_depend_on_the_data(settings):
    noisy_broadcast = wflmc.Link(channel.rayleigh(1.0), snr_db=20, downlink_snr_db=10)
    for link in (None, noisy_broadcast):
        facts = Facts(90, 3, 2, 3, PROMISE, 0.01, link=link)
        plans = []
        for seed, scale in ((0, 1.0), (1, 100.0)):
            g = np.random.default_rng(seed)
            posterior = chosen.private_posterior(
                facts,
                settings,
                scale * g.standard_normal((90, 3)),
                g.integers(0, 2, 90),
            )
            plans.append(chosen.make_plan(facts, settings, posterior))
        assert plans[0].checksum == plans[1].checksum  # of every field
        assert plans[0].warnings == plans[1].warnings == ()
        assert plans[0].spent.max() + 0.01 <= PROMISE.budget(1)[0] * (1 + 1e-9)


def test_a_stand_in_has_the_size_of_the_table_and_the_better_settings_come_first():
    facts = Facts(120, 4, 3, 5, PROMISE, 0.02)
    table = stand_ins.stand_in(facts, 6.0, 0)
    assert table.X.shape == (120, 4)
    assert set(np.unique(table.y)) <= {0, 1, 2}
    assert np.mean(table.X**2) == pytest.approx(1.0, abs=0.25)
    hopeless = Settings(1e-3, 1e-6, 5, 5, 1.0)
    good = Settings(1.0, 0.02, 5, 5, 1.0)
    worse, better = chosen.expect(facts, [hopeless, good])
    assert better.nll < worse.nll
    # The model does not move from where all classes are alike.
    assert worse.nll == pytest.approx(np.log(3), abs=0.05)


@pytest.mark.skipif(
    not FULL,
    reason="a stand-in of rare classes and their release are tested: make test-full runs it",
)
def test_a_rare_class_keeps_its_share(monkeypatch):
    """Rows of a rare class have long gradients: clipped at what suits equal classes, they lose half of their weight."""
    for name, values in {
        "CLIPS": ALL_CLIPS,
        "TRAVELS": (0.25,),
        "PRIORS": (12.0,),
        "ROUNDS": (100,),
    }.items():
        monkeypatch.setattr(chosen, name, values)
    generator = np.random.default_rng(0)
    seeds = 10
    ratios = []
    for seed in range(seeds):
        X = generator.standard_normal((15_000, 4))
        y = np.where(generator.random(15_000) < 0.03, "yes", "no")
        model = PrivateClassifier(classes=["no", "yes"], random_state=seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.fit(X, y, np.arange(15_000) % 12)
        predicted = model.predict_proba(X[:2000])[:, 1].mean()
        ratios.append(predicted / np.mean(y == "yes"))
    # The noise on the sum of 450 labels is that of a twentieth of them.
    assert np.all(np.abs(np.array(ratios) - 1) < 0.2)
    assert abs(np.mean(ratios) - 1) < 4 * 0.06 / seeds**0.5


def test_a_stand_in_has_the_shares_of_the_classes_and_knows_its_law():
    facts = Facts(20_000, 3, 3, 5, PROMISE, 0.02, shares=(0.7, 0.2, 0.1))
    table = stand_ins.stand_in(facts, 1.0, 0)
    counts = np.bincount(table.y) / len(table.y)
    assert counts == pytest.approx([0.7, 0.2, 0.1], abs=4 * (0.25 / 20_000) ** 0.5)
    assert table.X.mean(0) == pytest.approx(np.zeros(3), abs=0.03)
    # Calibrated by construction: the mean probability of a class is its share.
    assert table.expected.sum(1) == pytest.approx(1.0)
    assert table.expected.mean(0) == pytest.approx(
        [0.7, 0.2, 0.1], abs=4 * (0.25 / len(table.expected)) ** 0.5
    )
    # And right: no linear model of many rows predicts much better than the law itself.
    fitted = (
        LogisticRegression(C=1e6, max_iter=1000)
        .fit(table.X, table.y)
        .predict_proba(table.X_test)
    )
    assert np.abs(fitted - table.expected).max() < 0.06


def test_choosing_is_public_and_asked_once(monkeypatch):
    facts = Facts(40, 2, 2, 2, PROMISE, 0.02)
    first = chosen.choose(facts)
    monkeypatch.setattr(chosen, "expect", None)
    assert chosen.choose(facts) == first
    ranks = [candidate.rank for candidate in first]
    assert ranks[1:] == sorted(ranks[1:])
    assert ranks[0] <= chosen.EQUAL_LOSS_RATIO * min(ranks)
    assert all(
        candidate.settings.samples <= first[0].settings.samples
        for candidate in first
        if candidate.rank <= ranks[0]
    )


def test_burn_in_and_whitening_are_among_the_candidates(monkeypatch):
    monkeypatch.setattr(chosen, "MAX_MOMENTS", 10**4)
    facts = Facts(60, 3, 2, 2, PROMISE, 0.02)
    candidates = chosen.choose(facts)
    assert {candidate.settings.whiten for candidate in candidates} == {False, True}
    lengths = {
        (
            candidate.settings.burn_in,
            candidate.settings.burn_in + candidate.settings.samples,
        )
        for candidate in candidates
    }
    assert lengths == {
        (int(fraction * rounds), rounds)
        for fraction in chosen.BURN_INS
        for rounds in chosen.ROUNDS
    }
    # One chain serves all shares of burn-in: each is scored as if it had been run alone.
    early, late = Settings(1.0, 0.02, 4, 12, 1.0), Settings(1.0, 0.02, 12, 4, 1.0)
    together = chosen.expect(facts, [early, late])
    alone = chosen.expect(facts, [late])[0]
    assert together[1].settings == alone.settings
    # Chains in float32 are computed in other batches.
    assert together[1].scores == pytest.approx(alone.scores, rel=1e-5)
    assert together[0].nll != together[1].nll


def facts_at(epsilon: float) -> Facts:
    """Return the facts of a small table under a promise."""
    return Facts(60, 3, 2, 2, replace(PROMISE, epsilon=epsilon), spent=0.0)


def plan_of(facts: Facts, settings: Settings) -> wflmc.Plan:
    """Return the plan of a fit of any table of these facts."""
    X = np.ones((facts.rows, facts.features))
    labels = np.arange(facts.rows) % 2
    posterior = chosen.private_posterior(facts, settings, X, labels)
    return chosen.make_plan(facts, settings, posterior)


@pytest.mark.parametrize("epsilon", [0.1, 3.0])
@pytest.mark.parametrize("link", [None, wflmc.Link(channel.static(np.ones(2)), 40)])
def test_at_temperature_1_rounds_have_equal_power(epsilon, link):
    settings = replace(COLD_SETTINGS, burn_in_temperature=1.0)
    facts = facts_at(epsilon)._replace(link=link)
    plan = plan_of(facts, settings)
    assert plan.gain == pytest.approx(plan.gain[0])
    budget = facts.promise.budget(1)[0]
    is_at_cap = epsilon == 3.0
    assert plan.regime_share["lmc-limited" if is_at_cap else "dp-limited"] == 1
    # Rounds at the Langevin cap leave something; others take equal parts of it all.
    assert (plan.spent.max() < 0.99 * budget) == is_at_cap
    assert plan.spent.max() <= budget


def test_a_colder_burn_in_spends_what_kept_rounds_leave():
    X, y = two_clusters(60)
    plans = []
    for temperature in (1.0, 0.05):
        model = PrivateClassifier(
            classes=["no", "yes"],
            settings=replace(COLD_SETTINGS, burn_in_temperature=temperature),
        ).fit(X, y)
        assert model.settings_.burn_in_temperature == temperature
        assert model.privacy_.epsilon <= 3.0
        plans.append(model.plan_)
        relative_noise = plans[-1].noise_variance / plans[-1].langevin_noise
        assert relative_noise[10:] == pytest.approx(1.0)
        assert np.all(relative_noise[:10] >= temperature * (1 - 1e-9))
    assert np.all(relative_noise[:10] < 0.9)
    assert plans[1].spent.max() > 1.1 * plans[0].spent.max()


def test_a_colder_burn_in_is_tried_where_the_cap_binds(monkeypatch):
    monkeypatch.setattr(chosen, "TEMPERATURES", (0.3,))
    temperatures = {}
    for epsilon in (0.1, 10.0):
        facts = facts_at(epsilon)
        candidates = chosen.choose(facts)
        temperatures[epsilon] = {
            candidate.settings.burn_in_temperature for candidate in candidates
        }
        for candidate in candidates:
            plan = plan_of(facts, replace(candidate.settings, burn_in_temperature=1.0))
            is_limited = plan.regime_share["lmc-limited"] > 0
            assert is_limited or candidate.settings.burn_in_temperature == 1
            assert is_limited == (candidate.cap_fraction >= 1 - chosen.CAP_TOLERANCE)
    assert temperatures == {0.1: {1.0}, 10.0: {1.0, 0.3}}
    chosen._chosen.clear()
    assert chosen.choose(facts) == candidates


def test_candidates_with_a_cold_burn_in_are_scored_as_if_alone():
    facts = facts_at(10.0)
    late, early = (
        replace(COLD_SETTINGS, burn_in=burn_in, samples=20 - burn_in)
        for burn_in in (15, 5)
    )
    warm = replace(late, burn_in_temperature=1.0)
    together = chosen.expect(facts, [late, early, warm])
    # Noise goes by the number of a chain in its group.
    alone = chosen.expect(facts, [late])[0]
    assert together[0].scores == pytest.approx(alone.scores, rel=1e-5)
    warm_alone = chosen.expect(facts, [warm])[0]
    assert warm_alone.nll != pytest.approx(alone.nll, rel=1e-3)


@pytest.mark.parametrize("seed", [0, None])
def test_whitening_is_paid_from_the_same_epsilon(seed, tmp_path):
    X, y = two_clusters(200)
    whitened = replace(SHORT_SETTINGS, whiten=True)
    path = tmp_path / "ledger.jsonl"
    model = PrivateClassifier(
        classes=["no", "yes"], settings=whitened, random_state=seed
    ).fit(X, y, ledger=path)
    loss = model.privacy_.loss
    budget = PROMISE.budget(1)[0]
    assert loss["whitening"] == pytest.approx(
        WHITENING_FRACTION * (budget - loss["scaling"] - loss["class counts"]),
        rel=1e-6,
    )
    assert Ledger(PROMISE, 1, path=path).spent[0] == pytest.approx(sum(loss.values()))
    assert sum(loss.values()) <= budget * (1 + 1e-9)
    assert model.score(*two_clusters(seed=1)) > 0.75


def test_a_whitened_chain_finds_what_least_squares_finds():
    """Two features that are nearly one: a chain in their own coordinates would take far longer."""
    g = np.random.default_rng(0)
    z = g.standard_normal((3000, 2)) @ [[1.0, 1.0], [0.1, -0.1]]
    y = z @ [1.0, -2.0] + 0.1 * g.standard_normal(3000)
    settings = Settings(50.0, 2e-4, 100, 100, 30.0, whiten=True)
    weak = {
        "epsilon": 1e5,
        "delta": 1e-4,
        "ranges": [[-3, 3], [-3, 3]],
        "target_range": (-3, 3),
        "noise_scale": 0.1,
    }
    model = PrivateRegressor(settings=settings, random_state=0, **weak).fit(z, y)
    # Points along the direction of little variance, and of much.
    far = np.array([[1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
    design = np.column_stack([z, np.ones(3000)])
    exact = (
        np.column_stack([far, np.ones(3)]) @ np.linalg.lstsq(design, y, rcond=None)[0]
    )
    assert model.predict(far) == pytest.approx(exact, abs=0.15)


@AGAIN
def test_regression_is_calibrated():
    inside, scores = [], []
    for seed in range(count(4, 50)):
        X, y = make_friedman1(1500, noise=1.0, random_state=seed)
        model = PrivateRegressor(
            random_state=seed, settings=Settings(0.8 * 11**0.5, 0.0005, 50, 50, 2.0)
        ).fit(X[:1000], y[:1000])
        low, high = model.predict_interval(X[1000:])
        inside.append(np.mean((low < y[1000:]) & (y[1000:] < high)))
        scores.append(model.score(X[1000:], y[1000:]))
        assert model.privacy_.epsilon <= 3.0
        assert set(model.privacy_.loss) == {"scaling", "sampling", "noise scale"}
    # Standard error of a coverage of 90 % of 500 rows, and of the release of the noise scale.
    assert np.mean(inside) == pytest.approx(
        0.9, abs=0.02 + 3 * 0.025 / len(inside) ** 0.5
    )
    assert np.mean(scores) > 0.6  # least squares has .73


@AGAIN
def test_intervals_hold_where_columns_repeat_one_another():
    """Draws disagree most in directions that no row has, and no prediction depends on."""
    settings = Settings(2.0, 5e-4, 25, 75, 2.5, whiten=True)
    inside = []
    for seed in range(count(3, 20)):
        generator = np.random.default_rng(seed)
        signal = generator.standard_normal((2000, 2))
        group = generator.integers(0, 3, 2000)
        indicators = (group[:, None] == np.arange(3)).astype(float)
        X = np.column_stack([signal, indicators, np.full(2000, 7.0)])
        y = signal @ [2.0, 1.5] + 0.4 * generator.standard_normal(2000)
        model = PrivateRegressor(random_state=seed, settings=settings)
        model.fit(X[:1500], y[:1500])
        low, high = model.predict_interval(X[1500:])
        inside.append(np.mean((low < y[1500:]) & (y[1500:] < high)))
    # As in the test before.
    margin = 0.02 + 3 * 0.025 / len(inside) ** 0.5
    assert np.mean(inside) == pytest.approx(0.9, abs=margin)


def test_a_public_noise_scale_costs_nothing():
    X, y = load_diabetes(return_X_y=True)
    model = PrivateRegressor(
        noise_scale=54.0, target_range=(0, 350), settings=SHORT_SETTINGS, random_state=0
    ).fit(X, y)
    assert set(model.privacy_.loss) == {"scaling", "sampling"}
    mean, spread = model.predict(X, return_std=True)
    assert np.all(spread >= 54.0)
    assert mean.shape == spread.shape == y.shape


@pytest.mark.parametrize("unit", ["record", "device"])
def test_a_radio_link_carries_a_fit(unit):
    X, y = two_clusters(240)
    link = wflmc.Link(channel.rayleigh(1.0), snr_db=20)
    model = PrivateClassifier(
        8.0,
        0.01,
        unit=unit,
        link=link,
        settings=SHORT_SETTINGS,
        classes=["no", "yes"],
        random_state=0,
    ).fit(X, y, np.repeat(np.arange(12), 20))
    assert model.plan_.devices == 12
    assert model.privacy_.epsilon <= 8.0
    # Scales took three rounds of the link, and class counts one; those of twelve devices would tell too little.
    assert model.plan_.start == {"record": 4, "device": 3}[unit]


@pytest.mark.parametrize(
    ("arguments", "keywords", "key", "facts"),
    [
        ({"unit": "device"}, {}, "devices", ("missing",)),
        ({}, {"devices": [1, 2]}, "devices", ("(2,)", "40 rows")),
        ({"ranges": [[0, 1]]}, {}, "ranges", ("(1, 2)", "[3, 2]")),
        ({"classes": ["no", "maybe"]}, {}, "data", ("y[0]", "no, maybe")),
        ({"epsilon": -1}, {}, "epsilon", (-1,)),
        ({"adjacency": "other"}, {}, "adjacency", ("'other'",)),
    ],
)
def test_wrong_input_is_one_sentence(arguments, keywords, key, facts):
    with raises_input_error(key, *facts):
        PrivateClassifier(settings=SHORT_SETTINGS, random_state=0, **arguments).fit(
            *two_clusters(40), **keywords
        )


def test_private_selection_is_paid_from_the_same_epsilon():
    X, y = two_clusters(200)
    model = PrivateClassifier(
        settings="private", classes=["no", "yes"], random_state=2
    ).fit(X, y)
    assert set(model.privacy_.loss) == {"scaling", "class counts", "tuning", "sampling"}
    assert model.privacy_.epsilon == 3.0
    # The cost is that of a random number of repeats, which nobody may know.
    assert not hasattr(model.selected_, "repeats")
    assert model.selected_.run is None
    # What one repeat may lose, all of them together keep to ε; by the theorem itself, not by the library.
    before = model.privacy_.loss["scaling"] + model.privacy_.loss["class counts"]
    loss = selection.loss_of_repeat(PROMISE, before)
    assert model.plan_.spent.max() <= loss
    assert _epsilon_of_selection(loss, before, 1e-5, 4.0) == pytest.approx(
        3.0, abs=0.02
    )


def _epsilon_of_selection(
    loss: float, spent: float, delta: float, mean: float
) -> float:
    """Papernot & Steinke (2022), theorem 2 with η = 1 (a geometric number of runs, γ = 1/mean), and the conversion."""
    order = np.concatenate([np.arange(1.01, 20, 0.01), np.arange(20, 500, 0.5)])
    base = order * loss  # Rényi divergence of Gaussians with μ²/2 = loss
    constant = 2 * np.min((1 - 1 / order) * base + np.log(mean) / order)
    total = base + constant + np.log(mean) / (order - 1) + order * spent
    return float(
        np.min(total + np.log1p(-1 / order) - np.log(delta * order) / (order - 1))
    )


def test_the_number_of_repeats_is_geometric():
    drawn = [
        selection.select(np.random.default_rng(i), 3, lambda r, c: (r, r)).run + 1
        for i in range(2000)
    ]
    assert np.mean(drawn) == pytest.approx(
        selection.REPEATS, abs=4 * 12**0.5 / 2000**0.5
    )
    assert min(drawn) == 1


class _Peeks(PrivateClassifier):
    """A planted free look: features are centred by their own mean, which nobody has paid for."""

    def fit(self, X, y, devices=None, *, ledger=None):
        super().fit(X, y, devices, ledger=ledger)
        scaling = self.model_.scaling
        self.model_ = replace(
            self.model_, scaling=scaling._replace(center=np.mean(X, axis=0))
        )
        return self


def _neighbours():
    X, y = np.array([[1.0], [1], [-1], [-1], [1], [-1], [1], [-1]]), np.arange(8) % 2
    other = X.copy()
    other[0] = -1.0
    return (X, y, None), (other, y, None)


@AGAIN
def test_an_attack_on_a_whole_fit_proves_no_more_than_epsilon_and_catches_a_free_look():
    def honest(trial: int) -> PrivateClassifier:
        settings = (
            ("private", SHORT_SETTINGS, replace(SHORT_SETTINGS, whiten=True))[trial % 3]
            if FULL
            else replace(SHORT_SETTINGS, whiten=trial % 2 == 0)
        )
        return PrivateClassifier(
            1.0, 1e-3, classes=[0, 1], settings=settings, random_state=trial
        )

    report = audit_fit(honest, _neighbours(), count(20, 1500))
    assert report.consistent
    assert report.adjacency == "replace"

    def peeking(trial: int) -> PrivateClassifier:
        return _Peeks(
            1.0, 1e-3, classes=[0, 1], settings=SHORT_SETTINGS, random_state=trial
        )

    caught = audit_fit(peeking, _neighbours(), 60)
    assert not caught.consistent


@AGAIN
def test_an_attack_on_a_fit_with_a_cold_burn_in_proves_no_more_than_epsilon():
    tables = _neighbours()

    def cold(trial: int) -> PrivateClassifier:
        return PrivateClassifier(
            1.0, 1e-3, classes=[0, 1], settings=COLD_SETTINGS, random_state=trial
        )

    plan = cold(0).fit(*tables[0]).plan_
    assert np.all(plan.noise_variance[:10] < 0.9 * plan.langevin_noise[:10])
    assert audit_fit(cold, tables, count(20, 1500)).consistent


@pytest.mark.skipif(not FULL, reason="make test-full runs scikit-learn's checks")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [PrivateClassifier, PrivateRegressor])
def test_scikit_learns_own_checks_pass(kind):
    from sklearn.utils.estimator_checks import check_estimator

    # Scores on small tables need more than a usual ε; nothing else cannot hold for a randomised, private method.
    settings = Settings(2.0, 0.005, 10, 10, 1.0)
    check_estimator(kind(epsilon=100.0, delta=0.1, settings=settings, random_state=0))


def test_a_page_tells_of_a_fit_with_and_without_held_out_rows(monkeypatch):
    monkeypatch.setattr(folder, "value_of_more", lambda *_: {})
    X, y = two_clusters(120)
    settings = replace(COLD_SETTINGS, whiten=True)
    model = PrivateClassifier(
        settings=settings, classes=["no", "yes"], random_state=0
    ).fit(X[:80], y[:80])
    page = model.report_html_(X[80:], y[80:], np.arange(40) % 2)
    assert "calibration error" in page
    assert all(
        words in page for words in ("which features go together", "whiten<", ">yes<")
    )
    assert "burn_in_temperature" in page
    assert "No rows were held out" in model.report_html_()


def test_settings_are_read_back_from_the_file_of_a_fit(monkeypatch):
    monkeypatch.setattr(folder, "value_of_more", lambda *_: {})
    X, y = two_clusters(60)
    model = PrivateClassifier(
        settings=COLD_SETTINGS, classes=["no", "yes"], random_state=0
    ).fit(X, y)
    no_rows = folder.TableRows(X[:0], y[:0], np.zeros(0, int), [])
    content = folder.describe(model, no_rows).model_dump_json()
    fit = FitFile.model_validate_json(content)
    assert Settings(**fit.settings) == model.settings_ == COLD_SETTINGS


@pytest.mark.parametrize("kind", [PrivateClassifier, PrivateRegressor])
def test_all_noise_of_a_secret_fit_is_drawn_on_a_lattice(kind, monkeypatch):
    """Low-order bits of simulated noise exclude neighbours (Mironov 2012), so none of it may be in what is shown."""
    drawn = []
    honest = Lattice.noisy

    def noisy(lattice, signal):
        drawn.append(np.size(signal))
        return honest(lattice, signal)

    def never(*_, **__):
        raise AssertionError("noise of a simulation")

    monkeypatch.setattr(Lattice, "noisy", noisy)
    monkeypatch.setattr(estimators, "sample", never)
    X, y = two_clusters(40, names=(0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(
            releases.np.random,
            "default_rng",
            lambda seed: SimpleNamespace(standard_normal=never),
        )
        release = scaling.release_scaling(
            jax.random.key(0),
            X,
            np.zeros(40, int),
            scaling.ReleaseTerms(PROMISE, exact=True),
        )
    assert len(drawn) == len(release.loss) == 3
    drawn.clear()
    model = kind(settings=replace(SHORT_SETTINGS, whiten=True)).fit(X, y)
    parameters = model.model_.theta.shape[1]
    assert drawn.count(parameters) >= SHORT_SETTINGS.burn_in + SHORT_SETTINGS.samples
    assert len(drawn) == 3 + 3 + SHORT_SETTINGS.burn_in + SHORT_SETTINGS.samples + (
        kind is PrivateRegressor
    )


@pytest.mark.parametrize(("whiten", "temperature"), [(False, 1.0), (True, 0.05)])
def test_a_protected_chain_has_the_law_of_a_simulated_one(whiten, temperature):
    X, y = two_clusters(60)
    Z = (X - [0, 300, 7]) / [2, 40, 0.05]
    labels = (y == "yes").astype(int)
    facts = Facts(60, 3, 2, 4, PROMISE, 0.0)
    short = Settings(1.0, 0.02, 2, 3, 1.0, whiten, temperature)
    posterior = chosen.private_posterior(facts, short, Z, labels)
    posterior, facts, _ = chosen.whiten(jax.random.key(1), facts, short, posterior)
    plan = chosen.make_plan(facts, short, posterior)
    chains = count(60, 1500)
    draws = np.array(
        [
            protected_chain(posterior, plan, np.zeros(plan.dim)).theta[0, -1]
            for _ in range(chains)
        ]
    )
    simulated = np.asarray(
        wflmc.sample(jax.random.key(0), posterior, plan, chains=4 * chains).theta[:, -1]
    )
    # Moments of either, within five standard errors; and what the same chain adds is never the same.
    spread = simulated.std(0)
    assert np.all(
        np.abs(draws.mean(0) - simulated.mean(0)) < 5 * spread * np.sqrt(1.25 / chains)
    )
    assert np.all(
        np.abs(np.log(draws.std(0) / spread)) < 5 * np.sqrt(1.25 / (2 * chains))
    )
    assert len(np.unique(draws)) == draws.size


def test_a_ledger_that_is_continued_leaves_less_for_the_next_fit(tmp_path):
    X, y = two_clusters(80)
    half = Settings(1.0, 0.01, 5, 5, 1.0)
    ledger = Ledger(PROMISE, 1, path=tmp_path / "ledger.jsonl")
    ledger.charge("before", 0, 0.5 * PROMISE.budget(1)[None])
    model = PrivateClassifier(settings=half, classes=["no", "yes"]).fit(
        X, y, ledger=tmp_path / "ledger.jsonl"
    )
    loss = model.privacy_.loss
    budget = PROMISE.budget(1)[0]
    assert loss["earlier fits"] == pytest.approx(0.5 * budget)
    assert loss["scaling"] + loss["sampling"] <= 0.5 * budget * (1 + 1e-9)
    assert Ledger(PROMISE, 1, path=tmp_path / "ledger.jsonl").spent[0] == pytest.approx(
        sum(loss.values())
    )


@AGAIN
@pytest.mark.parametrize("whitened", [False, True])
def test_candidates_have_one_plan_for_all_stand_ins(monkeypatch, plans_made, whitened):
    """No plan looks at the rows of a stand-in: it would be the same for each of them."""
    facts = Facts(
        rows=60,
        features=3,
        classes=2,
        devices=2,
        promise=PROMISE,
        spent=0.1 * PROMISE.budget(1)[0],
    )
    tried = [replace(SHORT_SETTINGS, whiten=whitened, clip=clip) for clip in (0.5, 1.0)]
    shared = chosen.expect(facts, tried, max_stand_ins=2)
    assert plans_made() == len(tried)

    shared_plans = chosen._SharedPlans

    class PlanOfEach(shared_plans):
        def plan_of(self, facts, settings, posterior):
            plans_of_one = shared_plans()
            plan = plans_of_one.plan_of(facts, settings, posterior)
            self._plans |= plans_of_one._plans
            return plan

    monkeypatch.setattr(chosen, "_SharedPlans", PlanOfEach)
    assert chosen.expect(facts, tried, max_stand_ins=2) == shared
    assert plans_made() == len(tried) * (1 + 2 * len(stand_ins.STRENGTHS[True]))
