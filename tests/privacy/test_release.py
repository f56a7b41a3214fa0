"""Whitening that is paid for: what a release costs, and who is charged."""

from __future__ import annotations

import json
import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wflmc
from wflmc import channel
from wflmc.privacy import releases
from wflmc.privacy import whitening as preconditioning
from wflmc.privacy.lattice import Lattice

from ..error_tools import (
    codes_of,
    missing_facts,
    names_key,
    notices_of,
    raises_input_error,
    text_of,
)
from ..plan_tools import with_context
from ..posterior.whitening_tools import KEY, correlated, gaussian

PROMISE = {
    "device": wflmc.Privacy(2, 0.1, 60),
    "record": wflmc.Privacy(2, 0.1, 60, unit="record", example_clip=3),
}


def released(snr_db=20.0, unit="record", intercept=True, csi_error=0.0, **keywords):
    posterior = gaussian(intercept=intercept)
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=snr_db, csi_error=csi_error)
    return posterior, preconditioning.release_whitening(
        KEY, posterior, link, PROMISE[unit], **keywords
    )


@settings(max_examples=30, deadline=None)
@given(
    st.floats(-20, 60),
    st.sampled_from(["device", "record"]),
    st.booleans(),
    st.floats(0.01, 0.9),
    st.integers(3, 40),
    st.sampled_from([0.0, 0.3]),
)
def test_a_release_spends_no_more_than_its_share(
    snr_db, unit, intercept, budget_fraction, rounds, error
):
    posterior, release = released(
        snr_db, unit, intercept, error, budget_fraction=budget_fraction, rounds=rounds
    )
    assert release.loss.shape == (rounds, 5)
    assert np.all(release.loss >= 0)
    assert np.all(
        release.spent <= budget_fraction * PROMISE[unit].budget(5) * (1 + 1e-9)
    )
    assert np.linalg.cond(release.matrix) < 1e12
    posterior.whitened(release.matrix)


def test_a_strong_link_gives_the_whitening_of_the_data():
    # Without a privacy promise, the link is the only limit.
    posterior = gaussian(intercept=True)
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=120)
    free = preconditioning.release_whitening(
        KEY,
        posterior,
        link,
        wflmc.Privacy(None, None, 60),
        clip=30.0,
        prior_on="whitened",
    )
    exact = posterior.whitened(free.matrix).features.reshape(-1, 5)
    values = np.linalg.eigvalsh(exact.T @ exact / 60)
    # Not 1: devices are received at different strengths.
    assert 0.5 < values[0] < values[-1] < 2


def test_sums_move_no_further_than_the_stated_sensitivity():
    """Replacing one example, for the three sums, by random search and at the corners."""
    rng = np.random.default_rng(0)
    b = 1.7
    worst = np.zeros(3)
    for _ in range(4000):
        u, v = b * rng.standard_normal((2, 3)) * rng.choice([0.3, 3], (2, 1))
        pair = releases.clip_rows(np.stack([u, v])[None], b, np.ones((1, 2), bool))[0]
        products = preconditioning._packed(np.einsum("ni,nj->nij", pair, pair))
        lengths = (pair**2).sum(1)
        moved = [
            np.linalg.norm(pair[0] - pair[1]),
            abs(lengths[0] - lengths[1]),
            np.linalg.norm(products[0] - products[1]),
        ]
        worst = np.maximum(worst, moved)
    stated = np.array([2 * b, b**2, 2**0.5 * b**2])
    assert np.all(worst <= stated * (1 + 1e-12))
    assert np.all(worst > 0.9 * stated)


def test_the_loss_is_that_of_the_gaussian_mechanism_that_is_heard():
    """Two neighbouring data sets, one device: what the server hears differs by √(2 loss) standard deviations."""
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=5, csi_error=0.0)
    sizes = np.array([4])
    uses = 6
    reach = 2.0
    sums = np.array([[1.0, 2.0, -1.0]])
    other = sums + np.array([[0.6, 0.0, 0.8]])  # a replacement that moves the sum by 1
    for privacy, moved in ((PROMISE["record"], 1.0), (PROMISE["device"], 16.0)):
        received = []
        for given_sums in (sums, other):
            air = releases.ReleaseChannel(
                KEY,
                link,
                privacy,
                sizes,
                uses=uses,
                rounds=range(3),
                settings=np.zeros(1),
            )
            received.append(
                air.receive(
                    3, given_sums, reach=reach, moved_by=1.0, budget_fraction=0.5
                )
            )
        # The average over rounds is the sufficient statistic of the mean: its distance in standard deviations is μ.
        (first, noise), (second, _) = received
        distance = np.linalg.norm(second - first) / noise
        loss = air.losses[0].sum()
        assert distance**2 / 2 == pytest.approx(loss / moved**2, rel=1e-9)
        strength = np.abs(link.gains(3, 1)) * np.sqrt(link.snr(1) * uses) / (4 * reach)
        full = (strength * moved) ** 2 / 2
        assert loss == pytest.approx(
            np.minimum(full, 0.5 * privacy.budget(1)[0] / 3).sum(), rel=1e-9
        )


def test_noise_of_the_average_is_what_it_says():
    link = wflmc.Link(channel.rayleigh(0.01), snr_db=5)
    sizes = np.array([4, 8, 2])
    draws = []
    for seed in range(400):
        air = releases.ReleaseChannel(
            jax.random.key(seed),
            link,
            PROMISE["record"],
            sizes,
            uses=10,
            rounds=range(5),
            settings=np.zeros(1),
        )
        air.receive(1, np.zeros((3, 10)), reach=2.0, moved_by=1.0, budget_fraction=0.5)
        draws.append(
            air.receive(
                3, np.zeros((3, 10)), reach=2.0, moved_by=1.0, budget_fraction=0.5
            )
        )
    spread = np.std([average for average, _ in draws])
    assert spread / draws[0][1] == pytest.approx(1, abs=4 / np.sqrt(2 * 4000))


def test_wrong_requests_are_refused():
    for keywords, name in (
        ({"budget_fraction": 0.0}, "share"),
        ({"rounds": 2}, "rounds"),
        ({"clip": -1.0}, "clip"),
        ({"clip": 1e-80}, "clip"),
        ({"clip": 1e80}, "clip"),
    ):
        with raises_input_error(f"whiten_{name}", section="posterior"):
            released(**keywords)
    with raises_input_error("preconditioner", section="posterior"):
        preconditioning.release_whitening(
            KEY, gaussian().whitened(), wflmc.Link(channel.static()), PROMISE["record"]
        )


SCENARIO = """
[posterior]
examples = 600
devices = 6
intercept = true
preconditioner = "private-whiten"
whiten_rounds = 5
[link]
snr_db = 25.0
[privacy]
epsilon = 2.0
delta = 0.01
unit = "record"
example_clip = 9.0
[sampler]
step_size = "0.5/(mu+L)"
burn_in = 13
samples = 20
chains = 3
"""


@pytest.fixture
def scenario(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(SCENARIO)
    return path


def test_a_release_is_paid_from_the_same_ledger_once(scenario, tmp_path, call):
    ledger = tmp_path / "l.jsonl"
    plan = json.loads(call("plan", scenario, "--json", "--no-compare")[1])
    before, own = (
        np.array(plan["privacy"][name]) for name in ("spent_before", "spent")
    )
    budget = np.array(plan["privacy"]["budgets"])
    assert np.all(before > 0)
    assert np.all(before <= 0.1 * budget)
    assert np.max((before + own) / budget) == pytest.approx(1, abs=1e-9)
    assert call("run", scenario, "--ledger", ledger, "--out", tmp_path / "a")[0] == 0
    lines = [json.loads(line) for line in ledger.read_text().splitlines()[1:]]
    release = lines[0]["run"]  # which is the first that is paid for
    assert [line["round"] for line in lines if line["run"] == release] == list(range(5))
    assert [line["round"] for line in lines if line["run"] != release] == list(
        range(5, 38)
    )
    total = np.sum([line["loss"] for line in lines], axis=0)
    np.testing.assert_allclose(total, before + own)
    assert call("run", scenario, "--ledger", ledger)[0] == 2  # nothing is left
    # Nothing new is sent.
    assert (
        call("run", "--plan", tmp_path / "a" / "plan.json", "--ledger", ledger)[0] == 0
    )
    assert len(ledger.read_text().splitlines()) == len(lines) + 1


def test_a_second_run_does_not_pay_for_the_release_again(scenario, tmp_path, call):
    ledger = tmp_path / "l.jsonl"
    less = ("--set", "policy.power='equal'", "--set", "link.snr_db=0.0")
    assert call("run", scenario, *less, "--ledger", ledger)[0] == 0
    code, _, err = call(
        "run", scenario, *less, "--ledger", ledger, "--set", "sampler.seed=1"
    )
    assert code == 0, err
    runs = [json.loads(line)["run"] for line in ledger.read_text().splitlines()[1:]]
    assert runs.count(runs[0]) == 5
    assert len(set(runs)) == 3


def test_another_channel_is_another_release(scenario, tmp_path, call):
    """With noise of its own, or who hears both could take it away; and with a loss of its own."""
    ledger = tmp_path / "l.jsonl"
    less = ("--set", "policy.power='equal'", "--set", "link.snr_db=0.0")
    assert call("run", scenario, *less, "--ledger", ledger)[0] == 0
    code, _, err = call(
        "run",
        scenario,
        *less,
        "--ledger",
        ledger,
        "--set",
        "link.seed=1",
        "--set",
        "sampler.seed=1",
    )
    assert code == 0, err
    lines = [json.loads(line) for line in ledger.read_text().splitlines()[1:]]
    assert len({line["run"] for line in lines if line["round"] < 5}) == 2
    assert len({line["noise"] for line in lines if line["round"] < 5}) == 2


def test_a_plan_cannot_forget_its_release(scenario, tmp_path, call):
    saved = tmp_path / "p.json"
    document = json.loads(call("plan", scenario, "--json", "--no-compare")[1])
    document["privacy"]["spent_before"] = [0.0] * 6
    document["gain"] = [1.01 * gain for gain in document["gain"]]
    saved.write_text(json.dumps(document))
    code, _, err = call("run", "--plan", saved)
    assert code == 2
    assert "gain" in err
    folder = tmp_path / "p"
    assert call("plan", scenario, "--out", folder)[0] == 0
    plan = wflmc.Plan.load(folder / "plan.npz")
    plan = with_context(plan, ledger=np.zeros(6))
    plan.save(folder / "plan.npz")
    document = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(
        json.dumps(document | {"plan_digest": plan.checksum})
    )
    code, _, err = call("run", "--plan", folder)
    assert code == 2
    assert names_key(err, "--plan", "whitening")


def test_a_round_of_a_release_knows_only_the_rounds_before():
    gains = np.abs(np.random.default_rng(0).standard_normal((16, 5))) + 0.01
    later = np.where(np.arange(16)[:, None] < 9, gains, 10 * gains)
    paired = [
        preconditioning.release_whitening(
            KEY, gaussian(), wflmc.Link(channel.from_array(h), -20), PROMISE["device"]
        )
        for h in (gains, later)
    ]
    np.testing.assert_array_equal(paired[0].loss[:9], paired[1].loss[:9])
    assert not np.array_equal(paired[0].loss[9:], paired[1].loss[9:])


def test_the_audit_says_that_it_leaves_the_release_out(scenario, call):
    code, out, _ = call("audit", scenario, "--trials", "2000")
    assert code == 0
    assert not missing_facts(" ".join(out.split()), ("release", "ε = 2"))


def test_warnings_compare_like_with_like():
    """Distances of parameters are not held against bounds in other coordinates."""
    X, y = correlated()
    posterior = wflmc.gaussian_regression(
        KEY, 5, X=0.01 * X, y=y, prior_std=100.0
    ).whitened()
    step = 0.4 / (posterior.mu + posterior.L)
    plan = wflmc.plan(
        posterior, wflmc.Link(channel.static()), wflmc.Privacy(), step_size=step, burn_in=40, samples=5,
        policy=wflmc.Policy(power="noiseless", objective="exact"),
    )  # fmt: skip
    assert "nothing-gained" not in codes_of(plan)
    evaluation = wflmc.evaluate(wflmc.sample(KEY, posterior, plan, 200), posterior)
    assert evaluation.w2_sq.worst > evaluation.bound > evaluation.moving_w2_sq.worst
    assert "above-bound" not in codes_of(evaluation)


def test_a_whitened_run_goes_on(scenario, tmp_path, call):
    less = ("--set", "policy.power='equal'", "--set", "link.snr_db=0.0")
    code, _, err = call("run", scenario, *less, "--out", tmp_path / "a")
    assert code == 0, err
    code, _, err = call("run", "--resume", tmp_path / "a", "--more", "7")
    assert code == 0, err
    longer = json.loads((tmp_path / "a" / "plan.json").read_text())
    assert longer["constants"]["samples"] == 27
    assert np.all(
        np.array(longer["privacy"]["spent_before"])
        < 0.1 * np.array(longer["privacy"]["budgets"])
    )
    assert call("run", "--plan", tmp_path / "a" / "plan.json")[0] == 0


def test_public_whitening_is_warned_about(scenario, call):
    def document(*changes):
        sets = [part for change in changes for part in ("--set", f"posterior.{change}")]
        return json.loads(call("plan", scenario, *sets, "--json", "--no-compare")[1])

    whitened = document("preconditioner='whiten'")
    names = re.findall(r"posterior\.(\w+)", text_of(whitened, "data-constants"))
    assert names[:2] == ["preconditioner", "mu"]
    assert "posterior.preconditioner" not in " ".join(document()["warnings"])
    notices = notices_of(document("preconditioner='none'", "prior_on='whitened'"))
    idle = [notice.text.split()[0] for notice in notices if notice.code == "no-effect"]
    assert {"posterior.prior_on", "posterior.whiten_rounds"} <= set(idle)


def test_the_lattice_has_room_for_what_arrives_more_strongly_than_intended(monkeypatch):
    limits, norms = [], []
    fitted = Lattice.fitted

    def recorded_fit(**arguments):
        limits.append(arguments["total"])
        return fitted(**arguments)

    def without_noise(lattice, signal):
        norms.append(np.linalg.norm(signal))
        return signal

    monkeypatch.setattr(Lattice, "fitted", recorded_fit)
    monkeypatch.setattr(Lattice, "noisy", without_noise)
    link = wflmc.Link(channel.static(1.0), snr_db=200, csi_error=0.9, seed=4)
    release = releases.ReleaseChannel(
        jax.random.key(0),
        link,
        wflmc.Privacy(8, 0.01),
        np.array([4, 4]),
        uses=1,
        rounds=range(3),
        settings=np.zeros(1),
        exact=True,
    )
    sums = np.full((2, 1), 8.0)  # as long as they may be
    release.receive(3, sums, reach=2.0, moved_by=4.0, budget_fraction=0.5)
    np.testing.assert_allclose(norms, limits)
    assert release.mismatch.max() > 5


@pytest.mark.parametrize("weak_gain", [1e-6, 1e-13])
def test_a_weak_device_pays_for_the_rounding_of_what_strong_ones_send(weak_gain):
    """The server receives one rounded sum. Its error is that of the strongest term."""
    rng = np.random.default_rng(0)
    sizes = np.array([1, 1])
    link = wflmc.Link(channel.from_array([[1.0, weak_gain]]), snr_db=0)
    signals = []

    class Recorder(releases.ReleaseChannel):
        def _add_noise(self, signal, loss, total):
            signals.append(signal[0])
            return signal

    worst = 0.0
    for strong in rng.uniform(-1, 1, 200):
        for weak in (-1.0, 1.0):
            air = Recorder(
                KEY,
                link,
                wflmc.Privacy(50, 0.1, 60),
                sizes,
                uses=1,
                rounds=range(1),
                settings=np.zeros(1),
            )
            air.receive(
                1, np.array([[strong], [weak]]), reach=1, moved_by=2, budget_fraction=1
            )
        left, right = signals[-2:]
        worst = max(worst, float(np.abs(left - right)[0]))
    charged = np.sqrt(2 * air.losses[0][0, 1])
    change = 2 * weak_gain
    assert worst > change * (1 + 1e-11)  # Rounding is more than the device's own.
    assert worst <= charged
    assert charged <= worst + 4 * np.finfo(float).eps


def test_rounding_is_within_the_budget_and_silences_who_cannot_pay_for_it():
    """Device 2 may lose less than the rounding of what the others send costs it."""
    privacy = wflmc.Privacy([8, 8, 1e-30], [0.01, 0.01, 1e-300], 60)
    air = releases.ReleaseChannel(
        KEY,
        releases.ideal_link(),
        privacy,
        np.array([4, 4, 4]),
        uses=1,
        rounds=range(1),
        settings=np.zeros(1),
    )
    sums = np.ones((3, 2))
    received = air.receive(1, sums, reach=2.0, moved_by=4.0, budget_fraction=0.5)
    assert np.all(np.isfinite(received.mean))
    allowed = 0.5 * privacy.budget(3)
    loss = air.losses[0][0]
    assert np.all(loss <= allowed)
    np.testing.assert_allclose(loss[:2], allowed[:2], rtol=1e-12)
    assert loss[2] == 0.0


def test_new_noise_is_paid_for_again():
    """Exact noise does not repeat: a second release tells more than the first."""
    posterior = gaussian()
    promise = PROMISE["record"]
    ledger = wflmc.privacy.Ledger(promise, 5, subject=posterior.digest)
    for count in (1, 2):
        release = preconditioning.release_whitening(
            KEY, posterior, releases.ideal_link(), promise, exact=True
        )
        ledger.charge(release.name, 0, release.loss, release.noise)
        np.testing.assert_allclose(ledger.spent, count * release.spent)
