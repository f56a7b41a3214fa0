"""What a run leaves behind: the kept samples, how often gradients were clipped, the plans behind them; and all of it as
xarray data sets by group, in ArviZ's schema."""

import io
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from wflmc.planning import Plan
from wflmc.posterior import CustomPosterior
from wflmc.posterior.custom.model import (
    EXAMPLE_INDEX,
    ModelFunction,
    ShapeTree,
    checked_arrays,
    per_example,
    shape_of,
)
from wflmc.posterior.regression import Regression
from wflmc.sampling.recorders import Predictions
from wflmc.sampling.transcript import Transcript
from wflmc.support.errors import (
    Fault,
    InputError,
    Shown,
    ShownValues,
    without_data,
)
from wflmc.support.keys import host_generator
from wflmc.support.progress import progress_bar
from wflmc.support.storage import replacing, reserve
from wflmc.support.trees import ArrayTree, JsonValue
from wflmc.version import __version__

if TYPE_CHECKING:
    import arviz
    import xarray as xr

LIBRARY = {"inference_library": "wflmc", "inference_library_version": __version__}
"""Attributes of every group that is written."""
DRAWN = ("chain", "draw")
TAKEN = (*DRAWN, "observation", "device")
"""Names of axes, which no variable can have."""
NUMBERED = (*DRAWN, "observation", "round", "class", "parameter")
"""Axes that count from 0 unless they are given other numbers."""
DRAWS = 1000
"""Draws, of all chains together, that outcomes and log-likelihoods are computed for unless more are asked for."""
CHUNK_BYTES = 2**24
"""Results that are computed at a time, between two reports of progress."""
PRIVATE = "Made from the devices' private records, for the analyst's eyes only: epsilon does not cover this group."

Predictive = bool | ModelFunction
"""Whether outcomes are drawn; or a function of (key, parameters, example) that draws
one."""
Advance = Callable[[int, int], None]
Model = Regression | CustomPosterior
Theta = Callable[[NDArray[np.intp]], np.ndarray]
"""From the numbers of draws to their parameters, [draw, m]."""
Work = tuple[Callable[[NDArray[np.intp]], ArrayTree], int]
"""From the numbers of draws to a pytree of arrays [draw, n, ...]; and about how many numbers one draw takes."""
Variable: TypeAlias = tuple[tuple[str, ...], np.ndarray]
"""The names of an array's axes, and the array."""
Labels: TypeAlias = "Sequence[object] | np.ndarray | tuple[str, np.ndarray]"
Coords: TypeAlias = Mapping[str, Labels]
"""Labels along axes by the axis's name; those of another name come with their axis."""
Attributes: TypeAlias = Mapping[str, JsonValue]
"""Of a group, by name."""


class Group(NamedTuple):
    """A group of ArviZ's schema: what a data set of xarray has, without xarray.

    Importing xarray takes longer than most runs, and a file is written without it.
    """

    variables: Mapping[str, Variable]
    """Arrays by name."""
    coords: Coords
    """Labels along axes."""
    attributes: Attributes

    def with_attributes(self, attributes: Attributes) -> "Group":
        """Return the group with more attributes."""
        return self._replace(attributes={**self.attributes, **attributes})

    @property
    def data_set(self) -> "xr.Dataset":
        """The group as xarray has it."""
        import xarray as xr

        return xr.Dataset(self.variables, self.coords, self.attributes)

    @property
    def arrays(self) -> dict[str, Variable]:
        """All arrays by name, labels included, with the names of their axes."""
        labels: dict[str, Variable] = {}
        for name, values in self.coords.items():
            if isinstance(values, tuple):
                axis, along_axis = values
                labels[name] = ((axis,), np.asarray(along_axis))
            else:
                labels[name] = ((name,), np.asarray(values))
        arrays = {
            name: (axes, np.asarray(array))
            for name, (axes, array) in self.variables.items()
        }
        return {**arrays, **labels}

    @property
    def sizes(self) -> dict[str, int]:
        """Lengths of all axes, by name."""
        sizes: dict[str, int] = {}
        for axes, array in self.arrays.values():
            sizes.update(zip(axes, array.shape, strict=True))
        return sizes


Groups: TypeAlias = dict[str, Group]
"""Groups by their names in ArviZ's schema."""
ArvizData: TypeAlias = "arviz.InferenceData | xr.DataTree"
"""What ArviZ takes: InferenceData before ArviZ 1, a DataTree from then on."""


@without_data
class ArvizOptions(NamedTuple):
    """Which groups the model is to add, as the arguments of `Trace.to_arviz` say."""

    posterior: Model | None = None
    predictive: Predictive = False
    features: ArrayTree = None
    log_likelihood: bool = False
    outcome: str | Sequence[str] | None = None
    draws: int | None = DRAWS
    progress: Advance | None = None

    @property
    def alone(self) -> str:
        """What an outcome that is drawn without a name is called."""
        return self.outcome if isinstance(self.outcome, str) else "y"


@dataclass(frozen=True, eq=False, repr=False)
class Trace(Shown):
    """Samples theta[chain, draw, m] of the kept rounds."""

    theta: np.ndarray
    """[chain, draw, m], of the kept rounds."""
    clip_rate: np.ndarray
    """Share of sending devices whose gradient was clipped, [chain, draw]."""
    burn_in_clip_rate: np.ndarray
    """The same per round of burn-in, over all chains, [S_b]."""
    warmup: np.ndarray | None
    """Samples of burn-in, [chain, S_b, m], where they were asked for."""
    plans: tuple[Plan, ...]
    """One plan for all chains, or one for each."""
    velocity: np.ndarray | None = None
    """After the last round, [chain, m], with kinetic dynamics: what a run that goes on needs beside θ."""
    warmup_clip_rate: np.ndarray | None = None
    """Like `clip_rate`, of burn-in, [chain, S_b], where it was asked for."""
    key: tuple[int, ...] | None = None
    """The key that seeded the chains, as numbers."""
    predictions: Predictions | None = None
    """Averages over the draws, where these were not kept; then `theta` is their mean, [chain, 1, m]."""
    transcript: Transcript | None = None
    """What the server has received in every round, where it was asked for."""

    def _facts(self) -> ShownValues:
        sizes = dict(
            zip(("chains", "draws", "parameters"), self.theta.shape, strict=True)
        )
        plans = len(self.plans) if len(self.plans) > 1 else None
        burn_in = None if self.warmup is None else self.warmup.shape[1]
        return {
            **sizes,
            "plans": plans,
            "kept burn-in rounds": burn_in,
            "clip_rate": self.clip_rate.mean(),
        }

    @property
    def plan(self) -> Plan:
        """The plan; the first one where each chain has its own."""
        return self.plans[0]

    def to_arviz(
        self,
        posterior: Model | None = None,
        predictive: Predictive = False,
        features: ArrayTree = None,
        attributes: Attributes | None = None,
        *,
        log_likelihood: bool = False,
        outcome: str | Sequence[str] | None = None,
        draws: int | None = DRAWS,
        progress: Advance | None = None,
    ) -> ArvizData:
        """The trace for ArviZ: InferenceData before ArviZ 1, a DataTree from then on.

        Its groups are posterior, sample_stats, and the same of burn-in where it was kept (warmup_…).

        Args:
            posterior: adds observed_data, the outcomes with the device that holds each, and constant_data, the
                covariates. These are the private data, which epsilon does not cover, as are the next two groups. The
                parameters of a custom model come by their names.
            predictive: adds posterior_predictive, what the model would have observed instead. For a model of one's
                own, a function of (key, parameters, example) that draws it, best as {name in the data: draw}.
            features: u[n, d]: adds predictions, outcomes drawn for these features, such as those of a test set, and
                the features as predictions_constant_data. For a custom model, a pytree [n, ...] of what its
                function `predictive` takes for an example.
            attributes: of every group, beside the version, the key that seeded the chains and the plan in short.
            log_likelihood: adds log_likelihood, log p(example|θ) of every example, for `arviz.loo`.
            outcome: for a custom model, the names of the outcomes among its data; by default what `predictive`
                draws, else y, where (X, y) is such a pair. Where neither tells, all data count as outcomes.
            draws: for how many draws of all chains together outcomes and log-likelihoods are computed, evenly spaced;
                None for all. The posterior group has all draws in any case.
            progress: called with (done, in all); by default a bar on a terminal.
        """
        request = ArvizOptions(
            posterior, predictive, features, log_likelihood, outcome, draws, progress
        )
        return _for_arviz(_groups(self, attributes, request))

    def save(self, path: str | Path, attributes: Attributes | None = None) -> None:
        """Write NetCDF that `arviz.from_netcdf` reads, whole or not at all; chain by chain, as for traces on disk."""
        write_groups(path, _groups(self, attributes, ArvizOptions()))


def _for_arviz(made: Groups) -> ArvizData:
    """Return groups as ArviZ takes them."""
    import arviz
    import xarray as xr

    data_sets = {name: group.data_set for name, group in made.items()}
    if int(arviz.__version__.split(".")[0]) >= 1:
        return xr.DataTree.from_dict(data_sets)
    keywords: dict[str, Any] = {**data_sets}  # it has keywords of other types as well
    return arviz.InferenceData(**keywords)


class NamedDraws(NamedTuple):
    """Draws of the parameters by name, as a data set of ArviZ's has them."""

    variables: Mapping[str, Variable]
    """The names of the axes, chain and draw first, and the draws along them, by the name of the parameters."""
    coords: Coords
    """Labels along axes, by the axis's name."""
    numbered: tuple[str, ...]
    """Axes that count from 0."""


def name_draws(theta: np.ndarray, posterior: object = None) -> NamedDraws:
    """Return draws by name, in the space of each site's support where the model has sites.

    Args:
        theta: [chain, draw, m].
        posterior: of a custom model, which names its parameters; without one, all of them are called theta.
    """
    if isinstance(posterior, CustomPosterior) and posterior.dim == theta.shape[-1]:
        sites = posterior.model.sites
        variables = _named(posterior.unflatten(theta), DRAWN, "theta", sites.dims)
        return NamedDraws(variables, sites.coords, numbered=DRAWN)
    return NamedDraws({"theta": ((*DRAWN, "parameter"), theta)}, {}, numbered=NUMBERED)


def in_arviz(draws: NamedDraws, attributes: Attributes) -> ArvizData:
    """Return draws that are not a trace's for ArviZ."""
    return _for_arviz(
        {"posterior": _variables(draws).with_attributes({**LIBRARY, **attributes})}
    )


def _group(
    variables: Mapping[str, Variable],
    coords: Coords | None = None,
    attributes: Attributes | None = None,
    numbered: Sequence[str] = NUMBERED,
) -> Group:
    """Return arrays with the names of their axes as a group.

    Args:
        variables: arrays by name.
        coords: labels along axes.
        attributes: of the group.
        numbered: axes that count from 0 unless `coords` has labels for them.
    """
    sizes = Group(variables, {}, {}).sizes
    numbers = {
        axis: np.arange(size) for axis, size in sizes.items() if axis in numbered
    }
    return Group(variables, {**numbers, **(coords or {})}, attributes or {})


def _transcript(told: Transcript) -> Group:
    """The group of a transcript."""
    axes = ("round", "chain", "parameter")
    values = {
        "position": (axes, told.position),
        "gradient": (axes, told.gradient),
        "noise": (axes[:2], told.noise),
    }
    return _group(values, {"round": told.start}, {"rounds": told.rounds})


def _groups(
    trace: Trace,
    attributes: Attributes | None,
    request: ArvizOptions,
) -> Groups:
    """The groups by name."""
    plan, burn_in, posterior = trace.plan, trace.plan.burn_in, request.posterior
    made = {
        "posterior": _variables(name_draws(trace.theta, posterior)),
        "sample_stats": _statistics(trace, trace.clip_rate, slice(burn_in, None)),
    }
    if trace.predictions is not None:
        made |= _averages(trace.predictions)
    if trace.velocity is not None:
        statistics = made["sample_stats"].variables
        last_velocity = (("chain", "parameter"), trace.velocity)
        made["sample_stats"] = _group({**statistics, "last_velocity": last_velocity})
    if trace.warmup is not None:
        made["warmup_posterior"] = _variables(name_draws(trace.warmup, posterior))
    if trace.warmup_clip_rate is not None:
        made["warmup_sample_stats"] = _statistics(
            trace, trace.warmup_clip_rate, slice(burn_in)
        )
    if trace.transcript is not None:
        made["transcript"] = _transcript(trace.transcript)
    if posterior is not None:
        made |= _outcomes(trace.theta, request)
    elif request.predictive or request.log_likelihood or request.features is not None:
        raise InputError("posterior", None, "given, for what it predicts")
    about: dict[str, JsonValue] = {**LIBRARY, "plan": _in_short(plan)}
    about |= {} if trace.key is None else {"key": list(trace.key)}
    return {
        name: group.with_attributes({**about, **(attributes or {})})
        for name, group in made.items()
    }


def _averages(kept: Predictions) -> Groups:
    """The groups of averages over draws that were not kept: parameters by mean and variance, and mean predictions."""
    moments = {
        name: (("chain", "parameter"), getattr(kept, name))
        for name in ("mean", "variance")
    }
    about = {"about": "averages over the kept draws, which were not kept themselves"}
    predicted = {"probability": (("chain", "observation", "class"), kept.probability)}
    return {
        "posterior": _group(moments, attributes=about),
        "predictions": _group(predicted),
    }


def _in_short(plan: Plan) -> str:
    """What a plan is about, as JSON; numbers of each device or round as a list where they differ."""
    varying = (
        {"step_size": plan.step_size, "clip": plan.clip}
        if plan.clips
        else {"step_size": plan.step_size}
    )
    chain = {
        "rounds": len(plan.rounds),
        "burn_in": plan.burn_in,
        "dynamics": plan.dynamics.name,
    }
    spent = {"epsilon_spent": plan.epsilon_spent, "adjacency": plan.privacy.adjacency}
    facts = {"devices": plan.devices, **chain, **spent}
    lists = {name: np.asarray(values).tolist() for name, values in varying.items()}
    return json.dumps(
        facts
        | {
            name: each[0] if len(set(each)) == 1 else each
            for name, each in lists.items()
        }
    )


def _variables(draws: NamedDraws) -> Group:
    """Return the group of draws by name."""
    return _group(dict(draws.variables), draws.coords, numbered=draws.numbered)


def _named(
    tree: ArrayTree | ShapeTree,
    leading: tuple[str, ...],
    alone: str,
    dims: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Variable]:
    """The leaves of a tree by name, with their axes' names; one that is no tree is called `alone`.

    A leaf called as an axis, such as chain, becomes chain_. Two arrays without names are called X and y.
    """
    made: dict[str, Variable] = {}
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    # A tuple with names of its own is no pair without names.
    has_no_names = type(tree) in (tuple, list)
    if (
        has_no_names
        and isinstance(tree, tuple | list)
        and len(tree) == len(leaves) == 2
    ):
        leaves = jax.tree_util.tree_leaves_with_path({"X": tree[0], "y": tree[1]})
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or alone
        known = (dims or {}).get(name)
        while name in TAKEN or name in made:
            name += "_"
        axes = known or [
            f"{name}_dim_{axis}" for axis in range(np.ndim(leaf) - len(leading))
        ]
        made[name] = ((*leading, *axes), np.asarray(leaf))
    return made


def _statistics(trace: Trace, clip_rate: np.ndarray, rounds: slice) -> Group:
    """What is known of rounds, the same for all chains where they share a plan."""
    plans, shape = trace.plans, clip_rate.shape
    names = ("gain", "active_devices", "excess_noise")
    per_round = {name: [getattr(p, name)[rounds] for p in plans] for name in names}
    if all(p.clips for p in plans):
        per_round["loss"] = [p.loss.max(-1)[rounds] for p in plans]
    stats = {
        name: (DRAWN, np.broadcast_to(np.stack(rows), shape))
        for name, rows in per_round.items()
    }
    return _group({"clip_rate": (DRAWN, clip_rate), **stats})


def _outcomes(samples: np.ndarray, request: ArvizOptions) -> Groups:
    """The groups of what was observed, and of what the model says of it: the same every time."""
    posterior, features = request.posterior, request.features
    if (
        not isinstance(posterior, Regression | CustomPosterior)
        or posterior.dim != samples.shape[-1]
    ):
        raise InputError(
            "posterior",
            type(posterior).__name__,
            "the model of these samples, for what it predicts",
        )
    examples, device = posterior.observed
    observed: ArrayTree = examples
    if isinstance(posterior, Regression):
        observed = {"X": posterior.covariates, "y": examples}
    elif isinstance(examples, dict) and (sites := posterior.model.sites.observed):
        number = examples.pop(EXAMPLE_INDEX)
        observed = examples | {name: values[number] for name, values in sites.items()}
        request = request._replace(outcome=request.outcome or [*sites])
    data = _named(observed, ("observation",), "y")
    kept, thinning = _thinned(samples.shape[:2], request.draws)
    chain, draw = (numbers.ravel() for numbers in np.meshgrid(*kept, indexing="ij"))
    works, drawn = _works(
        posterior, lambda at: samples[chain[at], draw[at]], chain.size, request
    )
    names = _outcome_names(data, drawn, request.outcome)

    held: Coords = {"device": ("observation", device)}
    private: Attributes = {"privacy": PRIVATE}
    constant = [name for name in data if name not in names]
    made = {
        group: _group({name: data[name] for name in some}, held, private)
        for group, some in (("observed_data", names), ("constant_data", constant))
        if some
    }
    for group, values in _computed(works, chain.size, request.progress).items():
        split = jax.tree.map(
            lambda leaf: leaf.reshape(*map(len, kept), *leaf.shape[1:]), values
        )
        alone = (
            request.alone
            if group != "log_likelihood"
            else names[0]
            if len(names) == 1
            else group
        )
        variables = _named(split, (*DRAWN, "observation"), alone)
        numbers = dict(zip(DRAWN, kept, strict=True))
        coords: Coords = numbers if group == "predictions" else {**numbers, **held}
        attributes: Attributes = {} if group == "predictions" else private
        made[group] = _group(variables, coords, {"thinning": thinning, **attributes})
    if features is not None:
        given = (
            np.asarray(features, dtype=float)
            if isinstance(posterior, Regression)
            else features
        )
        made["predictions_constant_data"] = _group(_named(given, ("observation",), "X"))
    return made


def _outcome_names(
    data: Mapping[str, Variable],
    drawn: list[str],
    outcome: str | Sequence[str] | None,
) -> list[str]:
    """Which of the data are outcomes: those named, those drawn, or y; all of them where nobody can tell."""
    if outcome is None and not drawn:
        return ["y"] if "y" in data else list(data)
    names = [name for name in drawn if name in data]
    if outcome is not None:
        names = [str(one) for one in np.atleast_1d(outcome)]
    if not names or not set(names) <= set(data) & set(drawn or data):
        known = f"the name of what is observed, of {', '.join(data)}"
        raise InputError(
            "outcome",
            outcome,
            f"{known}, and is drawn, of {', '.join(drawn)}" if drawn else known,
        )
    return names


def _thinned(
    shape: tuple[int, ...], most: int | None
) -> tuple[list[NDArray[np.intp]], str]:
    """Which chains and draws to take, evenly spaced and at most so many together; and the same in words."""
    if most is not None and (
        isinstance(most, bool) or not isinstance(most, int | np.integer) or most < 1
    ):
        raise InputError(
            "draws", most, "a whole number above 0, or None for all of them"
        )
    chains, draws = shape
    limit = chains * draws if most is None else int(most)
    apart = -(-chains // limit)
    chosen = np.arange(0, chains, apart)
    step = -(-draws // (limit // chosen.size))
    last = np.arange(
        (draws - 1) % step, draws, step
    )  # the last draw is always among them
    words = f"{chosen.size * last.size} of {chains * draws} draws: steps of {step} along draw, of {apart} along chain"
    return [chosen, last], words


def _computed(
    works: dict[str, Work],
    draws: int,
    progress: Advance | None,
) -> dict[str, ArrayTree]:
    """What every work makes of all draws, in chunks of about CHUNK_BYTES."""
    total = draws * len(works)
    made: dict[str, ArrayTree] = {}
    bar = (
        progress_bar("outcomes", total)
        if progress is None
        else nullcontext(lambda done: progress(done, total))
    )
    with bar as advance:
        for before, (group, (run, size)) in enumerate(works.items()):
            chunk = -(-draws // -(-draws * 8 * size // CHUNK_BYTES))
            for at in range(0, draws, chunk):
                # The last chunk is filled up, so that nothing is compiled for it.
                part = jax.tree.map(
                    np.asarray, run(np.minimum(np.arange(at, at + chunk), draws - 1))
                )
                if not at:
                    made[group] = jax.tree.map(
                        lambda leaf: np.empty((draws, *leaf.shape[1:]), leaf.dtype),
                        part,
                    )
                for whole, values in zip(
                    jax.tree.leaves(made[group]), jax.tree.leaves(part), strict=True
                ):
                    whole[at : at + chunk] = values[: draws - at]
                advance(before * draws + min(at + chunk, draws))
    return made


def _works(
    posterior: Model, theta: Theta, draws: int, request: ArvizOptions
) -> tuple[dict[str, Work], list[str]]:
    """What is to be computed for each group, and the names of the outcomes that are drawn."""
    drawn: list[str] = []
    works: dict[str, Work] = {}
    if request.predictive:
        works["posterior_predictive"], drawn = _drawn(
            posterior, theta, draws, request, None
        )
    if request.features is not None:
        works["predictions"], drawn = _drawn(
            posterior, theta, draws, request, request.features
        )
    if request.log_likelihood:
        numbers = _numbers(posterior, posterior.observed[1].size)
        works["log_likelihood"] = (
            lambda at: posterior.log_likelihood(theta(at)),
            numbers,
        )
    return works, drawn


def _numbers(posterior: Model, count: int) -> int:
    """Return how many numbers a model computes for a draw and `count` examples."""
    return posterior.dim + count * (
        max(1, posterior.classes) if isinstance(posterior, Regression) else 1
    )


def _drawn(
    posterior: Model, theta: Theta, draws: int, request: ArvizOptions, rows: ArrayTree
) -> tuple[Work, list[str]]:
    """How to draw outcomes for rows, by default the devices' own, and their names: a custom model needs a function."""
    function = request.predictive
    if function is True and isinstance(posterior, CustomPosterior):
        function = posterior.model.sites.simulate or function
    if isinstance(posterior, Regression):
        if callable(function):
            raise InputError(
                "predictive", "a function", "True or False: this model draws by itself"
            )
        generator = host_generator(
            jax.random.key(0), "posterior_predictive" if rows is None else "predictions"
        )
        features = None if rows is None else np.asarray(rows)
        count = posterior.observed[1].size
        if features is not None:
            count = len(posterior.design_matrix(features))

        def draw_outcomes(indices: NDArray[np.intp]) -> np.ndarray:
            return posterior.simulate(generator, theta(indices), features)

        return (draw_outcomes, _numbers(posterior, count)), ["y"]
    wanted = "a JAX function of (key, parameters, example) that draws what this model would observe"
    given = (
        posterior.observed[0] if rows is None else checked_arrays("features", rows)[0]
    )
    count = len(jax.tree.leaves(given)[0])
    numbered = jnp.arange(count), jax.tree.map(jnp.asarray, given)
    keys = jax.random.split(
        jax.random.fold_in(jax.random.key(0), int(rows is not None)), draws
    )

    def outcome(
        draw: tuple[jax.Array, jax.Array],
        numbered_example: tuple[jax.Array, ArrayTree],
    ) -> ArrayTree:
        assert callable(function)  # as `shape_of` checks
        draw_key, parameters = draw
        number, example = numbered_example
        outcome_key = jax.random.fold_in(draw_key, number)
        return function(outcome_key, posterior.unflatten(parameters), example)

    first = (
        (keys[0], jnp.asarray(theta(np.arange(1))[0])),
        jax.tree.map(lambda values: values[0], numbered),
    )
    result = shape_of("predictive", function, wanted, outcome, *first)
    drawn = [*_named(result, (), request.alone)]
    if not drawn:
        raise InputError("predictive", Fault("returns nothing"), wanted)
    size = posterior.dim + count * sum(leaf.size for leaf in jax.tree.leaves(result))
    return (
        lambda at: per_example(outcome, (keys[at], jnp.asarray(theta(at))), numbered),
        size,
    ), drawn


def write_groups(path: str | Path, groups: Groups) -> None:
    """Write groups as NetCDF, whole or not at all, with one chain at a time in memory.

    HDF5 crashes when the disk is full. So the file without its numbers is made in memory, and the room for all of them
    is reserved before HDF5 writes the first.
    """
    import h5netcdf
    import h5py  # type: ignore[import-untyped]

    arrays = {name: group.arrays for name, group in groups.items()}
    empty = io.BytesIO()
    with h5netcdf.File(empty, "w") as file:
        for name, group in groups.items():
            place = file.create_group(name)
            place.attrs.update(group.attributes)
            place.dimensions = group.sizes
            for variable, (axes, values) in arrays[name].items():
                place.create_variable(variable, axes, values.dtype)
    contents = {
        f"{name}/{variable}": values
        for name, of_group in arrays.items()
        for variable, (_, values) in of_group.items()
    }
    room = sum(
        values.nbytes + 2048 for values in contents.values()
    )  # and where HDF5 leaves gaps
    with replacing(path) as target:
        target.write(empty.getbuffer())
        target.flush()
        reserve(target, target.tell() + room)
        with h5py.File(target.name, "r+") as file:
            for name, values in contents.items():
                place = file[name]
                for rows in range(len(values)) if values.ndim > 1 else [...]:
                    place[rows] = values[rows]
