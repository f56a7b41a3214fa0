"""Figures of a plan and of a run.

They show the rounds of a plan, the distance to the posterior, chains, marginals,
predictions and privacy.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
    Values,
)
from wflmc.apps.report.matplotlib_pictures import draw_picture
from wflmc.apps.report.numbers import format_number, format_percent
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

BinValues = Sequence[float | None] | NDArray[np.float64]
"""One number for every bin of a reliability diagram."""
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
"""Formats of pictures."""
TRACED_CHAINS = 4
"""Chains whose traces are drawn."""
TRACED_PARAMETERS = 4
"""Parameters whose traces and autocorrelations are drawn."""
MAX_LAG = 60
"""Draws apart, of the longest autocorrelation that is drawn."""
MAX_DEVICES_DRAWN = 40
"""Devices whose spending is drawn: of more, those that spend most."""
MAX_BINS = 40
"""Bars of a histogram."""
MIN_BINS = 8
"""Bars of a histogram of a handful of samples."""
OUTLIER_QUARTILE_RANGES = 6.0
"""Quartile ranges beyond the quartiles from which on samples are not drawn."""
LAW_POINTS = 121
"""Points of the density that is drawn beside a histogram."""
LAW_MIN_REACH = 4
"""Standard deviations on both sides of its mean that a law is drawn over at least."""
LAW_MAX_REACH = 6
"""Standard deviations on both sides of its mean that a law is drawn over at most."""
MAX_LEDGER_POINTS = 300
"""Rounds of a ledger at which ε is computed."""
MIN_SHARE_OF_EXAMPLES = 1e-3
"""Of a bin of the reliability diagram: accuracy in smaller ones is mere chance."""
SAMPLE_COLOR = "#8cbfdd"
"""Of histograms."""
DIAGONAL_COLOR = "#8a93a0"
"""Of perfect calibration."""


def check_picture(path: str) -> None:
    """Refuse a file that could not be drawn, before any work is done.

    Args:
        path: of the picture, as given to `--plot`.

    Raises:
        InputError: it does not end in .png, .svg or .pdf, or its folder does not exist.
    """
    target = Path(path)
    if target.suffix.lower() not in PICTURE_SUFFIXES or not target.parent.is_dir():
        suffixes = ", ".join(PICTURE_SUFFIXES)
        requirement = f"a file name that ends in {suffixes}, in a folder that exists"
        raise InputError("--plot", path, requirement)


def draw_plan(plan: Plan, path: str | Path) -> Path:
    """Draw a plan as a picture, as `wflmc plan --plot` does.

    Args:
        plan: the plan.
        path: of the picture, which `check_picture` has accepted.

    Returns:
        The file.
    """
    (picture,) = draw_picture(plan_figure(plan), Path(path))
    return picture


def plan_figure(plan: Plan) -> Figure:
    """Show a plan over its rounds, in stacked panels.

    They show gain, transmit power, noise σ², privacy loss, active devices, the channel
    threshold and the step size; panels that would show nothing are left out: power
    without a power limit, losses without clipping, thresholds that are zero, a step
    size that is constant. Colours behind the curves show which limit a round sits at.

    Args:
        plan: the plan.

    Returns:
        The figure; its title states the objective and ε, its caption what is kept.
    """
    rounds = len(plan.rounds)
    x = np.arange(1, rounds + 1)
    axis = Axis("round", range=(0.5, rounds + 0.5))
    title = f"{_goal(plan)}; {_privacy_statement(plan)}"
    caption = (
        "The plan round by round, computed before anything was transmitted. Colours "
        "show which limit a round sits at. Draws are kept from round "
        f"{plan.burn_in + 1:,} on."
    )
    panels = _signal_panels(plan, x)
    panels += _noise_and_losses(plan, x)
    panels += _participation_and_step_panels(plan, x)
    return Figure(
        panels,
        axis,
        title,
        caption,
        stacked=True,
        width=9,
        burn_in=plan.burn_in,
        shades=_limit_shades(plan),
    )


def _goal(plan: Plan) -> str:
    """Return the objective of a plan in words."""
    if not np.isfinite(plan.objective):
        return "no bound is known"
    objective = plan.certificate.objective_name
    if objective == "exact":
        kind = "W2²"
    elif objective == "transcript":
        kind = "noise V of all kept rounds"
    else:
        kind = f"bound on W2² ({objective} after burn-in)"
    return f"{kind} {plan.objective:.4g}, without clipping"


def _privacy_statement(plan: Plan) -> str:
    """Return ε of the worst device in words."""
    if not plan.epsilon_spent:
        return "no privacy statement"
    adjacency = plan.privacy.adjacency
    return f"ε = {plan.epsilon_spent:.4g} ({adjacency}), worst device"


def _step_panel(x: Values, y: Values, name: str, axis: Axis, title: str) -> Panel:
    """Return a panel of one curve that holds its value for a whole round."""
    return Panel([Line(x, y, name, step=True)], axis, title)


def _signal_panels(plan: Plan, x: Values) -> list[Panel]:
    """Return the gain of every round, and the power where it is limited."""
    gain_title = "gain α: received amplitude per unit of gradient"
    panels = [_step_panel(x, plan.gain, "gain α", Axis(log=True), gain_title)]
    percent_of_limit = 100 * plan.power_share
    if percent_of_limit.any():
        title = "transmit power of the weakest active device, % of its limit"
        axis = Axis(range=(0, 105))
        panels.append(_step_panel(x, percent_of_limit, "power", axis, title))
    return panels


def _participation_and_step_panels(plan: Plan, x: Values) -> list[Panel]:
    """Return active devices, the threshold and the step size of every round.

    The threshold is shown where devices stay silent by one: it is 0 where all transmit,
    and nan without a common one. The step size is shown where it changes.

    Args:
        plan: whose rounds are shown.
        x: the numbers of the rounds, [S].
    """
    axis = Axis(range=(0, 1.08 * plan.devices))
    title = f"active devices, of {plan.devices}"
    panels = [_step_panel(x, plan.active_devices, "active devices", axis, title)]
    zero = Axis(zero=True)
    if np.nan_to_num(plan.threshold).any():
        title = "threshold: the weakest |h| with which a device transmits"
        panels.append(_step_panel(x, plan.threshold, "threshold", zero, title))
    if min(plan.step_size) < max(plan.step_size):
        panels.append(_step_panel(x, plan.step_size, "step size", zero, "step size η"))
    return panels


def _noise_and_losses(plan: Plan, x: Values) -> list[Panel]:
    """Return noise and privacy losses of every round."""
    needed = plan.langevin_noise
    total = plan.noise_variance
    needed_name = "noise that Langevin sampling needs"
    # A tenth of what is needed is where the band ends on a logarithmic scale, or the
    # noise of a round with less.
    needed_low = np.minimum(0.1 * needed, total)
    needed_band = Band(x, needed_low, needed, needed_name, GREEN, 0.5, step=True)
    excess_high = np.maximum(needed, total)
    excess_band = Band(x, needed, excess_high, "excess noise", RED, 0.4, step=True)
    total_line = Line(x, total, "noise", step=True, width=1)
    noise = Panel(
        [needed_band, excess_band, total_line],
        Axis(log=True),
        "noise variance σ² of the update",
    )
    return [noise, _loss_panel(plan, x)] if plan.clips else [noise]


def _loss_panel(plan: Plan, x: Values) -> Panel:
    """Return the privacy loss so far: of all devices, and of the one with most."""
    spent = plan.ledger + np.cumsum(plan.loss, axis=0)
    worst = int(np.argmax(spent[-1]))
    all_devices = Band(
        x, spent.min(1), spent.max(1), "all devices", BLUE, 0.25, step=True
    )
    worst_name = f"device {worst}, which spends most"
    worst_line = Line(x, spent[:, worst], worst_name, BLUE, step=True)
    median = np.median(spent, axis=1)
    median_line = Line(x, median, "median device", BLUE, "--", step=True)
    items: list[Band | Line] = [all_devices, worst_line, median_line]
    budget = float(plan.privacy.budget(plan.devices)[worst])
    if np.isfinite(budget):
        ends = [x[0], x[-1]]
        name = f"budget of device {worst}"
        items.append(Line(ends, [budget, budget], name, dash=":"))
    return Panel(items, Axis(zero=True), "privacy loss so far")


def _limit_shades(plan: Plan) -> list[Shade]:
    """Return the ranges of rounds that sit at each limit."""
    changes = np.flatnonzero(np.diff(plan.limit)) + 1
    edges = [0, *changes.tolist(), len(plan.rounds)]
    shades = []
    for name, fraction in plan.regime_share.items():
        if not fraction:
            continue
        ranges = [
            (first + 0.5, end + 0.5)
            for first, end in pairwise(edges)
            if LIMITS[plan.limit[first]] == name
        ]
        label = f"round is {name} ({fraction:.0%})"
        shades.append(Shade(label, LIMIT_LOOKS[name], ranges))
    return shades


def parameter_name(run: Run, index: int) -> str:
    """Name a parameter for readers.

    Args:
        run: whose posterior says what its parameters are.
        index: of the parameter in θ, from 0.

    Returns:
        `θ[index]`; of a softmax classifier also the class and the feature, or the
        intercept, whose weight it is.
    """
    posterior = run.posterior
    if not isinstance(posterior, SoftmaxPosterior):
        return f"θ[{index}]"
    features = posterior.features.shape[-1]
    label, feature = divmod(index, features)
    is_intercept = posterior.intercept and feature == features - 1
    weight = "intercept" if is_intercept else f"feature {feature}"
    return f"θ[{index}] (class {posterior.class_names[label]}, {weight})"


def distance_figure(run: Run) -> Figure | None:
    """Show W2² to the posterior over the rounds.

    There are up to three curves: the plan's bound, the exact law of chains without
    clipping, and the estimate from the chains, of the kept rounds alone.

    Args:
        run: the run folder.

    Returns:
        The figure; None where none of the curves is known.
    """
    plan = run.plan
    constants = plan.constants
    rounds = list(range(1, constants.rounds + 1))
    lines = []
    if plan.bound is not None:
        lines.append(Line(rounds, plan.bound, "bound", RED, width=2))
    if plan.exact_w2_sq is not None:
        law_name = "exact law, no clipping"
        lines.append(Line(rounds, plan.exact_w2_sq, law_name, BLUE, width=2))
    estimate = None if run.summary is None else run.summary.w2_sq
    if estimate is not None:
        kept_rounds = rounds[constants.burn_in :]
        estimate_line = Line(
            kept_rounds,
            estimate.per_round,
            "estimated from the chains",
            GREEN,
            dash="",
            marker="o",
        )
        lines.append(estimate_line)
    if not lines:
        return None
    is_bound_alone = [line.name for line in lines] == ["bound"]
    label = "bound on W2²" if is_bound_alone else "W2² to the posterior"
    return Figure(
        [Panel(lines, Axis(label, log=True))],
        Axis("round", range=(0.5, constants.rounds + 0.5)),
        caption=_distance_caption(run, estimated=estimate is not None),
        burn_in=constants.burn_in,
    )


def _distance_caption(run: Run, *, estimated: bool) -> str:
    """Return what the curves of the distance mean."""
    plan = run.plan
    if plan.own_data:
        caption = (
            "Bound on the squared distance to a posterior with the plan's constants; "
            "it ignores clipping."
        )
    else:
        caption = (
            "Squared distance of the samples' law to the posterior, round by round; "
            "bound and law ignore clipping."
        )
    if estimated:
        caption += (
            " The estimate from chains cannot fall below a floor that their number "
            "sets; the exact law can."
        )
    if plan.coordinates == "whitened" and plan.bound is not None:
        caption += " The bound is in whitened coordinates."
    return caption


def slowest(theta: NDArray[np.float64]) -> list[int]:
    """Choose the parameters whose chains mix most slowly: those to look at first.

    They are those with the largest autocorrelation between successive draws. Of equal
    ones the first come first.

    Args:
        theta: samples [chain, draw, m], with at least four draws.

    Returns:
        Indices of at most `TRACED_PARAMETERS` parameters, in ascending order.
    """
    correlation = autocorrelation(theta, 1)[1]
    order = np.argsort(-correlation, kind="stable")
    return sorted(order[:TRACED_PARAMETERS].tolist())


def traces_figure(run: Run, draws: Draws) -> Figure:
    """Show how some parameters of the first chains move over the rounds.

    The parameters are those that mix most slowly, in a panel each; every chain has a
    colour. Draws of the burn-in are shown where the trace has them, to the left of a
    vertical line.

    Args:
        run: the run folder, which names the parameters.
        draws: the samples of the run.

    Returns:
        The figure.
    """
    chains, kept_draws, dim = draws.theta.shape
    theta = draws.theta[:TRACED_CHAINS]
    burn_in = 0
    if draws.early is not None:
        theta = np.concatenate([draws.early[:TRACED_CHAINS], theta], axis=1)
        burn_in = run.plan.constants.burn_in
    end = burn_in + 1 + kept_draws * draws.every
    early_rounds = range(1, burn_in + 1, draws.every)
    kept_rounds = range(burn_in + 1, end, draws.every)
    x = [*early_rounds, *kept_rounds]
    panels = []
    for index in slowest(draws.theta):
        lines = [
            Line(x, np.round(chain[:, index], 6), color=color, width=1)
            for chain, color in zip(theta, COLORS, strict=False)
        ]
        panels.append(Panel(lines, title=parameter_name(run, index)))
    plural = "s" if chains > 1 else ""
    caption = (
        f"{len(theta)} of {chains:,} chain{plural}, a colour each. "
        "Good chains cover the same ground."
    )
    if dim > TRACED_PARAMETERS:
        caption += " The parameters shown mix most slowly."
    if burn_in:
        caption += " Burn-in is left of the vertical line."
    axis = Axis("round" if burn_in else "kept draw")
    return Figure(
        panels, axis, caption=caption, stacked=True, legend=False, burn_in=burn_in
    )


def autocorrelation_figure(run: Run, draws: Draws) -> Figure:
    """Show the autocorrelation of the parameters that mix most slowly.

    Args:
        run: the run folder, which names the parameters.
        draws: the samples of the run, at least four of each chain. Lags are in rounds,
            also where the trace was thinned when it was read.

    Returns:
        A figure of one curve per parameter, up to `MAX_LAG` draws apart.
    """
    lags = min(MAX_LAG, draws.theta.shape[1] - 2)
    rounds_apart = [lag * draws.every for lag in range(lags + 1)]
    indices = slowest(draws.theta)
    correlations = autocorrelation(draws.theta[:, :, indices], lags)
    lines = []
    for column, index in enumerate(indices):
        name = parameter_name(run, index)
        lines.append(Line(rounds_apart, correlations[:, column], name, COLORS[column]))
    zero = Line([0, rounds_apart[-1]], [0, 0], width=1)
    caption = (
        "Correlation of draws so many rounds apart. The sooner it falls to 0, the more "
        "each draw tells."
    )
    lowest = min(-0.3, 1.1 * float(correlations.min()))
    axis = Axis("autocorrelation", range=(lowest, 1.05))
    panel = Panel([*lines, zero], axis)
    return Figure([panel], Axis("rounds apart"), caption=caption)


def marginal_figure(run: Run, draws: Draws, compared: Comparison, index: int) -> Figure:
    """Show the histogram of one parameter beside its law, as a small figure.

    Far outliers are left out, and the caption says which part of the samples they are.
    The law is the normal density of the exact posterior, or of its Laplace
    approximation; it is left out where neither is known.

    Args:
        run: the run folder, which names the parameters.
        draws: the samples of the run.
        compared: the samples beside their law, for all parameters.
        index: of the parameter.

    Returns:
        The figure; its caption has the name and z, the shift of the mean in standard
        errors.
    """
    values = draws.theta[:, :, index].ravel()
    low, high = histogram_range(values)
    inside = values[(values >= low) & (values <= high)]
    bins = min(MAX_BINS, max(MIN_BINS, int(values.size**0.5)))
    height, edges = np.histogram(inside, bins=bins, density=True)
    centres = 0.5 * (edges[1:] + edges[:-1])
    bars = Bars(
        np.round(centres, 7),
        np.round(height, 6),
        "samples",
        SAMPLE_COLOR,
        float(edges[1] - edges[0]),
    )
    caption = parameter_name(run, index)
    lines = []
    if compared.law is not None:
        lines.append(_law_line(compared, index, inside))
        if np.isfinite(compared.z[index]):
            z = f"{compared.z[index]:+.1f}".replace("-", "−")
            caption += f": z = {z}"
    if inside.size < values.size:
        outside = format_percent(1 - inside.size / values.size)
        caption += f"; {outside} of samples lie outside"
    return Figure([Panel([bars, *lines])], caption=caption, small=True)


def _law_line(compared: Comparison, index: int, samples: NDArray[np.float64]) -> Line:
    """Return the normal density of a parameter's law, over the samples' range."""
    assert compared.law is not None
    mean = float(compared.law.mean[index])
    deviation = float(compared.expected[index])
    farthest = float(np.abs(samples - mean).max())
    reach = max(LAW_MIN_REACH * deviation, farthest)
    reach = min(reach, LAW_MAX_REACH * deviation)
    x = np.linspace(mean - reach, mean + reach, LAW_POINTS)
    z = (x - mean) / deviation
    height = np.exp(-(z**2) / 2)
    density = height / (deviation * np.sqrt(2 * np.pi))
    return Line(x, density, "posterior", RED, width=2)


def histogram_range(values: NDArray[np.float64]) -> tuple[float, float]:
    """Choose the range of a histogram without far outliers.

    One sample far out would make a single bar of all others. Samples count as far out
    from `OUTLIER_QUARTILE_RANGES` quartile ranges beyond the quartiles on; where half
    of the samples are equal, none do.

    Args:
        values: samples of one parameter, all finite.

    Returns:
        Both ends, which are samples or the limits for outliers.
    """
    first, third = np.percentile(values, [25, 75])
    reach = OUTLIER_QUARTILE_RANGES * (third - first) or np.inf
    lower_limit = float(first - reach)
    upper_limit = float(third + reach)
    smallest = float(values.min())
    largest = float(values.max())
    return max(smallest, lower_limit), min(largest, upper_limit)


def spent_figure(spending: Spending) -> Figure:
    """Show the privacy loss of every device beside its budget.

    Losses include those of earlier runs. Of more than `MAX_DEVICES_DRAWN` devices,
    those are drawn that spend the largest part of their budgets, in this order. Without
    a promise there are no budgets, and bars stand alone.

    Args:
        spending: `privacy` of plan.json, of a scheme that clips.

    Returns:
        The figure; a page shows budget and ε of a device under the pointer.
    """
    total = spending.total or []
    fractions = spending.shares
    devices = list(range(len(total)))
    if len(total) > MAX_DEVICES_DRAWN:
        order = np.argsort(-np.asarray(fractions or total), kind="stable")
        devices = order[:MAX_DEVICES_DRAWN].tolist()
    names = [str(device) for device in devices]
    losses = [total[device] for device in devices]
    hover = [_spending_words(spending, device) for device in devices]
    items: list[Bars | Line] = [Bars(names, losses, "spent", hover=hover)]
    if fractions is not None:
        budgets = [spending.budgets[device] for device in devices]
        items.append(Line(names, budgets, "budget", dash="", marker="_", width=2))
    caption = _spent_caption(
        drawn=len(devices), devices=len(total), has_budgets=fractions is not None
    )
    panel = Panel(items, Axis("privacy loss", zero=True))
    return Figure([panel], Axis("device", kind="category"), caption=caption)


def _spent_caption(*, drawn: int, devices: int, has_budgets: bool) -> str:
    """Return what bars of devices show, and the dashes where there are budgets."""
    subject = "the privacy loss of every device"
    if drawn < devices:
        subject = (
            f"the privacy loss of the {drawn:,} of {devices:,} devices that spend most"
        )
    ending = "; dashes show the budget." if has_budgets else "."
    return f"Bars show {subject}, that of earlier runs included{ending}"


def _spending_words(spending: Spending, device: int) -> str:
    """Return what a page shows of a device under the pointer."""
    total = spending.total or []
    words = f"device {device}: loss {total[device]:.4g}"
    if spending.shares is not None:
        words += f", {format_percent(spending.shares[device])} of its budget"
    if spending.epsilon_each is not None:
        epsilon = format_number(spending.epsilon_each[device], 4)
        words += f", ε = {epsilon} ({spending.adjacency})"
    return words


def epsilon_figure(run: Run) -> Figure | None:
    """Show ε over the rounds of the ledger, by both accountants, beside the promise.

    The device is the one that has spent the largest part of its budget at the end. Of
    more than `MAX_LEDGER_POINTS` rounds, as many are drawn. A ledger may be longer than
    the run, where later runs have paid from it.

    Args:
        run: the run folder.

    Returns:
        The figure; None without a ledger, or without a δ to state ε at.
    """
    ledger = run.ledger
    if run.scenario.privacy.delta is None or ledger is None or not ledger.entries:
        return None
    privacy = build_privacy(run.scenario)
    spent = np.cumsum(list(ledger.entries.values()), axis=0)
    rounds, devices = spent.shape
    worst = int(np.argmax(spent[-1] / privacy.budget(devices)))
    promises = np.broadcast_to(np.asarray(privacy.epsilon, dtype=float), devices)
    promise = float(promises[worst])
    delta = float(np.broadcast_to(np.asarray(privacy.delta), devices)[worst])
    drawn = thin(rounds, MAX_LEDGER_POINTS)
    round_numbers = np.add(drawn, 1)
    lines = []
    for name, color in zip(ACCOUNTANTS, COLORS, strict=False):
        epsilon = epsilon_spent(spent[drawn, worst], delta, name)
        lines.append(Line(round_numbers, epsilon, f"{name} accountant", color, width=2))
    lines.append(Line([1, rounds], [promise, promise], "promised", dash="--"))
    adjacency = privacy.adjacency
    caption = (
        f"ε ({adjacency}) of device {worst}, the one nearest to its budget, after "
        "every round of the ledger."
    )
    panel = Panel(lines, Axis(f"ε so far ({adjacency})", zero=True))
    return Figure([panel], Axis("round"), caption=caption)


def draw_scores(
    evaluation: Evaluation, scenario: Scenario, folder: Path | None
) -> list[Path]:
    """Draw the reliability diagram of a classifier into the folder of its run.

    Args:
        evaluation: of the run; only scores of a classifier are drawn.
        scenario: that was run, for the title.
        folder: of the run; None where nothing is to be written.

    Returns:
        The files `reliability.png` and `reliability.svg`; none where there is nothing
        to draw or nowhere to write.
    """
    if folder is None or not isinstance(evaluation.scores, Calibration):
        return []
    snr_db = np.asarray(scenario.link.snr_db)
    ends = np.unique([np.min(snr_db), np.max(snr_db)])
    snr = " to ".join(f"{end:g}" for end in ends)
    subtitle = f"{scenario.policy.power}, {snr} dB"
    figure = reliability_figure(reliability(evaluation.scores), subtitle)
    return draw_picture(figure, folder / "reliability.png", folder / "reliability.svg")


def reliability_figure(bins: Mapping[str, BinValues], subtitle: str = "") -> Figure:
    """Show confidence against accuracy, bin by bin, over all chains.

    The lower panel shows how many predictions have each confidence. Accuracy is drawn
    of bins with more than one example in a thousand.

    Args:
        bins: `share` (the fraction of examples), `confidence` and `observed` (the
            accuracy) of every bin, between 0 and 1; the last two are None in empty
            bins.
        subtitle: a second line of the picture's title.

    Returns:
        A figure of two stacked panels.
    """
    fractions = bins["share"]
    count = len(fractions)
    drawn = [
        index
        for index, fraction in enumerate(fractions)
        if fraction is not None and fraction > MIN_SHARE_OF_EXAMPLES
    ]
    confidence = _chosen(bins["confidence"], drawn)
    accuracy = _chosen(bins["observed"], drawn)
    diagonal = Line([0, 1], [0, 1], "perfect calibration", DIAGONAL_COLOR)
    predictions = Line(confidence, accuracy, "predictions", RED, marker="o")
    accuracy_axis = Axis("accuracy", range=(0, 1.02))
    upper = Panel([diagonal, predictions], accuracy_axis, height=2)
    centres = [(index + 0.5) / count for index in range(count)]
    bars = Bars(centres, fractions, "share of examples", width=1 / count)
    lower = Panel([bars], Axis("share", zero=True), height=0.7)
    caption = (
        "Of predictions made with a confidence of 80 %, 80 % should be right: on the "
        "diagonal. Below it the model is overconfident, above it underconfident. Bars "
        "show how many predictions have that confidence."
    )
    return Figure(
        [upper, lower],
        Axis("confidence", range=(0, 1)),
        f"Reliability on the test set\n{subtitle}",
        caption,
        stacked=True,
        width=5.2,
    )


def _chosen(values: BinValues, indices: list[int]) -> list[float | None]:
    """Return the values at some indices."""
    return [values[index] for index in indices]
