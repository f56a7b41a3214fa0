"""What people read on a terminal: a plan in a few lines, the claims as a table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from wflmc.evaluation.causes import SHOWN
from wflmc.privacy import HIDDEN
from wflmc.studies import Claim


def _number(value: object, digits: int = 5) -> str:
    if value is None:
        return "–"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def _span(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return _number(low) if low == high else f"{_number(low)} … {_number(high)}"


def _steps(sizes: Sequence[float]) -> str:
    low, high, last = min(sizes), max(sizes), sizes[-1]
    return f"{last:.4g}" if low == high else f"{low:.4g} to {high:.4g}, {last:.4g} at the end"


def plan_table(document: dict[str, Any]) -> Table:
    """A plan's JSON document in words."""
    constants, privacy = document["constants"], document["privacy"]
    burn_in = constants["burn_in"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    if "solve_for" in document:
        asked = document["solve_for"]
        table.add_row("answer", asked["answer"] + ("" if asked["reachable"] else ", shown below"))
    step = f"η = {_steps(document['step_size'])}"
    if "friction" in constants:
        step = f"kinetic, h = {constants['step_size']:.4g}, friction = {constants['friction']:.4g}"
    table.add_row(
        "setting",
        f"{constants['devices']} devices, {constants['dim']} parameters, {burn_in} + {constants['samples']} rounds, "
        f"{step}, μ = {constants['mu']:.4g}, L = {constants['L']:.4g}",
    )
    exact_law = document["scenario"].get("policy", {}).get("objective") == "exact"
    otherwise = "chosen round by round" if exact_law else "changes with the channel"
    table.add_row("regime", document["regime"] or otherwise)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in document["regime_share"].items() if share)
    table.add_row("rounds at each limit", shares)
    if document["whitening"] is not None:
        paid = document["whitening"]
        cost = "" if paid["share_of_budget"] is None else f" for {paid['share_of_budget']:.2g} of the budget"
        table.add_row(
            "whitening",
            f"released in {paid['rounds']} rounds before{cost}; noise hides {paid['hidden']:.0%} of directions",
        )
    table.add_row("gain α", _span(document["gain"]))
    table.add_row("devices sending", _span(document["active_devices"]))
    gap = document["gap"]
    limit = document["max_round_noise"]
    given = "" if limit is None else f" with max_round_noise = {limit:g}"
    proof = "" if gap is None else f", within {gap:.1g} of the best possible{given}"
    start = f"(start {constants['initial_w2_sq']:.4g})"
    value = None if document["objective"] is None else f"{document['objective']:.4g} after burn-in {start}{proof}"
    name = "W2² by the law" if exact_law else "bound on W2²"
    if document["coordinates"] == "whitened" and not exact_law:
        start = f"{start[:-1]}; both in whitened coordinates)"
        value = None if document["objective"] is None else f"{document['objective']:.4g} after burn-in {start}{proof}"
    table.add_row(name, value or f"none is known for kinetic dynamics {start}")
    exact = document["exact_w2_sq"]
    if exact is not None:
        kept = exact[burn_in:]
        worst = "diverges" if None in kept else f"{max(kept):.4g} worst after burn-in"
        table.add_row("W2² if unclipped", f"{worst} (exact law of the chain)")
        ess = document["exact_ess_min"]
        table.add_row("ESS if unclipped", f"{ess:.3g} of {len(kept)} samples for the worst parameter (one chain)")
    if privacy["spent_max"] is None:
        table.add_row("privacy", "none: this scheme does not clip")
    else:
        for name, value in _privacy(privacy):
            table.add_row(name, value)
    for line in diagnosis_lines(document["diagnosis"]):
        table.add_row("diagnosis", line.removeprefix("diagnosis").strip())
    for warning in document["warnings"]:
        table.add_row("[yellow]warning[/yellow]", warning)
    return table


def diagnosis_lines(causes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The worst causes with the change that helps against each, in the columns of a summary."""
    if not causes:
        return [f"{'diagnosis':<25}nothing stands out"]
    return [f"{'diagnosis':<25}{number}. {cause['text']}" for number, cause in enumerate(causes[:SHOWN], 1)]


WORTH_SAYING = 0.001
"""Rounding of sums that a table shows."""


def _privacy(privacy: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What the worst device spends, whose change that hides, and ε by every accountant."""
    before = privacy["spent_before"] or [0.0] * len(privacy["spent"])
    spent = [now + earlier for now, earlier in zip(privacy["spent"], before, strict=True)]
    budgets = privacy["budgets"]
    worst = max(range(len(spent)), key=lambda k: spent[k] / budgets[k] if budgets[k] else spent[k])
    allowed = "no budget" if budgets[worst] is None else f"budget {budgets[worst]:.5g}"
    each = privacy["epsilon_each"]
    epsilon = "" if each is None else f", ε = {each[worst]:.5g} ({privacy['adjacency']})"
    unlike = each is not None and max(each) > min(each) * (1 + 1e-6) and len(set(budgets)) > 1
    whose = f", device {worst}; others from ε = {min(each):.4g} to {max(each):.4g}" if unlike else ""
    yield "privacy hides", f"{HIDDEN[privacy['unit'], privacy['adjacency']]} ({privacy['adjacency']})"
    yield (
        "privacy (worst device)",
        f"loss {spent[worst]:.5g} ({allowed}){epsilon}, {privacy['accountant']} accountant{whose}",
    )
    if privacy["epsilon_by"] is not None:
        each = (f"{name} {value:.5g}" for name, value in privacy["epsilon_by"].items() if value is not None)
        yield "ε by each accountant", f"{', '.join(each)} ({privacy['adjacency']})"
    if privacy["rounding"] >= WORTH_SAYING:
        yield (
            "clipping",
            f"{privacy['rounding']:.2%} below clip and example_clip: float32 sums keep to the loss",
        )


def answer_sentence(asked: dict[str, Any], adjacency: str) -> str:
    """The answer to an inverse question, from `solve_for` of a plan's JSON document, and the promise's adjacency."""
    what = "bound on W2²" if asked["metric"] == "bound" else "exact W2²"
    whose = f" (adjacency: {adjacency})" if asked["key"] == "privacy.epsilon" else ""
    if asked["reachable"]:
        # Rounded up, so that the printed value reaches the target too.
        value = asked["value"]
        shown = str(value) if isinstance(value, int) else f"{value + 5e-6 * abs(value):.6g}"
        return f"{asked['key']} = {shown} is the smallest found with {what} ≤ {asked['target']:g}{whose}"
    nothing = f"no {asked['key']} was found that reaches {what} ≤ {asked['target']:g}"
    return f"{nothing}; the best is {asked['reached']:.4g} at {asked['best_at']:g}{whose}"


def audit_table(document: dict[str, Any]) -> Table:
    """An audit's JSON document: every attack, what it proves, and what the plan claims."""
    table = Table(title=f"Attacks, and what they prove of ε ({document['claimed']['adjacency']})")
    for name in ("attack", "device", "rounds", "trials", "wrong + / −", "ε ≥", "by counting alone", "claimed"):
        table.add_column(name, justify="left" if name == "attack" else "right", overflow="fold")
    for test in document["tests"]:
        cells = (
            test["name"],
            str(test["device"]),
            str(test["rounds"]),
            f"{test['trials']:,}",
            f"{test['false_negatives']:,} / {test['false_positives']:,}",
            _number(test["epsilon_gaussian"], 4),
            _number(test["epsilon_counting"], 4),
            _number(test["epsilon_claimed"], 4),
        )
        table.add_row(*cells, style="bold red" if test["flagged"] else None)
    return table


def capacity_tables(document: dict[str, Any]) -> list[Table]:
    """The costs of a capacity document, and its necessary conditions, with what helps where one does not hold."""
    size = document["size"]
    words = ", ".join(f"{size[name]:,} {name}" for name in ("devices", "parameters", "rounds"))
    costs = Table(words, "one round", "all rounds", box=None)
    for name, cost in document["costs"].items():
        costs.add_row(name.replace("_", " "), *(_amount(cost[part], cost["unit"]) for part in ("round", "in_all")))
    conditions = Table("necessary condition", "needs", "has", "needs/has", "what helps", box=None)
    for each in document["conditions"]:
        fails = each["ratio"] > 1 + 1e-9
        has = "no limit" if each["has"] is None else _amount(each["has"], each["unit"])
        row = (_amount(each["needs"], each["unit"]), has, f"{each['ratio']:.4g}", each["helps"] if fails else "")
        conditions.add_row(each["name"], *row, style="bold red" if fails else None)
    return [costs, conditions]


def _amount(value: float | None, unit: str) -> str:
    """A number with its unit: seconds in those that people use, bytes and joules with a prefix."""
    if not value or unit not in ("s", "B", "J"):
        return "none" if value is None else f"{value:.4g} {unit}" if unit else f"{value:,.6g}"
    for name, length in (("years", 365.25 * 86400), ("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if unit == "s" and value >= 2 * length:
            return f"{value / length:.4g} {name}"
    power = min(8, max(-5, math.floor(math.log10(value) / 3)))
    return f"{value / 1000.0**power:.4g} {'fpnµm kMGTPEZY'[power + 5].strip()}{unit}"


def verdict(claim: Claim) -> str:
    """holds, differs, or the paper contradicts itself."""
    if claim.holds:
        return "holds"
    return "the paper contradicts itself" if claim.contradiction else "differs"


def claims_table(claims: Sequence[Claim]) -> Table:
    """Every stated outcome with the paper's number and ours."""
    table = Table(title="The paper's stated outcomes")
    for name in ("figure", "statement", "paper", "ours", "verdict"):
        table.add_column(name, overflow="fold")
    for claim in claims:
        said = verdict(claim) + (f" ({claim.note})" if claim.note else "")
        table.add_row(claim.figure, claim.statement, _number(claim.paper), _number(claim.ours), said)
    return table
