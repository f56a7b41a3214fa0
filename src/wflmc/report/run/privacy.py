"""The privacy ledger: what every device has spent of its budget, and ε as it grew round by round."""

from __future__ import annotations

from typing import Any

import numpy as np

from wflmc.privacy import ACCOUNTANTS, HIDDEN, Ledger, Privacy, epsilon_spent
from wflmc.report.parts import (
    COLORS,
    LEGEND_BELOW,
    Html,
    axis,
    figure,
    grid,
    join,
    missing,
    number,
    paragraph,
    picked,
    table,
    value,
)
from wflmc.runs.documents import Federation, PlanFile, Spending
from wflmc.runs.folder import Run
from wflmc.scenario.build import build_privacy

MANY = 40
"""Devices that are drawn: of more, those that spend most."""


def privacy_section(run: Run) -> Html:
    """Bars per device, ε over rounds, ε by accountant."""
    if run.plan is None:
        return missing("plan.json is missing: what was spent is not known.")
    spending = run.plan.privacy
    if spending.spent is None:
        return missing("This scheme does not clip gradients: no finite ε would be true, and no ledger is kept.")
    note = paragraph(
        "What is hidden: {hidden} (adjacency: {adjacency}). Each round that a device sends in costs it a loss, and "
        "losses add up to ε. All numbers are of <b>one chain</b>: chains repeat the experiment for evaluation, and "
        "publishing several of them from the same real devices would add their losses up.",
        hidden=HIDDEN[spending.unit, spending.adjacency],
        adjacency=spending.adjacency,
    )
    over = _over_rounds(run)
    pictures = [_bars(spending), *([] if over is None else [over])]
    return join([note, _accountants(run, spending), grid(pictures), _ledger_words(run), _not_covered(run.plan)])


def _not_covered(plan: PlanFile) -> Html:
    """What ε does not cover, and what of it a published file would rest on."""
    if not plan.not_covered:
        return Html("")
    rests = {True: "yes: wflmc publish refuses it unless told to accept it", False: "no: only this folder shows it"}
    rows = [(item.name, item.text, rests[item.published]) for item in plan.not_covered]
    return join([Html("<h3>What ε does not cover</h3>"), table(rows, ("what", "why", "in a published file"))])


def _accountants(run: Run, spending: Spending) -> Html:
    if spending.epsilon_by is None:
        return missing("Nothing is promised, so there is no δ to state an ε at; losses are shown as they are.")
    said = {"exact": "exact composition of the rounds", "paper": "the paper's sufficient condition, a larger ε"}
    rows = [
        (name, value(f"plan.privacy.epsilon_by.{name}", found, 5), said.get(name, "by the package dp-accounting"))
        for name, found in spending.epsilon_by.items()
    ]
    delta = None if run.scenario is None else run.scenario.privacy.delta
    at = "" if not isinstance(delta, float) else f" at δ = {number(delta)}"
    return table(rows, ("accountant", f"ε{at} ({spending.adjacency})", "what it is"))


def _bars(spending: Spending) -> Html:
    total = spending.total or []
    shares = spending.shares
    rank = np.argsort(-np.asarray(shares if shares is not None else total), kind="stable").tolist()
    devices = rank[:MANY] if len(rank) > MANY else list(range(len(rank)))
    each = spending.epsilon_each
    said = [
        f"device {k}: loss {total[k]:.4g}"
        + ("" if shares is None else f", {100 * shares[k]:.3g} % of its budget")
        + ("" if each is None else f", ε = {number(each[k], 4)} ({spending.adjacency})")
        for k in devices
    ]
    names = [str(k) for k in devices]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "x": names,
            "y": [total[k] for k in devices],
            "name": "spent",
            "marker": {"color": COLORS[0]},
            "hovertext": said,
            "hoverinfo": "text",
        }
    ]
    if shares is not None:
        traces.append(
            {
                "x": names,
                "y": [spending.budgets[k] for k in devices],
                "name": "budget",
                "mode": "markers",
                "marker": {"symbol": "line-ew-open", "size": 14, "color": "#1a1a1a", "line": {"width": 2}},
                "hoverinfo": "skip",
            }
        )
    layout = {
        "height": 400,
        "margin": {"l": 65, "r": 15, "t": 30, "b": 50},
        "xaxis": axis("device", type="category"),
        "yaxis": axis("privacy loss", rangemode="tozero"),
        "legend": LEGEND_BELOW,
    }
    which = (
        f"The {MANY} of {len(rank):,} devices that spend most, worst first." if len(rank) > MANY else "Every device."
    )
    before = " Losses of earlier runs are with it." if spending.spent_before is not None else ""
    return figure("spent", traces, layout, f"{which} Bars: what it has spent; lines: what it may spend.{before}")


def _over_rounds(run: Run) -> Html | None:
    """ε of the device nearest to its budget, round by round; None where there is no δ to state it at."""
    if run.scenario is None or run.scenario.privacy.delta is None:
        return None
    losses, where = _losses(run)
    if losses is None:
        return None
    promise = build_privacy(run.scenario)
    spent = np.cumsum(losses, axis=0)
    devices = spent.shape[1]
    worst = int(np.argmax(spent[-1] / promise.budget(devices)))
    at = picked(len(spent), 300)
    traces: list[dict[str, Any]] = [
        {
            "x": [i + 1 for i in at],
            "y": _epsilons(promise, spent[at, worst], worst, devices, name),
            "name": f"{name} accountant",
            "mode": "lines",
            "line": {"color": color, "width": 2},
        }
        for name, color in zip(ACCOUNTANTS, COLORS, strict=False)
    ]
    promised = float(np.broadcast_to(np.asarray(promise.epsilon, dtype=float), (devices,))[worst])
    line = {"color": "#1a1a1a", "dash": "dash", "width": 1.5}
    ends = [1, len(spent)]
    traces.append({"x": ends, "y": [promised] * 2, "name": "promised", "mode": "lines", "line": line})
    layout = {
        "height": 400,
        "margin": {"l": 65, "r": 15, "t": 30, "b": 50},
        "xaxis": axis("round"),
        "yaxis": axis(f"ε so far ({promise.adjacency})", rangemode="tozero"),
        "legend": LEGEND_BELOW,
    }
    caption = f"ε of device {worst}, the one nearest to its budget, after every round, {where}."
    return figure("epsilon", traces, layout, caption)


def _losses(run: Run) -> tuple[Any, str]:
    """Losses[round, device] and where they are from: the ledger, else the plan."""
    if run.ledger is not None and run.ledger.entries:
        return np.stack(list(run.ledger.entries.values())), "as the ledger has it"
    if run.rebuilt is not None:
        plan = run.rebuilt.plan
        losses = plan.loss.copy()
        losses[0] += plan.ledger
        return losses, "as planned"
    return None, ""


def _epsilons(promise: Privacy, losses: Any, device: int, devices: int, accountant: str) -> Any:
    delta = float(np.broadcast_to(np.asarray(promise.delta, dtype=float), (devices,))[device])
    return epsilon_spent(losses, delta, accountant)


def _ledger_words(run: Run) -> Html:
    summary = run.summary
    if run.ledger is None:
        return missing("There is no ledger in the folder: numbers are those of the plan.")
    rounds = len(run.ledger.entries)
    federation = None if summary is None else summary.federation
    said = paragraph(
        "The ledger has {rounds} round{s}, each written before {when}. Its hash chain is whole.{absent}",
        rounds=number(rounds),
        when="it was sent" if federation is None else "its sum was used",
        absent=" Table and bars are of the plan, in which nobody is absent." if _absent(federation) else "",
        s="s" * (rounds > 1),
    )
    if summary is None or summary.ledger is None:
        return said
    return join([said, *_more(summary.ledger.rounds, run.ledger)])


def _absent(federation: Federation | None) -> bool:
    return federation is not None and federation.absences > 0


def _more(then: int, ledger: Ledger) -> list[Html]:
    later = len(ledger.entries) - then
    return [missing("{later} of them were written after this run had ended.", later=later)] if later > 0 else []
