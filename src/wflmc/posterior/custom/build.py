"""Making the posterior of a custom model: checks, coordinates, and constants.

Programs for the search of coordinates and for the check of the start are compiled in
other threads while this one traces. The order in which they are begun is tuned.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from wflmc.posterior.coordinates import Affine
from wflmc.posterior.custom.geometry import (
    CoordinateSearch,
    GeometryError,
    NoModeError,
)
from wflmc.posterior.custom.model import (
    LogLikelihood,
    LogPrior,
    ParameterLayout,
    Sites,
    TracedModel,
    checked_arrays,
    checked_parameters,
    trace_model,
)
from wflmc.posterior.custom.posterior import CustomPosterior, LaplaceMode
from wflmc.posterior.custom.precision import in_float32, in_float64
from wflmc.posterior.custom.start import StartCheck
from wflmc.posterior.inputs import check_counts, check_positive
from wflmc.posterior.partition import examples_by_device
from wflmc.support.compilation import Compiler
from wflmc.support.errors import Fault, InputError, without_data
from wflmc.support.trees import ArrayTree, DrawFunction

Array = NDArray[np.float64]
Preconditioner: TypeAlias = str | ArrayLike | CustomPosterior
"""The coordinates that chains move in: by a method's name, by scales[m], or those of
another posterior."""

SEARCHES = ("laplace", "pilot")
"""Preconditioners that look for coordinates."""
MAX_SEARCH_DIM = 2048
"""Parameters up to which a matrix of coordinates is looked for."""
FLOAT32_SLACK = 1e-3
"""By how much, relatively, float32 may put an estimate beside the other constant."""


@without_data
class ChosenCoordinates(NamedTuple):
    """The coordinates that a preconditioner asks for, and what is known in them."""

    space: Affine | None = None
    """None: the parameters."""
    mu: float | None = None
    """μ in these coordinates, where it is known or estimated."""
    L: float | None = None
    """L in these coordinates, where it is known or estimated."""

    @property
    def has_constants(self) -> bool:
        """Return whether μ and L came with the coordinates."""
        return self.mu is not None


class Constants(NamedTuple):
    """Numbers that a user may give for a posterior; None where they are to be found."""

    mu: float | None
    L: float | None
    initial_std: float
    batch: int | None

    @property
    def missing(self) -> tuple[str, ...]:
        """Return which of mu and L were not given."""
        by_name = {"mu": self.mu, "L": self.L}
        return tuple(name for name, value in by_name.items() if value is None)

    def check(self) -> None:
        """Refuse numbers that are out of range.

        Raises:
            InputError: names the first one; or mu, if it is larger than L.
        """
        given_bounds = {}
        if self.mu is not None:
            given_bounds["mu"] = self.mu
        if self.L is not None:
            given_bounds["L"] = self.L
        check_positive(given_bounds)
        check_positive({"initial_std": self.initial_std}, or_zero=True)
        if self.mu is not None and self.L is not None and self.mu > self.L:
            raise InputError("mu", self.mu, f"at most L = {self.L:g}")
        if self.batch is not None:
            check_counts(batch=self.batch)


@without_data
class _Prepared(NamedTuple):
    """A model that is traced and checked, and where its chains begin."""

    model: TracedModel
    """In the coordinates that chains move in."""
    chosen: ChosenCoordinates
    start: Array
    """In these coordinates, [m]."""
    constants: Constants


def posterior_from(  # noqa: PLR0913  # what a model is made of, by name
    log_likelihood: LogLikelihood,
    log_prior: LogPrior,
    data: ArrayTree,
    *,
    initial: object,
    devices: int | ArrayLike | Sequence[ArrayLike],
    initial_std: float = 0.0,
    mu: float | None = None,
    L: float | None = None,
    batch: int | None = None,
    preconditioner: Preconditioner = "none",
    partition: str = "iid",
    key: jax.Array | None = None,
    functions: Mapping[str, DrawFunction] | None = None,
    sites: Sites | None = None,
) -> CustomPosterior:
    """Return the posterior of any JAX model whose examples are spread over devices.

    Device k has the cost f_k = −Σ_n log p(d_n|θ) − (1/K) log p(θ) of its examples d_n
    (the paper's equation 6). Its gradient is traced once: what the functions take from
    around them may change later without any effect.

    Args:
        log_likelihood: of parameters and ONE example, a number.
        log_prior: of parameters, up to a constant.
        data: a pytree of arrays [N, ...] with the examples along their first axis.
        initial: parameters to start chains at, any pytree of floating-point arrays: it
            says what parameters there are, which the functions alone cannot.
        devices: how many; or the device of every example, [N]; or a list of the
            examples of each device.
        initial_std: standard deviation of the starts around `initial`, the same for all
            parameters.
        mu: strong convexity of −log p(θ|D), where a public value is known. Else it is
            estimated by the Hessian at `initial` and at a mode, which depends on the
            data: no promise of privacy covers that.
        L: smoothness of −log p(θ|D); else estimated like `mu`.
        batch: examples that each device draws for a round, all by default and where no
            device has more. Gradients are then noisier than the bound knows, and no
            privacy is claimed for an example not being drawn.
        preconditioner: in which coordinates chains move, and start from N(0, I) in
            them. "none": in the parameters; "laplace": by a mode and the Hessian
            there; "pilot": by pilot chains from there, with mu and L as well; another
            posterior: in its coordinates, as of public data; an array [m]: scales of
            the parameters around `initial`, as known in public. What laplace and pilot
            reveal of the data is not covered by any promise of privacy.
        partition: "iid" or "blocks", where `devices` is a number.
        key: seeds iid; jax.random.key(0) by default.
        functions: of the parameters, such as predictions, by name: `evaluate` gives
            their R-hat and ESS.
        sites: what an adapter of another library knows of the parameters.

    Returns:
        The posterior; `estimated` names which of its constants are estimates.

    Raises:
        InputError: names the argument at fault, such as a function that fails on one
            example, or could let one example change the gradient of another; and where
            no mode, coordinates or constants are found.

    Examples:
        >>> X, y = np.ones((20, 1)), np.zeros(20)
        >>> posterior = posterior_from(
        ...     lambda w, e: -0.5 * (e[1] - e[0] @ w) ** 2,
        ...     lambda w: -0.5 * jnp.sum(w**2),
        ...     (X, y),
        ...     initial=jnp.zeros(1),
        ...     devices=4,
        ... )
        >>> round(posterior.mu)
        21
    """
    examples, count = checked_arrays("data", data)
    start, structure, shapes = checked_parameters(initial)
    sites = (sites or Sites())._replace(functions=functions or {})
    prepared = _prepare(
        log_likelihood,
        log_prior,
        ParameterLayout(structure, shapes, sites),
        examples=examples,
        start=start,
        constants=Constants(mu, L, initial_std, batch),
        preconditioner=preconditioner,
    )
    parts = examples_by_device(devices, count, partition=partition, key=key)
    posterior = _assemble(prepared, examples, parts)
    posterior = _with_origin(posterior, prepared.chosen, preconditioner, count)
    if np.isnan(posterior.mu + posterior.L):
        return _with_estimates(posterior)
    return posterior


def _prepare(
    log_likelihood: LogLikelihood,
    log_prior: LogPrior,
    layout: ParameterLayout,
    *,
    examples: ArrayTree,
    start: Array,
    constants: Constants,
    preconditioner: Preconditioner,
) -> _Prepared:
    """Trace a model, find its coordinates, and check it where chains begin.

    Args:
        log_likelihood: of parameters and one example.
        log_prior: of parameters.
        layout: of the parameters.
        examples: a pytree of arrays [N, ...].
        start: parameters that chains begin at, [m].
        constants: as the user gave them.
        preconditioner: as of `posterior_from`.
    """
    cost = partial(_pooled_cost, log_likelihood, log_prior, layout, examples)
    with Compiler() as compiler:
        begin_search = partial(
            _begin_search, compiler, preconditioner, cost, start.size
        )
        # Functions of NumPyro's adapter are checked already, so that their search may
        # begin first; what is wrong with others is for `trace_model` to report.
        is_checked = layout.sites.batched_log_likelihood is not None
        search = begin_search() if is_checked else None
        with in_float32():
            model = trace_model(log_likelihood, log_prior, layout, examples)
        if search is None:
            search = begin_search()
        start_check = StartCheck(model, examples)
        if search is not None:
            start_check.compile(compiler)
        chosen = _choose_coordinates(preconditioner, start, search, layout)
        if chosen.space is not None:
            start = 0 * start
            constants = constants._replace(initial_std=1.0)
        constants.check()
        # Before the compiler ends, which gives up what nobody has waited for.
        start_check.refuse(chosen.space, start)
    if chosen.space is not None:
        model = model.in_coordinates(chosen.space)
    return _Prepared(model, chosen, start, constants)


def _pooled_cost(
    log_likelihood: LogLikelihood,
    log_prior: LogPrior,
    layout: ParameterLayout,
    examples: ArrayTree,
    theta: jax.Array,
) -> jax.Array:
    """Return −log p(θ|D) of all devices' examples, in the precision of θ[m]."""
    parameters = layout.unflatten(theta)
    of_examples = jax.vmap(log_likelihood, (None, 0))
    if layout.sites.batched_log_likelihood is not None:
        of_examples = layout.sites.batched_log_likelihood
    return -jnp.sum(of_examples(parameters, examples)) - log_prior(parameters)


def _begin_search(
    compiler: Compiler,
    preconditioner: Preconditioner,
    cost: Callable[[jax.Array], jax.Array],
    dim: int,
) -> CoordinateSearch | None:
    """Begin the search that a preconditioner asks for; None where it asks for none."""
    if not isinstance(preconditioner, str) or preconditioner not in SEARCHES:
        return None
    if dim > MAX_SEARCH_DIM:
        return None
    by_pilot = preconditioner == "pilot"
    with in_float64():
        return CoordinateSearch(compiler, cost, dim, by_pilot=by_pilot)


def _choose_coordinates(
    preconditioner: Preconditioner,
    start: Array,
    search: CoordinateSearch | None,
    layout: ParameterLayout,
) -> ChosenCoordinates:
    """Return the coordinates that a preconditioner asks for.

    Args:
        preconditioner: as of `posterior_from`.
        start: parameters that chains begin at, [m].
        search: for coordinates, where it has begun.
        layout: of the parameters.

    Raises:
        InputError: for another preconditioner, or where none are found.
    """
    if search is not None:
        return _find_coordinates(search, start, layout)
    if isinstance(preconditioner, CustomPosterior):
        space = preconditioner.coordinates
        if space is not None and preconditioner.dim == start.size:
            return ChosenCoordinates(space, preconditioner.mu, preconditioner.L)
    elif not isinstance(preconditioner, str):
        has_shape = np.shape(preconditioner) == start.shape
        if has_shape and np.all(np.asarray(preconditioner) > 0):
            return ChosenCoordinates(
                Affine(start, np.asarray(preconditioner, dtype=float))
            )
    elif preconditioner == "none":
        return ChosenCoordinates()
    requirement = (
        f"none; a preconditioned posterior of {start.size} parameters, or a scale for "
        f"each; laplace or pilot (up to {MAX_SEARCH_DIM} parameters)"
    )
    raise InputError("preconditioner", preconditioner, requirement)


def _find_coordinates(
    search: CoordinateSearch, start: Array, layout: ParameterLayout
) -> ChosenCoordinates:
    """Return the coordinates that a search finds.

    The search for a mode moves all parameters but positive scales first, which would
    run away while the others are not fitted, and then all of them. In the coordinates
    found μ is taken to be 1; that is an estimate, and `_with_origin` lists it as one.

    Raises:
        InputError: names the parameter along which none were found.
    """
    moves_first = layout.unflatten(np.ones(layout.dim))
    # As of every model that has sites.
    if isinstance(moves_first, dict):
        moves_first |= {name: 0 * moves_first[name] for name in layout.sites.scales}
    try:
        with in_float64():
            leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(moves_first)]
            space, L = search.find(start, np.concatenate(leaves))
    except GeometryError as error:
        raise _without_coordinates(error, layout) from error
    return ChosenCoordinates(space, mu=1.0, L=L)


def _without_coordinates(
    error: GeometryError,
    layout: ParameterLayout,
) -> InputError:
    """Return the error that names the parameter along which the search failed."""
    directions = layout.unflatten(np.asarray(error.direction))
    sizes = jax.tree.map(lambda part: float(np.abs(part).max()), directions)
    leaves = jax.tree_util.tree_leaves_with_path(sizes)
    path, _ = max(leaves, key=lambda leaf: leaf[1])
    name = jax.tree_util.keystr(path, simple=True, separator=".") or "parameters"
    problem = Fault(error.problem)
    # Of a model with sites, these were written with offsets where that may help.
    if layout.sites.dims:
        return InputError(f"site {name}", problem, error.remedy)
    # Other errors state by themselves whether offsets would help.
    if isinstance(error, NoModeError):
        remedy = f"{error.remedy}; or a hierarchy written as mean + scale * offset"
        return InputError(name, problem, remedy)
    return InputError(name, problem, error.remedy)


def _assemble(
    prepared: _Prepared, examples: ArrayTree, parts: list[NDArray[np.intp]]
) -> CustomPosterior:
    """Return the posterior of a model and the examples of its devices.

    Args:
        prepared: the model.
        examples: a pytree of arrays [N, ...].
        parts: the examples of every device, by their numbers.

    Returns:
        The posterior; mu and L are nan where they are to be estimated.
    """
    constants = prepared.constants
    chosen = prepared.chosen
    sizes = np.array([part.size for part in parts])
    largest = sizes.max()
    # A device's first example fills it up: one of zeros might have no likelihood.
    filled_up = [
        np.append(part, np.full(largest - part.size, part[0])) for part in parts
    ]
    rows = np.stack(filled_up)
    batch = constants.batch
    if batch is not None:
        batch = None if batch >= largest else int(batch)
    return CustomPosterior(
        data=jax.tree.map(lambda values: values[rows], examples),
        sizes=sizes,
        start=prepared.start,
        initial_std=float(constants.initial_std),
        mu=_first_number(constants.mu, chosen.mu),
        L=_first_number(constants.L, chosen.L),
        model=prepared.model,
        prior_devices=len(parts),
        batch=batch,
        estimated=constants.missing,
    )


def _first_number(*numbers: float | None) -> float:
    """Return the first of some numbers that is not None; nan where all are."""
    return float(next((number for number in numbers if number is not None), np.nan))


def _with_origin(
    posterior: CustomPosterior,
    chosen: ChosenCoordinates,
    preconditioner: Preconditioner,
    count: int,
) -> CustomPosterior:
    """Return the posterior with its mode and what of it depends on the data.

    A mode is known where μ and L came with the coordinates. Those of another posterior
    depend on its data and not on these, so that nothing is listed as an estimate.

    Args:
        posterior: in the coordinates chosen, with neither set.
        chosen: its coordinates.
        preconditioner: as of `posterior_from`.
        count: N.
    """
    if not chosen.has_constants:
        return posterior
    # In coordinates by its own moments the posterior is N(0, I).
    mode = LaplaceMode(posterior.start, np.ones_like(posterior.start))
    posterior = replace(posterior, known_mode=mode)
    if isinstance(preconditioner, CustomPosterior):
        coordinate_examples = preconditioner.coordinate_examples
        return replace(posterior, estimated=(), coordinate_examples=coordinate_examples)
    estimated = (*posterior.estimated, "the preconditioner")
    return replace(posterior, estimated=estimated, coordinate_examples=count)


def _with_estimates(posterior: CustomPosterior) -> CustomPosterior:
    """Estimate mu and L by the Hessian at the start and at a mode.

    Where the cost is not convex at the start, mu is that of the mode alone.

    Raises:
        InputError: if mu cannot be estimated, or contradicts a constant that was given.
    """
    estimated = posterior.estimated
    mu = posterior.mu
    L = posterior.L
    at_start = posterior.eigenvalues(posterior.start)
    known_mode = LaplaceMode(posterior.start, at_start)
    # A network that is symmetric has no single mode to look for.
    if not posterior.model.sites.symmetric:
        known_mode = posterior.laplace
    at_mode = known_mode.eigenvalues
    values = np.concatenate([at_start, at_mode])
    smallest_at_start = at_start.min()
    smallest_at_mode = at_mode.min()
    is_convex = smallest_at_mode > 0 or "mu" not in estimated
    if not np.all(np.isfinite(values)) or not is_convex:
        raise _not_convex(estimated[0], smallest_at_mode, smallest_at_start)
    if "mu" in estimated and smallest_at_start > 0:
        mu = float(values.min())
    elif "mu" in estimated:
        mu = float(smallest_at_mode)
        at_mode_alone = (
            "mu (at the mode alone: at the start the least eigenvalue is "
            f"{smallest_at_start:.3g}, not convex)"
        )
        estimated = (at_mode_alone, *estimated[1:])
    if "L" in estimated:
        L = float(np.abs(values).max())
    if mu > L * (1 + FLOAT32_SLACK):
        names = " and ".join(posterior.estimated)
        raise InputError("mu", mu, f"at most L = {L:.6g} ({names} is an estimate)")
    if "L" in estimated:
        L = max(mu, L)
    return replace(
        posterior, mu=min(mu, L), L=L, estimated=estimated, known_mode=known_mode
    )


def _not_convex(
    name: str, smallest_at_mode: float, smallest_at_start: float
) -> InputError:
    """Return the error for a constant that cannot be estimated."""
    requirement = (
        "a number above 0: none can be estimated, as the cost is not convex (least "
        f"eigenvalue {smallest_at_mode:.3g} at the mode found and "
        f"{smallest_at_start:.3g} at `initial`); is a sign wrong?"
    )
    return InputError(name, Fault("was not given"), requirement)
