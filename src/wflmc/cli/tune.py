"""`wflmc tune`: which settings a fit would choose, what each is expected to reach, and what choosing costs."""

from dataclasses import asdict
from typing import Any

from wflmc.cli import fit as of_fit
from wflmc.cli import shared
from wflmc.cli.shared import AsJson

FREE = "Candidates were run on public stand-ins of the same size; choosing among them costs no privacy."
PAID = "Private selection pays for a geometric number of runs on the data: each may spend a loss of {:.3g} of {:.3g}."


def command(
    table: of_fit.Table,
    target: of_fit.Target,
    epsilon: of_fit.Epsilon,
    delta: of_fit.Delta,
    device: of_fit.Device = None,
    devices: of_fit.Devices = None,
    task: of_fit.Task = None,
    unit: of_fit.Unit = "record",
    adjacency: of_fit.Adjacency = "replace",
    link: of_fit.LinkFile = None,
    schema: of_fit.SchemaFile = None,
    id: of_fit.Id = None,
    missing: of_fit.Missing = None,
    test: of_fit.Test = 0.25,
    private: of_fit.Select = False,
    as_json: AsJson = False,
) -> None:
    """Show the settings that `wflmc fit` would choose from, and what more ε, rows or rounds would be worth.

    Of the table only its size, its columns and its classes are looked at.

    Example: wflmc tune patients.csv --target diagnosis --epsilon 3 --delta 1e-5
    """
    options = {name: value for name, value in locals().items() if name != "as_json"} | {"seed": "0"}
    with shared.needs_tables(), shared.renamed_keys(of_fit.RENAMED):
        from wflmc.estimators import selection
        from wflmc.estimators.folder import facts_of
        from wflmc.estimators.settings import choose, worth
        from wflmc.progress import progress_bar

        shared.cache_compilations()
        facts = facts_of(of_fit.make_request(options))
        with progress_bar("Running candidates on a stand-in", 100) as advance:
            found = choose(facts, lambda done, total: advance(100 * done / total))
        more = worth(facts, found[0].settings)
        budget = float(facts.promise.budget(1)[0])
        cost = FREE if not private else PAID.format(selection.loss_of_repeat(facts.promise, facts.spent), budget)
    rows: list[dict[str, Any]] = [{**asdict(one.settings), **one.scores} for one in found]
    gains = {name: one.scores for name, one in more.items()}
    if as_json:
        public = {name: getattr(facts, name) for name in ("rows", "features", "classes", "devices")}
        kind = {"epsilon": epsilon, "delta": delta, "unit": unit, "adjacency": adjacency}
        shared.print_json({"facts": public, "privacy": kind, "candidates": rows, "worth": gains, "cost": cost})
        return
    from wflmc.report.text import numbers_table

    whitened = next((row for row in rows if row["whiten"]), None)
    also = [] if whitened is None or whitened in rows[:12] else [whitened]
    title = f"The best 12 of {len(rows)} candidates on public stand-ins{', and the best with whitening' * bool(also)}"
    shared.show(numbers_table(title, rows[:12] + also))
    shared.show(
        numbers_table("What more of something would reach there", [{"": name, **one} for name, one in gains.items()])
    )
    print(f"(ε, δ) = ({epsilon:g}, {delta:g}), unit = {unit}, adjacency = {adjacency}. {cost}")
