"""Rows of delimited text: every line is split by itself, and every cell read by itself."""

import csv

import pytest

from wflmc.support.delimited import parse_finite, parse_float, split_rows


def test_every_line_is_one_row():
    lines = ['1,"a, b"', "", "2,c", "  "]
    rows = split_rows(lines)
    assert [row.line_number for row in rows] == [1, 2, 3, 4]
    assert [row.cells for row in rows] == [["1", "a, b"], [], ["2", "c"], ["  "]]
    assert split_rows(reversed(lines))[1].cells == rows[2].cells
    assert "a, b" not in repr(rows)  # cells may be private


def test_spaces_after_a_delimiter_may_be_dropped():
    lines = ['1; "a;b"']
    assert split_rows(lines, delimiter=";")[0].cells == ["1", ' "a', 'b"']
    spaced = split_rows(lines, delimiter=";", skip_spaces=True)
    assert spaced[0].cells == ["1", "a;b"]


LONG = "9" * (csv.field_size_limit() + 1)


@pytest.mark.parametrize(
    "line", ['1,"a', '"a"b,1', '1,"a\n2,b', "1,a\r2,b", "\r1,a", f"{LONG},a"]
)
def test_a_damaged_line_is_refused_and_swallows_no_other(line):
    with pytest.raises(csv.Error):
        split_rows([line, '2,b"'])


@pytest.mark.parametrize(
    "line", ['1"2,b', '"1\r2",b', "1\0,b", "\0", "\ufeff1,b", "1,2,3,4", "\x1c", ","]
)
def test_an_odd_line_is_a_row_and_changes_no_other(line):
    rows = split_rows(["a,b", line, '"c","d"'])
    assert len(rows) == 3
    assert [rows[0].cells, rows[2].cells] == [["a", "b"], ["c", "d"]]
    assert rows[1] == split_rows([line])[0]._replace(line_number=2)


@pytest.mark.parametrize(
    ("text", "number", "finite"),
    [
        ("1", 1.0, 1.0),
        (" -.5e1 ", -5.0, -5.0),
        ("1e400", float("inf"), None),
        ("-inf", float("-inf"), None),
        (" Infinity", float("inf"), None),
        ("nan", None, None),
        ("", None, None),
        ("1_000", None, None),
        ("１", None, None),
        ("1,5", None, None),
        ("True", None, None),
    ],
)
def test_numbers_are_written_in_ascii(text, number, finite):
    assert parse_float(text) == number
    assert parse_finite(text) == finite
