"""Tables and sentences to read in a terminal or as Markdown.

They show plans, claims, audits, fits and the ablation.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

import numpy as np
from rich.table import Column, Table

from wflmc.apps.diagnosis.values import CAUSES_SHOWN
from wflmc.apps.report.numbers import MISSING_NUMBER
from wflmc.apps.studies.study import Claim, Row
from wflmc.dynamics import from_constants
from wflmc.evaluation.wasserstein import Spread
from wflmc.privacy.promise import HIDDEN
from wflmc.runs.documents import FitFile, JsonObject
from wflmc.scenario.schema import PosteriorSection

MIN_ROUNDING_SHOWN = 0.001
"""Relative rounding of sums from which on a table shows it."""
MIN_RELATIVE_UNCERTAINTY = 1e-6
"""Standard error over its number up to which it is mere rounding."""
ROUNDED_UP = 5e-6
"""The relative amount that is added to an answer before it is rounded to six digits, so
that the printed value reaches the target too."""
CONTRADICTS = "the paper contradicts itself"
"""The verdict on a claim that disagrees with the paper's own theorem or numbers."""
DIAGNOSIS_WIDTH = 25
"""Characters of the first column of a summary."""
UNCHANGED = "as it is"
"""The entry of `worth` in fit.json that all others are compared with."""
WORTH_SCORES = ("accuracy", "nll", "ece", "relative_mse")
"""Scores of `worth` in fit.json, in the order of the sentence."""
AUDIT_COLUMNS = (
    "device",
    "rounds",
    "trials",
    "wrong + / −",
    "ε ≥",
    "by counting alone",
    "claimed",
)
"""The columns of an audit's table behind the name of the attack."""
ABLATION = """\
# What each ingredient buys

Figure 6's setting at 30 dB: W2², worst after burn-in, by the exact law \
(mean over channels) and from chains with
clipping on the first channel, and the exact effective sample size of one chain.

| scheme | W2² by the law | W2² of clipped chains | ESS |
|---|---|---|---|
{distances}

Figure 8's setting at 20 dB, means over experiments. Ours hides one image, which is \
how the paper's text defines
neighbours; the paper's recipe clips whole devices and hides them. Whitening uses \
statistics of the images that are taken
as public, unless it is paid for.

| recipe | accuracy | ECE | NLL | ε spent (replace) |
|---|---|---|---|---|
{scores}
"""
"""The ablation in Markdown; both tables are filled in."""


def _number(value: object, digits: int = 5) -> str:
    """Return a cell of a table: a rounded number, yes or no, or text as it is."""
    if value is None:
        return MISSING_NUMBER
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _span(values: Sequence[float], digits: int = 5) -> str:
    """Return the smallest and the largest of some numbers."""
    low = _number(min(values), digits)
    high = _number(max(values), digits)
    return low if low == high else f"{low} … {high}"


def plan_table(document: JsonObject) -> Table:
    """Show a plan in a terminal: what is planned, what it reaches and what it costs.

    Args:
        document: plan.json, with `solve_for` where a question was asked.

    Returns:
        A table of two columns: setting, limits, gains, the bound and the exact law,
        privacy of the worst device, the diagnosis if there is one, and warnings.
    """
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = [
        *_setting_rows(document),
        *_law_rows(document),
        *_privacy_rows(document["privacy"]),
        *_diagnosis_rows(document["diagnosis"]),
    ]
    rows += [("[yellow]warning[/yellow]", text) for text in document["warnings"]]
    for row in rows:
        table.add_row(*row)
    return table


def _setting_rows(document: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield what is planned: constants, limits, gains and participation."""
    question = document.get("solve_for")
    if question is not None:
        ending = "" if question["reachable"] else ", shown below"
        yield "answer", f"{question['answer']}{ending}"
    constants = document["constants"]
    size = f"{constants['devices']} devices, {constants['dim']} parameters"
    rounds = f"{constants['burn_in']} + {constants['samples']} rounds"
    step = _step_words(document)
    curvature = f"μ = {constants['mu']:.4g}, L = {constants['L']:.4g}"
    yield "setting", f"{size}, {rounds}, {step}, {curvature}"
    yield "regime", document["regime"] or "changes with the round"
    fractions = [
        f"{name} {fraction:.0%}"
        for name, fraction in document["regime_share"].items()
        if fraction
    ]
    yield "rounds at each limit", ", ".join(fractions)
    whitening = document["whitening"]
    if whitening is not None:
        release = f"released in {whitening['rounds']} rounds before"
        cost = f"for {_number(whitening['share_of_budget'], 2)} of the budget"
        hidden = f"noise hides {whitening['hidden']:.0%} of directions"
        yield "whitening", f"{release}, {cost}; {hidden}"
    section = document["scenario"].get("posterior", {})
    if section.get("prior_from"):
        source = PurePath(section["prior_from"]).name
        default_std = PosteriorSection.model_fields["prior_std"].default
        prior_std = section.get("prior_std", default_std)
        spread = f"deviation {prior_std:.4g} around it"
        yield "prior", f"mean fitted to the public rows of {source}, {spread}"
    yield "gain α", _span(document["gain"])
    yield "active devices", _span(document["active_devices"])


def _step_words(document: JsonObject) -> str:
    """Return the step sizes; of kinetic dynamics with their other parameters."""
    constants = document["constants"]
    dynamics = from_constants(constants)
    if not dynamics.has_velocity:
        return f"η = {_span(document['step_size'], 4)}"
    numbers = {"h": constants["step_size"], **dynamics.parameters}
    words = [f"{name} = {value:.4g}" for name, value in numbers.items()]
    return ", ".join([dynamics.name, *words])


def _law_rows(document: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield what is known of W2²: the objective with its proof, and the exact law."""
    objective = document["scenario"].get("policy", {}).get("objective")
    if objective == "exact":
        label = "W2² by the law"
    elif objective == "transcript":
        label = "noise of all, V"
    else:
        label = "bound on W2²"
    yield label, _objective_words(document, objective)
    if document["exact_w2_sq"] is not None:
        burn_in = document["constants"]["burn_in"]
        w2_sq = document["exact_w2_sq"][burn_in:]
        diverges = None in w2_sq
        worst = "diverges" if diverges else f"{max(w2_sq):.4g} worst after burn-in"
        yield "W2² (no clipping)", f"{worst} (exact law of the chain)"
        ess = f"{document['exact_ess_min']:.3g} of {len(w2_sq)} draws"
        yield "ESS (no clipping)", f"{ess}, worst parameter (one chain)"
    if document["spread"] is not None:
        spread = Spread(**document["spread"])
        if spread.is_narrow:
            yield "variance (no clipping)", spread.words


def _objective_words(document: JsonObject, objective: str | None) -> str:
    """Return the value of the objective, where it starts, and how good it is."""
    is_whitened = document["coordinates"] == "whitened" and objective != "exact"
    coordinates = "; both in whitened coordinates" if is_whitened else ""
    constants = document["constants"]
    start = ""  # not computed where it would serve no bound
    if constants["initial_w2_sq"] is not None:
        start = f" (start {constants['initial_w2_sq']:.4g}{coordinates})"
    value = document["objective"]
    if value is None:
        is_kinetic = from_constants(constants).has_velocity
        reason = "kinetic dynamics" if is_kinetic else "steps above 2/L"
        return f"none is known for {reason}{start}"
    words = f"{value:.4g} after burn-in"
    if objective != "transcript":
        words += start
    if document["gap"] is not None:
        words += f", within {document['gap']:.1g} of the best possible"
        limit = document["max_round_noise"]
        if limit is not None:
            words += f" with max_round_noise = {limit:g}"
    return words


def _privacy_rows(privacy: JsonObject) -> Iterator[tuple[str, str]]:
    """Yield what the worst device spends, what that hides, and ε by accountant."""
    if privacy["spent_max"] is None:
        yield "privacy", "none: this scheme does not clip"
        return
    adjacency = privacy["adjacency"]
    epsilons = privacy["epsilon_each"]
    yield "privacy hides", f"{HIDDEN[privacy['unit'], adjacency]} ({adjacency})"
    yield "privacy (worst device)", _worst_device_words(privacy)
    if epsilons is not None and len(set(privacy["budgets"])) > 1:
        yield "ε of all devices", f"{_span(epsilons)} ({adjacency})"
    if privacy["epsilon_by"] is not None:
        values = [
            f"{name} {epsilon:.5g}"
            for name, epsilon in privacy["epsilon_by"].items()
            if epsilon is not None
        ]
        yield "ε by each accountant", f"{', '.join(values)} ({adjacency})"
    if privacy["rounding"] >= MIN_ROUNDING_SHOWN:
        yield (
            "clipping",
            f"{privacy['rounding']:.2%} below clip and example_clip: float32 sums keep "
            "to the loss",
        )


def _worst_device_words(privacy: JsonObject) -> str:
    """Return loss and ε of the device that spends the largest part of its budget."""
    budgets = privacy["budgets"]
    spent = privacy["spent"]
    if privacy["spent_before"]:
        spent = np.add(spent, privacy["spent_before"]).tolist()
    # Without a promise there are no budgets: the device with most counts.
    scales = [budget or 1.0 for budget in budgets]
    worst = int(np.argmax(np.divide(spent, scales)))
    limit = "no budget" if budgets[worst] is None else f"budget {budgets[worst]:.5g}"
    words = f"loss {spent[worst]:.5g} ({limit})"
    if privacy["epsilon_each"] is not None:
        epsilon = privacy["epsilon_each"][worst]
        words += f", ε = {epsilon:.5g} ({privacy['adjacency']})"
    return f"{words}, {privacy['accountant']} accountant, device {worst}"


def _diagnosis_rows(
    causes: Sequence[Mapping[str, object]] | None,
) -> Iterator[tuple[str, str]]:
    """Yield the worst causes; nothing where no diagnosis was asked for."""
    if causes is not None:
        for text in _cause_sentences(causes):
            yield "diagnosis", text


def _cause_sentences(causes: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the worst causes with their rank, or that there are none."""
    if not causes:
        return ["nothing stands out"]
    return [
        f"{rank}. {cause['text']}"
        for rank, cause in enumerate(causes[:CAUSES_SHOWN], start=1)
    ]


def diagnosis_lines(causes: Sequence[Mapping[str, object]]) -> list[str]:
    """List the worst causes, each with the change that helps against it.

    Args:
        causes: of a diagnosis, the worst first.

    Returns:
        At most `CAUSES_SHOWN` lines in the columns of a summary; a single line that
        nothing stands out where there are no causes.
    """
    return [
        f"{'diagnosis':<{DIAGNOSIS_WIDTH}}{text}" for text in _cause_sentences(causes)
    ]


def answer_sentence(question: JsonObject, adjacency: str) -> str:
    """Return the answer to an inverse question in a sentence.

    Numbers that are not whole are rounded up to six digits, so that the printed value
    reaches the target too.

    Args:
        question: `solve_for` of a plan's JSON: the key that was solved for, the metric
            and its target, and the smallest value or the best that can be reached.
        adjacency: of the promise, which belongs to every ε.

    Returns:
        The sentence, without its full stop.
    """
    key = question["key"]
    metric = "bound on W2²" if question["metric"] == "bound" else "exact W2²"
    target = f"{metric} ≤ {question['target']:g}"
    ending = f" (adjacency: {adjacency})" if key == "privacy.epsilon" else ""
    if not question["reachable"]:
        best = f"the best is {question['reached']:.4g} at {question['best_at']:g}"
        return f"no {key} was found that reaches {target}; {best}{ending}"
    value = question["value"]
    shown = str(value)
    if not isinstance(value, int):
        shown = f"{value + ROUNDED_UP * abs(value):.6g}"
    return f"{key} = {shown} is the smallest found with {target}{ending}"


def audit_table(document: JsonObject) -> Table:
    """Show every attack of an audit, what it proves of ε, and what the plan claims.

    Args:
        document: the JSON of `wflmc audit`.

    Returns:
        A row for each attack, red where it proves more than the plan claims. `ε ≥` has
        two columns: by a Gaussian model of the scores, and by counting alone.
    """
    columns = [Column(name, justify="right", overflow="fold") for name in AUDIT_COLUMNS]
    adjacency = document["claimed"]["adjacency"]
    title = f"Attacks, and what they prove of ε ({adjacency})"
    table = Table(Column("attack", overflow="fold"), *columns, title=title)
    for test in document["tests"]:
        sizes = [f"{test[name]:,}" for name in ("device", "rounds", "trials")]
        errors = f"{test['false_negatives']:,} / {test['false_positives']:,}"
        epsilons = [
            _number(test[f"epsilon_{kind}"], 4)
            for kind in ("gaussian", "counting", "claimed")
        ]
        style = "bold red" if test["flagged"] else None
        table.add_row(test["name"], *sizes, errors, *epsilons, style=style)
    return table


def verdict(holds: bool, contradiction: bool) -> str:
    """Return the verdict on a claim of the paper in a word.

    Args:
        holds: whether our numbers agree with the statement.
        contradiction: whether the statement contradicts the paper's own theorem or
            numbers; it counts only where the statement does not hold.

    Returns:
        ``holds``, ``differs`` or `CONTRADICTS`.
    """
    if holds:
        return "holds"
    return CONTRADICTS if contradiction else "differs"


def claims_table(claims: Sequence[Claim]) -> Table:
    """Show every stated outcome with the paper's number, ours and the verdict.

    Args:
        claims: the outcomes that figures were tested on, in their order.

    Returns:
        A table to print; numbers have five significant digits, and notes stand in
        parentheses behind the verdict.
    """
    names = ("figure", "statement", "paper", "ours", "verdict")
    columns = [Column(name, overflow="fold") for name in names]
    table = Table(*columns, title="The paper's stated outcomes")
    for claim in claims:
        outcome = verdict(claim.holds, claim.contradiction)
        if claim.note:
            outcome += f" ({claim.note})"
        table.add_row(
            claim.figure,
            claim.statement,
            _number(claim.paper),
            _number(claim.ours),
            outcome,
        )
    return table


def ablation(tables: Mapping[str, Sequence[Row]]) -> str:
    """Write what each ingredient buys, as two tables in Markdown.

    The first is figure 6's setting at 30 dB, the second figure 8's at 20 dB, ingredient
    after ingredient.

    Args:
        tables: those of the study `beyond`, by name; each has a row for every scheme at
            these SNRs.

    Returns:
        The text of `ablation.md`.
    """
    distance_names = ("w2", "chains", "ess")
    distance_tables = [tables[f"beyond_{name}"] for name in distance_names]
    distances = _markdown(distance_tables, snr_db=30.0)
    endings = ("_accuracy", "", "_nll", "_epsilon")
    score_tables = [tables[f"beyond_ablation{ending}"] for ending in endings]
    scores = _markdown(score_tables, snr_db=20.0)
    return ABLATION.format(distances=distances, scores=scores)


def _markdown(tables: Sequence[Sequence[Row]], snr_db: float) -> str:
    """Return a row for each scheme, with its number in each of the tables."""
    columns = [_cells_at(table, snr_db) for table in tables]
    lines = []
    for scheme in columns[0]:
        cells = [scheme, *(column[scheme] for column in columns)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells_at(table: Sequence[Row], snr_db: float) -> dict[str, str]:
    """Return the number of every scheme at an SNR, with its standard error."""
    return {
        row.scheme: _number(row.y, 3) + uncertainty(row)
        for row in table
        if row.x == snr_db
    }


def uncertainty(row: Row) -> str:
    """Return the standard error of a row, to stand behind its number.

    Args:
        row: of a table.

    Returns:
        Such as `` ± 0.003``; empty where there is no number or no standard error, and
        where the error is mere rounding.
    """
    if row.y is None or not row.y_se:
        return ""
    if row.y_se <= MIN_RELATIVE_UNCERTAINTY * abs(row.y):
        return ""
    return f" ± {row.y_se:.1g}"


def fit_lines(fit: FitFile) -> list[str]:
    """Summarise what a fit reached and spent, in sentences.

    Args:
        fit: the content of fit.json.

    Returns:
        Lines for a terminal: the size of the table, what public rows gave if there were
        any, scores on held-out rows if there are any, ε with what each part has cost,
        what more data or ε would be worth on a stand-in, and what ε does not cover.
    """
    lines = [_size_line(fit)]
    lines += _public_lines(fit)
    lines += _score_lines(fit)
    lines.append(_epsilon_line(fit))
    lines += _worth_lines(fit)
    lines += [f"Not covered by ε: {item.text}" for item in fit.not_covered]
    return lines


def _size_line(fit: FitFile) -> str:
    """Return the size of the table."""
    devices = f"{fit.devices:,} device"
    if fit.devices != 1:
        devices += "s"
    held_out = f"{fit.test_rows:,} rows held out"
    return f"{fit.rows:,} rows of {devices}, {fit.features} features, {held_out}."


def _public_lines(fit: FitFile) -> Iterator[str]:
    """Yield what public rows gave, and how far the draws are from it."""
    if fit.public is None:
        return
    gifts = "scales and whitening"
    if fit.public.labelled:
        gifts = "scales, whitening, the mean of the prior and settings"
    yield f"{fit.public.rows:,} public rows gave {gifts}, without any ε."
    if fit.prior_distance is not None:
        away = f"{fit.prior_distance:.3g} standard deviations of the prior"
        yield f"The mean of the draws is {away} from the public fit."


def _score_lines(fit: FitFile) -> Iterator[str]:
    """Yield the scores on held-out rows."""
    if fit.accuracy is not None:
        accuracy = f"accuracy {fit.accuracy:.3f}"
        calibration = f"calibration error {fit.ece:.3f} (floor {fit.ece_floor:.3f})"
        yield f"{accuracy}, {calibration}, nll {fit.nll:.3f}"
    if fit.rmse is not None:
        errors = f"rmse {fit.rmse:.4g}, R² {fit.r2:.3f}"
        yield f"{errors}; 90 % intervals cover {fit.coverage_90:.1%}"


def _epsilon_line(fit: FitFile) -> str:
    """Return ε with what it hides and what its parts have cost."""
    privacy = fit.privacy
    parts = [f"{part} {epsilon:.3g}" for part, epsilon in fit.epsilon_by_part.items()]
    listed = ", ".join(parts)
    hidden = f"unit = {privacy.unit}, adjacency = {privacy.adjacency}"
    spent = f"{fit.epsilon_spent:.3g}"
    promise = f"{privacy.promised:g} at δ = {privacy.delta:g}"
    return f"You used ε = {spent} of {promise} ({hidden}): {listed}."


def _worth_lines(fit: FitFile) -> Iterator[str]:
    """Yield what every change would reach on a stand-in."""
    before = fit.worth.get(UNCHANGED, {})
    for name, after in fit.worth.items():
        if name == UNCHANGED:
            continue
        scores = [key for key in WORTH_SCORES if key in after]
        changes = [f"{key} {before[key]:.3g} → {after[key]:.3g}" for key in scores]
        yield (
            f"On a stand-in, not on this table, {name} would give {', '.join(changes)}."
        )


def numbers_table(title: str, rows: Sequence[Mapping[str, object]]) -> Table:
    """Show rows of numbers by name as a table.

    Args:
        title: above the table.
        rows: at least one, all with the same names; columns without any number are left
            out.

    Returns:
        A table of four significant digits, with a dash for a missing number.
    """
    names = []
    for name in rows[0]:
        column = [row[name] for row in rows]
        if any(value is not None for value in column):
            names.append(name)
    columns = [Column(name, justify="right") for name in names]
    table = Table(*columns, title=title)
    for row in rows:
        cells = [_number(row[name], 4) for name in names]
        table.add_row(*cells)
    return table
