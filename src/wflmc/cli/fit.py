"""`wflmc fit`: from a table to a private model."""

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from wflmc.cli import shared
from wflmc.cli.shared import AsJson, flag, option
from wflmc.support.errors import InputError, renamed_keys

if TYPE_CHECKING:
    from wflmc.apps.tables.folder import FitRequest
    from wflmc.apps.tables.schema import Missing, Task

KIND = "classification or regression; by the target's values by default."
SELECT = "Choose among the best settings by private selection, paid from ε."
PUBLIC = "Table of public rows, with the target or without: it costs no privacy."
HOW = "Missing values: refuse (default), or indicator (a constant and a column)."


def make_request(
    table: Annotated[
        str,
        typer.Argument(metavar="TABLE", help="A .csv, .tsv, .parquet or .npz file."),
    ],
    target: Annotated[str, option("COL", "Column to predict.")],
    epsilon: Annotated[
        float, option("E", "The promise: all that is done costs no more than this.")
    ],
    delta: Annotated[
        float, option("D", "The promise's δ; far below one over the number of rows.")
    ],
    device: Annotated[
        str | None,
        option("COL", "Column that says who holds a row, such as a hospital."),
    ] = None,
    devices: Annotated[
        int | None, option("K", "Or: spread rows over K devices at random.")
    ] = None,
    task: Annotated[str | None, option("KIND", KIND)] = None,
    unit: Annotated[
        str,
        option("UNIT", "What is hidden: record (a row) or device (all rows of one)."),
    ] = "record",
    adjacency: Annotated[str, option("KIND", "replace or add-remove.")] = "replace",
    link: Annotated[
        str | None,
        option("FILE", "Scenario (TOML) whose link is used; an ideal one by default."),
    ] = None,
    schema: Annotated[
        str | None,
        option("FILE", "JSON: public ranges, categories and classes.", "--schema"),
    ] = None,
    id: Annotated[
        str | None, option("COL", "Column with a row's own name; no feature.", "--id")
    ] = None,
    missing: Annotated[str | None, option("HOW", HOW)] = None,
    test: Annotated[
        float,
        option("SHARE", "Share of the rows that is held out to score predictions."),
    ] = 0.25,
    private: Annotated[bool, flag("--select", SELECT)] = False,
    public: Annotated[str | None, option("FILE", PUBLIC, "--public")] = None,
) -> "FitRequest":
    """Return the request that the options of `fit` and `tune` have in common make.

    The scenario of --link and the declarations of --schema are read; the table is not.
    Each parameter is an option of these commands, with its help text.

    Raises:
        InputError: one of these files cannot be read.
    """
    from wflmc.apps.tables.folder import FitRequest
    from wflmc.apps.tables.schema import read_declarations
    from wflmc.scenario import build_link, load_scenario

    # Other texts than these types have are refused with the table.
    request = FitRequest(
        table=table,
        target=target,
        epsilon=epsilon,
        delta=delta,
        device=device,
        devices=devices,
        task=cast("Task | None", task),
        unit=unit,
        adjacency=adjacency,
        link=None,
        id=id,
        missing=cast("Missing | None", missing),
        test=test,
        private=private,
        public=public,
    )
    if schema is not None:
        request = request._replace(declared=read_declarations(schema, "--schema"))
    if link is not None:
        request = request._replace(link=build_link(load_scenario(link)))
    return request


def about_a_table(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options of `make_request` before its own ones.

    Errors name options, and missing packages are reported with the extra that brings
    them.

    Args:
        command: takes the request that these options make, and then its own options.

    Returns:
        The command as typer takes it, with a signature of all options.
    """
    common = inspect.signature(make_request).parameters
    _, *further = inspect.signature(command).parameters.values()

    @functools.wraps(command)
    def run(**options: Any) -> None:
        with shared.needs_tables(), renamed_keys(RENAMED):
            shared.cache_compilations()
            request = make_request(**{name: options.pop(name) for name in common})
            command(request, **options)

    parameters = [
        parameter.replace(kind=parameter.KEYWORD_ONLY)
        for parameter in (*common.values(), *further)
    ]
    run.__annotations__ = {
        parameter.name: parameter.annotation for parameter in parameters
    }
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


@about_a_table
def command(
    request: "FitRequest",
    out: Annotated[
        str,
        option(
            "DIR", "New folder for model.npz, schema.json, fit.json and ledger.jsonl."
        ),
    ],
    seed: Annotated[
        str,
        option(
            "N", "secret (the operating system's entropy), or a number: a simulation."
        ),
    ] = "secret",
    as_json: AsJson = False,
) -> None:
    """Fit a private model to a table: scaling, settings and sampling, all paid from
    one ε.

    Devices are simulated in this process. Predictions may be shown; fit.json has scores
    that ε does not cover.

    Example: wflmc fit patients.csv --target diagnosis --device hospital --epsilon 3
    --delta 1e-5 --out model
    """
    from wflmc.apps.report.text import fit_lines
    from wflmc.apps.tables.folder import fit_table
    from wflmc.support.progress import progress_bar
    from wflmc.support.storage import output_folder

    if seed != "secret" and not (seed.isdigit() and int(seed) < 2**32):
        raise InputError(
            "--seed", seed, "secret, or a whole number of at least 0 and below 2³²"
        )
    request = request._replace(seed=None if seed == "secret" else int(seed))
    with (
        output_folder(out, "--out") as folder,
        progress_bar("Choosing settings on a stand-in", 100) as advance,
    ):
        try:
            document = fit_table(
                request,
                folder,
                lambda completed, total: advance(100 * completed / total),
            )
        except KeyboardInterrupt:
            ledger = folder / "ledger.jsonl"
            if ledger.exists():
                shared.note(
                    f"{ledger} has what was spent so far; fit again into a new folder."
                )
            raise
    shared.warn(document.warnings)
    written = (
        f"Written to {out}: wflmc predict {out} TABLE --out predictions.csv; wflmc "
        f"report {out}"
    )
    shared.print_result(document.model_dump(), [*fit_lines(document), written], as_json)


RENAMED = {
    name: f"--{name}"
    for name in (
        "target",
        "epsilon",
        "delta",
        "device",
        "devices",
        "task",
        "unit",
        "missing",
        "public",
    )
}
RENAMED |= {
    "adjacency": "--adjacency",
    "id": "--id",
    "table": "TABLE",
    "ranges": "--schema: range",
}
"""Options by the argument that they become, by which errors name them."""
