"""Rows written to be read as something else, for every reader of private data.

ε hides a row only if that row changes nothing but itself. The attacker writes one line of a text file, or one row of a
typed table by whose cells a library stores the others in another way. Everything is declared. Either the table is
refused, or every other row keeps its features and its outcome to the last bit. What is not declared is listed.
"""

import datetime
import decimal
import re
from collections import Counter

import numpy as np
import pytest

from tests.conftest import FULL
from wflmc import InputError
from wflmc.apps.tables import choosing as chosen
from wflmc.apps.tables import folder
from wflmc.apps.tables.cells import NameIndex
from wflmc.apps.tables.description import make_schema
from wflmc.apps.tables.encoding import encode, outcomes
from wflmc.apps.tables.folder import FitRequest, fit_table
from wflmc.apps.tables.reading import as_frame
from wflmc.posterior.inputs import as_classes
from wflmc.scenario import load_data

pandas = pytest.importorskip("pandas", reason="pandas is not installed")

PAIRS = 1500 if FULL else 60
"""Neighbours that each reader of typed tables is tried with."""
LINE_PAIRS = 20000 if FULL else 500
"""Neighbours that each format of text files is tried with."""
CLASSES = ["no", "yes"]


def is_unchanged(before, after, replaced):
    """Return whether all rows but one are the same to the last bit; each part of a table is an array of rows."""
    if any(
        len(first) != len(second) for first, second in zip(before, after, strict=True)
    ):
        return False
    others = np.arange(len(before[0])) != replaced
    return all(
        first[others].tobytes() == second[others].tobytes()
        for first, second in zip(before, after, strict=True)
    )


def read_table(table, declared):
    """Return the features and the outcomes of a table, or None where it is refused."""
    try:
        frame = as_frame(table)
        schema = make_schema(
            frame,
            target="y",
            declared={"missing": "indicator", "classes": CLASSES, **declared},
        )
        assert schema.taken == []
        return encode(frame, schema)[0], outcomes(frame, schema)
    except InputError:
        return None


# One line of a text file

PIECES = [
    *(
        '"',
        '""',
        '"""',
        "'",
        ",",
        ";",
        "\t",
        "|",
        " ",
        "  ",
        "\r",
        "\x00",
        "\x0b",
        "\x0c",
        "\x1c",
        "\x85",
        "\u2028",
    ),
    *(
        "\ufeff",
        "\\",
        "\\n",
        "#",
        "1",
        "-0",
        "1e400",
        "5",
        '5"',
        "yes",
        "no",
        "a",
        "y",
        "NA",
        "\xa0",
        "\x1a",
        "０",
    ),
]
"""What hostile lines are made of; a line feed would make two lines of one."""
TABLE_LINES = [
    "1,a,yes",
    '2,5",no',
    '"3","a",no',
    '4,"""",yes',
    '5,""",a",no',
    "6,,yes",
    '7,"a",no',
    '8,5",yes',
]
TABLE_COLUMNS = {
    "x": {"range": [0, 9], "indicator": True},
    "size": {"categories": ["a", '5"', '"', '",a', "NA"]},
}
FORMATS = {
    "lf": (".csv", ",", "\n", "utf-8"),
    "crlf": (".csv", ",", "\r\n", "utf-8"),
    "cr": (".csv", ",", "\r", "utf-8"),
    "bom": (".csv", ",", "\n", "utf-8-sig"),
    "tabs": (".tsv", "\t", "\n", "utf-8"),
    "semicolons": (".csv", ";", "\r\n", "utf-8"),
    "spaces": (".txt", " ", "\n", "utf-8"),
}
"""Suffix, delimiter, end of lines and encoding of a file."""


def hostile_line(generator, line):
    """Return a line with one to four pieces put in, or in the place of a part of it."""
    for _ in range(generator.integers(1, 5)):
        start = int(generator.integers(len(line) + 1))
        length = int(generator.integers(3)) if generator.random() < 0.5 else 0
        line = (
            line[:start]
            + PIECES[generator.integers(len(PIECES))]
            + line[start + length :]
        )
    return line


@pytest.mark.parametrize("name", FORMATS)
def test_a_line_of_a_table_changes_no_other(tmp_path, name):
    suffix, delimiter, end, encoding = FORMATS[name]
    generator = np.random.default_rng(20361119)
    path = tmp_path / f"table{suffix}"
    lines = [line.replace(",", delimiter) for line in TABLE_LINES]
    columns = {**TABLE_COLUMNS}
    columns["size"] = {
        "categories": [
            name.replace(",", delimiter) for name in TABLE_COLUMNS["size"]["categories"]
        ]
    }
    if delimiter == " ":  # spaces in a row are one delimiter
        lines = [line.replace("  ", ' "" ') for line in lines]

    def write(rows):
        header = delimiter.join(["x", "size", "y"])
        path.write_bytes(end.join([header, *rows, ""]).encode(encoding))

    write(lines)
    before = read_table(path, {"columns": columns})
    assert before is not None
    assert len(before[0]) == len(lines)
    tried = Counter()
    for _ in range(LINE_PAIRS // len(FORMATS)):
        replaced = int(generator.integers(len(lines)))
        line = hostile_line(generator, lines[replaced])
        if not line.strip() or (end == "\r" and "\r" in line):
            continue  # no row, or two
        write([*lines[:replaced], line, *lines[replaced + 1 :]])
        after = read_table(path, {"columns": columns})
        tried["refused" if after is None else "compared"] += 1
        assert after is None or is_unchanged(before, after, replaced), (line, replaced)
    assert tried["compared"] >= tried.total() / 20, tried
    print(f"{name}:", dict(tried))


@pytest.mark.parametrize("header", [None, "a,b,y", "0,1,y"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_line_of_a_data_file_changes_no_other(tmp_path, header, end):
    """With text labels, of which one is called y as the target is, and with the number of examples declared."""
    generator = np.random.default_rng(20361120)
    path = tmp_path / "data.csv"
    lines = [
        "0.5,1.5,y",
        "2.5,3.5,no",
        '4.5,"5.5",yes',
        "6.5,7.5,y",
        '8.5,9.5,"no"',
        "1,0,y",
    ]

    def read(rows):
        path.write_bytes(
            end.join([*([] if header is None else [header]), *rows, ""]).encode()
        )
        try:
            data, _ = load_data(path, "text", examples=len(lines))
        except InputError:
            return None
        # Labels of another number than rows are refused by `build_posterior`.
        return (data.X, data.y.astype("U40")) if len(data.y) == len(lines) else None

    before = read(lines)
    assert before is not None
    tried = Counter()
    for attempt in range(LINE_PAIRS // 6):
        replaced = int(generator.integers(len(lines)))
        line = "" if attempt < 5 else hostile_line(generator, lines[replaced])
        after = read([*lines[:replaced], line, *lines[replaced + 1 :]])
        tried["refused" if after is None else "compared"] += 1
        assert after is None or is_unchanged(before, after, replaced), (line, replaced)
    assert tried["compared"] >= tried.total() / 20, tried
    print(f"{header}:", dict(tried))


# One row of a typed table


class TooLong(decimal.Decimal):
    """A decimal that, beside the digits of others, has more than the 38 digits of a column."""


DAY = datetime.date(2036, 11, 18)
ORDINARY = {
    "edge": [2**53 + 1, 7],
    "code": ["1", "01", "001", "A"],
    "sign": ["1.0", "+1", "-1"],
    "whole": [1, 2],
    "part": [1.0, 2.5],
    "flag": [True, False],
    "exact": [
        decimal.Decimal("0.10"),
        decimal.Decimal("2"),
        decimal.Decimal(2**53 + 1),
    ],
    "size": [-0.0, 0.1, 1 / 3, 5e-324],
    "price": [
        decimal.Decimal("-0.0"),
        decimal.Decimal("0.1"),
        decimal.Decimal("12345678901234567.125"),
    ],
    "narrow": [np.float32(0.1), np.float32(2**24), np.float16(0.1)],
}
CATEGORIES = {
    "edge": [2**53 + 1, 2**53, 7],
    "code": ["1", "01", "A"],
    "sign": ["1.0", "+1", "-1"],
    "whole": ["1.0", "+1", "2"],
    "part": [1, 2.5, "x"],
    "flag": ["true", "0", "x"],
    "exact": ["0.1", "2.0", 2**53 + 1, 2**53],
}
NUMERIC = ["size", "price", "narrow"]
REPLACEMENTS = [
    *(
        None,
        float("nan"),
        pandas.NA,
        pandas.NaT,
        np.datetime64("NaT"),
        decimal.Decimal("NaN"),
        decimal.Decimal("1.5"),
    ),
    *(
        TooLong("1e-30"),
        TooLong("1e30"),
        decimal.Decimal("sNaN"),
        decimal.Decimal("Infinity"),
    ),
    *(
        "x",
        "1",
        "1.0",
        "01",
        "True",
        "-0.0",
        "0.1",
        "a\x00",
        "\ud800",
        b"1",
        1,
        1.0,
        0.5,
        -0.0,
        True,
        2**53,
        -(2**63),
    ),
    *(
        2**64,
        10**30,
        10**5000,
        1j,
        [1],
        {"a": 1},
        (1, 2),
        DAY,
        datetime.timedelta(1),
        object(),
    ),
    *(
        np.float16(1),
        np.float32(0.1),
        np.longdouble("0.1"),
        np.int8(1),
        np.uint64(2**63),
        np.str_("1"),
        np.bytes_("1"),
    ),
]
"""Cells by which a library stores a column in another way, or not at all."""


def as_pandas(columns, path):
    return pandas.DataFrame(columns)


def as_categories(columns, path):
    return pandas.DataFrame(
        {
            name: pandas.Series(cells).astype("category")
            for name, cells in columns.items()
        }
    )


def as_converted(columns, path):
    # Integers that lost digits as floats must not become integers again, of which no reader could tell.
    return pandas.DataFrame(columns).convert_dtypes(convert_integer=False)


def as_arrow_types(columns, path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    return pandas.DataFrame(columns).convert_dtypes(
        convert_integer=False, dtype_backend="pyarrow"
    )


def as_pandas_csv(columns, path):
    # How float32 and numbers beside a complex one are written depends on the other rows: these files differ in more.
    _refuse(columns, complex)
    _refuse(columns, np.floating)
    pandas.DataFrame(columns).to_csv(path / "t.csv")
    return path / "t.csv"


def as_arrow(columns, path, *, encode_dictionary=False):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    arrays = {
        name: pyarrow.array([_plain(cell) for cell in cells], from_pandas=True)
        for name, cells in columns.items()
    }
    if encode_dictionary:
        # Beside one, Arrow makes durations of all cells, and Parquet integers of them.
        _refuse(columns, datetime.timedelta)
        arrays = {name: cells.dictionary_encode() for name, cells in arrays.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), path / "t.parquet")
    return path / "t.parquet"


def as_dictionaries(columns, path):
    return as_arrow(columns, path, encode_dictionary=True)


def as_polars(columns, path):
    polars = pytest.importorskip("polars", reason="polars is not installed")
    _refuse(columns, TooLong)  # beside which polars makes missing values of others
    plain = {name: [_plain(cell) for cell in cells] for name, cells in columns.items()}
    return polars.DataFrame(plain, strict=False)


def as_numpy(columns, path):
    """The arrays of one column each, as NumPy makes them of a list."""
    if any(isinstance(cell, str) for cell in columns.get("narrow", [])):
        raise ValueError("float32 that NumPy would write with fewer digits")
    return pandas.DataFrame({name: np.array(cells) for name, cells in columns.items()})


def _refuse(columns, kind):
    """Refuse cells by which a library loses the values of other rows before any reader sees them."""
    if any(isinstance(cell, kind) for cells in columns.values() for cell in cells):
        raise ValueError("a column that would not be stored as it is")


def _plain(cell):
    if isinstance(cell, decimal.Decimal) and not cell.is_finite():
        raise ValueError("a decimal by which Arrow and polars crash")
    return cell.item() if isinstance(cell, np.generic) else cell


WRITERS = [as_pandas, as_categories, as_converted, as_arrow_types, as_pandas_csv]
WRITERS += [as_arrow, as_dictionaries, as_polars, as_numpy]


@pytest.mark.filterwarnings(
    "ignore::RuntimeWarning", "ignore::UserWarning", "ignore::FutureWarning"
)
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_a_cell_of_a_typed_table_changes_no_other_row(write, tmp_path):
    """One column at a time, so that a table is refused for the sake of this column alone."""
    if write in (as_arrow, as_dictionaries):
        pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    generator = np.random.default_rng(20361121)
    tried = Counter()
    for attempt in range(PAIRS):
        name = list(ORDINARY)[attempt % len(ORDINARY)]
        cells = [
            ORDINARY[name][place]
            for place in generator.integers(len(ORDINARY[name]), size=4)
        ]
        replaced = int(generator.integers(len(cells)))
        neighbour = list(cells)
        neighbour[replaced] = REPLACEMENTS[generator.integers(len(REPLACEMENTS))]
        column = (
            {"range": [0, 1], "indicator": True}
            if name in NUMERIC
            else {"categories": CATEGORIES[name]}
        )
        encoded = []
        for content in (cells, neighbour):
            try:
                table = write({name: content, "y": [*CLASSES, *CLASSES]}, tmp_path)
            except Exception:  # a library that cannot store the column
                table = None
            declared = {"id": "Unnamed: 0"} if write is as_pandas_csv else {}
            declared["columns"] = {name: column}
            encoded.append(None if table is None else read_table(table, declared))
        before, after = encoded
        if before is None or after is None:
            tried["refused"] += 1
            continue
        tried["compared"] += 1
        assert is_unchanged(before, after, replaced), (name, cells, neighbour)
    assert tried["compared"] >= PAIRS / 20, tried
    print(f"{write.__name__}:", dict(tried))


# What has succeeded once


def test_an_open_quote_swallows_no_row_of_a_table(tmp_path):
    """A quote at the end of an unquoted cell, as in 5\", would close it."""
    path = tmp_path / "t.csv"
    declared = {"columns": {"size": {"categories": ["7", '5"']}}}
    path.write_text('size,y\n7,yes\n5",no\n7,no\n')
    assert len(read_table(path, declared)[0]) == 3
    path.write_text('size,y\n"7,yes\n5",no\n7,no\n')
    assert read_table(path, declared) is None


def test_a_carriage_return_makes_no_two_rows_of_one(tmp_path):
    """Of a data file, the first row would become the header, since there is one row more than there are examples."""
    path = tmp_path / "t.csv"
    path.write_bytes(b"x,y\n3,yes\n1,no\r2,yes\n")
    assert (
        read_table(path, {"columns": {"x": {"range": [0, 9], "indicator": False}}})
        is None
    )
    path.write_bytes(b"1.0,2.0,y\n3.0,4.0,n\r3.5,4.5,n\n5.0,6.0,n\n")
    with pytest.raises(InputError):
        load_data(path, "text", examples=3)


def test_a_blank_line_makes_no_row_of_a_header(tmp_path):
    path = tmp_path / "t.csv"
    for rows in ("3.0,4.0,n\n\n", "\n3.0,4.0,n\n"):
        path.write_text(f"0,1,y\n{rows}")
        with pytest.raises(InputError):
            load_data(path, "text", examples=2)
    # A blank line between rows changes nothing.
    path.write_text("0,1,y\n3.0,4.0,n\n\n5.0,6.0,n\n\n")
    assert load_data(path, "text", examples=2)[0].y.tolist() == ["n", "n"]


@pytest.mark.parametrize("gap", [None, 0.5, decimal.Decimal("1.5")])
def test_the_first_whole_number_that_a_float_lacks_is_refused(gap):
    """2⁵³ + 1 becomes 2⁵³ beside a missing value, which every float has."""
    declared = {"columns": {"x": {"categories": [2**53 + 1, 2**53, 7]}}}
    encoded = [
        read_table(pandas.DataFrame({"x": [2**53 + 1, last], "y": CLASSES}), declared)
        for last in (7, gap)
    ]
    assert encoded[0] is not None
    assert encoded[1] is None or is_unchanged(*encoded, replaced=1)
    with pytest.raises(InputError):
        as_classes(np.array([2**53 + 1, 1.0]), (1, 2**53, 2**53 + 1))
    with pytest.raises(InputError):  # which int64 would take for −2⁶³
        as_classes(np.array([2**63, 1], dtype=np.uint64), (1, -(2**63)))


@pytest.mark.parametrize(
    "names",
    [["1", "1.0"], ["True", "true"], ["1", "TRUE"], ["0.1", "0.10"], ["1000", "1e3"]],
)
def test_spellings_of_one_number_are_not_declared_together(names):
    frame = pandas.DataFrame({"x": [0, 1], "y": [0, 1]})
    with pytest.raises(InputError) as caught:
        make_schema(
            frame,
            target="y",
            declared={"columns": {"x": {"categories": names}}, "classes": [0, 1]},
        )
    assert caught.value.key == "columns.x.categories"
    with pytest.raises(InputError) as caught:
        make_schema(
            frame,
            target="y",
            declared={"columns": {"x": {"range": [0, 1]}}, "classes": names},
        )
    assert caught.value.key == "classes"


def test_a_number_that_is_two_codes_is_refused():
    """pandas.read_csv makes the number 1 of the code 01, unless another row has a code with letters."""
    declared = {"columns": {"x": {"categories": ["1", "01", "A"]}}}
    text = pandas.DataFrame({"x": ["01", "A"], "y": CLASSES})
    np.testing.assert_array_equal(read_table(text, declared)[0], [[0, 1, 0], [0, 0, 1]])
    assert read_table(pandas.DataFrame({"x": [1, 7], "y": CLASSES}), declared) is None
    index = NameIndex(["1.0", "+1"])
    assert [index.index_of(name) for name in ("1", "1.0", "True", "+1")] == [0, 0, 0, 1]


def test_tables_without_plain_columns_are_refused():
    frame = pandas.DataFrame(
        [[1, "no"]], columns=pandas.MultiIndex.from_tuples([("x", "a"), ("y", "b")])
    )
    with pytest.raises(InputError):
        as_frame(frame)


# What comes after reading


def patients(rows=60):
    generator = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "age": generator.integers(20, 90, rows).astype(float),
            "sex": ["f", "m"] * (rows // 2),
        }
    )
    frame["smokes"] = [True, False, False] * (rows // 3)
    frame["clinic"] = ["north", "south", "west"] * (rows // 3)
    frame["state"] = np.where(frame["age"] > 55, "ill", "well")
    frame.loc[3, "age"] = None
    return frame


DECLARED = {
    "classes": ["ill", "well"],
    "columns": {
        "age": {"range": [0, 100], "indicator": True},
        "sex": {"categories": ["f", "m"]},
        "smokes": {"range": [0, 1], "indicator": False},
    },
}


@pytest.mark.parametrize("devices", [{"device": "clinic"}, {"devices": 5}, {}])
def test_no_row_decides_who_holds_another_or_whether_it_is_held_out(devices):
    request = FitRequest(
        patients(),
        target="state",
        epsilon=3.0,
        delta=1e-5,
        missing="indicator",
        **devices,
    )
    if "device" not in devices:
        request = request._replace(table=request.table.drop(columns="clinic"))
    request = request._replace(declared=DECLARED)
    original = request.table.copy(deep=True)
    split = folder._read_table(request)
    before = (split.fitted, split.held_out)
    pandas.testing.assert_frame_equal(request.table, original)
    for replaced in range(5):
        table = original.astype({"sex": object, "smokes": object}).copy()
        for name, cell in {
            "age": None,
            "sex": 7,
            "smokes": 0.5,
            "state": "ill",
        }.items():
            table.loc[replaced, name] = cell
        split = folder._read_table(request._replace(table=table))
        after = (split.fitted, split.held_out)
        changed = 0
        for first, second in zip(before, after, strict=True):
            assert (first.owner == second.owner).all()
            rows_differ = (first.X != second.X).any(axis=1) | (first.y != second.y)
            changed += int(rows_differ.sum())
        assert changed == 1


@pytest.mark.skipif(not FULL, reason="a fit takes some seconds")
def test_all_that_a_fit_reads_off_the_data_is_listed(tmp_path, monkeypatch):
    small = {
        "CLIPS": (0.4,),
        "TRAVELS": (0.25,),
        "PRIORS": (4.0,),
        "ROUNDS": (20,),
        "MAX_STAND_INS": 1,
        "MAX_MOMENTS": 0,
    }
    for name, values in small.items():
        monkeypatch.setattr(chosen, name, values)
    request = FitRequest(
        patients(),
        target="state",
        epsilon=3.0,
        delta=1e-5,
        device="clinic",
        missing="indicator",
        seed=0,
    )
    fit = fit_table(request, tmp_path / "fit")
    listed = " ".join(item.text for item in fit.not_covered)
    for words in (
        "task",
        "classes",
        "kinds of columns: age, sex, smokes",
        "categories of sex",
        "range of smokes",
    ):
        assert words in listed
    assert "which columns have missing values" in listed
    assert re.search("device holds a row", listed)
    frame = as_frame(request.table)
    declared = make_schema(
        frame, target="state", device="clinic", missing="indicator", declared=DECLARED
    )
    assert declared.taken == []
