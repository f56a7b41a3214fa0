"""Posteriors of NumPyro models: how a model is read, and which models are refused.

The model runs on the data of one example, with plates over examples cut down to one.
That is the likelihood of the example only where examples are independent given the
parameters. The sum over examples is therefore compared with the model on all data, site
by site, and a model for which they differ is refused.

Everything else, the prior above all, belongs to no single record, is never clipped, and
must not depend on the examples. It is read off the model on placeholders, which are
examples of ones: private data enter a posterior only as the rows of its examples.

- `cut_program` holds a model with its data, and evaluates it on some of the examples.
- `program_sources` decides which sites belong to an example, by the equations of the
  model and never by the values of data.
- `program_densities` compares densities, and refuses those that are not finite.
"""

import inspect
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from types import FrameType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from wflmc.apps.adapters.cut_program import (
    CONTROL_FLOW,
    REAL_KINDS,
    Leaf,
    LeafPath,
    Program,
    Refusal,
    leaves_by_path,
    number_kind,
    path_name,
    refuse_site,
)
from wflmc.apps.adapters.numpyro_types import (
    Model,
    Site,
    bijection,
    library,
    seeded_on_host,
    values_of,
    visit,
)
from wflmc.apps.adapters.program_densities import check_densities
from wflmc.apps.adapters.program_sources import check_sources
from wflmc.posterior.custom import CustomPosterior
from wflmc.posterior.custom.geometry import GeometryError
from wflmc.posterior.custom.model import EXAMPLE_INDEX
from wflmc.posterior.custom.precision import in_float64
from wflmc.support.errors import Fault, InputError, without_data
from wflmc.support.trees import NumericArray

MAX_EXAMPLES_WITH_OWN_PARAMETERS = 64
"""Examples up to which their latent variables are parameters without `keep`.

With more of them, parameters that grow in number with the data are a mistake more often
than a wish.
"""
MAX_DISCRETE_COMBINATIONS = 256
"""Values of an example's discrete variables, all together, that are summed over.

The likelihood of an example is computed once for each of them.
"""
MAX_ERROR_CHARACTERS = 160
"""Characters of a model's own error that the sentence about it cites."""

GROWING = Refusal(
    "has a value for every example, and grows with the data",
    "a variable of all examples, summed over by hand, or named in keep=… to be a "
    "parameter for each",
)
DISCRETE_OF_ALL_EXAMPLES = Refusal(
    "is discrete and of all examples",
    "in the plate over examples, where it is summed over; others have to be summed "
    "over by hand",
)
TOO_MANY_COMBINATIONS = Refusal(
    "has too many values",
    f"at most {MAX_DISCRETE_COMBINATIONS}, all discrete sites together",
)
INFINITE_SUPPORT = Refusal(
    "is discrete without end", "continuous, or summed over by hand"
)
SUPPORT_FROM_DATA = Refusal(
    "is discrete with values that depend on the data",
    "one whose values are the same whatever the data, or summed over by hand",
)
RUNNABLE = (
    "one that runs on the data (are its arguments there? is a plate over the wrong "
    "axis?)"
)
ALL_EXAMPLES_PLATE = (
    "one of all examples: mini-batches are an option of the posterior, batch=…"
)
UNAMBIGUOUS_PATH = (
    f"an argument with a name of its own, other than {EXAMPLE_INDEX}: keys with dots "
    "may spell another one's path"
)


def from_numpyro(
    model: Model,
    data: object,
    *,
    devices: int | ArrayLike | Sequence[ArrayLike],
    example_axis: int = 0,
    shared: Sequence[str] = (),
    keep: Sequence[str] = (),
    initial: Mapping[str, ArrayLike] | None = None,
    preconditioner: str | ArrayLike | CustomPosterior = "pilot",
    coords: Mapping[str, Sequence[object]] | None = None,
    **options: Any,
) -> CustomPosterior:
    """Return the posterior of a NumPyro model with independent observations.

    Observations have to be independent over examples given the parameters. Parameters
    are unconstrained inside, and log-Jacobians are counted;
    `posterior.unflatten(trace.theta)` and `trace.to_arviz(posterior)` have values by
    site, with deterministic sites that do not depend on the data.

    Args:
        model: a NumPyro model. Discrete latent variables of an example are summed over.
            Where it has no mode, its location-scale sites are written as location +
            scale * offset, as `LocScaleReparam(0)` does.
        data: a dictionary of the model's arguments by name, of which it takes those
            that it names; a tuple of its arguments; or its one argument. Arrays as long
            as the observations are the examples. All else, such as their number, is
            known to every device, and `posterior.not_covered` lists it. Sites that
            observe such data, and factors of them, are refused.
        devices: how many; or the device of every example, [N]; or a list of each one's
            examples.
        example_axis: the axis of the arrays that counts the examples; the last one of
            arrays with fewer axes.
        shared: names of arguments that are public: every device knows all of them, also
            where they are as long as the observations, and sites may observe them. They
            are listed in `posterior.not_covered` as well.
        keep: sites with a value for every example to be kept as parameters; up to 64
            examples all are.
        initial: values of sites to search for a mode from, by name; else 0 in
            unconstrained space.
        preconditioner: as of `posterior_from`. By default pilot chains on the pooled
            data find mean and covariance, and no promise of privacy covers what these
            reveal; the posterior of public data reveals nothing.
        coords: labels along plates, by the plate's name, for ArviZ.
        options: those of `posterior_from`: mu, L, batch, partition, key.

    Returns:
        The posterior, which samples, plans and reports take like a built-in one.

    Raises:
        InputError: in one sentence that names the site, for a model that cannot be
            split over devices, or whose prior would depend on data.
    """
    posterior_options = options | {"devices": devices, "preconditioner": preconditioner}
    read = partial(_read, data=data, axis=example_axis, shared=shared, keep=keep)
    program = read(model, initial=initial or {})
    try:
        return program.posterior(coords, **posterior_options)
    except InputError as error:
        # A model without a mode may have one if it is written with offsets.
        if not isinstance(error.__cause__, GeometryError) or not program.is_centred:
            raise
        with_offsets = _with_offsets(model, program.location_scale_sites)
        try:
            program = read(with_offsets, initial={})
            return program.posterior(coords, **posterior_options)
        except InputError as error_with_offsets:
            if isinstance(error_with_offsets.__cause__, GeometryError):
                raise  # the advice to write offsets would not help
        # Where offsets make another fault, the first error is the one to report.
        raise


def _with_offsets(model: Model, names: Iterable[str]) -> Model:
    """Return the model with some sites written as location + scale * offset."""
    numpyro = library()
    config = {name: numpyro.infer.reparam.LocScaleReparam(0) for name in names}
    return wraps(model)(numpyro.handlers.reparam(model, config=config))


def _read(
    model: Model,
    *,
    data: object,
    axis: int,
    shared: Sequence[str],
    keep: Sequence[str],
    initial: Mapping[str, ArrayLike],
) -> Program:
    """Return the model, cut such that the sum over examples is the model on all data.

    A model that cannot be cut is refused.
    """
    values = _arguments_by_name(model, data)
    list_arguments = tuple(
        name for name, value in values.items() if isinstance(value, list)
    )
    arguments = {
        name: np.asarray(value) if name in list_arguments else value
        for name, value in values.items()
    }
    _check_paths(arguments)
    program = Program(model, arguments, tuple(shared), list_arguments)
    with in_float64(), _naming_site(program):
        _run_on_blanks(program)
        _find_examples(program, axis, initial)
        _check_latent(program, keep)
        check_sources(program)
        check_densities(program)
    return program


def _arguments_by_name(model: Model, data: object) -> dict[str, object]:
    """Return the arguments of a model by name, out of a dictionary, a tuple or one."""
    parameters = inspect.signature(model).parameters.values()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD
    ]
    if isinstance(data, Mapping) and set(names) & set(data):
        return {name: data[name] for name in names if name in data}
    values = data if isinstance(data, tuple) else (data,)
    return dict(zip(names, values, strict=False))


def _check_paths(arguments: Mapping[str, object]) -> None:
    """Refuse arguments of which two have the same path, or one that of the numbers."""
    leaves = jax.tree_util.tree_leaves_with_path(arguments)
    paths = [path_name(path) for path, _ in leaves]
    ambiguous = [
        path for path in {*paths} if path == EXAMPLE_INDEX or paths.count(path) > 1
    ]
    if ambiguous:
        key = f"data[{min(ambiguous)}]"
        raise InputError(key, Fault("has a name that is taken"), UNAMBIGUOUS_PATH)


def _run_on_blanks(program: Program) -> None:
    """Run the model on ones before it sees data.

    A model that remembers its first data then remembers nothing private. A mean kept
    from the first call would otherwise pass from all records into the prior, as a
    number like any other.
    """

    def blank(path: LeafPath, leaf: Leaf) -> Leaf:
        is_array = np.ndim(leaf) > 0 and number_kind(leaf) in REAL_KINDS
        is_private = is_array and not program.is_declared(path_name(path))
        return np.ones_like(leaf) if is_private else leaf

    arguments = jax.tree_util.tree_map_with_path(blank, program.arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _find_sites(lambda _: partial(program.model, **arguments), {})
        except Exception:
            # A model that fails with ones may run on data; `not_covered` lists it.
            program.runs_on_ones = False


@contextmanager
def _naming_site(program: Program) -> Iterator[None]:
    """Let an error of a model name the site, or the plate, that raised it."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # whatever a user's model may raise
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, jax.errors.JAXTypeError | jax.errors.JAXIndexError):
            key = f"site {_first_untraced_site(program, frames)}"
            fault = Fault(CONTROL_FLOW.fault)
            raise InputError(key, fault, CONTROL_FLOW.requirement) from error
        fault = Fault(f"fails: {_first_line(error)}")
        raise InputError(_failing_site(frames), fault, RUNNABLE) from error


def _first_untraced_site(program: Program, frames: Iterable[FrameType]) -> str:
    """Return the first site that the traces of NumPyro on the stack lack."""
    visited: set[str] = set()
    for frame in frames:
        trace = getattr(frame.f_locals.get("self"), "trace", None)
        if isinstance(trace, Mapping):
            visited.update(trace)
    return next((name for name in program.sites if name not in visited), "")


def _failing_site(frames: Iterable[FrameType]) -> str:
    """Return the site that NumPyro was called for, as errors name it."""
    for frame in frames:
        is_primitive = frame.f_globals.get("__name__") == "numpyro.primitives"
        name = frame.f_locals.get("name")
        if is_primitive and name:
            return f"site {name}"
    return "model"


def _first_line(error: Exception) -> str:
    """Return the kind and the beginning of an error's text, without its last stop."""
    text = f"{type(error).__name__}: {str(error).strip()}"
    line = text.splitlines()[0]
    return line[:MAX_ERROR_CHARACTERS].rstrip(".: ")


@without_data
class _Reading(NamedTuple):
    """The sites of a model where its latent ones have the values to start from."""

    sites: dict[str, Site]
    start: dict[str, np.ndarray]
    """Unconstrained values of the continuous latent sites."""
    supports: dict[str, np.ndarray]
    """All values of the discrete ones."""


def _find_sites(
    model: Callable[[ModuleType], Model], initial: Mapping[str, ArrayLike]
) -> _Reading:
    """Run a model without arguments at the start, with arrays of NumPy if it can.

    JAX would compile a program for each of its operations. A model that fails with
    arrays of NumPy, as one that indexes them inside a loop of JAX, runs again with
    those of JAX.

    Args:
        model: without random keys, for the library of its arrays.
        initial: values of latent sites by name; others are 0 in unconstrained space.
    """
    try:
        with np.errstate(all="ignore"):
            return _visit_sites(model(np), initial, np)
    except InputError:
        raise
    except Exception:  # whatever a user's model may raise
        return _visit_sites(model(jnp), initial, jnp)


def _visit_sites(
    model: Model, initial: Mapping[str, ArrayLike], arrays: ModuleType
) -> _Reading:
    """Run a model once, with a value to start from at every latent site.

    Args:
        model: without random keys.
        initial: values of latent sites by name, as the model has them (constrained).
        arrays: numpy, with which nothing is compiled, or jax.numpy for a model that
            fails with it. Arrays of NumPy are read-only, so that a model that changes
            its values in place fails with both.
    """
    reading = _Reading({}, {}, {})

    def value_of(site: Site) -> NumericArray | None:
        if site["type"] != "sample" or site["is_observed"]:
            return None
        name = site["name"]
        law = site["fn"]
        if law.support.is_discrete:
            refuse_site(name, None if law.has_enumerate_support else INFINITE_SUPPORT)
            values = values_of(law)
            reading.supports[name] = values
            return _constant_array(arrays.broadcast_to(values[0], law.shape()))
        start = _start_value(site, initial.get(name))
        reading.start[name] = start
        return _constant_array(arrays.asarray(bijection(site)(start)))

    reading.sites.update(visit(seeded_on_host(model), value_of))
    return reading


def _start_value(site: Site, initial: ArrayLike | None) -> np.ndarray:
    """Return the unconstrained value of a latent site to start from; 0 by default."""
    to_support = bijection(site)
    shape = to_support.inverse_shape(site["fn"].shape())
    if initial is None:
        return np.zeros(shape)
    value = np.asarray(to_support.inv(jnp.asarray(initial, float)))
    return np.broadcast_to(value, shape).copy()


def _constant_array(values: NumericArray) -> NumericArray:
    """Return an array that cannot be changed in place, as arrays of JAX cannot."""
    if isinstance(values, np.ndarray):
        values = values.view()
        values.flags.writeable = False
    return values


def _find_examples(
    program: Program,
    axis: int,
    initial: Mapping[str, ArrayLike],
) -> None:
    """Find which data are examples, and the sites on placeholders for them.

    Examples are the arrays as long as the observations.
    """
    on_data = _find_sites(
        lambda _: partial(program.model, **program.arguments), initial
    )
    # Errors name these sites until those on placeholders take their place below.
    program.sites = on_data.sites
    _check_plates(on_data.sites)
    observations = {
        name: np.asarray(site["value"])
        for name, site in on_data.sites.items()
        if site.get("is_observed")
    }
    _find_example_axes(program, axis, observations)
    if not program.example_axes or not observations:
        fault = Fault("observes no array of the data")
        raise InputError("model", fault, "a NumPyro model with obs=… of the data")

    placeholders = program.placeholders(program.count)
    on_placeholders = _find_sites(
        lambda arrays: program.model_on(placeholders, arrays=arrays), initial
    )
    _check_same_sites(on_data, on_placeholders)
    program.observations = observations
    program.sites = on_placeholders.sites
    program.start = on_placeholders.start
    program.supports = on_placeholders.supports


def _find_example_axes(
    program: Program, axis: int, observations: Mapping[str, np.ndarray]
) -> None:
    """Set N, and which axis of which arguments counts the examples.

    N is the first length of an observation, or else of an argument, that some argument
    has as well. Arguments that are declared public are no examples.
    """
    shapes = {
        path: np.shape(leaf)
        for path, leaf in leaves_by_path(program.arguments).items()
        if np.ndim(leaf) and not program.is_declared(path)
    }
    axes = {path: min(axis, len(shape) - 1) for path, shape in shapes.items()}
    argument_lengths = {path: shape[axes[path]] for path, shape in shapes.items()}
    observed_shapes = [value.shape for value in observations.values() if value.ndim]
    lengths = [shape[min(axis, len(shape) - 1)] for shape in observed_shapes]
    lengths += argument_lengths.values()
    all_sizes = {size for shape in shapes.values() for size in shape}
    program.count = next((length for length in lengths if length in all_sizes), 0)
    program.example_axes = {
        path: axes[path]
        for path, length in argument_lengths.items()
        if length == program.count
    }


def _check_plates(sites: Mapping[str, Site]) -> None:
    """Refuse plates that draw mini-batches.

    Their densities are scaled, and which examples are drawn is random.
    """
    for name, site in sites.items():
        if site["type"] != "plate":
            continue
        size, subsample_size = site["args"]
        if subsample_size is not None and subsample_size != size:
            fault = f"is a plate that draws {subsample_size} of {size}"
            refuse_site(name, Refusal(fault, ALL_EXAMPLES_PLATE))


def _check_same_sites(on_data: _Reading, on_placeholders: _Reading) -> None:
    """Refuse a model whose sites, or the values of a discrete one, depend on data."""
    different = on_data.sites.keys() ^ on_placeholders.sites.keys()
    if different:
        refuse_site(min(different), CONTROL_FLOW)
    for name, values in on_placeholders.supports.items():
        is_same = np.array_equal(values, on_data.supports[name])
        refuse_site(name, None if is_same else SUPPORT_FROM_DATA)


def _check_latent(program: Program, keep: Sequence[str]) -> None:
    """Refuse latent sites that would grow with the data, or cannot be summed over."""
    sizes = [values.size for values in program.supports.values()]
    combinations = np.prod(sizes, dtype=float)
    for name in (*program.local_axes, *program.supports):
        is_local = name in program.local_axes
        is_discrete = name in program.supports
        has_too_many = program.count > MAX_EXAMPLES_WITH_OWN_PARAMETERS
        if is_local and has_too_many and name not in keep:
            refuse_site(name, GROWING)
        if is_discrete and not program.is_in_example_plate(name):
            refuse_site(name, DISCRETE_OF_ALL_EXAMPLES)
        if combinations > MAX_DISCRETE_COMBINATIONS:
            refuse_site(name, TOO_MANY_COMBINATIONS)
