"""Plans in files: every field comes back bit for bit, and what is not as it was written is refused."""

from __future__ import annotations

from dataclasses import fields, replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import wflmc
from wflmc.dynamics import kinetic, overdamped
from wflmc.planning.plan import Certificate, Context, Plan, Rounds, join_plans
from wflmc.privacy import Privacy
from wflmc.support import notices
from wflmc.support.notices import Notice, NoticeCode

from ..error_tools import raises_input_error
from ..plan_tools import with_context

DEVICES = 5
GAUSSIAN = wflmc.gaussian_regression(
    jax.random.key(0), devices=DEVICES, examples=60, dim=3
)
SOFTMAX = wflmc.softmax_regression(
    jax.random.key(1), devices=DEVICES, examples=60, dim=2, classes=3
)
POWERS = ("optimized", "equal", "no-dp", "noiseless-dp", "noiseless")


def same(first, second):
    """Whether two values are equal bit for bit, of the same kind."""
    if first is None or isinstance(first, str | bool):
        return type(first) is type(second) and first == second
    first_array, second_array = np.asarray(first), np.asarray(second)
    return (
        first_array.dtype == second_array.dtype
        and first_array.shape == second_array.shape
        and first_array.tobytes() == second_array.tobytes()
    )


def assert_equal_plans(first, second):
    for part, kind in (
        ("rounds", Rounds),
        ("certificate", Certificate),
        ("context", Context),
    ):
        for field in fields(kind):
            first_value, second_value = (
                getattr(getattr(plan, part), field.name) for plan in (first, second)
            )
            if field.name == "notices":
                assert first_value == second_value
            elif field.name == "dynamics":
                assert (type(first_value), first_value.parameters) == (
                    type(second_value),
                    second_value.parameters,
                )
            elif field.name == "privacy":
                for name in (field.name for field in fields(Privacy)):
                    assert same(
                        getattr(first_value, name), getattr(second_value, name)
                    ), name
            else:
                assert same(first_value, second_value), (part, field.name)
    assert first.digest == second.digest
    assert first.checksum == second.checksum
    assert first.warnings == second.warnings


@st.composite
def plans(draw):
    """Plans of every policy and all dynamics, with and without promises, channel errors and earlier rounds."""
    power = draw(st.sampled_from(POWERS))
    dynamics = draw(st.sampled_from(["overdamped", "kinetic"]))
    kinetic = dynamics == "kinetic"
    posterior = GAUSSIAN if kinetic else draw(st.sampled_from([GAUSSIAN, SOFTMAX]))
    objective = draw(st.sampled_from(["worst", "average", "exact", "transcript"]))
    if kinetic or power not in ("optimized", "noiseless-dp"):
        objective = "exact" if kinetic and power == "optimized" else "worst"
    if posterior is SOFTMAX and objective == "exact":
        objective = "worst"
    unit = draw(st.sampled_from(["device", "record"]))
    promise = {
        "clip": draw(st.sampled_from([30.0, np.linspace(20.0, 30.0, DEVICES)])),
        "unit": unit,
    }
    if unit == "record":
        promise["example_clip"] = 10.0
    if draw(st.booleans()):
        promise |= {
            "epsilon": draw(st.sampled_from([8.0, np.linspace(6.0, 9.0, DEVICES)])),
            "delta": 0.01,
        }
        promise["adjacency"] = draw(st.sampled_from(["replace", "add-remove"]))
    link = wflmc.Link(
        wflmc.channel.rayleigh(0.01),
        snr_db=draw(st.sampled_from([5.0, 20.0])),
        csi_error=draw(st.sampled_from([0.0, 0.1])),
        downlink_snr_db=draw(st.sampled_from([np.inf, 30.0]))
        if objective != "exact"
        else np.inf,
    )
    step = 0.3 / posterior.L**0.5 if kinetic else 0.4 / (posterior.mu + posterior.L)
    return wflmc.plan(
        posterior,
        link,
        Privacy(**promise),
        step_size=step,
        burn_in=draw(st.integers(0, 5)),
        samples=draw(st.integers(1, 6)),
        sampler=wflmc.Sampler(
            dynamics=dynamics,
            start=draw(st.integers(0, 2)),
            init=draw(st.sampled_from(["prior", "zero"])),
        ),
        policy=wflmc.Policy(power=power, objective=objective),
        ledger=np.full(DEVICES, 0.01),
    )


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_a_plan_comes_back_bit_for_bit(plan, tmp_path_factory):
    path = plan.save(tmp_path_factory.mktemp("plan") / "plan.npz")
    loaded = Plan.load(path)
    assert_equal_plans(plan, loaded)
    assert loaded.save(path.with_name("again.npz")).read_bytes() == path.read_bytes()


@pytest.fixture
def plan():
    return wflmc.plan(GAUSSIAN, wflmc.Link(wflmc.channel.rayleigh(0.01)), Privacy(8.0, 0.01, 30.0), step_size=1e-3,
                      burn_in=3, samples=4)  # fmt: skip


def test_odd_values_come_back(plan, tmp_path):
    odd = replace(
        plan,
        certificate=replace(
            plan.certificate,
            objective=np.nan,
            bound=None,
            regime=None,
            lower_bound=-0.0,
            notices=(),
        ),
        context=replace(
            plan.context,
            initial_w2_sq=np.inf,
            dynamics=wflmc.dynamics.kinetic(0.1 + 0.2),
        ),
    )
    assert_equal_plans(odd, Plan.load(odd.save(tmp_path / "plan.npz")))
    with_texts = odd.with_notices(
        [
            Notice("a-code", "Ein Satz — «θ ≤ 1»\nmit zwei Zeilen."),
            Notice("b", "x" * 5000),
        ]
    )
    assert_equal_plans(with_texts, Plan.load(with_texts.save(tmp_path / "plan.npz")))


def test_a_loaded_plan_gives_the_same_draws(plan, tmp_path):
    loaded = Plan.load(plan.save(tmp_path / "plan.npz"))
    drawn, redrawn = (
        wflmc.sample(jax.random.key(3), GAUSSIAN, plan_used, 4)
        for plan_used in (plan, loaded)
    )
    np.testing.assert_array_equal(drawn.theta, redrawn.theta)


def test_lists_in_a_promise_become_arrays(plan, tmp_path):
    listed = replace(
        plan,
        context=replace(
            plan.context, privacy=Privacy([8.0] * DEVICES, 0.01, [30.0] * DEVICES)
        ),
    )
    loaded = Plan.load(listed.save(tmp_path / "plan.npz"))
    np.testing.assert_array_equal(loaded.privacy.epsilon, [8.0] * DEVICES)
    np.testing.assert_array_equal(loaded.spent, listed.spent)
    assert loaded.epsilon_spent == listed.epsilon_spent


def test_damaged_and_changed_files_are_refused(plan, tmp_path):
    path = plan.save(tmp_path / "plan.npz")
    content = path.read_bytes()
    with np.load(path) as saved:
        arrays = dict(saved)
    flipped = bytearray(content)
    flipped[content.index(plan.gain.tobytes()) + 3] ^= 1
    for damaged in (b"", content[:-20], content[:200], bytes(flipped), b"PK\x03\x04"):
        path.write_bytes(damaged)
        with raises_input_error("--plan", path):
            Plan.load(path, key="--plan")
    for change in (
        {"rounds.gain": 2 * plan.gain},
        {"context.burn_in": np.array(0)},
        {"other": np.zeros(2)},
    ):
        np.savez(path, **arrays | change)
        with raises_input_error("plan", path, "damaged"):
            Plan.load(path)
    del arrays["context.mu"]
    np.savez(path, **arrays)
    with raises_input_error("plan", path, "damaged"):
        Plan.load(path)
    with raises_input_error("plan", tmp_path / "missing.npz", "No such file"):
        Plan.load(tmp_path / "missing.npz")


def test_a_file_of_another_version_is_refused(plan, tmp_path):
    from wflmc.support import storage

    path = plan.save(tmp_path / "plan.npz")
    arrays = storage.read_verified_arrays(path, key="plan", requirement="a plan")
    for changed in (
        arrays | {"rounds.new": np.zeros(2)},
        {k: v for k, v in arrays.items() if k != "context.mu"},
    ):
        with path.open("wb") as file:
            storage.write_arrays(file, changed)
        with raises_input_error("plan", path, "version"):
            Plan.load(path)


def test_every_field_changes_the_checksum(plan):
    seen = {plan.checksum}
    others = [
        plan.with_rounds(gain=plan.gain * (1 + 1e-15)),
        plan.with_notices([Notice(NoticeCode.ORACLE, "x")]),
        replace(plan, certificate=replace(plan.certificate, gamma=0.5)),
        replace(plan, context=replace(plan.context, sizes=plan.context.sizes + 1)),
        replace(plan, context=replace(plan.context, privacy=Privacy(8.0, 0.02, 30.0))),
    ]
    for other in others:
        assert other.checksum not in seen
        seen.add(other.checksum)


def test_a_friction_is_not_taken_for_noise_of_the_downlink(plan):
    swinging = with_context(plan, dynamics=kinetic(2.0), downlink_noise=0.0)
    broadcast = with_context(plan, dynamics=overdamped(), downlink_noise=2.0)
    assert swinging.digest != broadcast.digest


@pytest.mark.parametrize("objective", ["worst", "average"])
def test_joined_plans_are_the_whole_plan(objective):
    """Of a policy whose rounds do not depend on each other, the parts joined are the plan of all rounds."""
    link = wflmc.Link(wflmc.channel.rayleigh(0.01))
    promise = Privacy(clip=30.0)
    common = {
        "step_size": 1e-3,
        "policy": wflmc.Policy(power="no-dp", objective=objective),
    }
    whole = wflmc.plan(GAUSSIAN, link, promise, burn_in=3, samples=9, **common)
    first = wflmc.plan(GAUSSIAN, link, promise, burn_in=3, samples=4, **common)
    added = wflmc.plan(
        GAUSSIAN, link, promise, burn_in=0, samples=5, sampler=wflmc.Sampler(start=7),
        initial_w2_sq=float(first.bound[-1]), **common,
    )  # fmt: skip
    joined = join_plans(first, added)
    assert joined.digest == whole.digest
    for name in (
        "bound",
        "threshold",
        "power_share",
        "limit",
        "loss",
        "objective",
        "gamma",
    ):
        np.testing.assert_allclose(
            getattr(joined, name), getattr(whole, name), rtol=1e-12
        )
    assert (joined.lower_bound, joined.regime) == (None, None)
    with raises_input_error("added", value="another plan"):
        join_plans(first, first)


def test_notices_have_codes_and_texts(plan):
    assert plan.notices
    assert notices.texts(plan.notices) == plan.warnings
    assert {notice.code for notice in plan.notices} <= set(NoticeCode)
    assert all(text.endswith(".") for text in plan.warnings)
    assert plan.with_notices(()).warnings == ()
