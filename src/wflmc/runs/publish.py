"""What of a run may be shown: its first chain, or what follows from that, with a
statement of what is promised."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wflmc.evaluation import Moments, noise_aware
from wflmc.evaluation.scores import mean_probabilities
from wflmc.planning import Plan, policy_named
from wflmc.posterior import Posterior
from wflmc.posterior.inputs import with_intercept
from wflmc.posterior.regression import Regression
from wflmc.privacy.promise import HIDDEN
from wflmc.runs.documents import JsonObject, PlanFile, read_document
from wflmc.runs.planning import load_plan
from wflmc.sampling import Trace, Transcript
from wflmc.sampling.groups import DRAW_AXES, LIBRARY, Group, Labels, Variable
from wflmc.sampling.netcdf import write_groups
from wflmc.scenario import NotCovered, Scenario, build_privacy, validate
from wflmc.support.errors import InputError
from wflmc.support.storage import read_array, read_arrays

KINDS = ("draws", "predictions", "moments", "noise-aware")
"""What can be published."""
NEEDS_FILE = {
    "predictions": "the rows to predict",
    "noise-aware": "public moments; of private ones ε knows nothing",
}
"""Kinds that need --features, and what the file has."""
ROUNDING = 1e-6
"""Relative error up to which a sum of losses may exceed a budget."""


class Publication(NamedTuple):
    """A group that is published, computed from the first chain and what is public."""

    name: str
    variables: dict[str, Variable]

    @property
    def coords(self) -> dict[str, Labels]:
        """Return labels along all axes, which count from 0.

        There is nothing else to label them by: draws are one chain's in their order,
        observations the public rows of a file.
        """
        coords: dict[str, Labels] = {}
        for axes, values in self.variables.values():
            for axis, size in zip(axes, values.shape, strict=True):
                coords[axis] = np.arange(size)
        return coords


class FinishedRun(NamedTuple):
    """A finished run, as far as what may be published depends on it."""

    folder: Path
    plan: PlanFile
    scenario: Scenario
    not_covered: list[NotCovered]
    """What ε does not cover of what would be published."""


def publish_run(
    run: Path,
    out: Path,
    *,
    kind: str = "draws",
    chains: int = 1,
    features: Path | None = None,
    accept: bool = False,
) -> JsonObject:
    """Write the first chain of a finished run, or what follows from it, as NetCDF.

    It is the first because a chain that is chosen by its score tells of the data that
    scored it. The file has neither key nor seed, clip rates, exact law, constants of
    the data, paths or digests.

    Args:
        run: the folder of the run.
        out: the file, which must not exist.
        kind: "draws" [draw, m]; "predictions" for `features`; "moments", the mean and
            covariance of the draws; or "noise-aware", draws of the posterior given the
            chain's transcript.
        chains: 1; more of them would cost as many times the loss.
        features: .npy file, or .npz with an array X, of public rows [n, d] to predict;
            for noise-aware, .npz with the public moments gram, prior, examples and, if
            uncertain, deviation (`wflmc.Moments`); prior_linear, where it is not that
            of the run's own prior mean.
        accept: publish although the file rests on something that ε does not cover,
            which the statement then lists.

    Returns:
        The statement of what is promised, plain data that is also in the file.

    Raises:
        InputError: there is no promise that the file would keep, or no such file can be
            written.
    """
    _check_arguments(kind, features, out)
    finished = _read_finished(run)
    _check_epsilon_holds(finished, chains)
    if finished.not_covered and not accept:
        names = ", ".join(item.name for item in finished.not_covered)
        raise InputError(
            "RUN",
            str(run),
            "a run of which epsilon covers all that is published; this one rests on "
            f"{names}. not_covered in its plan.json says what to change, and "
            "--accept-not-covered publishes it as it is",
        )
    publication = _publication(finished, kind, features)
    statement = _statement(kind, finished)
    attributes: dict[str, str | float] = {}
    for key, value in statement.items():
        is_plain = isinstance(value, str | float)
        attributes[key] = value if is_plain else json.dumps(value)
    attributes |= LIBRARY
    if finished.plan.classes is not None:
        attributes["classes"] = json.dumps(finished.plan.classes)
        attributes["theta"] = "class after class, the intercept, if any, last"
    group = Group(publication.variables, publication.coords, attributes)
    write_groups(out, {publication.name: group})
    return statement


def statement_lines(statement: JsonObject) -> list[str]:
    """Return a statement in sentences, as `wflmc publish` prints it.

    The promise comes first, then what it assumes, then one sentence for everything that
    ε does not cover.

    Args:
        statement: as `publish_run` returns it.
    """
    not_covered = [f"Not covered: {text}" for text in statement["not_covered"]]
    return [statement["promise"], statement["assumes"], *not_covered]


def _check_arguments(kind: str, features: Path | None, out: Path) -> None:
    """Refuse arguments that do not go together, and files that are in the way."""
    if kind not in KINDS:
        raise InputError("--what", kind, f"one of {', '.join(KINDS)}")
    content = NEEDS_FILE.get(kind)
    if features is None:
        if content is not None:
            requirement = f"given with --what {kind}: {content}"
            raise InputError("--features", None, requirement)
    elif content is None:
        requirement = "given with --what predictions or noise-aware"
        raise InputError("--features", str(features), requirement)
    elif not features.is_file():
        raise InputError("--features", str(features), "a file that exists")
    if out.exists():
        raise InputError("--out", str(out), "a new file: it exists already")
    if out.suffix != ".nc" or not out.parent.is_dir():
        raise InputError("--out", str(out), "a file that ends in .nc, in a folder")


def _read_finished(run: Path) -> FinishedRun:
    """Read plan.json of a run, which must be finished."""
    for name in ("plan.json", "summary.json", "trace.nc"):
        if not (run / name).is_file():
            raise InputError(
                "RUN",
                str(run),
                "the folder of a finished run, with plan.json, summary.json and "
                "trace.nc",
            )
    if (run / ".checkpoint" / "about.json").exists():
        requirement = f"a finished run; `wflmc run --resume {run}` finishes this one"
        raise InputError("RUN", str(run), requirement)
    path = run / "plan.json"
    plan = read_document(path, PlanFile, "RUN")
    scenario = validate(plan.scenario, f"{path}: ")
    not_covered = [item for item in plan.not_covered if item.published]
    return FinishedRun(run, plan, scenario, not_covered)


def _check_epsilon_holds(finished: FinishedRun, chains: int) -> None:
    """Refuse a run of which no finite ε is true, or not the promised one.

    More chains than one are refused as well: their losses add up.
    """
    run = str(finished.folder)
    promise = build_privacy(finished.scenario)
    power = finished.scenario.policy.power
    privacy = finished.plan.privacy
    if privacy.spent is None or not policy_named(power).private:
        raise InputError(
            "RUN",
            run,
            "a run that clips and keeps to its budget; policy.power = "
            f"{power!r} does not: no epsilon is promised",
        )
    if promise.epsilon is None:
        raise InputError(
            "RUN",
            run,
            "a run with privacy.epsilon and privacy.delta: this one promises nothing",
        )
    spent = np.asarray(privacy.spent)
    total = np.asarray(privacy.total)
    budget = promise.budget(spent.size)
    if np.any(total > budget * (1 + ROUNDING)):
        requirement = "a run within its budget; this one has spent more"
        raise InputError("RUN", run, requirement)
    if chains != 1:
        total_of_chains = total + max(0, chains - 1) * spent
        epsilon = promise.epsilon_spent(total)
        epsilon_of_chains = promise.epsilon_spent(total_of_chains)
        increase = f"ε = {epsilon_of_chains:.4g} instead of {epsilon:.4g}"
        cost = f"{chains} times the loss, {increase}"
        requirement = f"1: {chains} chains of the same devices cost {cost}"
        raise InputError("--chains", chains, requirement)


def _publication(
    finished: FinishedRun,
    kind: str,
    features: Path | None,
) -> Publication:
    """Return what is published: a function of the first chain and of what is public."""
    if finished.scenario.sampler.keep == "predictions":
        return _recorded_moments(finished.folder, kind)
    if kind == "noise-aware" and features is not None:
        return _draws(_noise_aware(finished.folder, features))
    theta = _first_chain_draws(finished.folder, finished.plan)
    if kind == "moments":
        return _moments(theta)
    if kind == "predictions" and features is not None:
        return _predictions(theta, finished, features)
    return _draws(theta)


def _first_chain_draws(run: Path, plan: PlanFile) -> NDArray[np.float32]:
    """Return theta[draw, m] of the first chain.

    A crash while rounds were added may have left more draws than plan.json has.
    """
    theta = _read_of_first_chain(run, "posterior/theta")
    return theta[: plan.constants.samples]


def _read_of_first_chain(run: Path, name: str) -> NDArray[np.float32]:
    """Return what a variable of trace.nc, whose first axis is the chain, has of it."""
    import h5netcdf

    path = run / "trace.nc"
    try:
        with h5netcdf.File(path) as file:
            return np.asarray(file[name][0], np.float32)
    except (OSError, KeyError, ValueError, IndexError):
        raise InputError("RUN", str(path), "as wflmc wrote it") from None


def _recorded_moments(run: Path, kind: str) -> Publication:
    """Return the moments of a run that kept predictions instead of draws.

    They are the mean and the variance of every parameter; nothing else of the chain was
    recorded that could be published.
    """
    if kind != "moments":
        raise InputError(
            "--what",
            kind,
            "moments of a run with sampler.keep = 'predictions', which kept no draws",
        )
    variables: dict[str, Variable] = {}
    for name in ("mean", "variance"):
        values = _read_of_first_chain(run, f"posterior/{name}")
        variables[name] = (("parameter",), values)
    return Publication("moments", variables)


def _noise_aware(run: Path, moments_path: Path) -> NDArray[np.float32]:
    """Return draws[draw, m] of the noise-aware posterior of the first chain.

    Beside the chain's transcript it depends on public moments alone.
    """
    loaded = load_plan(run, option="RUN")
    content = read_arrays(
        moments_path,
        key="--features",
        requirement="an .npz file with gram, prior and examples",
    )
    try:
        trace = _first_transcript(run, loaded.plan)
        moments = Moments(
            gram=content["gram"],
            prior=content["prior"],
            examples=content["examples"],
            deviation=content.get("deviation"),
            coordinates=loaded.inputs.posterior.coordinates,
            prior_linear=_prior_linear(loaded.inputs.posterior, content),
        )
    except (OSError, KeyError, ValueError, IndexError):
        raise InputError(
            "RUN",
            str(run),
            "a run with sampler.transcript = true, and an .npz file with gram, prior "
            "and examples",
        ) from None
    draws = noise_aware(trace, moments).draws
    return draws[0].astype(np.float32)


def _prior_linear(
    posterior: Posterior, content: Mapping[str, np.ndarray]
) -> float | np.ndarray:
    """Return the prior's precision times its mean, [m].

    It is that of the public moments; without one, the mean is that of the run's prior,
    which is public too.
    """
    if "prior_linear" in content:
        return content["prior_linear"]
    if not isinstance(posterior, Regression) or posterior.prior_mean is None:
        return 0.0
    return np.asarray(content["prior"] @ posterior.prior_mean)


def _first_transcript(run: Path, plan: Plan) -> Trace:
    """Return the first chain of trace.nc with its transcript, [round, chain, m].

    Clip rates, which `noise_aware` does not use, are not read: they are zeros here.
    """
    import h5netcdf

    with h5netcdf.File(run / "trace.nc") as file:
        theta = file["posterior/theta"][:1]
        group = file["transcript"]
        position = group["position"][:, :1]
        gradient = group["gradient"][:, :1]
        noise = group["noise"][:, :1]
        start = group["round"][...]
    transcript = Transcript(position, gradient, noise, start, len(plan.rounds))
    return Trace(
        theta=theta,
        clip_rate=np.zeros((1, 1)),
        burn_in_clip_rate=np.zeros(0),
        warmup=None,
        plans=(plan,),
        transcript=transcript,
    )


def _draws(theta: NDArray[np.float32]) -> Publication:
    """Return draws[draw, m] of one chain as they are."""
    axes = (*DRAW_AXES, "parameter")
    return Publication("posterior", {"theta": (axes, theta[None])})


def _moments(theta: NDArray[np.float32]) -> Publication:
    """Return the mean and the covariance of draws[draw, m]."""
    if len(theta) < 2:
        requirement = "draws: a covariance takes at least two of them"
        raise InputError("--what", "moments", requirement)
    mean = theta.mean(0, dtype=float)
    covariance = np.atleast_2d(np.cov(theta.T))
    variables: dict[str, Variable] = {
        "mean": (("parameter",), mean),
        "covariance": (("parameter", "parameter_bis"), covariance),
    }
    return Publication("moments", variables)


def _predictions(
    theta: NDArray[np.float32],
    finished: FinishedRun,
    features: Path,
) -> Publication:
    """Return mean predictions of draws[draw, m] for the public rows of a file."""
    class_names = finished.plan.classes
    # A regression has the parameters of one class.
    classes = 1 if class_names is None else len(class_names)
    adds_ones = finished.scenario.posterior.adds_ones
    rows = _read_rows(features, adds_ones, theta.shape[1] // classes)
    variables: dict[str, Variable] = {}
    if class_names is None:
        by_draw = rows @ theta.T.astype(float)
        # In the model the noise of a target has variance 1. The rest is the variance
        # of the mean over draws.
        variance = 1 + by_draw.var(1)
        variables["mean"] = (("observation",), by_draw.mean(1))
        variables["variance"] = (("observation",), variance)
    else:
        probability = mean_probabilities(theta, rows, classes)
        variables["probability"] = (("observation", "class"), probability)
    return Publication("predictions", variables)


def _read_rows(path: Path, intercept: bool, size: int) -> NDArray[np.float64]:
    """Return the rows of a file, [n, size].

    Args:
        path: .npy, or .npz with an array X.
        intercept: whether a column of ones is added, as the model has an intercept.
        size: d, the column of ones included.
    """
    requirement = "an .npy file, or an .npz file with an array X"
    if zipfile.is_zipfile(path):
        arrays = read_arrays(
            path,
            key="--features",
            requirement=requirement,
            names=("X",),
        )
        features = arrays.get("X")
    else:
        features = read_array(path, key="--features", requirement=requirement)
    if features is None:
        raise InputError("--features", str(path), requirement)
    if not _is_finite_matrix(features) or features.shape[1] + intercept != size:
        width = size - intercept
        requirement = f"finite rows of {width} numbers, as the model has features"
        raise InputError("--features", str(path), requirement)
    rows = features.astype(float)
    return with_intercept(rows) if intercept else rows


def _is_finite_matrix(features: np.ndarray) -> bool:
    """Return whether an array is a matrix of finite real numbers, not empty."""
    is_numeric = features.dtype.kind in "fiub"
    if features.ndim != 2 or features.size == 0 or not is_numeric:
        return False
    return bool(np.isfinite(features).all())


def _statement(kind: str, finished: FinishedRun) -> JsonObject:
    """Return what is promised to whom, by which accountant, unit and adjacency."""
    section = finished.scenario.privacy
    return {
        "what": kind,
        "epsilon": section.epsilon,
        "delta": section.delta,
        "accountant": section.accountant,
        "unit": section.unit,
        "adjacency": finished.plan.privacy.adjacency,
        "promise": _promise_text(finished),
        "assumes": _assumption_text(finished.plan),
        "not_covered": [item.text for item in finished.not_covered],
    }


def _promise_text(finished: FinishedRun) -> str:
    """Return the promise in sentences, restrictions first."""
    section = finished.scenario.privacy
    adjacency = finished.plan.privacy.adjacency
    epsilon = np.max(np.asarray(section.epsilon or 0))
    delta = np.max(np.asarray(section.delta or 0))
    restrictions = ""
    if finished.not_covered:
        restrictions = "Epsilon does not hold for what is listed as not covered. "
    if any(item.name == "sampler.seed" for item in finished.not_covered):
        restrictions += (
            "As the seed of the noise can be guessed, it holds for nobody who tries. "
        )
    return (
        f"{restrictions}Every device is promised (ε, δ) = ({epsilon:g}, {delta:g}) "
        "differential privacy against whoever sees this file and nothing else of its "
        f"run, by the {section.accountant} accountant. It hides "
        f"{HIDDEN[section.unit, adjacency]} (unit = {section.unit}, adjacency = "
        f"{adjacency}). The file is made of one chain; one more chain of the same "
        "devices, published or observed, adds its loss."
    )


def _assumption_text(plan: PlanFile) -> str:
    """Return what the promise assumes, in sentences."""
    noise = "in float32: attacks on its low-order bits are not excluded"
    if plan.noise != "simulated":
        noise = "exactly, on a lattice, from the operating system's entropy"
    return (
        "The numbers of devices and of their examples, the channels and the schedule "
        f"are public. Noise was drawn {noise}."
    )
