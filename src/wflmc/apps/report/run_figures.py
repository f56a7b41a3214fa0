"""Figures of a plan and of a run: the rounds, distance to the posterior, chains, marginals, predictions, privacy."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wflmc.apps.report.blocks import number, percent, words
from wflmc.apps.report.figure import (
    BLUE,
    COLORS,
    GREEN,
    LIMIT_LOOKS,
    RED,
    Axis,
    Band,
    Bars,
    Figure,
    Line,
    Panel,
    Shade,
)
from wflmc.apps.report.matplotlib_pictures import draw_picture
from wflmc.apps.report.plotly_figures import thin
from wflmc.evaluation import Calibration, Evaluation, reliability
from wflmc.evaluation.wasserstein import Comparison, autocorrelation
from wflmc.planning import Plan
from wflmc.planning.solvers.closed_form import LIMITS
from wflmc.posterior import SoftmaxPosterior
from wflmc.privacy import ACCOUNTANTS, epsilon_spent
from wflmc.runs.documents import Spending
from wflmc.runs.folder import Draws, Run
from wflmc.scenario import Scenario, build_privacy
from wflmc.support.errors import InputError

SUFFIXES = (".png", ".svg", ".pdf")
FEW = 4
"""Chains and parameters whose traces are drawn."""
LAGS = 60
MANY = 40
"""Devices that are drawn: of more, those that spend most."""
BINS = 40
FAR_OUT = 6.0
"""Quartile ranges beyond the quartiles from which on samples are not drawn."""
CAPTIONS = words("run_words.toml")["captions"]


def check_picture(path: str) -> None:
    """Refuse a file that could not be drawn, before any work."""
    target = Path(path)
    if target.suffix.lower() not in SUFFIXES or not target.parent.is_dir():
        raise InputError(
            "--plot",
            path,
            f"a file name that ends in {', '.join(SUFFIXES)}, in a folder that exists",
        )


def draw_plan(plan: Plan, path: str | Path) -> Path:
    """Draw a plan as a picture; return the file."""
    return draw_picture(plan_figure(plan), Path(path))[0]


def plan_figure(plan: Plan) -> Figure:
    """Return stacked panels over the rounds; those that would show nothing are left out."""
    x, share, devices = (
        np.arange(1, len(plan.rounds) + 1),
        100 * plan.power_share,
        plan.devices,
    )
    power, below, zero = (
        share.any(),
        np.nan_to_num(plan.threshold).any(),
        Axis(zero=True),
    )
    steps = min(plan.step_size) < max(plan.step_size)
    curves = [
        (
            True,
            "gain α",
            plan.gain,
            Axis(log=True),
            "gain α: received amplitude per unit of gradient",
        ),
        (
            power,
            "power",
            share,
            Axis(range=(0, 105)),
            "transmit power of the weakest active device, % of its limit",
        ),
        (
            True,
            "active devices",
            plan.active_devices,
            Axis(range=(0, 1.08 * devices)),
            f"active devices, of {devices}",
        ),
        (
            below,
            "threshold",
            plan.threshold,
            zero,
            "threshold: the weakest |h| with which a device transmits",
        ),
        (steps, "step size", plan.step_size, zero, "step size η"),
    ]
    panels = [
        Panel([Line(x, y, name, step=True)], axis, title)
        for shown, name, y, axis, title in curves
        if shown
    ]
    epsilon, how = plan.epsilon_spent, plan.privacy.adjacency
    privacy = (
        f"ε = {epsilon:.4g} ({how}), worst device"
        if epsilon
        else "no privacy statement"
    )
    names = {"exact": "W2²", "transcript": "noise V of all kept rounds"}
    kind = names.get(
        plan.certificate.objective_name,
        f"bound on W2² ({plan.certificate.objective_name} after burn-in)",
    )
    goal = (
        f"{kind} {plan.objective:.4g}, without clipping"
        if np.isfinite(plan.objective)
        else "no bound is known"
    )
    caption = CAPTIONS["plan"].format(first=plan.burn_in + 1)
    across, title = Axis("round", range=(0.5, len(x) + 0.5)), f"{goal}; {privacy}"
    after_power = 1 + bool(power)
    panels[after_power:after_power] = _noise_and_losses(plan, x)
    return Figure(
        panels,
        across,
        title,
        caption,
        stacked=True,
        width=9,
        burn_in=plan.burn_in,
        shades=[*_shades(plan)],
    )


def _noise_and_losses(plan: Plan, x: Any) -> list[Panel]:
    """Return noise and privacy losses of every round."""
    needed, total = plan.langevin_noise, plan.noise_variance
    needs = Band(
        x,
        0.1 * needed,
        needed,
        "noise that Langevin sampling needs",
        GREEN,
        0.5,
        step=True,
    )
    excess = Band(x, needed, total, "excess noise", RED, 0.4, step=True)
    title = "noise variance σ² of the update"
    noise = Panel(
        [needs, excess, Line(x, total, "noise", step=True, width=1)],
        Axis(log=True),
        title,
    )
    if not plan.clips:
        return [noise]
    spent = plan.ledger + np.cumsum(plan.loss, axis=0)
    most = int(np.argmax(spent[-1]))
    lines = [
        Line(x, spent[:, most], f"device {most}, which spends most", BLUE, step=True),
        Line(x, np.median(spent, axis=1), "median device", BLUE, "--", step=True),
    ]
    budget = float(plan.privacy.budget(plan.devices)[most])
    if np.isfinite(budget):
        lines.append(
            Line([x[0], x[-1]], [budget] * 2, f"budget of device {most}", dash=":")
        )
    devices = Band(x, spent.min(1), spent.max(1), "all devices", BLUE, 0.25, step=True)
    return [noise, Panel([devices, *lines], Axis(zero=True), "privacy loss so far")]


def _shades(plan: Plan) -> Iterator[Shade]:
    """Yield the ranges of rounds that sit at each limit."""
    edges = [0, *(np.flatnonzero(np.diff(plan.limit)) + 1).tolist(), len(plan.rounds)]
    for name in (name for name, share in plan.regime_share.items() if share):
        here = [
            (a + 0.5, b + 0.5)
            for a, b in pairwise(edges)
            if LIMITS[plan.limit[a]] == name
        ]
        yield Shade(
            f"round is {name} ({plan.regime_share[name]:.0%})", *LIMIT_LOOKS[name], here
        )


def parameter_name(run: Run, index: int) -> str:
    """Return θ[i], and for classifiers whose weight it is."""
    posterior = run.posterior
    if not isinstance(posterior, SoftmaxPosterior):
        return f"θ[{index}]"
    label, feature = divmod(index, posterior.features.shape[-1])
    last = posterior.intercept and feature == posterior.features.shape[-1] - 1
    return f"θ[{index}] (class {posterior.class_names[label]}, {'intercept' if last else f'feature {feature}'})"


def distance_figure(run: Run) -> Figure | None:
    """Return bound, exact law and estimate of W2² over the rounds; None where none of them is known."""
    plan, c = run.plan, run.plan.constants
    estimate = None if run.summary is None else run.summary.w2_sq
    rounds = list(range(1, c.rounds + 1))
    known = {
        "bound": (plan.bound, RED),
        "exact law, no clipping": (plan.exact_w2_sq, BLUE),
    }
    lines = [
        Line(rounds, y, name, color, width=2)
        for name, (y, color) in known.items()
        if y is not None
    ]
    caption = "Squared distance of the samples' law to the posterior, round by round; bound and law ignore clipping."
    if plan.own_data:
        caption = "Bound on the squared distance to a posterior with the plan's constants; it ignores clipping."
    if estimate is not None:
        kept = rounds[c.burn_in :]
        lines.append(
            Line(
                kept,
                estimate.per_round,
                "estimated from the chains",
                GREEN,
                dash="",
                marker="o",
            )
        )
        caption += " The estimate from chains cannot fall below a floor that their number sets; the exact law can."
    if plan.coordinates == "whitened" and plan.bound is not None:
        caption += " The bound is in whitened coordinates."
    label = (
        "bound on W2²"
        if [line.name for line in lines] == ["bound"]
        else "W2² to the posterior"
    )
    x = Axis("round", range=(0.5, c.rounds + 0.5))
    return (
        Figure(
            [Panel(lines, Axis(label, log=True))], x, caption=caption, burn_in=c.burn_in
        )
        if lines
        else None
    )


def slowest(theta: NDArray[np.float64]) -> list[int]:
    """Return the parameters whose successive draws resemble each other most: those to look at first."""
    return sorted(
        np.argsort(-autocorrelation(theta, 1)[1], kind="stable")[:FEW].tolist()
    )


def traces_figure(run: Run, draws: Draws) -> Figure:
    """Return a few parameters of the first chains over the rounds."""
    chains, kept, dim = draws.theta.shape
    theta, burn_in = draws.theta[:FEW], 0
    if draws.early is not None:
        theta, burn_in = (
            np.concatenate([draws.early[:FEW], theta], axis=1),
            run.plan.constants.burn_in,
        )
    x = [
        *range(1, burn_in + 1, draws.every),
        *range(burn_in + 1, burn_in + 1 + kept * draws.every, draws.every),
    ]
    panels = []
    for index in slowest(draws.theta):
        lines = [
            Line(x, np.round(chain[:, index], 6), color=COLORS[i], width=1)
            for i, chain in enumerate(theta)
        ]
        panels.append(Panel(lines, title=parameter_name(run, index)))
    caption = f"{len(theta)} of {chains:,} chain{'s' * (chains > 1)}, a colour each. Good chains cover the same ground."
    caption += " The parameters shown mix most slowly." * (dim > FEW)
    caption += " Burn-in is left of the vertical line." * bool(burn_in)
    axis = Axis("round" if burn_in else "kept draw")
    return Figure(
        panels, axis, caption=caption, stacked=True, legend=False, burn_in=burn_in
    )


def autocorrelation_figure(run: Run, draws: Draws) -> Figure:
    """Return the autocorrelation of the parameters that mix most slowly."""
    lags = min(LAGS, draws.theta.shape[1] - 2)
    x = [lag * draws.every for lag in range(lags + 1)]
    shown = slowest(draws.theta)
    values = autocorrelation(draws.theta[:, :, shown], lags)
    lines = [
        Line(x, values[:, i], parameter_name(run, k), COLORS[i])
        for i, k in enumerate(shown)
    ]
    zero = Line([0, x[-1]], [0, 0], width=1)
    caption = "Correlation of draws so many rounds apart. The sooner it falls to 0, the more each draw tells."
    y = Axis("autocorrelation", range=(min(-0.3, 1.1 * float(values.min())), 1.05))
    return Figure([Panel([*lines, zero], y)], Axis("rounds apart"), caption=caption)


def marginal_figure(run: Run, draws: Draws, compared: Comparison, index: int) -> Figure:
    """Return the histogram of one parameter beside its law."""
    values = draws.theta[:, :, index].ravel()
    low, high = histogram_range(values)
    inside = values[(values >= low) & (values <= high)]
    height, edges = np.histogram(
        inside, bins=min(BINS, max(8, int(values.size**0.5))), density=True
    )
    captions = [parameter_name(run, index)]
    if inside.size < values.size:
        captions.append(
            f"{percent(1 - inside.size / values.size)} of samples lie outside"
        )
    lines = []
    if compared.law is not None:
        mean, deviation, z = (
            float(compared.law.mean[index]),
            float(compared.expected[index]),
            compared.z[index],
        )
        reach = min(
            max(4 * deviation, float(np.abs(inside - mean).max())), 6 * deviation
        )
        x = np.linspace(mean - reach, mean + reach, 121)
        density = np.exp(-(((x - mean) / deviation) ** 2) / 2) / (
            deviation * np.sqrt(2 * np.pi)
        )
        lines.append(Line(x, density, "posterior", RED, width=2))
        if np.isfinite(z):
            captions[0] += f": z = {z:+.1f}".replace("-", "−")
    centres, width = 0.5 * (edges[1:] + edges[:-1]), float(edges[1] - edges[0])
    bars = Bars(np.round(centres, 7), np.round(height, 6), "samples", "#8cbfdd", width)
    return Figure([Panel([bars, *lines])], caption="; ".join(captions), small=True)


def histogram_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return where bars are drawn: without far outliers, which would make a single bar of the others."""
    first, third = np.percentile(values, [25, 75])
    reach = FAR_OUT * (third - first) or np.inf
    return max(float(values.min()), float(first - reach)), min(
        float(values.max()), float(third + reach)
    )


def spent_figure(spending: Spending) -> Figure:
    """Return the privacy loss of every device beside its budget; of many devices, those that spend most."""
    total, shares, each, how = (
        spending.total or [],
        spending.shares,
        spending.epsilon_each,
        spending.adjacency,
    )
    devices = list(range(len(total)))
    if len(total) > MANY:
        devices = np.argsort(-np.asarray(shares or total), kind="stable")[
            :MANY
        ].tolist()
    hover = []
    for k in devices:
        part = "" if shares is None else f", {percent(shares[k])} of its budget"
        epsilon = "" if each is None else f", ε = {number(each[k], 4)} ({how})"
        hover.append(f"device {k}: loss {total[k]:.4g}{part}{epsilon}")
    names = [str(k) for k in devices]
    bars = Bars(names, [total[k] for k in devices], "spent", hover=hover)
    lines = [
        Line(
            names,
            [spending.budgets[k] for k in devices],
            "budget",
            dash="",
            marker="_",
            width=2,
        )
    ]
    caption = CAPTIONS["spent"].format(shown=len(devices), all=len(total))
    panel = Panel(
        [bars, *([] if shares is None else lines)], Axis("privacy loss", zero=True)
    )
    return Figure([panel], Axis("device", kind="category"), caption=caption)


def epsilon_figure(run: Run) -> Figure | None:
    """Return ε of the device nearest to its budget by the ledger; None without a ledger, or a δ to state it at."""
    if (
        run.scenario.privacy.delta is None
        or run.ledger is None
        or not run.ledger.entries
    ):
        return None
    privacy, spent = (
        build_privacy(run.scenario),
        np.cumsum(list(run.ledger.entries.values()), axis=0),
    )
    rounds, devices = spent.shape
    worst = int(np.argmax(spent[-1] / privacy.budget(devices)))
    promises = np.broadcast_to(np.asarray(privacy.epsilon, dtype=float), devices)
    delta = float(np.broadcast_to(np.asarray(privacy.delta), devices)[worst])
    drawn = thin(rounds, 300)
    lines = [
        Line(
            np.add(drawn, 1),
            epsilon_spent(spent[drawn, worst], delta, name),
            f"{name} accountant",
            color,
            width=2,
        )
        for name, color in zip(ACCOUNTANTS, COLORS, strict=False)
    ]
    lines.append(Line([1, rounds], [float(promises[worst])] * 2, "promised", dash="--"))
    how = privacy.adjacency
    caption = f"ε ({how}) of device {worst}, the one nearest to its budget, after every round of the ledger."
    return Figure(
        [Panel(lines, Axis(f"ε so far ({how})", zero=True))],
        Axis("round"),
        caption=caption,
    )


def draw_scores(
    evaluation: Evaluation, scenario: Scenario, folder: Path | None
) -> list[Path]:
    """Draw the reliability diagram of a classifier into the folder of its run; return the files."""
    if folder is None or not isinstance(evaluation.scores, Calibration):
        return []
    ends = np.unique([np.min(scenario.link.snr_db), np.max(scenario.link.snr_db)])
    about = f"{scenario.policy.power}, {' to '.join(f'{end:g}' for end in ends)} dB"
    figure = reliability_figure(reliability(evaluation.scores), about)
    return draw_picture(figure, folder / "reliability.png", folder / "reliability.svg")


def reliability_figure(bins: dict[str, Any], about: str = "") -> Figure:
    """Return confidence against accuracy, bin by bin, over all chains; bins of few examples are left out."""
    share = bins["share"]
    count, full = len(share), [index for index, part in enumerate(share) if part > 1e-3]
    x, y = ([bins[name][i] for i in full] for name in ("confidence", "observed"))
    lines = [
        Line([0, 1], [0, 1], "perfect calibration", "#8a93a0"),
        Line(x, y, "predictions", RED, marker="o"),
    ]
    bars = Bars(
        [(i + 0.5) / count for i in range(count)],
        share,
        "share of examples",
        width=1 / count,
    )
    upper = Panel(lines, Axis("accuracy", range=(0, 1.02)), height=2)
    lower = Panel([bars], Axis("share", zero=True), height=0.7)
    across, title = (
        Axis("confidence", range=(0, 1)),
        f"Reliability on the test set\n{about}",
    )
    return Figure(
        [upper, lower], across, title, CAPTIONS["reliability"], stacked=True, width=5.2
    )
