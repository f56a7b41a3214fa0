"""`wflmc predict`: predictions of a fitted model for the rows of a table."""

from pathlib import Path
from typing import Annotated

import typer

from wflmc.cli.shared import AsJson, needs_tables, option, print_result, warn
from wflmc.support.errors import InputError


def command(
    folder: Annotated[
        str,
        typer.Argument(metavar="DIR", help="Folder of a fit (--out of `wflmc fit`)."),
    ],
    table: Annotated[
        str,
        typer.Argument(
            metavar="TABLE", help="Rows to predict, with the columns of the fit."
        ),
    ],
    out: Annotated[str, option("FILE", "File for predictions (.csv).")],
    as_json: AsJson = False,
) -> None:
    """Predict the rows of a table: class and probabilities, or mean and 90 % interval.

    However often a model predicts, it costs those it was fitted to no more privacy. The
    new rows are not hidden: a prediction tells about its row.

    Example: wflmc predict model new_patients.csv --out predictions.csv
    """
    target = Path(out).expanduser()
    if target.suffix != ".csv" or not target.parent.is_dir():
        requirement = "a file that ends in .csv, in a folder that exists"
        raise InputError("--out", out, requirement)
    if target.exists():
        raise InputError("--out", out, "a new file: it exists already")
    with needs_tables():
        from wflmc.apps.tables.folder import predict_table

        predictions, notes = predict_table(Path(folder).expanduser(), table, target)
    warn(notes)
    rows = len(predictions)
    columns = list(predictions.columns)
    document = {"file": str(target), "rows": rows, "columns": columns}
    names = ", ".join(map(str, columns))
    line = f"{rows:,} predictions written to {target}: {names}"
    print_result(document, [line], as_json)
