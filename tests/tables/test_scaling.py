"""Scales that are paid for: what a row moves of the sums, what is found, and what it costs."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wflmc
from wflmc import channel
from wflmc.apps.tables import scaling
from wflmc.apps.tables.scaling import ReleaseTerms
from wflmc.privacy import Privacy, releases

from ..error_tools import raises_input_error

KEY = jax.random.key(3)
LARGE_EPSILON = 1e6
"""An ε at which noise is nothing."""


def promise(
    epsilon: float = 3.0, unit: str = "record", adjacency: str = "replace"
) -> Privacy:
    example_clip = 1.0 if unit == "record" else None
    return Privacy(
        epsilon, 1e-5, unit=unit, adjacency=adjacency, example_clip=example_clip
    )


def columns(rows: int = 2000) -> np.ndarray:
    """Columns as tables have them: far from zero, tiny, heavy-tailed, centred, 0 or 1, constant."""
    g = np.random.default_rng(0)
    return np.column_stack([
        13 + 0.8 * g.standard_normal(rows),
        0.06 + 0.007 * g.standard_normal(rows),
        np.exp(6 + 0.5 * g.standard_normal(rows)),
        g.standard_normal(rows),
        g.integers(0, 2, rows),
        np.full(rows, 7.0),
    ])  # fmt: skip


def received(monkeypatch):
    """Record the sums that devices send, the reach and the move that are claimed for each."""
    calls = []
    honest = releases.ReleaseChannel.receive

    def receive(self, rounds, sums, *, reach, moved_by, budget_fraction):
        calls.append((sums, reach, moved_by))
        return honest(
            self,
            rounds,
            sums,
            reach=reach,
            moved_by=moved_by,
            budget_fraction=budget_fraction,
        )

    monkeypatch.setattr(releases.ReleaseChannel, "receive", receive)
    return calls


@pytest.mark.parametrize("adjacency", ["replace", "add-remove"])
@given(
    row=st.lists(st.floats(-1e9, 1e9), min_size=6, max_size=6),
    other=st.lists(st.floats(-1e9, 1e9), min_size=6, max_size=6),
)
def test_no_row_moves_a_sum_by_more_than_is_claimed(adjacency, row, other):
    """Knows all rows but one. What devices send moves by no more than the mechanism is made for, and is no longer."""
    with pytest.MonkeyPatch.context() as patch:
        calls = received(patch)
        owner = np.arange(30) % 3
        here = np.arange(30) != 4
        sides = [columns(30), columns(30)]
        sides[0][4] = row
        sides[1][4] = 0.0 if adjacency == "add-remove" else other
        air = releases.ReleaseChannel(
            KEY,
            releases.ideal_link(),
            promise(adjacency=adjacency),
            np.bincount(owner),
            uses=600,
            rounds=range(4),
            settings=np.zeros(1),
        )
        for side, rows in enumerate(sides):
            kind = np.clip(np.round(rows * 3), 0, 9).astype(int)
            # An empty row counts nowhere.
            present = here if side and adjacency == "add-remove" else slice(None)
            scaling.count_kinds(air, kind[present], 10, owner[present], 0.1)
        for rows in sides:
            scaling._find_means(
                air, np.clip(rows / 13, -3, 3), owner, np.array([0, 5, 6]), 0.1
            )
        for first, second in (calls[:2], calls[2:]):
            assert np.linalg.norm(first[0] - second[0]) <= first[2] * (1 + 1e-12)
            assert np.all(
                np.linalg.norm(first[0], axis=1)
                <= np.bincount(owner) * first[1] * (1 + 1e-12)
            )


@pytest.mark.parametrize("unit", ["record", "device"])
def test_the_loss_is_the_share_that_was_asked_for(unit):
    privacy = promise(unit=unit)
    owner = np.arange(2000) % 20
    release = scaling.release_scaling(
        KEY, columns(), owner, ReleaseTerms(privacy), budget_fraction=0.2
    )
    assert release.loss.shape == (3, 20)
    assert release.loss.sum(0) == pytest.approx(0.2 * privacy.budget(20), rel=1e-9)
    known = np.column_stack([columns().min(0) - 1, columns().max(0) + 1])
    cheap = scaling.release_scaling(
        KEY,
        columns(),
        owner,
        ReleaseTerms(privacy),
        ranges=known,
        budget_fraction=0.05,
    )
    assert cheap.loss.shape == (1, 20)
    assert cheap.loss.sum(0) == pytest.approx(0.05 * privacy.budget(20), rel=1e-9)


@pytest.mark.parametrize("epsilon", [3.0, LARGE_EPSILON])
def test_scaled_columns_are_centred_and_of_about_unit_size(epsilon):
    table = columns()
    release = scaling.release_scaling(
        KEY, table, np.arange(len(table)) % 20, ReleaseTerms(promise(epsilon))
    )
    scaled = release.scaling(table)[:, :5]
    assert np.all(np.abs(scaled.mean(0)) < 0.8)
    assert np.all((scaled.std(0) > 0.3) & (scaled.std(0) < 3))
    assert 0.5 < np.sqrt(np.mean(scaled**2)) < 2


def test_noise_is_new_for_another_key_and_the_same_for_the_same():
    table = columns(300)
    owner = np.zeros(300, dtype=int)
    first, again, other = (
        scaling.release_scaling(
            jax.random.key(seed), table, owner, ReleaseTerms(promise())
        )
        for seed in (1, 1, 2)
    )
    assert np.array_equal(first.scaling.center, again.scaling.center)
    assert first.name == again.name
    assert not np.array_equal(first.scaling.center, other.scaling.center)
    assert first.noise != other.noise


def test_a_weak_link_adds_its_own_noise():
    table = columns()
    owner = np.arange(2000) % 20
    privacy = promise(LARGE_EPSILON)
    ideal = scaling.release_scaling(KEY, table, owner, ReleaseTerms(privacy))
    weak_link = wflmc.Link(channel.static(1e-9), snr_db=0)
    weak = scaling.release_scaling(KEY, table, owner, ReleaseTerms(privacy, weak_link))
    assert weak.loss.max() < ideal.loss.max()
    assert np.all(np.isfinite(weak.scaling.scale))
    assert np.all(weak.scaling.scale > 0)


def test_wrong_ranges_are_refused():
    with raises_input_error("ranges", "6 columns"):
        scaling.release_scaling(
            KEY,
            columns(10),
            np.zeros(10, int),
            ReleaseTerms(promise()),
            ranges=np.tile([1.0, 0.0], (6, 1)),
        )


def test_more_rows_need_a_smaller_share():
    fractions = [
        scaling.scaling_fraction(n, 30, 0.26, True) for n in (50, 400, 2000, 10**6)
    ]
    assert fractions == sorted(fractions, reverse=True)
    assert fractions[0] == 0.25
    assert fractions[-1] == 0.02


# Class counts


@pytest.mark.parametrize("adjacency", ["replace", "add-remove"])
@pytest.mark.parametrize(
    "link",
    [None, wflmc.Link(channel.rayleigh(1.0), snr_db=20)],
    ids=["ideal", "rayleigh"],
)
def test_class_shares_cost_what_they_say_and_have_the_noise_of_it(adjacency, link):
    """The noise of a Gaussian mechanism of this loss and sensitivity, whatever the code computes it from."""
    labels = (np.arange(6000) % 25 == 0).astype(int)
    owner = np.arange(6000) % 6
    releases_of_seeds = [
        scaling.release_class_shares(
            jax.random.key(seed),
            labels,
            2,
            owner,
            ReleaseTerms(promise(adjacency=adjacency), link, start=2),
            0.02,
        )
        for seed in range(60)
    ]
    estimates = np.array([release.shares[1] for release in releases_of_seeds])
    loss = releases_of_seeds[0].loss
    assert loss.shape == (1, 6)
    assert np.all(loss <= 0.02 * promise(adjacency=adjacency).budget(1)[0] * (1 + 1e-9))
    # Noise draws the share towards a half by next to nothing.
    assert abs(estimates.mean() - 0.04) < 5 * estimates.std() / 60**0.5 + 1e-4
    if link is None:
        moved = {"replace": 2**0.5, "add-remove": 1.0}[adjacency]
        deviation = moved / np.sqrt(2 * loss.max()) / 6000
        # Two counts with independent noise are brought to a sum of 1, which leaves half of the variance.
        assert estimates.std(ddof=1) == pytest.approx(
            deviation * 0.5**0.5, rel=5 / (2 * 60) ** 0.5
        )


def test_class_shares_that_noise_hides_are_alike():
    labels = np.arange(40) % 4
    release = scaling.release_class_shares(
        KEY, labels, 4, np.zeros(40, int), ReleaseTerms(promise(0.05)), 0.02
    )
    assert np.all(release.shares > 0)
    assert release.shares.sum() == pytest.approx(1.0)
    exact = scaling.release_class_shares(
        KEY,
        labels % 2,
        2,
        np.zeros(40, int),
        ReleaseTerms(promise(LARGE_EPSILON)),
        0.02,
    )
    assert exact.shares == pytest.approx([0.5, 0.5], abs=1e-3)


def test_class_counts_are_paid_for_where_they_tell_enough():
    budget = float(promise().budget(1)[0])
    parts = [
        scaling.class_counts_fraction(rows, 2, budget)
        for rows in (30, 400, 15_000, 10**6)
    ]
    # Thirty rows would be counted with an error of a quarter and more.
    assert parts[0] == 0
    assert parts[1:] == sorted(parts[1:], reverse=True)
    assert all(
        scaling.CLASS_COUNTS_BUDGET[0] <= part <= scaling.CLASS_COUNTS_BUDGET[1]
        for part in parts[1:]
    )
