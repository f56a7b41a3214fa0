"""Adjacency: by how much neighbours differ in every mechanism, what that costs, and that it is said with every ε."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wflmc
from wflmc import channel, privacy
from wflmc.apps import audit
from wflmc.apps.federation.job import make_job
from wflmc.apps.federation.messages import Terms
from wflmc.privacy import releases
from wflmc.privacy import whitening as preconditioning
from wflmc.privacy.accountants import epsilon_by_dp_accounting
from wflmc.privacy.ledger import ForeignLedgerError

from ..audit.audit_tools import KEY, TRIALS, planned
from ..cli_tools import strict, with_set
from ..error_tools import raises_input_error
from ..plan_tools import with_context

CLIPS = [(30.0, 9.0), (30.0, 45.0), (30.0, 90.0)]


def promise(adjacency="add-remove", clip=30.0, example_clip=None, epsilon=8.0):
    unit = "device" if example_clip is None else "record"
    return wflmc.Privacy(
        epsilon, 0.01, clip, unit=unit, example_clip=example_clip, adjacency=adjacency
    )


@pytest.fixture(scope="module")
def sent():
    """What each of 400 devices with three examples in two dimensions sends, for rows[k, n, 2] and targets[k, n]."""

    @jax.jit
    def sum_of_model(posterior, clip, example_clip):
        ones = jnp.ones(posterior.devices)
        theta = jnp.array([0.3, -0.2])

        def alone(weight):
            return posterior.clipped_sum(
                theta, weight, clip * ones, example_clip=example_clip * ones
            )[0]

        return jax.vmap(alone)(jnp.eye(posterior.devices))

    def send(rows, targets, clip, example_clip):
        posterior = wflmc.gaussian_regression(
            KEY,
            len(rows),
            X=rows.reshape(-1, 2),
            y=targets.reshape(-1),
            partition="blocks",
            prior_std=0.1,
        )
        return np.asarray(
            sum_of_model(
                posterior.on_accelerator(1, 2.0**30, True), clip, example_clip
            ),
            float,
        )

    return send


@pytest.mark.parametrize(("clip", "example_clip"), CLIPS)
def test_no_neighbours_differ_by_more_than_is_stated(sent, clip, example_clip):
    """One record replaced or left empty, a device replaced or silent: by random search, and nearly reached."""
    rng = np.random.default_rng(0)
    shape = (400, 3)
    # Rows lie mostly along one direction.
    rows = rng.standard_normal((*shape, 1)) * np.array([1.0, 0.3])
    targets = rng.standard_normal(shape) * 10 ** rng.uniform(-1, 3, shape)
    # Half of the devices are set to the worst: others add s against the record, where s is half the change.
    half = min(clip, example_clip / 2)
    rows[::2] = [1.0, 0.0]
    targets[::2] = [1e4, -half, 0.0]
    other, empty, replaced = targets.copy(), rows.copy(), targets.copy()
    empty[:, 0] = 0.0
    other[:, 0] = 0.0
    replaced[:, 0] = -1e4 * np.sign(targets[:, 0])
    signal = sent(rows, targets, clip, example_clip)
    changes = {
        ("record", "add-remove"): signal - sent(empty, other, clip, example_clip),
        ("record", "replace"): signal - sent(rows, replaced, clip, example_clip),
        ("device", "add-remove"): signal,  # silence
        ("device", "replace"): signal
        - sent(rows, -1e4 * np.sign(targets), clip, example_clip),
    }
    for (unit, adjacency), change in changes.items():
        stated = (
            2
            * promise(
                adjacency, clip, example_clip if unit == "record" else None
            ).sensitivity(1)[0]
        )
        largest = np.linalg.norm(change, axis=1).max()
        assert largest <= stated * (1 + 1e-5), (unit, adjacency)
        if unit == "record" or clip < example_clip:
            assert largest > 0.9 * stated, (unit, adjacency)


def test_sensitivities_by_hand():
    assert promise("replace", 30, 9).sensitivity(2).tolist() == [9, 9]
    assert promise("add-remove", 30, 9).sensitivity(2).tolist() == [4.5, 4.5]
    # ℓ/2, not half of min(c, ℓ).
    assert promise("add-remove", 30, 45).sensitivity(1).tolist() == [22.5]
    assert promise("add-remove", 30, 90).sensitivity(1).tolist() == [30]
    assert promise("add-remove", [30, 10]).sensitivity(2).tolist() == [15, 5]


def test_a_mini_batch_draws_an_empty_record_like_any_other():
    """N_k and so the scale N_k/batch stay: an empty record changes the sum by c when it is drawn, else not at all."""
    # The columns are a value and whether it is present.
    rows = np.stack([np.linspace(1, 2, 8), np.ones(8)], axis=1).astype(np.float32)
    posterior = wflmc.posterior_from(
        lambda theta, d: -theta[0] * d[0] * d[1], lambda theta: -0.5 * theta @ theta, rows,
        initial=jnp.zeros(1), devices=1, batch=2, mu=1.0, L=1.0,
    )  # fmt: skip
    other = dataclasses.replace(
        posterior, data=posterior.data * (np.arange(8) != 3)[:, None]
    )

    @jax.jit
    def change(key):
        position, ones = jnp.zeros(1), jnp.ones(1)
        totals = [
            model.clipped_sum(position, ones, 100 * ones, key, 3 * ones)[0]
            for model in (posterior, other)
        ]
        return totals[0] - totals[1]

    changes = np.asarray(jax.vmap(change)(jax.random.split(KEY, 40)))[:, 0]
    # 4 times its gradient is clipped to 3.
    np.testing.assert_allclose(np.unique(changes.round(4)), [0.0, 3.0], atol=1e-4)


def test_the_loss_of_a_plan_follows(six_devices):
    plans = {
        name: planned(six_devices, promise(name), power="equal")
        for name in privacy.ADJACENCIES
    }
    same_power = with_context(plans["replace"], privacy=promise())
    np.testing.assert_allclose(same_power.loss, plans["replace"].loss / 4)
    # Both spend the budget: 4 times the power.
    np.testing.assert_allclose(plans["add-remove"].spent, plans["replace"].spent)
    np.testing.assert_allclose(plans["add-remove"].gain, 2 * plans["replace"].gain)
    loss = plans["add-remove"].loss[:, 0]
    ours = float(privacy.epsilon_spent(loss.sum(), 0.01))
    assert ours == pytest.approx(8, rel=1e-6)
    # By the distance between neighbours in standard deviations of the noise, as dp-accounting takes it.
    separation = (
        plans["add-remove"].gain * 30 / np.sqrt(plans["add-remove"].noise_power)
    )
    np.testing.assert_allclose(separation**2 / 2, loss)
    others = epsilon_by_dp_accounting(separation**2 / 2, 0.01)
    assert others["pld"] is None or others["pld"] == pytest.approx(ours, rel=1e-2)
    assert others["rdp"] is None or others["rdp"] >= ours


# The whitening release


def test_the_releases_sums_move_no_further_than_stated(monkeypatch):
    """Rows at most b long, replaced or left empty: the three sums by random search, against what is charged for."""
    rng = np.random.default_rng(0)
    charged = {}
    honest = releases.ReleaseChannel.receive

    def hear(air, rounds, sums, *, reach, moved_by, budget_fraction):
        charged.setdefault((air.privacy.adjacency, air.privacy.unit), []).append(
            (moved_by, reach)
        )
        return honest(
            air,
            rounds,
            sums,
            reach=reach,
            moved_by=moved_by,
            budget_fraction=budget_fraction,
        )

    monkeypatch.setattr(releases.ReleaseChannel, "receive", hear)
    posterior = wflmc.gaussian_regression(
        KEY, 4, X=rng.standard_normal((40, 3)), y=np.zeros(40), intercept=True
    )
    link = wflmc.Link(channel.static(0.01), snr_db=20)
    for adjacency in privacy.ADJACENCIES:
        preconditioning.release_whitening(
            KEY, posterior, link, promise(adjacency, 30, 9), clip=1.7
        )
    pair = 1.7 * rng.standard_normal((4000, 2, 3)) * rng.choice([0.3, 3], (4000, 2, 1))
    pair[::4, 1] = -pair[::4, 0]  # opposite, for the mean
    real = np.ones(pair.shape[:2], bool)

    def sums(radius):
        rows = releases.clip_rows(pair, radius, real)
        return (
            rows,
            (rows**2).sum(-1, keepdims=True),
            preconditioning._packed(np.einsum("kni,knj->knij", rows, rows)),
        )

    wide = sums(2 * 1.7)
    tight = sums(1.7)
    for adjacency in privacy.ADJACENCIES:
        for (stated, _), terms in zip(
            charged[adjacency, "record"], (wide[0], wide[1], tight[2]), strict=True
        ):
            moved = terms[:, 0] - (terms[:, 1] if adjacency == "replace" else 0)
            largest = np.linalg.norm(moved, axis=-1).max()
            assert 0.95 * stated < largest <= stated * (1 + 1e-12)
    ratios = [
        a[0] / b[0]
        for a, b in zip(
            charged["add-remove", "record"], charged["replace", "record"], strict=True
        )
    ]
    np.testing.assert_allclose(ratios, [1 / 2, 1, 2**-0.5])


@pytest.mark.parametrize(("example_clip", "least"), [(None, 4.0), (9.0, 1.0)])
def test_a_release_costs_less_and_has_noise_of_its_own(example_clip, least):
    posterior = wflmc.gaussian_regression(KEY, 4, examples=80, intercept=True)
    link = wflmc.Link(channel.static(0.01), snr_db=-20)
    released = {
        name: preconditioning.release_whitening(
            KEY, posterior, link, promise(name, 30, example_clip), budget_fraction=0.9
        )
        for name in privacy.ADJACENCIES
    }
    ratio = released["replace"].loss / released["add-remove"].loss
    assert np.all(ratio >= least * (1 - 1e-9))
    assert ratio.max() == pytest.approx(4)
    assert released["replace"].noise != released["add-remove"].noise


# Who is told


def test_a_ledger_of_another_adjacency_is_refused(tmp_path, six_devices):
    path = tmp_path / "ledger.jsonl"
    old = privacy.Ledger(promise("replace"), 6, path=path)
    assert json.loads(path.read_text().splitlines()[0])["adjacency"] == "replace"
    with raises_input_error(
        "ledger", "replace", "add-remove", error=ForeignLedgerError
    ):
        privacy.Ledger(promise(), 6, path=path)
    with raises_input_error("ledger", "adjacency"):
        wflmc.sample(
            KEY,
            six_devices,
            planned(six_devices, promise()),
            1,
            ledger=privacy.Ledger(promise("replace"), 6),
        )
    assert old.spent.sum() == 0


def test_terms_of_a_federation_carry_it(tmp_path, six_devices):
    link = wflmc.Link(channel.static(0.01), snr_db=40)
    terms = {}
    for name, privacy_promise in {
        "device": promise(),
        "record": promise(example_clip=9.0),
    }.items():
        terms[name] = make_job(
            KEY, six_devices, link, planned(six_devices, privacy_promise)
        ).terms(2)
        assert (terms[name].sensitivity, terms[name].promise.adjacency) == (
            15.0 if name == "device" else 4.5,
            "add-remove",
        )
        terms[name].save(tmp_path / name)
        assert Terms.load(tmp_path / name) == terms[name]


SMALL = with_set(
    [
        "posterior.devices=4",
        "posterior.examples=40",
        "sampler.burn_in=5",
        "sampler.samples=2",
        "sampler.chains=2",
    ]
)


def test_it_stands_beside_every_epsilon_of_the_command_line(call, scenario, tmp_path):
    changed = [*SMALL, *with_set(["privacy.adjacency=add-remove"])]
    table = " ".join(call("plan", scenario, *changed, "--no-compare")[1].split())
    assert "whether a device sends or is silent (add-remove)" in table
    assert table.count("(add-remove)") == 3
    code, out, err = call("run", scenario, *changed, "--out", tmp_path / "run")
    assert code == 0, err
    assert "for the worst device (add-remove)" in out
    plan, summary = (
        strict((tmp_path / "run" / name).read_text())
        for name in ("plan.json", "summary.json")
    )
    assert plan["privacy"]["adjacency"] == summary["adjacency"] == "add-remove"
    assert plan["privacy"]["epsilon_spent"] <= 8 * (1 + 1e-9)
    assert (
        '"adjacency": "add-remove"'
        in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()[0]
    )


# The audit's neighbours


def test_an_audit_comes_close_with_neighbours_of_its_own(six_devices):
    """A record that is there or empty, one canary and one model: neither may prove more, and all come near."""
    plan = planned(six_devices, promise(example_clip=45.0))
    report = audit.audit(
        KEY, plan, six_devices, trials=TRIALS, attacks=["constant", "record", "model"]
    )
    assert report.consistent, str(report)
    assert report.adjacency == "add-remove"
    assert "(add-remove, " in report.verdict
    assert report.ratio > 0.9
    assert report.tests[-1].epsilon_gaussian > 0.8 * report.epsilon
    record = next(test for test in report.tests if "clipped" in test.name)
    assert 0.2 < record.epsilon_gaussian / report.epsilon < 1


def test_an_audit_of_silence_comes_close(six_devices):
    plan = planned(six_devices, promise())
    report = audit.audit(
        KEY, plan, six_devices, trials=TRIALS, attacks=["constant", "model"]
    )
    assert report.consistent, str(report)
    for test in report.tests:
        assert 0.8 < test.epsilon_gaussian / report.epsilon < 1, test.name


def test_neighbours_by_replacement_break_the_claim_of_add_remove(
    six_devices, monkeypatch
):
    """As if the promise of add-remove were given for any other data in place of one's own."""
    monkeypatch.setattr(audit.attack.Target, "neighbour", -1.0)
    monkeypatch.setattr(
        audit.attack.Target, "midpoint", property(lambda self: 0 * self.signal)
    )
    report = audit.audit(
        KEY,
        planned(six_devices, promise()),
        six_devices,
        trials=TRIALS,
        attacks=["constant", "model"],
    )
    assert {test.name for test in report.flagged} >= {
        "matched filter",
        "gaussian model",
    }
