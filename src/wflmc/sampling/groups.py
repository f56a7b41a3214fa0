"""Groups of arrays with named axes, in ArviZ's schema.

A trace is exported as groups: `posterior` has the draws, `sample_stats` what is known
of the rounds, and so on. They are plain NumPy arrays, so that a file can be written
without importing xarray, which takes longer than most runs.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import jax
import numpy as np

from wflmc.posterior import CustomPosterior
from wflmc.posterior.custom.model import ShapeTree
from wflmc.support.trees import ArrayTree, JsonValue
from wflmc.version import __version__

if TYPE_CHECKING:
    import arviz
    import xarray as xr

LIBRARY = {"inference_library": "wflmc", "inference_library_version": __version__}
"""Attributes of every group that is written."""
DRAW_AXES = ("chain", "draw")
"""The leading axes of all that is computed for every draw."""
RESERVED_NAMES = (*DRAW_AXES, "observation", "device")
"""Names of axes, which no variable can have."""
NUMBERED_AXES = (*DRAW_AXES, "observation", "round", "class", "parameter")
"""Axes that count from 0 unless they have other labels."""

Variable: TypeAlias = tuple[tuple[str, ...], np.ndarray]
"""The names of an array's axes, and the array."""
Labels: TypeAlias = "Sequence[object] | np.ndarray | tuple[str, np.ndarray]"
"""Labels along an axis; with the name of the axis where they have another name."""
Coords: TypeAlias = Mapping[str, Labels]
"""Labels by name, which is that of their axis unless they come with it."""
Attributes: TypeAlias = Mapping[str, JsonValue]
"""Of a group, by name."""


class Group(NamedTuple):
    """A group of ArviZ's schema: what a data set of xarray has, without xarray."""

    variables: Mapping[str, Variable]
    """Arrays by name."""
    coords: Coords
    """Labels along axes."""
    attributes: Attributes
    """Facts about the group, as JSON values."""

    def with_attributes(self, attributes: Attributes) -> "Group":
        """Return the group with further attributes.

        Those of the same name are replaced. Arrays and labels are shared with this
        group, not copied.

        Args:
            attributes: by name.
        """
        return self._replace(attributes={**self.attributes, **attributes})

    @property
    def data_set(self) -> "xr.Dataset":
        """Return the group as a data set of xarray.

        xarray is imported here, and is needed for nothing else. Arrays are wrapped, not
        copied: those of a file on disk are read when they are used.
        """
        import xarray as xr

        return xr.Dataset(self.variables, self.coords, self.attributes)

    @property
    def arrays(self) -> dict[str, Variable]:
        """Return all arrays by name, labels included, with the names of their axes.

        In a file labels are variables as well. Those of an axis have its name, others,
        such as the device of every observation, lie along the axis that they name.
        """
        arrays: dict[str, Variable] = {}
        for name, (axes, values) in self.variables.items():
            arrays[name] = (axes, np.asarray(values))
        for name, labels in self.coords.items():
            if isinstance(labels, tuple):
                axis, along_axis = labels
                arrays[name] = ((axis,), np.asarray(along_axis))
            else:
                arrays[name] = ((name,), np.asarray(labels))
        return arrays

    @property
    def sizes(self) -> dict[str, int]:
        """Return the lengths of all axes by name, in the order of their first use.

        An axis that several arrays have must be equally long in all of them; the last
        array decides, and xarray refuses any other.
        """
        sizes: dict[str, int] = {}
        for axes, array in self.arrays.values():
            sizes.update(zip(axes, array.shape, strict=True))
        return sizes


Groups: TypeAlias = dict[str, Group]
"""Groups by their names in ArviZ's schema."""
ArvizData: TypeAlias = "arviz.InferenceData | xr.DataTree"
"""What ArviZ takes: InferenceData before ArviZ 1, a DataTree from then on."""


def make_group(
    variables: Mapping[str, Variable],
    coords: Coords | None = None,
    attributes: Attributes | None = None,
    numbered: Sequence[str] = NUMBERED_AXES,
) -> Group:
    """Return arrays with the names of their axes as a group, axes labelled.

    An axis in `numbered` is labelled 0, 1, 2, … unless `coords` has labels for it; any
    other axis has labels only where `coords` has them.

    Args:
        variables: arrays by name.
        coords: labels along axes.
        attributes: of the group.
        numbered: axes that count from 0.
    """
    sizes = Group(variables, {}, {}).sizes
    labels: dict[str, Labels] = {}
    for axis, size in sizes.items():
        if axis in numbered:
            labels[axis] = np.arange(size)
    labels.update(coords or {})
    return Group(variables, labels, attributes or {})


def to_arviz_data(groups: Groups) -> ArvizData:
    """Return groups as the installed version of ArviZ takes them.

    ArviZ and xarray are imported here; they are optional dependencies of wflmc.

    Args:
        groups: by their names in ArviZ's schema.

    Returns:
        A DataTree of xarray from ArviZ 1 on, InferenceData before.

    Raises:
        ImportError: if ArviZ or xarray is not installed.
    """
    import arviz
    import xarray as xr

    data_sets = {name: group.data_set for name, group in groups.items()}
    major_version = int(arviz.__version__.split(".")[0])
    if major_version >= 1:
        return xr.DataTree.from_dict(data_sets)
    # InferenceData has keyword arguments of other types as well.
    keywords: dict[str, Any] = {**data_sets}
    return arviz.InferenceData(**keywords)


class NamedDraws(NamedTuple):
    """Draws of the parameters by name, as a data set of ArviZ's has them."""

    variables: Mapping[str, Variable]
    """The names of the axes, chain and draw first, and the draws along them, by the
    name of the parameters."""
    coords: Coords
    """Labels along axes, by the axis's name."""
    numbered: tuple[str, ...]
    """Axes that count from 0."""

    @property
    def group(self) -> Group:
        """Return the draws as the group `posterior`, without attributes.

        Axes that the model has no labels for count from 0 where they are in `numbered`,
        and are without labels else, as is usual in ArviZ.
        """
        return make_group(dict(self.variables), self.coords, numbered=self.numbered)


def name_draws(theta: np.ndarray, posterior: object = None) -> NamedDraws:
    """Return draws by the names of the parameters.

    A custom model names its parameters, and has their axes' names and labels where it
    comes from another library; sites with a bounded support are in that support. The
    draws of any other model, or of one with another number of parameters, are one array
    called theta.

    Args:
        theta: draws, [chain, draw, m].
        posterior: of a custom model; None for draws without names.

    Returns:
        Arrays [chain, draw, ...] by name.
    """
    if isinstance(posterior, CustomPosterior) and posterior.dim == theta.shape[-1]:
        sites = posterior.model.sites
        variables = name_leaves(
            posterior.unflatten(theta),
            DRAW_AXES,
            "theta",
            sites.dims,
        )
        return NamedDraws(variables, sites.coords, numbered=DRAW_AXES)
    axes = (*DRAW_AXES, "parameter")
    return NamedDraws({"theta": (axes, theta)}, {}, numbered=NUMBERED_AXES)


def draws_to_arviz(draws: NamedDraws, attributes: Attributes) -> ArvizData:
    """Return draws that do not come from a trace as ArviZ takes them.

    The result has the one group `posterior`, with the version of wflmc among its
    attributes; draws of the noise-aware posterior are such draws.

    Args:
        draws: by the names of the parameters, from `name_draws`.
        attributes: further attributes of the group.
    """
    group = draws.group.with_attributes({**LIBRARY, **attributes})
    return to_arviz_data({"posterior": group})


def name_leaves(
    tree: ArrayTree | ShapeTree,
    leading_axes: tuple[str, ...],
    default_name: str,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Variable]:
    """Return the arrays of a pytree by name, with the names of their axes.

    Nested names are joined by dots. Two arrays without names, such as (X, y), are
    called X and y; a single one is called `default_name`. A name that an axis has, such
    as chain, or that was used before, gets an underscore.

    Args:
        tree: a pytree of arrays, all with the leading axes.
        leading_axes: the names of the first axes.
        default_name: for an array that is no tree.
        dims: the names of the further axes by the array's name; `<name>_dim_0` and so
            on where they have none.

    Returns:
        Arrays with their axes, in the order of the tree.
    """
    variables: dict[str, Variable] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if _is_unnamed_pair(tree, len(leaves)):
        pair = {"X": tree[0], "y": tree[1]}
        leaves = jax.tree_util.tree_leaves_with_path(pair)
    for path, leaf in leaves:
        tree_name = jax.tree_util.keystr(path, simple=True, separator=".")
        name = tree_name or default_name
        axes = (dims or {}).get(name)
        while name in RESERVED_NAMES or name in variables:
            name += "_"
        if not axes:
            further_axes = range(np.ndim(leaf) - len(leading_axes))
            axes = [f"{name}_dim_{axis}" for axis in further_axes]
        variables[name] = ((*leading_axes, *axes), np.asarray(leaf))
    return variables


def _is_unnamed_pair(
    tree: ArrayTree | ShapeTree, leaf_count: int
) -> TypeGuard[Sequence[ArrayTree | ShapeTree]]:
    """Return whether a tree is a plain tuple or list of two arrays.

    A named tuple has names of its own, and is no such pair.
    """
    is_sequence = type(tree) in (tuple, list)
    if not is_sequence or not isinstance(tree, tuple | list):
        return False
    return len(tree) == leaf_count == 2
