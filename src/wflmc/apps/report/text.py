"""Tables and sentences to read in a terminal or as Markdown: plans, claims, audits, the ablation."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Column, Table

from wflmc.apps.diagnosis.values import CAUSES_SHOWN
from wflmc.apps.report.blocks import asset
from wflmc.apps.studies.study import Claim, Row
from wflmc.dynamics import from_constants
from wflmc.privacy.promise import HIDDEN
from wflmc.runs.documents import FitFile

WORTH_SAYING = 0.001
"""Rounding of sums that a table shows."""
CONTRADICTS = "the paper contradicts itself"


def _number(value: object, digits: int = 5) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _span(values: Sequence[float], digits: int = 5) -> str:
    low, high = _number(min(values), digits), _number(max(values), digits)
    return low if low == high else f"{low} … {high}"


def plan_table(document: dict[str, Any]) -> Table:
    """Return a plan's JSON document in words."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = [
        *_setting_rows(document),
        *_law_rows(document),
        *_privacy_rows(document["privacy"]),
    ]
    causes = document["diagnosis"]
    diagnosis = (
        []
        if causes is None
        else [line.split(maxsplit=1) for line in diagnosis_lines(causes)]
    )
    for row in (
        *rows,
        *diagnosis,
        *(("[yellow]warning[/yellow]", warning) for warning in document["warnings"]),
    ):
        table.add_row(*row)
    return table


def _setting_rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is planned: constants, limits, gains and participation."""
    c, asked, whitening = (
        document["constants"],
        document.get("solve_for"),
        document["whitening"],
    )
    if asked is not None:
        yield (
            "answer",
            asked["answer"] + ("" if asked["reachable"] else ", shown below"),
        )
    step = f"η = {_span(document['step_size'], 4)}"
    dynamics = from_constants(c)
    if dynamics.has_velocity:
        numbers = {"h": c["step_size"], **dynamics.parameters}
        step = ", ".join(
            [
                dynamics.name,
                *(f"{name} = {value:.4g}" for name, value in numbers.items()),
            ]
        )
    size = f"{c['devices']} devices, {c['dim']} parameters, {c['burn_in']} + {c['samples']} rounds"
    yield "setting", f"{size}, {step}, μ = {c['mu']:.4g}, L = {c['L']:.4g}"
    yield "regime", document["regime"] or "changes with the round"
    shares = [
        f"{name} {share:.0%}"
        for name, share in document["regime_share"].items()
        if share
    ]
    yield "rounds at each limit", ", ".join(shares)
    if whitening is not None:
        cost = f"for {_number(whitening['share_of_budget'], 2)} of the budget"
        hidden = f"noise hides {whitening['hidden']:.0%} of directions"
        yield (
            "whitening",
            f"released in {whitening['rounds']} rounds before, {cost}; {hidden}",
        )
    yield "gain α", _span(document["gain"])
    yield "active devices", _span(document["active_devices"])


def _law_rows(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is known of W2²: the objective with its proof, and the exact law without clipping."""
    c, objective, limit = (
        document["constants"],
        document["objective"],
        document["max_round_noise"],
    )
    kind = document["scenario"].get("policy", {}).get("objective")
    exact_law, transcript = kind == "exact", kind == "transcript"
    whitened = document["coordinates"] == "whitened" and not exact_law
    start = f"(start {c['initial_w2_sq']:.4g}{'; both in whitened coordinates' if whitened else ''})"
    words = f"none is known for kinetic dynamics {start}"
    if objective is not None:
        words = f"{objective:.4g} after burn-in{f' {start}' * (not transcript)}"
        if document["gap"] is not None:
            given = "" if limit is None else f" with max_round_noise = {limit:g}"
            words += f", within {document['gap']:.1g} of the best possible{given}"
    yield (
        "W2² by the law"
        if exact_law
        else "noise of all, V"
        if transcript
        else "bound on W2²",
        words,
    )
    if document["exact_w2_sq"] is not None:
        kept = document["exact_w2_sq"][c["burn_in"] :]
        worst = "diverges" if None in kept else f"{max(kept):.4g} worst after burn-in"
        yield "W2² (no clipping)", f"{worst} (exact law of the chain)"
        yield (
            "ESS (no clipping)",
            f"{document['exact_ess_min']:.3g} of {len(kept)} draws, worst parameter (one chain)",
        )


def _privacy_rows(privacy: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the worst device spends, what that hides, and ε by every accountant."""
    if privacy["spent_max"] is None:
        yield "privacy", "none: this scheme does not clip"
        return
    budgets, each, how = (
        privacy["budgets"],
        privacy["epsilon_each"],
        privacy["adjacency"],
    )
    before = privacy["spent_before"] or [0.0] * len(privacy["spent"])
    spent = [
        now + earlier for now, earlier in zip(privacy["spent"], before, strict=True)
    ]
    worst = max(range(len(spent)), key=lambda k: spent[k] / (budgets[k] or 1.0))
    allowed = "no budget" if budgets[worst] is None else f"budget {budgets[worst]:.5g}"
    epsilon = "" if each is None else f", ε = {each[worst]:.5g} ({how})"
    by = f"{privacy['accountant']} accountant"
    yield "privacy hides", f"{HIDDEN[privacy['unit'], how]} ({how})"
    yield (
        "privacy (worst device)",
        f"loss {spent[worst]:.5g} ({allowed}){epsilon}, {by}, device {worst}",
    )
    if each is not None and len(set(budgets)) > 1:
        yield "ε of all devices", f"{_span(each)} ({how})"
    if privacy["epsilon_by"] is not None:
        values = [
            f"{name} {value:.5g}"
            for name, value in privacy["epsilon_by"].items()
            if value is not None
        ]
        yield "ε by each accountant", f"{', '.join(values)} ({how})"
    if privacy["rounding"] >= WORTH_SAYING:
        yield (
            "clipping",
            f"{privacy['rounding']:.2%} below clip and example_clip: float32 sums keep to the loss",
        )


def diagnosis_lines(causes: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the worst causes with the change that helps against each, in the columns of a summary."""
    shown = [
        f"{rank}. {cause['text']}"
        for rank, cause in enumerate(causes[:CAUSES_SHOWN], 1)
    ]
    return [f"{'diagnosis':<25}{words}" for words in shown or ["nothing stands out"]]


def answer_sentence(asked: dict[str, Any], adjacency: str) -> str:
    """Return the answer to an inverse question, from `solve_for` of a plan's JSON, and the promise's adjacency."""
    key, value = asked["key"], asked["value"]
    target = f"{'bound on W2²' if asked['metric'] == 'bound' else 'exact W2²'} ≤ {asked['target']:g}"
    whose = f" (adjacency: {adjacency})" if key == "privacy.epsilon" else ""
    if not asked["reachable"]:
        best = f"the best is {asked['reached']:.4g} at {asked['best_at']:g}"
        return f"no {key} was found that reaches {target}; {best}{whose}"
    # Rounded up, so that the printed value reaches the target too.
    shown = str(value) if isinstance(value, int) else f"{value + 5e-6 * abs(value):.6g}"
    return f"{key} = {shown} is the smallest found with {target}{whose}"


def audit_table(document: dict[str, Any]) -> Table:
    """Return an audit's JSON document: every attack, what it proves, and what the plan claims."""
    columns = (
        "device",
        "rounds",
        "trials",
        "wrong + / −",
        "ε ≥",
        "by counting alone",
        "claimed",
    )
    right = (Column(name, justify="right", overflow="fold") for name in columns)
    title = f"Attacks, and what they prove of ε ({document['claimed']['adjacency']})"
    table = Table(Column("attack", overflow="fold"), *right, title=title)
    for test in document["tests"]:
        cells = [
            test["name"],
            *(f"{test[name]:,}" for name in ("device", "rounds", "trials")),
        ]
        cells.append(f"{test['false_negatives']:,} / {test['false_positives']:,}")
        cells += [
            _number(test[f"epsilon_{kind}"], 4)
            for kind in ("gaussian", "counting", "claimed")
        ]
        table.add_row(*cells, style="bold red" if test["flagged"] else None)
    return table


def verdict(holds: bool, contradiction: bool) -> str:
    """Return what came of a claim of the paper."""
    return "holds" if holds else CONTRADICTS if contradiction else "differs"


def claims_table(claims: Sequence[Claim]) -> Table:
    """Return every stated outcome with the paper's number and ours."""
    names = ("figure", "statement", "paper", "ours", "verdict")
    table = Table(
        *(Column(name, overflow="fold") for name in names),
        title="The paper's stated outcomes",
    )
    for claim in claims:
        outcome = verdict(claim.holds, claim.contradiction) + (
            f" ({claim.note})" if claim.note else ""
        )
        table.add_row(
            claim.figure,
            claim.statement,
            _number(claim.paper),
            _number(claim.ours),
            outcome,
        )
    return table


def ablation(tables: Mapping[str, Sequence[Row]]) -> str:
    """Return two tables in Markdown: figure 6's setting at 30 dB, ingredient after ingredient; figure 8's at 20 dB."""
    distances = [tables[f"beyond_{name}"] for name in ("w2", "chains", "ess")]
    scores = [
        tables[f"beyond_ablation{name}"]
        for name in ("_accuracy", "", "_nll", "_epsilon")
    ]
    return asset("ablation.md").format(
        distances=_markdown(distances, 30.0), scores=_markdown(scores, 20.0)
    )


def _markdown(tables: Sequence[Sequence[Row]], snr_db: float) -> str:
    """Return a row for each scheme, with its number in each of the tables."""
    chosen = [[row for row in table if row.x == snr_db] for table in tables]
    columns = [
        {row.scheme: _number(row.y, 3) + uncertainty(row) for row in rows}
        for rows in chosen
    ]
    rows = ([scheme, *(column[scheme] for column in columns)] for scheme in columns[0])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def uncertainty(row: Row) -> str:
    """Return the standard error of a row, to stand behind its number; nothing where it is mere rounding."""
    return (
        f" ± {row.y_se:.1g}"
        if row.y and row.y_se and row.y_se > 1e-6 * abs(row.y)
        else ""
    )


def fit_lines(fit: FitFile) -> list[str]:
    """Return what a fit reached and spent, in sentences."""
    devices = f"{fit.devices:,} device{'s' * (fit.devices != 1)}"
    lines = [
        f"{fit.rows:,} rows of {devices}, {fit.features} features, {fit.test_rows:,} rows held out."
    ]
    if fit.accuracy is not None:
        calibrated = f"calibration error {fit.ece:.3f} (floor {fit.ece_floor:.3f})"
        lines.append(f"accuracy {fit.accuracy:.3f}, {calibrated}, nll {fit.nll:.3f}")
    if fit.rmse is not None:
        lines.append(
            f"rmse {fit.rmse:.4g}, R² {fit.r2:.3f}; 90 % intervals cover {fit.coverage_90:.1%}"
        )
    parts = ", ".join(
        f"{part} {value:.3g}" for part, value in fit.epsilon_by_part.items()
    )
    hidden = f"unit = {fit.privacy.unit}, adjacency = {fit.privacy.adjacency}"
    promised = f"{fit.privacy.promised:g} at δ = {fit.privacy.delta:g}"
    lines.append(
        f"You used ε = {fit.epsilon_spent:.3g} of {promised} ({hidden}): {parts}."
    )
    now = fit.worth.get("as it is", {})
    for name, one in fit.worth.items():
        if one is not now:
            scores = [
                key for key in ("accuracy", "nll", "ece", "relative_mse") if key in one
            ]
            better = ", ".join(
                f"{key} {now[key]:.3g} → {one[key]:.3g}" for key in scores
            )
            lines.append(
                f"On a stand-in, which may be easier or harder than the table, {name} would give {better}."
            )
    return lines + [f"Not covered by ε: {item.text}" for item in fit.not_covered]


def numbers_table(title: str, rows: Sequence[Mapping[str, object]]) -> Table:
    """Return rows of numbers by name as a table; columns without any are left out."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    found = Table(*(Column(name, justify="right") for name in names), title=title)
    for row in rows:
        found.add_row(*(_number(row[name], 4) for name in names))
    return found
