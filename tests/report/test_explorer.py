"""The explorer: what its page computes against what `wflmc plan` does, in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import mpmath
import numpy as np
import pytest

import wflmc
from wflmc.apps.report import explorer
from wflmc.apps.report.templates import plotly_javascript
from wflmc.dynamics import overdamped
from wflmc.planning.bound import discretization_error
from wflmc.planning.solvers.closed_form import REGIMES, regime
from wflmc.runs.planning import make_plan
from wflmc.scenario import build, load_scenario

from ..cli_tools import STATIC, strict
from ..conftest import count
from .browser import visit

EXAMPLE = Path(__file__).parents[2] / "examples" / "static.toml"

HELPERS = """
const at = (id) => document.querySelector("#" + id);
const set = (id, value, kind = "input") => {
  at(id).value = value;
  at(id).dispatchEvent(new Event(kind, { bubbles: true }));
};
const read = () => ({
  state: wflmc.state, result: wflmc.result, wrong: wflmc.wrong, scenario: at("scenario").value,
  values: Object.fromEntries([...document.querySelectorAll("[data-result]")].map((e) => [e.id, e.dataset.value])),
});
"""

TOUR = """
const start = read();
const points = POINTS.map((point) => {
  for (const [id, value] of point) set(id, value);
  return { ...read(), map: wflmc.map };
});
drawFrames();
const erfcx = XS.map(wflmc.erfcx);
const traces = ["map", "plan", "bound"].map((name) => at("explorer-" + name).querySelectorAll(".trace").length);
const buttons = [...document.querySelectorAll(".modebar-btn")].map((button) => button.dataset.title);

at("reset").click();
const mistakes = MISTAKES.map(([id, value]) => {
  set(id, value);
  const said = at(id.replace("-number", "") + "-wrong").textContent;
  drawFrames();
  const shown = { ...read(), said, stale: !!document.querySelector(".stale"), invalid: at(id).ariaInvalid };
  shown.drawn = at("explorer-bound").data[0].y;
  at("reset").click();
  return shown;
});

const place = at("explorer-map").getBoundingClientRect();
at("explorer-map").dispatchEvent(new MouseEvent("click", { clientX: place.left + 300, clientY: place.top + 100 }));
const clicked = read();
set("accountant", "paper"), set("epsilon-number", "12.345"), set("epsilon-number", "12.345", "change");
const controls = [...document.querySelectorAll("input, select, textarea")];
const unlabelled = controls.filter((e) => !e.labels.length).map((e) => e.id);
const silent = controls.filter((e) => e.type === "range" && !at(e.id + "-shown").textContent).map((e) => e.id);
return {
  start, points, erfcx, traces, buttons, mistakes, clicked, unlabelled, silent, last: read(), hash: location.hash,
  nan: /NaN|undefined|Infinity/.test(document.querySelector("#explorer").innerText),
};
"""

MISTAKES = {
    ("step_size-number", "1.0"): "step size η must be below 2/L = ",
    ("step_size-number", ""): "step size η must be a number.",
    ("rounds-number", "2.5"): "rounds S must be a whole number.",
    ("rounds-number", "0"): "rounds S must be between 1 and 10000.",
    ("delta-number", "1"): "privacy slack δ must be between 1e-300 and 0.999.",
    ("mu", "1e9"): "strong convexity μ must be at most L = ",
}
XS = [0.0, *np.geomspace(1e-9, 1e6, 120)]


def positions():
    """Where to set the controls: all over, in the corners, and near the paper's study, where limits are close."""
    generator = np.random.default_rng(0)
    draw = generator.uniform
    for i in range(count(40, 1000)):
        corner = i % 8 == 7
        near = i % 8 < 4
        mu = draw(900, 1200) if near else 10 ** draw(0, 4)
        sliders = {
            "snr_db": draw(12, 30) if near else draw(-20, 60),
            "epsilon": draw(0, 1.5)
            if near
            else generator.choice([-3, 3])
            if corner
            else draw(-3, 3),
            "delta": draw(-4, -1) if near else -12 if corner else draw(-12, -0.3),
            "step_size": draw(-1.3, -0.4)
            if near
            else draw(-0.05, -0.005)
            if corner
            else draw(-3, -0.005),
            "devices": generator.integers(1, 60),
            "rounds": generator.choice([1, 2, 1000])
            if corner
            else generator.integers(1, 200),
            "clip": draw(1.2, 1.7) if near else draw(-1, 3),
        }
        typed = {
            "mu": mu,
            "L": mu * 10 ** draw(0, 0.2 if near else 2),
            "dim": generator.integers(1, 9),
            "initial_w2_sq": 10 ** draw(-2, 3),
            "power": 1e-4 if near else 10 ** draw(-5, 0),
            "noise_power": 10 ** draw(-3, 3),
            "example_clip": 10 ** draw(-1, 2),
        }
        chosen = {
            "accountant": ("exact", "paper")[i % 2],
            "bound": ("corrected", "paper")[i // 2 % 2],
            "unit": ("device", "device", "record")[i % 3],
            "adjacency": ("replace", "add-remove")[i // 4 % 2],
            "map_axis": ("epsilon", "delta", "step_size", "rounds", "clip")[i % 5],
        }
        exact = {
            "epsilon-number": 10 ** draw(-3, 3),
            "step_size-number": 10 ** draw(-4, 0) / typed["L"],
        }
        yield [
            *typed.items(),
            *chosen.items(),
            *sliders.items(),
            *(exact.items() if i % 8 == 6 else ()),
        ]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("explorer") / "explorer.html"
    path.write_text(explorer.explorer_page(explorer.paper_study()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def light(page):
    """A page with nothing to draw with, which is quicker to open."""

    def write(constants):
        path = page.with_name("light.html")
        text = explorer.explorer_page(constants)
        path.write_text(
            text.replace(
                plotly_javascript(), "const Plotly = { newPlot() {}, react() {} };"
            ),
            encoding="utf-8",
        )
        return path

    return write


@pytest.fixture(scope="module")
def tour(page):
    """One visit that everything is read from."""
    points = json.dumps(
        [[[key, str(value)] for key, value in point] for point in positions()]
    )
    constants = f"const POINTS = {points}, XS = {json.dumps(XS)}, MISTAKES = {json.dumps(list(MISTAKES))};"
    visited = visit(page, HELPERS + constants + TOUR)
    assert visited.complaints == []
    return SimpleNamespace(requests=visited.requests, **visited.answer)


def planned(text, folder, **policy):
    """What the scenario in the page gives when it is saved and planned."""
    path = folder / "copied.toml"
    path.write_text(text, encoding="utf-8")
    scenario = load_scenario(
        path, [f"policy.{key}={value}" for key, value in policy.items()]
    )
    return make_plan(scenario, build(scenario))


def close(ours, theirs):
    np.testing.assert_allclose(np.asarray(ours, float), theirs, rtol=1e-9, atol=0)


def test_every_position_gives_the_numbers_of_a_plan(tour, tmp_path):
    seen = set()
    mixed = 0
    large_steps = 0
    for point in tour.points:
        assert point["wrong"] == {}, point
        result, values = point["result"], point["values"]
        plan = planned(point["scenario"], tmp_path)
        equal = planned(point["scenario"], tmp_path, power="equal")
        assert values["regime"] == result["regime"] == plan.regime
        seen.add((plan.regime, plan.privacy.accountant, point["state"]["bound"]))
        mixed += 0 < plan.regime_share["dp-limited"] < 1
        close(result["gain"], plan.gain)
        close(result["bound"], plan.bound)
        close(
            np.sum(
                [result[part] for part in ("from_start", "from_steps", "from_noise")],
                axis=0,
            ),
            plan.bound,
        )
        close(result["loss_each"], plan.loss[:, 0])
        close(result["equal_bound"], equal.bound)
        close(values["objective"], plan.objective)
        close(values["equal_objective"], equal.objective)
        close(values["budget"], plan.privacy.budget(1)[0])
        close(values["loss"], plan.spent[0])
        close(values["gain-first"], plan.gain[0])
        close(values["gain-last"], plan.gain[-1])
        close(values["lmc_cap"], np.sqrt(plan.step_size[0] / 2 * plan.noise_power))
        constants = overdamped().contraction(plan.step_size[0], plan.mu, plan.L)
        error = discretization_error(plan.step_size[:1], plan.L, plan.dim)[0]
        close(values["floor"], constants.kappa * error / (1 - constants.rho**2))
        sensitivity = plan.privacy.sensitivity(1)[0]
        round_budget = (
            plan.privacy.budget(1)[0] / (2 * sensitivity**2) / len(plan.rounds)
        )
        close(values["dp_share"], np.sqrt(round_budget * plan.noise_power))
        large_steps += plan.step_size[0] > 2 / (plan.mu + plan.L)
        close(values["power_cap"], plan.gain[0] / np.sqrt(plan.power_share[0]))
        energy = np.sum((plan.gain[:, None] * plan.clip) ** 2) / point["state"]["power"]
        close(values["energy"], energy)
        np.testing.assert_allclose(
            float(values["epsilon_spent"]), plan.epsilon_spent, rtol=1e-9, atol=1e-12
        )
        assert result["regime_share"] == pytest.approx(plan.regime_share)
        assert result["gamma"] == pytest.approx(plan.gamma, rel=1e-12)
        loud = [
            int(re.search(r"\d+", notice.text)[0])
            for notice in plan.notices
            if notice.code == "chains-may-be-lost"
        ]
        assert result["loud_rounds"] == sum(loud)
    assert {name for name, _, _ in seen} == set(REGIMES)
    assert len({(accountant, bound) for _, accountant, bound in seen}) == 4
    assert mixed >= 5  # rounds both at a cap and below it: the whole of Theorem 1
    assert large_steps > 2


def test_the_map_turns_where_theorem_1_does(tour):
    """Just left and right of the edge of every row, and at the two ends."""
    for point in tour.points[:: count(4, 1)]:
        state = point["state"]
        axis = point["state"]["map_axis"]
        for row in point["map"]["rows"][:: count(12, 5)]:
            setting = SimpleNamespace(**{**state, axis: row["y"]})
            example = setting.example_clip if setting.unit == "record" else None
            promise = wflmc.Privacy(
                1,
                0.1,
                setting.clip,
                unit=setting.unit,
                example_clip=example,
                adjacency=setting.adjacency,
            )
            reach = promise.sensitivity(1)[0]
            budget = explorer.ACCOUNTANTS[setting.accountant].budget(
                np.asarray(setting.epsilon), np.asarray(setting.delta)
            )
            round_budget = budget / (2 * reach**2 * setting.rounds)
            snr = np.array([row["edge"] - 1e-6, row["edge"] + 1e-6])
            power = setting.dim * 10 ** (snr / 10) * setting.power / setting.clip**2
            if abs(np.log(setting.step_size / 2 / round_budget)) < 1e-9:
                continue  # where all three limits meet
            assert list(regime(setting.step_size / 2, power, round_budget)) == [
                REGIMES[1],
                REGIMES[row["beyond"]],
            ]


def test_the_page_starts_at_the_example(tour, plan_of):
    plan = plan_of(EXAMPLE, "--no-compare")
    close(tour.start["values"]["objective"], plan["objective"])
    close(tour.start["result"]["gain"], plan["gain"])
    assert tour.start["values"]["regime"] == plan["regime"]


def test_error_function_in_the_tails(tour):
    with mpmath.workdps(60):
        exact = [
            float(mpmath.exp(mpmath.mpf(x) ** 2) * mpmath.erfc(x)) if x < 1e3 else None
            for x in XS
        ]
    pairs = [
        (ours, theirs)
        for ours, theirs in zip(tour.erfcx, exact, strict=True)
        if theirs is not None
    ]
    np.testing.assert_allclose(*np.transpose(pairs), rtol=2e-15)
    assert tour.erfcx[-1] == pytest.approx(1 / (np.sqrt(np.pi) * XS[-1]), rel=1e-11)


def test_mistakes_are_said_at_the_control_and_the_last_picture_stays(tour):
    for (key, sentence), shown in zip(MISTAKES.items(), tour.mistakes, strict=True):
        assert shown["said"].startswith(sentence), key
        assert shown["stale"]
        assert shown["invalid"] == "true"
        assert shown["values"] == tour.start["values"]
        assert shown["drawn"] == tour.start["result"]["bound"]
    assert not tour.nan


def test_pictures_are_drawn_and_can_be_clicked(tour):
    assert min(tour.traces) >= 3
    assert tour.buttons
    assert not [
        title
        for title in tour.buttons
        if re.search("cloud|share|studio", title, flags=re.I)
    ]
    assert tour.clicked["state"]["snr_db"] != tour.start["state"]["snr_db"]
    assert tour.clicked["state"]["epsilon"] != tour.start["state"]["epsilon"]
    assert tour.clicked["wrong"] == {}


def test_every_control_has_a_name_and_says_its_value(tour):
    assert tour.unlabelled == []
    assert tour.silent == []


def test_the_address_restores_a_point(tour, light):
    visited = visit(
        light(explorer.paper_study()), HELPERS + "return read();", tour.hash
    )
    assert visited.complaints == []
    for key in ("state", "values", "scenario"):
        assert visited.answer[key] == tour.last[key]
    assert tour.last["state"]["epsilon"] == 12.345
    assert tour.last["state"]["accountant"] == "paper"


ODD_WAYS = """
const start = { ...read(), wrong: at("trouble").textContent, scale: at("scale").textContent };
const sliders = [...document.querySelectorAll("input[type=range]")];
const held = sliders.filter((e) => Math.abs(Number(e.value) - Number(e.min)) * Math.abs(Number(e.max) - e.value) > 0);
const go = (hash) => { history.replaceState(null, "", hash), dispatchEvent(new Event("hashchange")); };
const steps = sliders.flatMap((slider) => [1, 1, 1, -1, -1, -1, -1].map((way) => {
  const before = wflmc.state[slider.id];
  way > 0 ? slider.stepUp() : slider.stepDown();
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  return [slider.id, way, before, wflmc.state[slider.id]];
}));
go("#mu=1000&L=1985");
at("step_size").step = "any", at("step_size").max = "-0.0005";  // as where a plan starts close to 2/L
at("step_size").value = at("step_size").max;
at("step_size").dispatchEvent(new Event("input", { bubbles: true }));
const end = { ...wflmc.wrong, eta: wflmc.state.step_size };
go("#clip=5"), go("#snr_db=10");
const partial = { ...wflmc.state };
const fold = at("mu").closest("details"), closed = !fold.open;
go("#L=1");
return { start, held: held.length, steps, end, partial, closed, open: fold.open, said: at("trouble").textContent };
"""


def test_a_link_budget_and_odd_ways(light, plan_of, scenario):
    """130 dB of path loss; then keys, ends of sliders, addresses that name little, and a mistake in a fold."""
    budget = {"link.power": 1e-13, "link.snr_db": 132, "link.noise_power": 1.26e-14}
    document = plan_of(
        scenario,
        *(word for pair in budget.items() for word in ("--set", "{}={}".format(*pair))),
    )
    visited = visit(light(explorer.constants_of(document)), HELPERS + ODD_WAYS)
    assert visited.complaints == []
    answer = SimpleNamespace(**visited.answer)
    start = answer.start
    assert start["wrong"] == ""
    assert [start["state"][key] for key in ("power", "snr_db", "noise_power")] == list(
        budget.values()
    )
    close(start["values"]["objective"], document["objective"])
    assert re.match(r"[\d.]+ times the posterior’s own variance", start["scale"])
    assert answer.held == 7
    assert [step for step in answer.steps if (step[3] - step[2]) * step[1] <= 0] == []
    assert answer.end == {"eta": pytest.approx(2 / 1985, rel=0.02)}
    assert answer.partial == {**start["state"], "snr_db": 10}
    assert (answer.closed, answer.open) == (True, True)
    assert "strong convexity μ must be at most L = 1." in answer.said


def test_plans_beyond_the_limits_start_within_them(plan_of, scenario):
    document = plan_of(scenario, "--no-compare")
    document["scenario"]["privacy"]["clip"] = 1e9
    document["scenario"]["link"]["power"] = 1e-40
    constants = explorer.constants_of(document)
    assert (constants["clip"], constants["power"]) == (1e6, 1e-30)


def test_nothing_is_asked_of_the_network(tour, page):
    assert tour.requests == set()
    markup = re.sub(
        r"<(script|style)[^>]*>.*?</\1>",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.S,
    )
    assert not re.search(r"(src|href|action)\s*=\s*[\"']?\s*(https?:)?//", markup)
    assert "default-src 'none'" in markup
    careless = page.with_name("careless.html")
    careless.write_text(
        '<html><head></head><body><img src="http://127.0.0.1:9/seen.png"></body></html>'
    )
    assert visit(careless).requests == {"http://127.0.0.1:9/seen.png"}


def test_command(call, plan_of, scenario, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("report", "--explore")
    assert (code, err) == (0, "")
    assert "explorer.html" in out
    (tmp_path / "run").mkdir()
    document = plan_of(
        scenario,
        "--set",
        "link.snr_db=[13.5, 14.5]",
        "--set",
        "posterior.devices=2",
        "--no-compare",
    )
    (tmp_path / "run" / "plan.json").write_text(json.dumps(document))
    code, out, _ = call("report", "run", "--explore", "--out", "point.html", "--json")
    assert (code, strict(out)) == (0, {"file": "point.html"})
    started = json.loads(
        re.search(r"const START = (\{.*?\})", (tmp_path / "point.html").read_text())[1]
    )
    assert (started["snr_db"], started["devices"], started["rounds"]) == (13.5, 2, 51)
    assert started["mu"] == document["constants"]["mu"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "FOLDER"),
        (("nowhere",), "nowhere"),
        ((".", "--explore"), "plan.json"),
        (("--explore", "--out", "nowhere/page.html"), "--out"),
    ],
)
def test_command_refuses(call, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("report", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_points_that_theorem_1_does_not_know(plan_of, tmp_path):
    """Fading, no promise and kinetic steps start at what comes nearest."""
    path = tmp_path / "other.toml"
    other = STATIC.replace("epsilon = 8.0\ndelta = 0.01\n", "").replace(
        '"static"', '"rayleigh"'
    )
    path.write_text(
        other.replace("[sampler]", '[sampler]\ndynamics = "kinetic"')
        + 'power = "equal"\n'
    )
    document = plan_of(path, "--no-compare")
    constants = explorer.constants_of(document)
    assert constants["epsilon"] == 8.0
    assert constants["step_size"] == pytest.approx(
        0.4 / (constants["mu"] + constants["L"])
    )
    assert constants["power"] == 1e-4
