"""`wflmc tune`: settings for a fit, what they are expected to reach, and their cost."""

from typing import TYPE_CHECKING

from wflmc.cli import shared
from wflmc.cli.fit import about_a_table
from wflmc.cli.shared import AsJson

if TYPE_CHECKING:
    from wflmc.apps.tables.folder import FitRequest

FREE = (
    "Candidates were run on public stand-ins of the same size; choosing among them "
    "costs no privacy."
)
PAID = (
    "Private selection pays for a geometric number of runs on the data: each may spend "
    "a loss of {:.3g} of {:.3g}."
)
SHOWN_CANDIDATES = 12
"""Of the best, in the table for people; JSON has all."""


@about_a_table
def command(request: "FitRequest", as_json: AsJson = False) -> None:
    """Show the settings that `wflmc fit` would choose from, and what more ε, rows or
    rounds would be worth.

    Of the table only its size, its columns and its classes are looked at.

    Example: wflmc tune patients.csv --target diagnosis --epsilon 3 --delta 1e-5
    """
    from wflmc.apps.report.text import numbers_table
    from wflmc.apps.tables import selection
    from wflmc.apps.tables.choosing import choose, value_of_more
    from wflmc.apps.tables.folder import facts_of
    from wflmc.support.progress import progress_bar

    facts = facts_of(request)
    with progress_bar("Running candidates on a stand-in", 100) as advance:
        candidates = choose(
            facts, lambda completed, total: advance(100 * completed / total)
        )
    rows = [candidate.plain for candidate in candidates]
    improvements = value_of_more(facts, candidates[0].settings)
    gains = {name: outcome.scores for name, outcome in improvements.items()}
    cost = FREE
    if request.private:
        loss = selection.loss_of_repeat(facts.promise, facts.spent)
        budget = float(facts.promise.budget(1)[0])
        cost = PAID.format(loss, budget)
    if as_json:
        document = {
            "facts": {
                "rows": facts.rows,
                "features": facts.features,
                "classes": facts.classes,
                "devices": facts.devices,
            },
            "privacy": {
                "epsilon": request.epsilon,
                "delta": request.delta,
                "unit": request.unit,
                "adjacency": request.adjacency,
            },
            "candidates": rows,
            "worth": gains,
            "cost": cost,
        }
        shared.print_json(document)
        return
    title = f"The best {SHOWN_CANDIDATES} of {len(rows)} candidates on public stand-ins"
    shown = rows[:SHOWN_CANDIDATES]
    whitened = next((row for row in rows if row["whiten"]), None)
    if whitened is not None and whitened not in shown:
        title += ", and the best with whitening"
        shown = [*shown, whitened]
    shared.show(numbers_table(title, shown))
    gain_rows = [{"": name, **scores} for name, scores in gains.items()]
    shared.show(numbers_table("What more of something would reach there", gain_rows))
    promise = f"(ε, δ) = ({request.epsilon:g}, {request.delta:g})"
    print(f"{promise}, unit = {request.unit}, adjacency = {request.adjacency}. {cost}")
