"""Given the kinds of its columns, no row of a table changes how another row is read.

Tables and neighbours that differ in one row are written as people write them, for every reader: libraries on the way
infer types from all rows, so that one cell may change how all others are stored. The features and the outcomes of all
other rows have to be the same to the last bit, or the table has to be refused.
"""

import csv
import decimal
from collections import Counter

import numpy as np
import pytest

from tests.conftest import FULL
from wflmc import InputError
from wflmc.apps.tables.description import make_schema
from wflmc.apps.tables.encoding import encode, outcomes
from wflmc.apps.tables.reading import as_frame
from wflmc.posterior.inputs import as_classes

from ..error_tools import raises_input_error

pandas = pytest.importorskip("pandas", reason="pandas is not installed")

PAIRS = 3000 if FULL else 60
"""Neighbours that each reader is tried with."""

ORDINARY = {
    "zip": ["01067", "04109", "10115", "99999"],
    "level": [1, 2, 3],
    "large": [2**53 + 1, 2**53 + 2, 12345678901234567],
    "flag": [True, False],
    "word": ["true", "false", "TRUE", "FALSE"],
    "code": ["1.0", "2.0", "1e3", "+1", "-1"],
    "size": [0.1, 1 / 3, 2.5, 1e-300, -7.0],
    "count": [0, 1, 2, 2**40],
    "typed": ["0.5", "1e3", "+2", "17", "12345678901234567"],
}
"""Cells that a column of each name usually has."""
CATEGORIES = {
    "zip": ["01067", "04109", "10115"],
    "level": [1, 2, 3],
    "large": [2**53 + 1, 2**53 + 2, 12345678901234567],
    "flag": [True, False],
    "word": ["true", "false"],
    "code": ["1.0", "2.0", "1e3", "+1", "-1"],
}
RANGES = {"size": [-10, 10], "count": [0, 100], "typed": [0, 100]}
STRANGE = [
    *(
        "A1010",
        "",
        " ",
        "NA",
        "None",
        "nan",
        "inf",
        "-inf",
        "1e999",
        "9" * 400,
        "0x10",
        "1_000",
        "１",
        "1,5",
        "yes",
    ),
    *(
        "felt 'dizzy' today",
        'said "no"',
        '"',
        "'",
        "a\nb",
        "a;b;c;d;e;f;g;h",
        "a\tb",
        "=cmd|' /C calc'!A0",
        "\ufeff",
    ),
    *(
        None,
        float("nan"),
        float("inf"),
        0.5,
        -0.0,
        1.0,
        2.0,
        1e3,
        1e17,
        2.0**53,
        3,
        -1,
        2**53 + 1,
        2**62,
        2**63,
        10**30,
    ),
    *(
        True,
        False,
        decimal.Decimal("1.0"),
        decimal.Decimal("0.10"),
        np.float32(0.1),
        np.int8(3),
        np.bool_(True),
    ),
]
"""Cells that the replaced row may have in any column."""


def schema_of(frame, classes):
    columns = {
        name: {"categories": names}
        for name, names in CATEGORIES.items()
        if name in frame
    }
    columns |= {name: {"range": ends} for name, ends in RANGES.items() if name in frame}
    declared = {"missing": "indicator", "classes": classes, "columns": columns}
    for column in columns.values():
        if "range" in column:
            column["indicator"] = True
    return make_schema(frame, target="y", declared=declared)


def as_csv(rows, names, folder):
    path = folder / "table.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(
            [["" if cell is None else cell for cell in row] for row in rows]
        )
    return path


def as_pandas(rows, names, folder):
    return pandas.DataFrame(rows, columns=names)


def as_nullable(rows, names, folder):
    """The types of pandas that hold missing values beside anything; its `convert_dtypes` makes integers of floats."""
    types = {int: "Int64", bool: "boolean", str: "string", float: "Float64"}
    columns = {}
    for name, cells in zip(names, zip(*rows, strict=True), strict=True):
        cell_types = {type(cell) for cell in cells if cell is not None}
        columns[name] = pandas.Series(
            list(cells),
            dtype=types.get(*cell_types, object) if len(cell_types) == 1 else object,
        )
    return pandas.DataFrame(columns)


def as_pandas_csv(rows, names, folder):
    as_pandas(rows, names, folder).to_csv(folder / "table.csv", index=False)
    return folder / "table.csv"


def as_parquet(rows, names, folder):
    as_pandas(rows, names, folder).to_parquet(folder / "table.parquet")
    return folder / "table.parquet"


def as_polars(rows, names, folder):
    polars = pytest.importorskip("polars", reason="polars is not installed")
    plain = [
        [cell.item() if isinstance(cell, np.generic) else cell for cell in row]
        for row in rows
    ]
    return polars.DataFrame(
        plain, schema=names, orient="row", strict=False, infer_schema_length=None
    )


def as_polars_parquet(rows, names, folder):
    as_polars(rows, names, folder).write_parquet(folder / "table.parquet")
    return folder / "table.parquet"


def as_npz(rows, names, folder):
    """Features of numbers and text alike make one array of text, which is refused."""
    features = [
        [cell for name, cell in zip(names, row, strict=True) if name != "y"]
        for row in rows
    ]
    np.savez(
        folder / "table.npz",
        X=np.array(features),
        y=np.array([row[names.index("y")] for row in rows]),
    )
    return folder / "table.npz"


def read(table, classes):
    """Return the features and the outcomes of a table, or None where it is refused."""
    try:
        frame = as_frame(table)
        frame = (
            frame.rename(columns={"x0": "size", "x1": "count", "x2": "level"})
            if "x0" in frame
            else frame
        )
        schema = schema_of(frame, classes)
        return encode(frame, schema)[0], outcomes(frame, schema)
    except InputError:
        return None


def written(write, rows, names, folder):
    """Return a table as a library writes it, or None where that library cannot."""
    try:
        return write(rows, names, folder)
    except ImportError as error:
        pytest.skip(f"{error.name} is not installed: pip install 'wflmc[test]'")
    except Exception:  # whatever a library says of cells that it cannot write; the counts below tell how often
        return None


WRITERS = [
    as_csv,
    as_pandas_csv,
    as_pandas,
    as_nullable,
    as_parquet,
    as_polars,
    as_polars_parquet,
    as_npz,
]
LABELS = {
    "text": (["no", "yes"], ["no", "yes"]),
    "whole": ([0, 1], [0, 1]),
    "bool": ([False, True], [True, False]),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast:RuntimeWarning")
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_no_row_changes_how_another_is_read(write, tmp_path):
    generator = np.random.default_rng(20361118)
    tried = Counter()
    for _ in range(PAIRS):
        everything = (
            list(ORDINARY) if write is not as_npz else ["size", "count", "level"]
        )
        classes, labels = LABELS[generator.choice(list(LABELS))]
        rows = [
            [
                *(
                    ORDINARY[name][generator.integers(len(ORDINARY[name]))]
                    for name in everything
                ),
                label,
            ]
            for label in generator.permutation(labels * 2).tolist()
        ]
        replaced = int(generator.integers(len(rows)))
        neighbour = [list(row) for row in rows]
        for column in generator.permutation(len(everything))[
            : generator.integers(1, 4)
        ]:
            neighbour[replaced][column] = STRANGE[generator.integers(len(STRANGE))]
        if generator.random() < 0.2:
            neighbour[replaced][-1] = STRANGE[generator.integers(len(STRANGE))]
        names = [*everything, "y"]
        first = written(write, rows, names, tmp_path)
        before = None if first is None else read(first, classes)
        second = written(write, neighbour, names, tmp_path)
        after = None if second is None else read(second, classes)
        if before is None or after is None:
            tried["refused"] += 1
            continue
        tried["compared"] += 1
        others = np.arange(len(rows)) != replaced
        for part_before, part_after in zip(before, after, strict=True):
            assert part_before[others].tobytes() == part_after[others].tobytes(), (
                rows,
                neighbour,
            )
    assert tried["compared"] >= PAIRS / 20, tried
    print(write.__name__, dict(tried))


ZIPS = ["01067", "04109", "10115", "01067"]


@pytest.mark.parametrize(
    ("cells", "categories", "replacement"),
    [
        (ZIPS, ["01067", "04109", "10115"], "A1010"),
        (["true", "false", "true", "false"], ["true", "false"], "maybe"),
        (["TRUE", "FALSE", "TRUE", "FALSE"], ["TRUE", "FALSE"], "maybe"),
        (["1.0", "2.0", "1.0", "2.0"], ["1.0", "2.0"], "x"),
        (["1e3", "2e3", "1e3", "2e3"], ["1e3", "2e3"], "x"),
        (["+1", "-1", "+1", "-1"], ["+1", "-1"], "x"),
        (
            ["12345678901234567", "12345678901234569"] * 2,
            ["12345678901234567", "12345678901234569"],
            "",
        ),
    ],
)
def test_one_cell_of_a_csv_does_not_decide_how_the_others_are_encoded(
    tmp_path, cells, categories, replacement
):
    declared = {
        "missing": "indicator",
        "columns": {"x": {"categories": categories}},
        "classes": ["no", "yes"],
    }
    encoded = []
    for last in (cells[-1], replacement):
        table = tmp_path / "t.csv"
        table.write_text(
            "x,y\n" + "".join(f"{cell},yes\n" for cell in [*cells[:-1], last])
        )
        frame = as_frame(table)
        encoded.append(
            encode(frame, make_schema(frame, target="y", declared=declared))[0]
        )
    np.testing.assert_array_equal(encoded[0][:-1], encoded[1][:-1])
    np.testing.assert_array_equal(encoded[0][:-1].sum(1), 1)


def test_labels_that_lost_digits_are_refused():
    """A label that is no integer makes floats of all labels, in which 2⁵³ + 1 would become another class."""
    names = (2**53, 2**53 + 1)
    assert as_classes([2**53, 2**53 + 1, 2**53], names).tolist() == [0, 1, 0]
    with pytest.raises(InputError):
        as_classes(np.array([2**53 + 2, 2**53 + 1, 1.0]), names)


def test_floats_that_lost_digits_are_refused():
    """Integers beside a missing value are stored as floats by pandas, and lose digits above 2⁵³."""
    declared = {
        "missing": "indicator",
        "columns": {"x": {"categories": [2**53 + 1]}},
        "classes": ["no", "yes"],
    }
    exact = pandas.DataFrame({"x": [2**53 + 1, 7], "y": ["no", "yes"]})
    schema = make_schema(exact, target="y", declared=declared)
    assert encode(exact, schema)[0].ravel().tolist() == [1, 0]
    rounded = pandas.DataFrame({"x": [2**53 + 3, None], "y": ["no", "yes"]})
    assert rounded["x"].dtype == float
    with raises_input_error("column 'x'"):
        encode(rounded, schema)
