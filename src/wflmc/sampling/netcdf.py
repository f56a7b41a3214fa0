"""Groups of arrays as a NetCDF file, which `arviz.from_netcdf` reads."""

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from wflmc.sampling.groups import Groups
from wflmc.support.storage import replacing, reserve

VARIABLE_OVERHEAD = 2048
"""Bytes that are reserved for every variable beside its numbers: HDF5 aligns arrays,
which leaves gaps."""


def write_groups(path: str | Path, groups: Groups) -> None:
    """Write groups as NetCDF, completely or not at all.

    One chain at a time is in memory, so that draws may lie in a file. HDF5 crashes when
    the disk is full: therefore the file without its numbers is prepared in memory, and
    the space for all of them is reserved before HDF5 writes the first.

    Args:
        path: of the file, which is replaced where it exists.
        groups: by their names.

    Raises:
        OSError: if the disk has no space for the file, which is then not changed.
    """
    import h5py  # type: ignore[import-untyped]

    empty_file = _describe_groups(groups)
    contents: dict[str, np.ndarray] = {}
    for group_name, group in groups.items():
        for variable, (_, values) in group.arrays.items():
            contents[f"{group_name}/{variable}"] = values
    sizes = [values.nbytes + VARIABLE_OVERHEAD for values in contents.values()]
    with replacing(path) as target:
        target.write(empty_file)
        target.flush()
        reserve(target, target.tell() + sum(sizes))
        with h5py.File(target.name, "r+") as file:
            _write_values(file, contents)


def _describe_groups(groups: Groups) -> memoryview:
    """Return a NetCDF file with all names, axes and attributes, without numbers."""
    import h5netcdf

    buffer = io.BytesIO()
    with h5netcdf.File(buffer, "w") as file:
        for group_name, group in groups.items():
            file_group = file.create_group(group_name)
            file_group.attrs.update(group.attributes)
            file_group.dimensions = group.sizes
            for variable, (axes, values) in group.arrays.items():
                file_group.create_variable(variable, axes, values.dtype)
    return buffer.getbuffer()


def _write_values(
    file: Mapping[str, np.ndarray],
    contents: Mapping[str, np.ndarray],
) -> None:
    """Write arrays into the variables of a file, row by row: a row is a chain."""
    for name, values in contents.items():
        variable = file[name]
        if values.ndim > 1:
            for row in range(len(values)):
                variable[row] = values[row]
        else:
            variable[...] = values[...]
