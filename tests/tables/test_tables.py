"""Tables: what is read, what is refused, and how columns become features."""

from __future__ import annotations

import datetime
import io
import json
import zipfile

import numpy as np
import pytest

from wflmc import InputError
from wflmc.apps.tables import folder, reading
from wflmc.apps.tables.description import make_schema
from wflmc.apps.tables.encoding import device_names, encode, outcomes, owners
from wflmc.apps.tables.reading import as_frame, read_table
from wflmc.apps.tables.schema import Schema

pandas = pytest.importorskip("pandas")

SECRET = "s3cr3t"
"""A value of the table, which no error may show."""


def patients(**columns):
    base = {
        "age": [31.0, 44.5, 29.0, 61.0],
        "sex": ["f", "m", "m", "f"],
        "smokes": [True, False, False, True],
        "y": ["benign", "malignant", "benign", "malignant"],
    }
    return pandas.DataFrame(base | columns)


def refused(*words):
    return pytest.raises(InputError, match="".join(f"(?=.*{word})" for word in words))


def schema_of(frame, target="y", **options):
    return make_schema(frame, target=target, **options)


def kinds(schema):
    return {column.name: column.kind for column in schema.columns}


# Reading


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.txt"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_any_delimiter(tmp_path, name, delimiter):
    frame = patients()
    frame.to_csv(tmp_path / name, sep=delimiter, index=False)
    read = read_table(tmp_path / name)
    assert read.to_numpy().tolist() == [
        [str(cell) for cell in row] for row in frame.to_numpy().tolist()
    ]
    schema = schema_of(frame)
    assert schema_of(read) == schema
    for read_part, part in zip(
        encode(read, schema), encode(frame, schema), strict=True
    ):
        np.testing.assert_array_equal(read_part, part)


def test_spaces_delimit_columns_of_plain_text_alone(tmp_path):
    for name, columns in (("t.txt", ["a", "b"]), ("t.csv", ["a b"])):
        (tmp_path / name).write_text(
            "a b\n" + ("1 2\n" if len(columns) == 2 else "1\n")
        )
        assert list(read_table(tmp_path / name).columns) == columns


def test_the_header_alone_decides_the_delimiter(tmp_path):
    """One row full of another sign, or of quotes, is a row like any other."""
    (tmp_path / "t.csv").write_text(
        'a,b\n1,felt \'dizzy\' today\n2,;;;;;;\n3,"x, ""y"""\n'
    )
    assert read_table(tmp_path / "t.csv")["b"].tolist() == [
        "felt 'dizzy' today",
        ";;;;;;",
        'x, "y"',
    ]
    (tmp_path / "t.csv").write_text('"weight, kg, dry";"b, c"\n1;2\n')
    assert list(read_table(tmp_path / "t.csv").columns) == ["weight, kg, dry", "b, c"]


def test_decimal_commas_do_not_hide_the_delimiter(tmp_path):
    (tmp_path / "t.csv").write_text("a;b\n" + "3,5;4,5\n" * 5, encoding="utf-8-sig")
    assert list(read_table(tmp_path / "t.csv").columns) == ["a", "b"]


def test_a_delimiter_at_the_end_of_each_row(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2,\n3,4,\n")
    assert read_table(tmp_path / "t.csv").to_numpy().tolist() == [
        ["1", "2"],
        ["3", "4"],
    ]


@pytest.mark.parametrize("text", ["a\n1\n2\n", "patient age\n1\n2\n"])
def test_one_column_is_read_whole(tmp_path, text):
    (tmp_path / "t.csv").write_text(text)
    assert read_table(tmp_path / "t.csv").shape == (2, 1)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("t.xls", b"a", (r"\.csv", r"\.parquet", r"\.npz")),
        ("t.csv", b"", ("empty",)),
        ("t.csv", b"\n\n", ("empty",)),
        ("t.csv", b"a,b\n", ("no rows",)),
        ("t.csv", b"a,b,a\n1,2,3\n", ("more than one column", "'a'")),
        ("t.csv", b"a,b\n1,2\n3,s3cr3t,5\n", ("can be read",)),
        ("t.csv", b"a,b\ns3cr3t,2,5\n1,2,3\n", ("can be read",)),
        ("t.csv", b"5.1,3.5,s3cr3t\n4.9,3.0,x\n", ("first row",)),
        ("t.csv", b"1,0,1\n0,0,1\n", ("first row",)),
        ("t.csv", b"a,b\n\xff\xfe,2\n", ("UTF-8",)),
        ("t.csv", b"a,b\ns3cr3t\n1,2\n", ("each row",)),
        ("t.csv", b'a,b\n"s3cr3t,2\n1,2\n', ("quoted",)),
        ("t.csv", b'a,b\n"s3cr3t"x,2\n1,2\n', ("quoted",)),
        ("t.npz", b"s3cr3t", (r"\.npz",)),
    ],
)
def test_unreadable_files(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with refused(*words) as raised:
        read_table(tmp_path / name)
    assert SECRET not in str(raised.value)


def test_no_such_file(tmp_path):
    with refused("exists"):
        read_table(tmp_path / "none.csv")


def test_parquet(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    patients().to_parquet(tmp_path / "t.parquet")
    frame = read_table(str(tmp_path / "t.parquet"))
    schema = schema_of(frame)
    assert kinds(schema) == {
        "age": "numeric",
        "sex": "categorical",
        "smokes": "numeric",
    }
    np.testing.assert_array_equal(
        encode(frame, schema)[0], encode(patients(), schema)[0]
    )


def test_a_missing_package_is_one_sentence(monkeypatch, tmp_path):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr(reading, "import_module", absent)
    with refused("pandas is missing", r"pip install 'wflmc\[tables\]'"):
        read_table(tmp_path / "t.csv")


def test_npz(tmp_path):
    X = np.arange(6.0).reshape(3, 2)
    y = np.array([0, 1, 0])
    devices = np.array([5, 7, 5])
    np.savez(tmp_path / "t.npz", X=X, y=y, devices=devices)
    frame = read_table(tmp_path / "t.npz")
    assert list(frame.columns) == ["x0", "x1", "y", "device"]
    schema = schema_of(frame, device="device")
    np.testing.assert_array_equal(encode(frame, schema)[0], X)
    np.testing.assert_array_equal(outcomes(frame, schema), y)
    np.savez(tmp_path / "new.npz", X=X)
    np.testing.assert_array_equal(
        encode(read_table(tmp_path / "new.npz"), schema)[0], X
    )
    np.savez(tmp_path / "bad.npz", X=X, y=y[:2])
    with refused("X"):
        read_table(tmp_path / "bad.npz")


def test_npz_that_promises_more_than_it_holds(tmp_path):
    """The header speaks of 4 GiB, for which no memory is taken; tests/package/test_storage.py has more such files."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (2**20, 2**9)}
    )
    with zipfile.ZipFile(tmp_path / "t.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("X.npy", header.getvalue() + bytes(2**20))
    with refused("table"):
        read_table(tmp_path / "t.npz")


def test_frames(tmp_path):
    frame = patients()
    assert as_frame(frame) is frame
    assert list(as_frame(pandas.DataFrame(np.ones((2, 2)))).columns) == ["0", "1"]
    frame.to_csv(tmp_path / "t.csv", index=False)
    assert as_frame(str(tmp_path / "t.csv")).shape == frame.shape
    with refused("path", "polars"):
        as_frame([[1, 2]])
    with refused("more than one column"):
        as_frame(pandas.DataFrame(np.ones((2, 2)), columns=["a", "a"]))
    with refused("no rows"):
        as_frame(frame[:0])


def test_frames_that_convert_themselves(monkeypatch):
    class Other:
        def to_pandas(self):
            return patients()

    monkeypatch.setattr(reading, "import_module", lambda name: pandas)
    pandas.testing.assert_frame_equal(as_frame(Other()), patients())


def test_polars():
    polars = pytest.importorskip("polars", reason="polars is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    schema = schema_of(patients())
    frame = as_frame(polars.DataFrame(patients().to_dict("list")))
    np.testing.assert_array_equal(
        encode(frame, schema)[0], encode(patients(), schema)[0]
    )


# Describing and encoding


def test_encoding_of_each_kind():
    frame = patients()
    schema = schema_of(frame, declared={"columns": {"age": {"range": [0, 120]}}})
    X, ranges, names = encode(frame, schema)
    assert names == ["age", "sex=f", "sex=m", "smokes"]
    np.testing.assert_array_equal(
        X, [[31, 1, 0, 1], [44.5, 0, 1, 0], [29, 0, 1, 0], [61, 1, 0, 1]]
    )
    np.testing.assert_array_equal(ranges, [[0, 120], [0, 1], [0, 1], [0, 1]])
    assert schema.taken == [
        "task",
        "classes",
        "kinds of columns: sex, smokes",
        "categories of sex",
        "range of smokes",
    ]
    assert np.all(np.isnan(encode(frame, schema_of(frame))[1][0]))


def test_declared_categories_are_not_taken_and_others_are_zero():
    frame = patients(zip=[1010, 2020, 1010, 3030])
    declared = {
        "columns": {
            "sex": {"categories": ["f"]},
            "zip": {"categories": [1010, 2020]},
            "smokes": {"kind": "categorical"},
        },
        "classes": ["benign", "malignant"],
    }
    schema = schema_of(frame, declared=declared)
    X, _, names = encode(frame, schema)
    assert names == [
        "age",
        "sex=f",
        "smokes=False",
        "smokes=True",
        "zip=1010",
        "zip=2020",
    ]
    np.testing.assert_array_equal(X[:, 1], [1, 0, 0, 1])
    np.testing.assert_array_equal(X[:, 4:], [[1, 0], [0, 1], [1, 0], [0, 0]])
    assert schema.taken == ["kinds of columns: age", "categories of smokes"]
    # Whole numbers become floats where some are missing.
    new = frame.assign(sex="x", zip=1010.0)
    np.testing.assert_array_equal(encode(new, schema)[0][:, [1, 4]], [[0, 1]] * 4)


@pytest.mark.parametrize("missing", ["refuse", "indicator"])
def test_a_written_schema_encodes_the_same(missing):
    frame = patients(size=[1.0, 2.0, 3.0, 4.0])
    if missing == "indicator":
        frame.loc[1, "age"] = frame.loc[2, "sex"] = None
    first = schema_of(
        frame, missing=missing, declared={"columns": {"size": {"range": [0, 9]}}}
    )
    text = first.model_dump_json()
    read = Schema.model_validate_json(text)
    again = schema_of(frame, target=None, declared=json.loads(text))
    assert read == again == first
    for expected, actual in zip(
        encode(frame, first), encode(frame, again), strict=True
    ):
        np.testing.assert_array_equal(expected, actual)


def test_prediction_needs_the_features_alone():
    schema = schema_of(patients(pid=[1, 2, 3, 4]), id="pid")
    new = patients().drop(columns="y")
    assert encode(new.assign(other=SECRET), schema)[0].shape == (4, 4)
    with refused("'age', 'sex'"):
        encode(new.drop(columns=["age", "sex"]), schema)
    with refused("'age'", "numbers") as raised:
        encode(new.assign(age=SECRET), schema)
    assert SECRET not in str(raised.value)
    with refused("target"):
        outcomes(new, schema)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"columns": {"aeg": {}}}, ("columns", "aeg", "did you mean age")),
        ({"colums": {}}, ("colums", "did you mean columns")),
        (
            {"columns": {"age": {"rnage": [0, 1]}}},
            (r"columns\.age\.rnage", "did you mean range"),
        ),
        (
            {"columns": {"age": {"range": [1, 0]}}},
            (r"columns\.age\.range", "lower first"),
        ),
        (
            {"columns": {"age": {"range": [0]}}},
            (r"columns\.age\.range", "two finite numbers"),
        ),
        ({"columns": {"age": {"kind": "number"}}}, (r"columns\.age\.kind", "numeric")),
        (
            {"columns": {"age": {"range": [0, 1], "categories": ["a"]}}},
            (r"columns\.age", "either"),
        ),
        ({"columns": {"sex": {"categories": ["f", "f"]}}}, ("each given once",)),
        ({"columns": {"sex": {"categories": "f"}}}, ("list",)),
        ({"columns": {"sex": {"categories": []}}}, (r"sex\.categories", "at least")),
        (
            {"columns": {"sex": {"categories": ["f", float("nan")]}}},
            (r"sex\.categories", "text or number"),
        ),
        (
            {"columns": {"sex": {"categories": ["1", True]}}},
            (r"sex\.categories", "number twice"),
        ),
        ({"columns": {"sex": {"kind": "numeric"}}}, ("'sex'", "numbers")),
        ({"columns": {"y": {"range": [0, 1]}}}, ("columns", "y", "feature")),
        ({"columns": ["age"]}, ("columns", "object")),
        ({"columns": {"age": 3}}, ("columns", "object")),
        ({"classes": ["benign"]}, ("classes", "two")),
        ({"classes": ["benign", 2]}, ("classes", "two")),
        ({"classes": ["a", "b"], "task": "regression"}, ("classification",)),
        ({"classes": ["benign", "other"]}, ("'y'", "outside")),
        ({"target_range": [0, 1]}, ("'y'", "numbers")),
        ({"missing": "drop"}, ("missing", "indicator")),
    ],
)
def test_bad_declarations(declared, words):
    with refused(*words) as raised:
        schema_of(patients(), declared=declared)
    assert "malignant" not in str(raised.value)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ([datetime.date(1999, 1, 2)] * 4, ("date",)),
        (pandas.to_datetime(["1999-01-02"] * 4), ("datetime",)),
        ([1j] * 4, ("complex",)),
        ([1.0, np.inf, 2.0, 3.0], ("infinite",)),
        ([1.0, np.nan, 2.0, 3.0], ("missing values", "--missing indicator")),
        ([SECRET, None, SECRET, SECRET], ("missing values", "--missing indicator")),
    ],
)
def test_columns_that_are_refused_by_name(column, words):
    with refused("column 'extra'", *words) as raised:
        schema_of(patients(extra=column))
    assert SECRET not in str(raised.value)
    assert "1999" not in str(raised.value)


def wide(text):
    count = 101
    return pandas.DataFrame(
        {"city": [text(i) for i in range(count)], "y": np.arange(count) % 2}
    )


def test_no_categories():
    declared = {"missing": "indicator", "columns": {"sex": {"kind": "categorical"}}}
    with refused("'sex'", "no values"):
        schema_of(patients(sex=[None] * 4), declared=declared)


def test_too_many_categories():
    with refused("'city'", "100", "--id") as raised:
        schema_of(wide(lambda i: f"{SECRET} {i}"))
    assert SECRET not in str(raised.value)
    assert (
        len(
            encode(
                wide(str),
                schema_of(
                    wide(str), declared={"columns": {"city": {"categories": [1]}}}
                ),
            )[2]
        )
        == 1
    )


@pytest.mark.parametrize(
    "text",
    [
        lambda i: f"{i},5",
        lambda i: f"1 {i % 25:03d}",
        lambda i: f"{i}.5" if i > 5 else "?",
    ],
)
def test_numbers_as_text(text):
    with refused("'city'", "numbers written as text"):
        schema_of(wide(text))


def test_few_numbers_as_text_are_categories():
    frame = wide(lambda i: f"{i % 5},5")
    assert schema_of(frame).columns[0].categories == ["0,5", "1,5", "2,5", "3,5", "4,5"]


def test_types_of_pandas():
    frame = pandas.DataFrame(
        {
            "whole": pandas.array([1, None, 3], dtype="Int64"),
            "flag": [True, None, False],
            "level": pandas.Categorical([2, 1, 2], categories=[1, 2, 3]),
            "empty": [None, None, None],
            "y": [0.5, 1.5, 2.5],
        }
    )
    schema = schema_of(frame, missing="indicator")
    X, ranges, names = encode(frame, schema)
    assert names == [
        "whole",
        "whole=missing",
        "flag",
        "flag=missing",
        "level=1",
        "level=2",
        "empty",
        "empty=missing",
    ]
    np.testing.assert_array_equal(X[1], [0, 1, 0, 1, 1, 0, 0, 1])
    np.testing.assert_array_equal(ranges[2], [0, 1])


@pytest.mark.parametrize(
    ("cells", "kind", "features"),
    [
        (["1.0", "2.5", "1e3", "+1"], "numeric", ["x"]),
        (["true", "FALSE", "True", "false"], "numeric", ["x"]),
        (
            ["01067", "04109", "01067", "10115"],
            "categorical",
            ["x=01067", "x=04109", "x=10115"],
        ),
        (["1", "2", "a", "1"], "categorical", ["x=1", "x=2", "x=a"]),
        (["1,5", "2,5", "1,5", "2,5"], "categorical", ["x=1,5", "x=2,5"]),
    ],
)
def test_kinds_of_a_text_file_that_are_not_declared(tmp_path, cells, kind, features):
    (tmp_path / "t.csv").write_text(
        "x;y\n" + "".join(f"{cell};{row % 2}\n" for row, cell in enumerate(cells))
    )
    frame = read_table(tmp_path / "t.csv")
    schema = schema_of(frame)
    assert kinds(schema) == {"x": kind}
    assert encode(frame, schema)[2] == features
    assert {"task", "classes", "kinds of columns: x"} <= set(schema.taken)
    assert (
        (schema.columns[0].range == (0, 1))
        == ("range of x" in schema.taken)
        == ("true" in cells)
    )
    assert outcomes(frame, schema).tolist() == [0, 1, 0, 1]


def test_a_declared_kind_gives_no_range():
    """A range is public only where it is declared, or listed as taken."""
    schema = schema_of(
        patients(), declared={"columns": {"smokes": {"kind": "numeric"}}}
    )
    assert schema.columns[2].range is None
    assert "range of smokes" not in schema.taken


def test_text_of_a_frame_stays_text():
    assert (
        kinds(schema_of(patients(code=["1", "2", "1", "2"])))["code"] == "categorical"
    )


def test_a_word_for_missing_values_may_be_a_category(tmp_path):
    (tmp_path / "t.csv").write_text("x,y\nNA,yes\nb,no\n,no\n")
    frame = read_table(tmp_path / "t.csv")
    declared = {"missing": "indicator", "columns": {"x": {"categories": ["NA", "b"]}}}
    np.testing.assert_array_equal(
        encode(frame, schema_of(frame, declared=declared))[0], [[1, 0], [0, 1], [0, 0]]
    )
    with refused("'x'", "missing values"):
        schema_of(frame)


# Missing values


def test_indicators_are_those_of_the_fit():
    frame = patients(size=[1.0, 2.0, 3.0, 4.0])
    frame.loc[1, "age"] = frame.loc[2, "sex"] = None
    schema = schema_of(frame, missing="indicator", declared={"fill": 40.0})
    X, ranges, names = encode(frame, schema)
    assert names == ["age", "age=missing", "sex=f", "sex=m", "smokes", "size"]
    np.testing.assert_array_equal(
        X[:3, :4], [[31, 0, 1, 0], [40, 1, 0, 1], [29, 0, 0, 0]]
    )
    np.testing.assert_array_equal(ranges[1], [0, 1])
    assert set(schema.taken) >= {
        "classes",
        "which columns have missing values",
        "categories of sex",
    }
    assert encode(patients(size=1.0), schema)[2] == names
    with refused("'size'", "missing values", "fit"):
        encode(frame.assign(size=np.nan), schema)


def test_declared_indicators_are_not_taken():
    columns = {"age": {"indicator": True}, "sex": {"categories": ["f", "m"]}}
    columns["smokes"] = {"kind": "numeric", "indicator": False}
    schema = schema_of(
        patients(),
        task="classification",
        missing="indicator",
        declared={"columns": columns},
    )
    assert schema.taken == ["classes"]
    assert encode(patients(), schema)[2][:2] == ["age", "age=missing"]


@pytest.mark.parametrize("role", ["target", "device", "id"])
def test_roles_are_complete(role):
    frame = patients(role=[1, 2, None, 4])
    with refused(f"{role} 'role'", "missing values"):
        make_schema(frame, **({"target": "y", "missing": "indicator"} | {role: "role"}))
    with refused(role, "did you mean role"):
        make_schema(frame, **({"target": "y"} | {role: "rolle"}))


def test_row_numbers_are_no_feature(tmp_path):
    patients().to_csv(tmp_path / "t.csv")
    frame = read_table(tmp_path / "t.csv")
    with refused("'Unnamed: 0'", "--id"):
        schema_of(frame)
    assert "Unnamed: 0" not in kinds(schema_of(frame, id="Unnamed: 0"))


def test_roles_are_distinct():
    for role in ("device", "id"):
        with refused("target", "neither"):
            schema_of(patients(), **{role: "y"})
    with refused("target"):
        schema_of(patients(), target=None)
    with refused("no features"):
        schema_of(patients()[["y", "age"]], id="age")


def test_repeated_ids():
    with refused("'pid'", "epsilon hides one row", "--unit device") as raised:
        schema_of(patients(pid=[SECRET, SECRET, "b", "c"]), id="pid")
    assert SECRET not in str(raised.value)


# Outcomes


@pytest.mark.parametrize(
    ("values", "task", "classes"),
    [
        (["b", "a", "b", "a"], "classification", ["a", "b"]),
        ([True, False, True, False], "classification", ["False", "True"]),
        ([2.0, 1.0, 2.0, 1.0], "classification", [1, 2]),
        ([3, 1, 2, 3], "classification", [1, 2, 3]),
        ([0.5, 1.0, 2.0, 3.0], "regression", None),
    ],
)
def test_task_and_classes(values, task, classes):
    frame = patients(y=values)
    schema = schema_of(frame)
    assert (schema.task, schema.classes) == (task, classes)
    y = outcomes(frame, schema)
    assert y.tolist() == (
        [str(value) for value in values] if isinstance(values[0], bool) else values
    )
    assert y.dtype.kind == (
        "f" if classes is None else "i" if isinstance(classes[0], int) else "U"
    )


def test_many_whole_numbers_are_a_regression():
    frame = pandas.DataFrame({"x": np.ones(42), "y": np.arange(42) % 21})
    assert schema_of(frame).task == "regression"
    assert schema_of(frame, declared={"columns": {"x": {"kind": "numeric"}}}).taken == [
        "task"
    ]
    assert schema_of(frame, task="classification").classes == list(range(21))
    assert schema_of(frame, declared={"target_range": [0, 20]}).target_range == (0, 20)


def test_declared_classes():
    frame = patients(y=[1, 2, 1, 2])
    named = schema_of(frame, declared={"classes": ["1", "2", "3"]})
    assert outcomes(frame, named).tolist() == ["1", "2", "1", "2"]
    assert "classes" not in named.taken
    assert schema_of(
        patients(y=[True] * 4), declared={"classes": [False, True]}
    ).classes == ["False", "True"]


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        ([SECRET] * 4, {}, ("one class only",)),
        ([SECRET, "a", "b", "a"], {"declared": {"classes": ["a", "b"]}}, ("outside",)),
        ([0.5, 1.5, 2.5, 3.5], {"task": "classification"}, ("class labels",)),
        ([SECRET, "a", "b", "a"], {"task": "regression"}, ("numbers",)),
        ([1.0, np.inf, 2.0, 3.0], {}, ("infinite",)),
        (pandas.to_datetime(["1999-01-02"] * 4), {}, ("numbers",)),
    ],
)
def test_bad_targets(values, options, words):
    with refused("target 'y'", *words) as raised:
        schema_of(patients(y=values), **options)
    assert SECRET not in str(raised.value)


# Devices


def test_owners():
    frame = patients(site=["b", "a", "b", "c"])
    rng = np.random.default_rng(0)
    schema = schema_of(frame, device="site")
    np.testing.assert_array_equal(owners(frame, schema, None, rng), [1, 0, 1, 2])
    assert device_names(frame, schema) == ["a", "b", "c"]
    assert "site" not in kinds(schema)
    with refused("devices", "device column"):
        owners(frame, schema, 3, rng)
    with refused("device 'site'", "missing"):
        owners(frame.assign(site=None), schema, None, rng)
    schema = schema_of(patients())
    np.testing.assert_array_equal(owners(frame, schema, None, rng), [0, 0, 0, 0])
    for devices in (0, 2.5, 5):
        with refused(f"devices = {devices}"):
            owners(frame, schema, devices, rng)
    large = pandas.DataFrame({"x": np.ones(1000)})
    numbers = owners(large, schema, 7, rng)
    assert np.ptp(np.bincount(numbers, minlength=7)) <= 1
    assert numbers.dtype == np.intp
    assert np.any(np.diff(numbers) < 0)


def test_devices_keep_their_names_where_rows_are_held_out():
    clinics = [f"clinic {row}" for row in range(8)]
    table = pandas.DataFrame({"age": range(8), "y": ["a", "b"] * 4, "clinic": clinics})
    request = folder.FitRequest(
        table, target="y", epsilon=1.0, delta=1e-5, device="clinic"
    )
    read = folder._read_table(request)
    for rows, count in ((read.fitted, 6), (read.held_out, 2)):
        assert len(rows.X) == count
        names = [rows.names[owner] for owner in rows.owner]
        assert names == [clinics[int(age)] for age in rows.X[:, 0]]
    assert len(read.fitted.names) == 6


def test_devices_that_are_numbers_are_in_the_order_of_numbers(tmp_path):
    frame = patients(site=[10, 9, 10, 2])
    frame.to_csv(tmp_path / "t.csv", index=False)
    for table in (frame, read_table(tmp_path / "t.csv")):
        schema = schema_of(table, device="site")
        assert device_names(table, schema) == ["2", "9", "10"]
        np.testing.assert_array_equal(
            owners(table, schema, None, np.random.default_rng(0)), [2, 1, 2, 0]
        )


def test_a_constant_column_is_kept():
    frame = patients(one=1.0)
    assert "one" in encode(frame, schema_of(frame))[2]
