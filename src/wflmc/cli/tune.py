"""`wflmc tune`: which settings a fit would choose, what each is expected to reach, and what choosing costs."""

from typing import TYPE_CHECKING

from wflmc.cli import shared
from wflmc.cli.fit import about_a_table
from wflmc.cli.shared import AsJson

if TYPE_CHECKING:
    from wflmc.apps.tables.folder import FitRequest

FREE = "Candidates were run on public stand-ins of the same size; choosing among them costs no privacy."
PAID = "Private selection pays for a geometric number of runs on the data: each may spend a loss of {:.3g} of {:.3g}."


@about_a_table
def command(request: "FitRequest", as_json: AsJson = False) -> None:
    """Show the settings that `wflmc fit` would choose from, and what more ε, rows or rounds would be worth.

    Of the table only its size, its columns and its classes are looked at.

    Example: wflmc tune patients.csv --target diagnosis --epsilon 3 --delta 1e-5
    """
    from wflmc.apps.report.text import numbers_table
    from wflmc.apps.tables import selection
    from wflmc.apps.tables.folder import facts_of
    from wflmc.apps.tables.settings import choose, worth
    from wflmc.support.progress import progress_bar

    facts = facts_of(request)
    with progress_bar("Running candidates on a stand-in", 100) as advance:
        found = choose(facts, lambda done, total: advance(100 * done / total))
    rows = [one.plain for one in found]
    gains = {name: one.scores for name, one in worth(facts, found[0].settings).items()}
    cost = FREE
    if request.private:
        cost = PAID.format(
            selection.loss_of_repeat(facts.promise, facts.spent),
            float(facts.promise.budget(1)[0]),
        )
    kind = {
        name: getattr(request, name)
        for name in ("epsilon", "delta", "unit", "adjacency")
    }
    if as_json:
        public = {
            name: getattr(facts, name)
            for name in ("rows", "features", "classes", "devices")
        }
        shared.print_json(
            {
                "facts": public,
                "privacy": kind,
                "candidates": rows,
                "worth": gains,
                "cost": cost,
            }
        )
        return
    whitened = next((row for row in rows if row["whiten"]), None)
    also = [] if whitened is None or whitened in rows[:12] else [whitened]
    title = f"The best 12 of {len(rows)} candidates on public stand-ins{', and the best with whitening' * bool(also)}"
    shared.show(numbers_table(title, rows[:12] + also))
    better = [{"": name, **one} for name, one in gains.items()]
    shared.show(numbers_table("What more of something would reach there", better))
    print(
        "(ε, δ) = ({epsilon:g}, {delta:g}), unit = {unit}, adjacency = {adjacency}. ".format(
            **kind
        )
        + cost
    )
