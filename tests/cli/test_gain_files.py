"""Channel gains from files of every format: the same plan from each, and clear errors."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile

import h5py
import numpy as np
import pytest
import scipy.io

from wflmc.scenario.gains import as_complex, load_gains, split_variable
from wflmc.support.errors import InputError

from ..cli_tools import with_set
from ..error_tools import names_key, raises_input_error

ROUNDS = 60
DEVICES = 30


def draw_gains(kind):
    generator = np.random.default_rng(0)
    magnitude = generator.rayleigh(0.1, (ROUNDS, DEVICES))
    if kind == "real":
        return magnitude
    return magnitude * np.exp(2j * np.pi * generator.random((ROUNDS, DEVICES)))


def write_csv(path, table, letter="j"):
    def cell(value):
        if not np.iscomplexobj(table):
            return repr(float(value))
        return f"{float(value.real)!r}{float(value.imag):+.17g}{letter}"

    lines = [",".join(cell(value) for value in row) for row in table]
    path.write_text("\n".join(lines) + "\n")


def write_matlab_73(path, name="H", table=None, **others):
    """A file as MATLAB's `save -v7.3` writes it: a header of 512 bytes, and transposed arrays."""
    with h5py.File(path, "w", userblock_size=512) as file:
        for key, values in {name: table, **others}.items():
            stored = values.T
            if np.iscomplexobj(values):
                stored = np.empty(values.T.shape, [("real", "f8"), ("imag", "f8")])
                stored["real"] = values.T.real
                stored["imag"] = values.T.imag
            file[key] = stored
            file[key].attrs["MATLAB_class"] = np.bytes_("double")
    with path.open("r+b") as file:
        file.write(b"MATLAB 7.3 MAT-file".ljust(116) + bytes(8) + b"\x00\x02IM")


def write_hdf5(path, table, name="H"):
    with h5py.File(path, "w") as file:
        file[name] = table


WRITERS = {
    "h.npz": lambda path, table: np.savez(path, table),
    "packed.npz": lambda path, table: np.savez_compressed(path, H=table),
    "h.csv": write_csv,
    "matlab.csv": lambda path, table: write_csv(path, table, "i"),
    "numpy.csv": lambda path, table: np.savetxt(path, table, delimiter=","),
    "v4.mat": lambda path, table: scipy.io.savemat(path, {"H": table}, format="4"),
    "v6.mat": lambda path, table: scipy.io.savemat(path, {"H": table}),
    "v7.mat": lambda path, table: scipy.io.savemat(
        path, {"H": table}, do_compression=True
    ),
    "v73.mat": lambda path, table: write_matlab_73(path, table=table),
    "h.h5": write_hdf5,
    "H.HDF5": write_hdf5,
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_every_format_gives_the_same_array(tmp_path, name, kind):
    table = draw_gains(kind)
    WRITERS[name](tmp_path / name, table)
    read = load_gains(str(tmp_path / name))
    assert read.dtype == table.dtype
    assert read.shape == table.shape
    np.testing.assert_array_equal(read, table)
    # Rounding of sums over devices depends on the order in memory.
    assert read.flags.c_contiguous


@pytest.fixture
def plan_by_gains(plan_of, scenario):
    """Return the plan of the scenario with a file of gains, without what names the file."""

    def plan(gains):
        overrides = [
            "link.fading=file",
            f"link.gains={gains}",
            "policy.schedule=threshold",
        ]
        document = plan_of(scenario, *with_set(overrides))
        return {
            key: document[key]
            for key in (
                "gain",
                "threshold",
                "active_devices",
                "bound",
                "privacy",
                "warnings",
            )
        }

    return plan


def test_every_format_gives_the_same_plan(plan_by_gains, tmp_path):
    table = draw_gains("complex")
    np.save(tmp_path / "h.npy", table)
    expected = plan_by_gains("h.npy")
    for name, write in WRITERS.items():
        write(tmp_path / name, table)
        assert plan_by_gains(name) == expected, name


@pytest.mark.parametrize("name", ["h.npz", "h.mat", "v73.mat", "h.h5"])
def test_a_variable_is_chosen_by_its_name(
    plan_by_gains, call, scenario, tmp_path, name
):
    table = draw_gains("complex")
    np.save(tmp_path / "h.npy", table)
    arrays = {"H": table, "snr": np.ones((1, 1))}
    if name == "h.npz":
        np.savez(tmp_path / name, **arrays)
    elif name == "h.mat":
        scipy.io.savemat(tmp_path / name, arrays)
    elif name == "v73.mat":
        write_matlab_73(tmp_path / name, table=table, snr=arrays["snr"])
    else:
        with h5py.File(tmp_path / name, "w") as file:
            file["H"] = table
            file["measured/snr"] = arrays["snr"]
    assert plan_by_gains(f"{name}:H") == plan_by_gains("h.npy")
    for gains in (name, f"{name}:G", f"{name}:"):
        code, out, err = call(
            "plan", scenario, *with_set(["link.fading=file", f"link.gains={gains}"])
        )
        assert (code, out) == (2, "")
        assert names_key(err, "link.gains", name, "H", "snr")


def test_a_data_set_in_a_group(tmp_path):
    table = draw_gains("complex")
    write_hdf5(tmp_path / "h.h5", table, "cell/uplink/H")
    for name in ("h.h5", "h.h5:/cell/uplink/H", "h.h5:cell/uplink/H"):
        np.testing.assert_array_equal(load_gains(str(tmp_path / name)), table)


def test_vectors_of_matlab_are_rows_and_columns(tmp_path):
    """A row is one round of all devices, a column all rounds of one device."""
    row = draw_gains("complex")[:1]
    for number, table in enumerate((row, row.T)):
        scipy.io.savemat(tmp_path / f"{number}.mat", {"h": table})
        write_matlab_73(tmp_path / f"{number}-73.mat", "h", table)
        for name in (f"{number}.mat", f"{number}-73.mat"):
            np.testing.assert_array_equal(load_gains(str(tmp_path / name)), table)


def test_whole_numbers_of_matlab_stay_doubles(tmp_path):
    """MATLAB writes doubles that are whole numbers as bytes, of which −128 has no absolute value."""
    scipy.io.savemat(tmp_path / "h.mat", {"h": np.full((2, 2), -128.0)})
    assert load_gains(str(tmp_path / "h.mat")).dtype == np.float64


def test_the_name_of_a_variable_is_no_part_of_the_path():
    assert split_variable("h.mat:H") == ("h.mat", "H")
    assert split_variable("h.h5:/group/H") == ("h.h5", "/group/H")
    assert split_variable("C:\\data\\h.mat") == ("C:\\data\\h.mat", None)
    assert split_variable("a.mat:b/h.npz:H") == ("a.mat:b/h.npz", "H")


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("0.5", 0.5),
        (" -2e-3 ", -2e-3),
        ("0.3-0.4j", 0.3 - 0.4j),
        ("0.3 - 0.4i", 0.3 - 0.4j),
        ("(1.5e-01+-2e+00j)", 0.15 - 2j),
        ("-.5i", -0.5j),
        ("1e-3+1e-4i", 1e-3 + 1e-4j),
        ("", None),
        ("nan", None),
        ("1e999", None),
        ("1+infj", None),
        ("1_000", None),
        ("١", None),
        ("1+2", None),
        ("1j2", None),
        ("1 2j", None),
        ("1++2j", None),
        ("(1", None),
        ("j", None),
        ("0x10", None),
    ],
)
def test_cells_of_a_csv(cell, value):
    assert as_complex(cell) == value


def write_bytes(content):
    return lambda path: path.write_bytes(content)


def pickled(path):
    array = np.array([[{"a": 1}]], dtype=object)
    if path.suffix == ".npz":
        np.savez(path, H=array)
    else:
        scipy.io.savemat(path, {"H": array})


def with_nan(name):
    table = draw_gains("complex")
    table[3, 2] = np.nan
    return lambda path: WRITERS[name](path, table)


def cut(name):
    """A file that lost its second half."""

    def write(path):
        WRITERS[name](path, draw_gains("complex"))
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])

    return write


def linked_hdf5(path):
    write_hdf5(path.with_name("other.h5"), draw_gains("real"))
    with h5py.File(path, "w") as file:
        file["H"] = h5py.ExternalLink("other.h5", "H")


def external_hdf5(path):
    with h5py.File(path, "w") as file:
        file.create_dataset("H", (2, 2), "f8", external=[("raw.bin", 0, 32)])


def vast_hdf5(path):
    """A file of a few kilobytes that declares 8 TiB."""
    with h5py.File(path, "w") as file:
        file.create_dataset("H", (2**20, 2**20), "f8", chunks=(64, 64))


def text_of_matlab_73(path):
    write_matlab_73(path, table=np.ones((ROUNDS, DEVICES)))
    with h5py.File(path, "r+") as file:
        file["H"].attrs["MATLAB_class"] = np.bytes_("char")


BAD_FILES = {
    "text.npz": write_bytes(b"no zip file"),
    "pickled.npz": pickled,
    "cut.npz": cut("h.npz"),
    "text.mat": write_bytes(b"no MATLAB file" * 20),
    "empty.mat": write_bytes(b""),
    "cells.mat": pickled,
    "logical.mat": lambda path: scipy.io.savemat(
        path, {"H": np.ones((ROUNDS, DEVICES), bool)}
    ),
    "char.mat": lambda path: scipy.io.savemat(path, {"H": "0.5"}),
    "struct.mat": lambda path: scipy.io.savemat(path, {"H": {"a": 1.0}}),
    "cut.mat": cut("v7.mat"),
    "cut73.mat": cut("v73.mat"),
    "char73.mat": text_of_matlab_73,
    "text.h5": write_bytes(b"no HDF5 file"),
    "cut.h5": cut("h.h5"),
    "text-array.h5": lambda path: write_hdf5(path, ["a", "b"]),
    "no-array.h5": lambda path: h5py.File(path, "w").close(),
    "linked.h5": linked_hdf5,
    "external.h5": external_hdf5,
    "vast.h5": vast_hdf5,
    "missing.mat": lambda path: None,
    "missing.h5": lambda path: None,
    "missing.csv": lambda path: None,
    "missing.npz": lambda path: None,
    "empty.csv": write_bytes(b""),
    "header.csv": write_bytes(b"a,b\n1,2\n"),
    "ragged.csv": write_bytes(b"1,2\n3\n"),
    "blank.csv": write_bytes(b"1,2\n\n3,4\n"),
    "semicolons.csv": write_bytes(b"1;2\n3;4\n"),
    "open-quote.csv": write_bytes(b'1,"2\n3,4\n'),
    "latin.csv": write_bytes(b"1,\xe9\n"),
    "nan.npz": with_nan("h.npz"),
    "nan.csv": with_nan("numpy.csv"),
    "nan.mat": with_nan("v7.mat"),
    "nan73.mat": with_nan("v73.mat"),
    "nan.h5": with_nan("h.h5"),
    "zero.csv": write_bytes(b"0,1\n1,1\n"),
    "zero.mat": lambda path: scipy.io.savemat(path, {"H": np.zeros((ROUNDS, DEVICES))}),
    "shape.mat": lambda path: scipy.io.savemat(path, {"H": np.ones((DEVICES, ROUNDS))}),
    "vector.h5": lambda path: write_hdf5(path, np.ones(DEVICES)),
    "cube.mat": lambda path: scipy.io.savemat(
        path, {"H": np.ones((ROUNDS, 2, DEVICES))}
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_refused_by_name(call, scenario, tmp_path, name):
    BAD_FILES[name](tmp_path / name)
    code, out, err = call(
        "plan",
        scenario,
        *with_set(["link.fading=file", f"link.gains={name}"]),
        "--json",
    )
    assert (code, out) == (2, "")
    assert names_key(err, "link.gains", name)


@pytest.mark.parametrize("name", ["h.npy:H", "h.csv:H"])
def test_files_of_one_array_have_no_variables(tmp_path, name):
    with pytest.raises(InputError) as refused:
        load_gains(str(tmp_path / name))
    assert refused.value.key == "link.gains"


def test_a_packed_file_that_unpacks_to_too_much_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr("wflmc.support.storage.MAX_EXPANDED_BYTES", 2**16)
    monkeypatch.setattr("wflmc.support.storage.MAX_EXPANSION", 2)
    monkeypatch.setattr(
        "wflmc.scenario.gains.expansion_limit", lambda size: max(2**16, 2 * size)
    )
    table = np.ones((300, 300))
    scipy.io.savemat(tmp_path / "h.mat", {"H": table}, do_compression=True)
    np.savez_compressed(tmp_path / "h.npz", H=table)
    with h5py.File(tmp_path / "h.h5", "w") as file:
        file.create_dataset("H", data=table, compression="gzip")
    for name in ("h.mat", "h.npz", "h.h5"):
        with raises_input_error("link.gains", "MiB"):
            load_gains(str(tmp_path / name))


def test_an_array_that_is_there_twice_is_refused(tmp_path):
    np.savez(tmp_path / "h.npz", H=np.ones((2, 2)))
    with (
        zipfile.ZipFile(tmp_path / "h.npz", "a") as archive,
        pytest.warns(UserWarning, match="Duplicate"),
    ):
        archive.writestr("H.npy", archive.read("H.npy"))
    for name in ("h.npz", "h.npz:H"):
        with pytest.raises(InputError):
            load_gains(str(tmp_path / name))


def test_without_h5py_the_error_names_the_package(tmp_path, monkeypatch):
    write_hdf5(tmp_path / "h.h5", np.ones((2, 2)))
    write_matlab_73(tmp_path / "h.mat", table=np.ones((2, 2)))
    scipy.io.savemat(tmp_path / "old.mat", {"H": np.ones((2, 2))})
    monkeypatch.setitem(sys.modules, "h5py", None)
    for name in ("h.h5", "h.mat"):
        with raises_input_error("link.gains", "pip install h5py"):
            load_gains(str(tmp_path / name))
    assert load_gains(str(tmp_path / "old.mat")).shape == (2, 2)


@pytest.mark.parametrize("option", ["-v4", "-v6", "-v7"])
def test_files_of_octave(tmp_path, option):
    octave = shutil.which("octave-cli") or shutil.which("octave")
    if octave is None:
        pytest.skip("Octave is not installed")
    code = f"H = reshape(1:6, 2, 3) / 8 + 0.5i; save('{option}', 'h.mat', 'H');"
    subprocess.run(
        [octave, "--quiet", "--no-init-file", "--eval", code], cwd=tmp_path, check=True
    )
    expected = np.arange(1, 7).reshape(3, 2).T / 8 + 0.5j
    np.testing.assert_array_equal(load_gains(str(tmp_path / "h.mat")), expected)


def test_a_plan_remembers_the_file_of_a_variable(plan_of, call, scenario, tmp_path):
    """A saved plan is refused when the file has other gains, wherever the variable is."""
    path = tmp_path / "h.h5"
    write_hdf5(path, draw_gains("real"), "cell/H")
    overrides = with_set(["link.fading=file", "link.gains=h.h5:/cell/H"])
    document = plan_of(scenario, *overrides)
    assert list(document["files"]) == ["link.gains"]
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps(document))
    write_hdf5(path, 2 * draw_gains("real"), "cell/H")
    code, _, err = call("run", "--plan", saved, "--out", tmp_path / "run")
    assert code == 2
    assert "link.gains" in err
