"""`wflmc fit`: from a table to a private model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from wflmc.cli import shared
from wflmc.cli.shared import AsJson, flag, option
from wflmc.errors import InputError

Table = Annotated[str, typer.Argument(metavar="TABLE", help="A .csv, .tsv, .parquet or .npz file.")]
Target = Annotated[str, option("COL", "Column to predict.")]
Epsilon = Annotated[float, option("E", "The promise: all that is done costs no more than this.")]
Delta = Annotated[float, option("D", "The promise's δ; far below one over the number of rows.")]
Device = Annotated[str | None, option("COL", "Column that says who holds a row, such as a hospital.")]
Devices = Annotated[int | None, option("K", "Or: spread rows over K devices at random.")]
Task = Annotated[str | None, option("KIND", "classification or regression; by the target's values by default.")]
Unit = Annotated[str, option("UNIT", "What is hidden: record (a row) or device (all rows of one).")]
Adjacency = Annotated[str, option("KIND", "replace or add-remove.")]
LinkFile = Annotated[str | None, option("FILE", "Scenario (TOML) whose link is used; an ideal one by default.")]
SchemaFile = Annotated[str | None, option("FILE", "JSON: public ranges, categories and classes.", "--schema")]
Id = Annotated[str | None, option("COL", "Column with a row's own name; no feature.", "--id")]
Missing = Annotated[
    str | None, option("HOW", "Missing values: refuse (default), or indicator (a constant and a column).")
]
Test = Annotated[float, option("SHARE", "Share of the rows that is held out to score predictions.")]
Seed = Annotated[str, option("N", "secret (the operating system's entropy), or a number: a simulation.")]
Select = Annotated[bool, flag("--select", "Choose among the best settings by private selection, paid from ε.")]


def make_request(options: dict[str, Any]) -> Any:
    """Return the request of a command's options, files read."""
    import json

    from wflmc.estimators.folder import Request
    from wflmc.scenario import build_link, load_scenario

    link, schema, seed = (options.pop(name) for name in ("link", "schema", "seed"))
    if seed != "secret" and not (seed.isdigit() and int(seed) < 2**32):
        raise InputError("--seed", seed, "secret, or a whole number of at least 0 and below 2³²")
    declared = None
    if schema is not None:
        try:
            declared = json.loads(Path(schema).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise InputError("--schema", schema, "a JSON file that can be read") from None
    made = None if link is None else build_link(load_scenario(link))
    return Request(**options, link=made, declared=declared, seed=None if seed == "secret" else int(seed))


def command(
    table: Table,
    target: Target,
    epsilon: Epsilon,
    delta: Delta,
    out: Annotated[str, option("DIR", "New folder for model.npz, schema.json, fit.json and ledger.jsonl.")],
    device: Device = None,
    devices: Devices = None,
    task: Task = None,
    unit: Unit = "record",
    adjacency: Adjacency = "replace",
    link: LinkFile = None,
    schema: SchemaFile = None,
    id: Id = None,
    missing: Missing = None,
    test: Test = 0.25,
    seed: Seed = "secret",
    private: Select = False,
    as_json: AsJson = False,
) -> None:
    """Fit a private model to a table: scaling, settings and sampling, all paid from one ε.

    Devices are simulated in this process. Predictions may be shown; fit.json has scores that ε does not cover.

    Example: wflmc fit patients.csv --target diagnosis --device hospital --epsilon 3 --delta 1e-5 --out model
    """
    options = {name: value for name, value in locals().items() if name not in ("out", "as_json")}
    with shared.needs_tables(), shared.renamed_keys(RENAMED):
        from wflmc.estimators.folder import fit_table
        from wflmc.progress import progress_bar
        from wflmc.storage import output_folder

        shared.cache_compilations()
        request = make_request(options)
        with output_folder(out, "--out") as folder, progress_bar("Choosing settings on a stand-in", 100) as advance:
            try:
                document = fit_table(request, folder, lambda done, total: advance(100 * done / total))
            except KeyboardInterrupt:
                if (folder / "ledger.jsonl").exists():
                    shared.note(f"{folder / 'ledger.jsonl'} has what was spent so far; fit again into a new folder.")
                raise
    shared.warn(document.warnings)
    if as_json:
        shared.print_json(document.model_dump())
        return
    from wflmc.report.text import fit_lines

    print("\n".join(fit_lines(document)))
    print(f"Written to {out}: wflmc predict {out} TABLE --out predictions.csv; wflmc report {out}")


RENAMED = {name: f"--{name}" for name in ("target", "epsilon", "delta", "device", "devices", "task", "unit", "missing")}
RENAMED |= {"adjacency": "--adjacency", "id": "--id", "table": "TABLE", "ranges": "--schema: range"}
"""Options by the argument that they become."""
