"""Files of data and of channels through the command line, good ones and bad ones."""

from __future__ import annotations

import numpy as np
import pytest

from ..cli_tools import write_gains
from ..error_tools import names_key, text_of


@pytest.mark.parametrize(
    ("table", "part"),
    [
        (np.ones((51, 29)), "30 devices"),
        (np.ones((50, 30)), "51 rounds"),
        (np.ones(51), "rounds, devices"),
        (np.zeros((51, 30)), "non-zero"),
        (np.full((51, 30), np.nan), "finite"),
    ],
)
def test_bad_gain_files(call, scenario, tmp_path, table, part):
    write_gains(tmp_path, table)
    code, out, err = call(
        "plan",
        scenario,
        "--set",
        "link.fading=file",
        "--set",
        "link.gains=h.npy",
        "--json",
    )
    assert (code, out) == (2, "")
    assert names_key(err, "link.gains", part)


def test_gain_files_are_used_as_they_are(plan_of, scenario, tmp_path):
    table = np.random.default_rng(0).rayleigh(0.1, (60, 30)) * np.exp(1j)
    write_gains(tmp_path, table)
    document = plan_of(
        scenario, "--set", "link.fading=file", "--set", "link.gains=h.npy", "--set", "policy.power=no-dp",
    )  # fmt: skip
    power = (np.array(document["gain"]) * 30) ** 2 / np.min(
        np.abs(table[:51]), axis=1
    ) ** 2
    cap = document["constants"]["step_size"] / 2
    limit = np.minimum(5 * 100.0, cap * 900 / np.min(np.abs(table[:51]), axis=1) ** 2)
    np.testing.assert_allclose(power, limit, rtol=1e-9)
    assert "link.power" in text_of(document, "no-effect")


@pytest.mark.parametrize("kind", ["npz", "csv", "bare.csv"])
def test_own_data(plan_of, call, scenario, tmp_path, kind):
    generator = np.random.default_rng(0)
    X, y = generator.standard_normal((90, 3)), generator.standard_normal(90)
    name = f"data.{kind}"
    if kind == "npz":
        np.savez(tmp_path / name, X=X, y=y)
    elif kind == "csv":
        np.savetxt(
            tmp_path / name,
            np.column_stack([y, X]),
            delimiter=",",
            header="y,a,b,c",
            comments="",
        )
    else:
        np.savetxt(tmp_path / name, np.column_stack([X, y]), delimiter=",")
    document = plan_of(
        scenario, "--set", f"posterior.data={name}", "--set", "policy.power=equal"
    )
    eigenvalues = np.linalg.eigvalsh(X.T @ X + np.eye(3))
    assert document["constants"]["mu"] == pytest.approx(eigenvalues[0], rel=1e-9)
    assert document["constants"]["dim"] == 3
    code, _, err = call(
        "plan", scenario, "--set", f"posterior.data={name}", "--set", "posterior.dim=4"
    )
    assert code == 2
    assert names_key(err, "posterior.dim", 4, 3)


@pytest.mark.parametrize(
    ("content", "facts"),
    [
        ("a,b\n1,2\n", ("y", "header")),
        ("y,a\n1,x\n", ("line 2", "column 2")),
        ("y,a\n1,\n", ("line 2", "column 2")),
        ("x1,x2,y\n0,0.1,0.2,0.3\n", ("3 columns", "line 2", 4)),
        ('"a,1",b,y\n1,2,3,4\n', ("3 columns", "line 2", 4)),
        ("1;2\n3;4\n", ("y", "header")),
        ("y,a\n", ("row", "header")),
        (",a,y\n0,1,2\n", ("every column", "header")),
        ("", ("row", "header")),
        ("1\n2\n", ("row", "header")),
        ("\xff\xfe", ("UTF-8",)),
    ],
)
def test_bad_csv(call, scenario, tmp_path, content, facts):
    (tmp_path / "d.csv").write_bytes(content.encode("latin-1"))
    code, _, err = call("plan", scenario, "--set", "posterior.data=d.csv")
    assert code == 2
    assert names_key(err, "posterior.data", *facts)


@pytest.mark.parametrize(
    "arrays",
    [
        {"X": np.ones((40, 2))},
        {"X": np.ones((40, 2), dtype=complex), "y": np.ones(40)},
        {"X": np.full((40, 2), "1"), "y": np.ones(40)},
        {"X": np.full((40, 2), 1e200), "y": np.ones(40)},
        {"X": np.full((40, 2), None), "y": np.ones(40)},
        b"not a zip file",
    ],
)
def test_bad_npz(call, scenario, tmp_path, arrays):
    if isinstance(arrays, bytes):
        (tmp_path / "d.npz").write_bytes(arrays)
    else:
        np.savez(tmp_path / "d.npz", **arrays)
    for arguments in (
        ["plan", scenario, "--set", "posterior.data=d.npz"],
        ["reproduce", "--data", tmp_path / "d.npz"],
    ):
        code, _, err = call(*arguments)
        assert code == 2
        assert names_key(err, "posterior.data") or names_key(err, "--data")


def test_odd_but_good_csv(plan_of, scenario, tmp_path):
    """Windows line ends, a byte-order mark, blank lines and spaces are no reason to refuse."""
    generator = np.random.default_rng(0)
    table = generator.standard_normal((60, 3))
    text = (
        "\ufeff x , y ,z\r\n\r\n"
        + "\r\n".join(", ".join(f"{v:.6f}" for v in row) for row in table)
        + "\r\n\r\n"
    )
    (tmp_path / "d.csv").write_bytes(text.encode("utf-8"))
    X = np.round(table[:, [0, 2]], 6)
    document = plan_of(
        scenario, "--set", "posterior.data=d.csv", "--set", "policy.power=equal"
    )
    assert document["constants"]["L"] == pytest.approx(
        np.linalg.eigvalsh(X.T @ X + np.eye(2))[-1], rel=1e-9
    )
