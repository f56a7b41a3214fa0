"""Groups of observed data and of what the model predicts, for `Trace.to_arviz`.

Outcomes and log-likelihoods are computed for evenly spaced draws, in chunks, with keys
of their own: the same trace gives the same groups every time. All of it is computed
from the devices' private records.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.posterior import CustomPosterior
from wflmc.posterior.custom.model import (
    EXAMPLE_INDEX,
    ModelFunction,
    checked_arrays,
    per_example,
    shape_of,
)
from wflmc.posterior.regression import Regression
from wflmc.sampling.groups import (
    DRAW_AXES,
    Coords,
    Group,
    Groups,
    Labels,
    Variable,
    make_group,
    name_leaves,
)
from wflmc.support.errors import Fault, InputError, without_data
from wflmc.support.keys import host_generator
from wflmc.support.progress import progress_bar
from wflmc.support.trees import ArrayTree

DEFAULT_DRAWS = 1000
"""Draws, of all chains together, that outcomes and log-likelihoods are computed for
unless the caller sets another number."""
CHUNK_BYTES = 2**24
"""Results that are computed at a time, between two reports of progress."""
FLOAT64_BYTES = 8
"""Bytes of a number, for the size of chunks."""
PRIVATE = (
    "Made from the devices' private records, for the analyst's eyes only: epsilon does "
    "not cover this group."
)
"""Attribute `privacy` of every group that is computed from records."""

Predictive = bool | ModelFunction
"""Whether outcomes are drawn; or a function of (key, parameters, example) that draws
one."""
ProgressCallback = Callable[[int, int], None]
"""Called with (draws done, draws in all), counted once for each group."""
Model = Regression | CustomPosterior
DrawLookup = Callable[[NDArray[np.intp]], np.ndarray]
"""From the numbers of draws to their parameters, [draw, m]."""


class Computation(NamedTuple):
    """What is computed of every draw for one group."""

    run: Callable[[NDArray[np.intp]], ArrayTree]
    """From the numbers of draws to a pytree of arrays [draw, n, ...]."""
    numbers_per_draw: int
    """About how many numbers one draw takes."""


class OutcomeDraws(NamedTuple):
    """How outcomes are drawn."""

    computation: Computation
    names: list[str]
    """The names of the outcomes."""


class Computations(NamedTuple):
    """All that is computed of draws."""

    by_group: dict[str, Computation]
    """By the group's name."""
    drawn_names: list[str]
    """The names of outcomes that are drawn; empty where none are."""


@without_data
class ArvizOptions(NamedTuple):
    """Which groups the model is to add, as the arguments of `Trace.to_arviz` say."""

    posterior: Model | None = None
    predictive: Predictive = False
    features: ArrayTree = None
    log_likelihood: bool = False
    outcome: str | Sequence[str] | None = None
    draws: int | None = DEFAULT_DRAWS
    progress: ProgressCallback | None = None

    @property
    def default_outcome(self) -> str:
        """Return what an outcome is called that is drawn without a name.

        It is `outcome` where that is a single name, else "y". A function `predictive`
        that returns a dictionary names its outcomes itself.
        """
        return self.outcome if isinstance(self.outcome, str) else "y"

    @property
    def needs_model(self) -> bool:
        """Return whether a group is asked for that only a model can compute.

        These are outcomes, predictions for features, and log-likelihoods; all of them
        need `posterior`.
        """
        is_predictive = bool(self.predictive) or self.features is not None
        return is_predictive or self.log_likelihood


class DrawSubset(NamedTuple):
    """Evenly spaced chains and draws."""

    chains: NDArray[np.intp]
    """Indices of chains."""
    draws: NDArray[np.intp]
    """Indices of draws, the same of every chain; the last one is among them."""
    description: str
    """The same in words."""

    @property
    def labels(self) -> dict[str, Labels]:
        """Return the indices as labels along the axes chain and draw.

        With them a group of some draws is aligned with the posterior group, which has
        all of them.
        """
        return {"chain": self.chains, "draw": self.draws}

    def split(self, values: np.ndarray) -> np.ndarray:
        """Return an array of all draws together with axes of chains and draws.

        Args:
            values: [chains · draws, ...], chain after chain.

        Returns:
            The same as [chain, draw, ...].
        """
        return values.reshape(self.chains.size, self.draws.size, *values.shape[1:])


class Observations(NamedTuple):
    """The devices' data by name."""

    variables: dict[str, Variable]
    """Arrays [observation, ...] by name."""
    owners: Coords
    """The device of every observation, as labels along the axis."""
    site_names: list[str]
    """Which of them the model declares as observed; empty where it does not."""


def outcome_groups(samples: np.ndarray, options: ArvizOptions) -> Groups:
    """Return the groups of observed data, and of what the model predicts.

    These are observed_data and constant_data, and as far as the options ask for them
    posterior_predictive, predictions, log_likelihood and predictions_constant_data.
    Groups that are computed from records say so in their attribute `privacy`.

    Args:
        samples: draws, [chain, draw, m].
        options: the model and which groups it adds.

    Returns:
        Groups by name.

    Raises:
        InputError: if the posterior is not the model of these samples, or an option
            does not fit it.
    """
    posterior = options.posterior
    if (
        not isinstance(posterior, Regression | CustomPosterior)
        or posterior.dim != samples.shape[-1]
    ):
        requirement = "the model of these samples, for what it predicts"
        raise InputError("posterior", type(posterior).__name__, requirement)
    observations = _observations(posterior)
    if observations.site_names and not options.outcome:
        options = options._replace(outcome=observations.site_names)
    subset = _space_evenly(samples.shape[:2], options.draws)
    chain_grid, draw_grid = np.meshgrid(subset.chains, subset.draws, indexing="ij")
    chains = chain_grid.ravel()
    draws = draw_grid.ravel()

    def look_up(indices: NDArray[np.intp]) -> np.ndarray:
        return samples[chains[indices], draws[indices]]

    computations = _plan_computations(posterior, look_up, chains.size, options)
    variables = observations.variables
    drawn_names = computations.drawn_names
    outcome_names = _outcome_names(variables, drawn_names, options.outcome)
    groups = _data_groups(observations, outcome_names)
    results = _compute(computations.by_group, chains.size, options.progress)
    for group_name, values in results.items():
        default_name = options.default_outcome
        if group_name == "log_likelihood":
            is_single = len(outcome_names) == 1
            default_name = outcome_names[0] if is_single else group_name
        by_chain = jax.tree.map(subset.split, values)
        axes = (*DRAW_AXES, "observation")
        result_variables = name_leaves(by_chain, axes, default_name)
        owners = None if group_name == "predictions" else observations.owners
        groups[group_name] = _result_group(result_variables, subset, owners)
    if options.features is not None:
        groups["predictions_constant_data"] = _feature_group(
            posterior, options.features
        )
    return groups


def _observations(posterior: Model) -> Observations:
    """Return the data of a model by name."""
    examples, device = posterior.observed
    observed: ArrayTree = examples
    site_names: list[str] = []
    if isinstance(posterior, Regression):
        observed = {"X": posterior.covariates, "y": examples}
    elif isinstance(examples, dict) and posterior.model.sites.observed:
        sites = posterior.model.sites.observed
        site_names = list(sites)
        example_indices = examples.pop(EXAMPLE_INDEX)
        site_values = {name: values[example_indices] for name, values in sites.items()}
        observed = examples | site_values
    variables = name_leaves(observed, ("observation",), "y")
    owners: Coords = {"device": ("observation", device)}
    return Observations(variables, owners, site_names)


def _data_groups(observations: Observations, outcome_names: list[str]) -> Groups:
    """Return outcomes as observed_data and all other data as constant_data."""
    variables = observations.variables
    constant_names = [name for name in variables if name not in outcome_names]
    names_by_group = {"observed_data": outcome_names, "constant_data": constant_names}
    groups = {}
    for group_name, names in names_by_group.items():
        if names:
            group_variables = {name: variables[name] for name in names}
            groups[group_name] = make_group(
                group_variables,
                observations.owners,
                {"privacy": PRIVATE},
            )
    return groups


def _result_group(
    variables: Mapping[str, Variable],
    subset: DrawSubset,
    owners: Coords | None,
) -> Group:
    """Return what was computed for some draws as a group.

    Args:
        variables: arrays [chain, draw, observation, ...] by name.
        subset: which chains and draws.
        owners: the device of every observation; None where observations are not the
            devices', so that nothing is private.
    """
    coords: dict[str, Labels] = {**subset.labels}
    attributes: dict[str, str] = {"thinning": subset.description}
    if owners is not None:
        coords.update(owners)
        attributes["privacy"] = PRIVATE
    return make_group(variables, coords, attributes)


def _feature_group(posterior: Model, features: ArrayTree) -> Group:
    """Return the features that predictions are drawn for."""
    if isinstance(posterior, Regression):
        features = np.asarray(features, dtype=float)
    return make_group(name_leaves(features, ("observation",), "X"))


def _outcome_names(
    data: Mapping[str, Variable],
    drawn_names: list[str],
    outcome: str | Sequence[str] | None,
) -> list[str]:
    """Return which of the data are outcomes.

    These are the ones that the caller names, else those that are drawn, else y; all
    data where there is none of that name.
    """
    if outcome is None and not drawn_names:
        return ["y"] if "y" in data else list(data)
    names = [name for name in drawn_names if name in data]
    if outcome is not None:
        names = [str(name) for name in np.atleast_1d(outcome)]
    allowed_names = set(data) & set(drawn_names or data)
    if not names or not set(names) <= allowed_names:
        requirement = f"the name of what is observed, of {', '.join(data)}"
        if drawn_names:
            requirement += f", and is drawn, of {', '.join(drawn_names)}"
        raise InputError("outcome", outcome, requirement)
    return names


def _space_evenly(shape: tuple[int, ...], limit: int | None) -> DrawSubset:
    """Return evenly spaced chains and draws.

    Args:
        shape: the numbers of chains and draws.
        limit: the largest number of draws of all chains together; None for all.
    """
    is_count = isinstance(limit, int | np.integer) and not isinstance(limit, bool)
    if limit is not None and (not is_count or limit < 1):
        requirement = "a whole number above 0, or None for all of them"
        raise InputError("draws", limit, requirement)
    chain_count, draw_count = shape
    total = chain_count * draw_count
    largest = total if limit is None else int(limit)
    chain_step = -(-chain_count // largest)
    chains = np.arange(0, chain_count, chain_step)
    draws_per_chain = largest // chains.size
    draw_step = -(-draw_count // draws_per_chain)
    first_draw = (draw_count - 1) % draw_step  # so that the last draw is included
    draws = np.arange(first_draw, draw_count, draw_step)
    steps = f"steps of {draw_step} along draw, of {chain_step} along chain"
    description = f"{chains.size * draws.size} of {total} draws: {steps}"
    return DrawSubset(chains, draws, description)


def _compute(
    computations: Mapping[str, Computation],
    draws: int,
    progress: ProgressCallback | None,
) -> dict[str, ArrayTree]:
    """Return what every computation makes of all draws, in chunks of `CHUNK_BYTES`."""
    total = draws * len(computations)
    results: dict[str, ArrayTree] = {}
    with _report_progress(progress, total) as report:
        for index, (group_name, computation) in enumerate(computations.items()):
            before = index * draws

            def report_draws(draws_done: int, before: int = before) -> None:
                report(before + draws_done)

            results[group_name] = _compute_in_chunks(computation, draws, report_draws)
    return results


def _report_progress(
    progress: ProgressCallback | None,
    total: int,
) -> AbstractContextManager[Callable[[float], None]]:
    """Return a bar, or what passes the number of draws done to a callback."""
    if progress is None:
        return progress_bar("outcomes", total)

    def report(draws_done: float) -> None:
        progress(int(draws_done), total)

    return nullcontext(report)


def _compute_in_chunks(
    computation: Computation,
    draws: int,
    report: Callable[[int], None],
) -> ArrayTree:
    """Return a computation's results for all draws, a pytree of [draw, n, ...]."""
    total_bytes = draws * FLOAT64_BYTES * computation.numbers_per_draw
    chunk_count = -(-total_bytes // CHUNK_BYTES)
    chunk = -(-draws // chunk_count)
    result: ArrayTree = None
    for start in range(0, draws, chunk):
        # The last chunk is filled up, so that nothing is compiled for it.
        indices = np.minimum(np.arange(start, start + chunk), draws - 1)
        part = jax.tree.map(np.asarray, computation.run(indices))
        if start == 0:
            result = jax.tree.map(lambda leaf: _empty_like(leaf, draws), part)
        for array, values in zip(
            jax.tree.leaves(result),
            jax.tree.leaves(part),
            strict=True,
        ):
            array[start : start + chunk] = values[: draws - start]
        report(min(start + chunk, draws))
    return result


def _empty_like(part: np.ndarray, draws: int) -> np.ndarray:
    """Return an array for all draws, of the type of a part of them."""
    return np.empty((draws, *part.shape[1:]), part.dtype)


def _plan_computations(
    posterior: Model,
    look_up: DrawLookup,
    draws: int,
    options: ArvizOptions,
) -> Computations:
    """Return what is to be computed for each group."""
    by_group: dict[str, Computation] = {}
    drawn_names: list[str] = []
    if options.predictive:
        outcomes = _draw_outcomes(posterior, look_up, draws, options, None)
        by_group["posterior_predictive"] = outcomes.computation
        drawn_names = outcomes.names
    if options.features is not None:
        outcomes = _draw_outcomes(posterior, look_up, draws, options, options.features)
        by_group["predictions"] = outcomes.computation
        drawn_names = outcomes.names
    if options.log_likelihood:

        def log_likelihood(indices: NDArray[np.intp]) -> ArrayTree:
            return posterior.log_likelihood(look_up(indices))

        device_of_example = posterior.observed[1]
        numbers = _numbers_per_draw(posterior, device_of_example.size)
        by_group["log_likelihood"] = Computation(log_likelihood, numbers)
    return Computations(by_group, drawn_names)


def _numbers_per_draw(posterior: Model, examples: int) -> int:
    """Return how many numbers a model computes for a draw and some examples."""
    per_row = 1
    if isinstance(posterior, Regression):
        per_row = max(1, posterior.classes)
    return posterior.dim + examples * per_row


def _draw_outcomes(
    posterior: Model,
    look_up: DrawLookup,
    draws: int,
    options: ArvizOptions,
    rows: ArrayTree,
) -> OutcomeDraws:
    """Return how outcomes are drawn for rows, by default the devices' own."""
    if isinstance(posterior, Regression):
        if callable(options.predictive):
            requirement = "True or False: this model draws by itself"
            raise InputError("predictive", "a function", requirement)
        return _draw_regression_outcomes(posterior, look_up, rows)
    return _draw_custom_outcomes(posterior, look_up, draws, options, rows)


def _draw_regression_outcomes(
    posterior: Regression,
    look_up: DrawLookup,
    rows: ArrayTree,
) -> OutcomeDraws:
    """Return how a regression draws outcomes, with noise from one generator."""
    group_name = "posterior_predictive" if rows is None else "predictions"
    generator = host_generator(jax.random.key(0), group_name)
    if rows is None:
        features = None
        count = posterior.observed[1].size
    else:
        features = np.asarray(rows)
        count = len(posterior.design_matrix(features))

    def simulate(indices: NDArray[np.intp]) -> np.ndarray:
        return posterior.simulate(generator, look_up(indices), features)

    numbers = _numbers_per_draw(posterior, count)
    return OutcomeDraws(Computation(simulate, numbers), ["y"])


def _draw_custom_outcomes(
    posterior: CustomPosterior,
    look_up: DrawLookup,
    draws: int,
    options: ArvizOptions,
    rows: ArrayTree,
) -> OutcomeDraws:
    """Return how the function of a custom model draws outcomes.

    Every pair of a draw and an example has a key of its own.
    """
    function = options.predictive
    if function is True:
        function = posterior.model.sites.simulate or function
    if rows is None:
        examples = posterior.observed[0]
    else:
        examples, _ = checked_arrays("features", rows)
    count = len(jax.tree.leaves(examples)[0])
    numbered_examples = (jnp.arange(count), jax.tree.map(jnp.asarray, examples))
    group_key = jax.random.fold_in(jax.random.key(0), int(rows is not None))
    keys = jax.random.split(group_key, draws)

    def draw_outcome(
        keyed_draw: tuple[jax.Array, jax.Array],
        numbered_example: tuple[jax.Array, ArrayTree],
    ) -> ArrayTree:
        assert callable(function)  # as `shape_of` checks
        draw_key, parameters = keyed_draw
        number, example = numbered_example
        outcome_key = jax.random.fold_in(draw_key, number)
        return function(outcome_key, posterior.unflatten(parameters), example)

    requirement = (
        "a JAX function of (key, parameters, example) that draws what this model would "
        "observe"
    )
    first_parameters = jnp.asarray(look_up(np.arange(1))[0])
    first_draw = (keys[0], first_parameters)
    first_example = jax.tree.map(lambda values: values[0], numbered_examples)
    shapes = shape_of(
        "predictive",
        function,
        requirement,
        draw_outcome,
        first_draw,
        first_example,
    )
    names = list(name_leaves(shapes, (), options.default_outcome))
    if not names:
        raise InputError("predictive", Fault("returns nothing"), requirement)
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes)]

    def draw_all(indices: NDArray[np.intp]) -> ArrayTree:
        parameters = jnp.asarray(look_up(indices))
        keyed_draws = (keys[indices], parameters)
        return per_example(draw_outcome, keyed_draws, numbered_examples)

    numbers = posterior.dim + count * sum(sizes)
    return OutcomeDraws(Computation(draw_all, numbers), names)
