"""What of a run may be shown: its first chain, or what follows from that, with a statement of what is promised."""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wflmc.evaluation import Moments, noise_aware
from wflmc.evaluation.scores import mean_probabilities
from wflmc.planning import policy_named
from wflmc.posterior.inputs import with_intercept
from wflmc.privacy.promise import HIDDEN
from wflmc.runs.documents import PlanFile, read_document
from wflmc.runs.planning import load_plan
from wflmc.sampling import Trace, Transcript
from wflmc.sampling.groups import LIBRARY, Group
from wflmc.sampling.netcdf import write_groups
from wflmc.scenario import NotCovered, Scenario, build_privacy, validate
from wflmc.support.errors import InputError, refuse
from wflmc.support.storage import read_array, read_arrays

KINDS = ("draws", "predictions", "moments", "noise-aware")
NEEDS_FILE = {
    "predictions": "the rows to predict",
    "noise-aware": "public moments; of private ones ε knows nothing",
}
ROUNDING = 1e-6
"""Relative, of sums of losses."""


def publish_run(
    run: Path,
    out: Path,
    *,
    what: str = "draws",
    chains: int = 1,
    features: Path | None = None,
    accept: bool = False,
) -> dict[str, Any]:
    """Write the first chain of a finished run, or what follows from it, as NetCDF; return what is promised of it.

    It is the first because a chain that is chosen by its score tells of the data that scored it. The file has neither
    key nor seed, clip rates, exact law, constants of the data, paths or digests.

    Args:
        what: draws [draw, m]; predictions for `features`; moments, the mean and covariance of the draws; or
            noise-aware, draws of the posterior given the chain's transcript.
        chains: 1; more of them would cost as many times the loss.
        features: .npy file, or .npz with an array X, of public rows [n, d] to predict; for noise-aware, .npz with the
            public moments gram, prior, examples and, if uncertain, deviation (`wflmc.Moments`).
        accept: publish although the file rests on something that ε does not cover, which the statement
            then lists.

    Raises:
        InputError: there is no promise that the file would keep, or no such file can be written.
    """
    _check_arguments(what, features, out)
    plan, scenario, uncovered = _finished(run)
    _check_promise(run, plan, scenario, chains)
    if uncovered and not accept:
        names = ", ".join(item.name for item in uncovered)
        hint = "not_covered in its plan.json says what to change, and --accept-not-covered publishes it as it is"
        allowed = f"a run of which epsilon covers all that is published; this one rests on {names}. {hint}"
        raise InputError("RUN", str(run), allowed)
    if scenario.sampler.keep == "predictions":
        name, variables = _kept_moments(run, what)
    else:
        theta = (
            _noise_aware(run, features)
            if what == "noise-aware" and features
            else _first_chain(run, plan)
        )
        name, variables = _group(what, theta, plan, scenario, features)
    coords = {
        axis: np.arange(n)
        for axes, part in variables.values()
        for axis, n in zip(axes, part.shape, strict=True)
    }
    statement = _statement(what, plan, scenario, uncovered)
    about = {
        key: value if isinstance(value, str | float) else json.dumps(value)
        for key, value in statement.items()
    }
    about |= LIBRARY
    if plan.classes is not None:
        about |= {
            "classes": json.dumps(plan.classes),
            "theta": "class after class, the intercept, if any, last",
        }
    write_groups(out, {name: Group(variables, coords, about)})
    return statement


def statement_lines(statement: dict[str, Any]) -> list[str]:
    """Return the statement in sentences."""
    return [
        statement["promise"],
        statement["assumes"],
        *(f"Not covered: {text}" for text in statement["not_covered"]),
    ]


def _check_arguments(what: str, features: Path | None, out: Path) -> None:
    needed, given = NEEDS_FILE.get(what), None if features is None else str(features)
    refuse(
        (what not in KINDS, "--what", what, f"one of {', '.join(KINDS)}"),
        (
            needed and features is None,
            "--features",
            None,
            f"given with --what {what}: {needed}",
        ),
        (
            features is not None and not needed,
            "--features",
            given,
            "given with --what predictions or noise-aware",
        ),
        (
            features is not None and not features.is_file(),
            "--features",
            given,
            "a file that exists",
        ),
        (out.exists(), "--out", str(out), "a new file: it exists already"),
        (
            out.suffix != ".nc" or not out.parent.is_dir(),
            "--out",
            str(out),
            "a file that ends in .nc, in a folder",
        ),
    )


def _finished(run: Path) -> tuple[PlanFile, Scenario, list[NotCovered]]:
    """Return plan.json of a finished run, its scenario, and what ε does not cover of what would be published."""
    if not all(
        (run / name).is_file() for name in ("plan.json", "summary.json", "trace.nc")
    ):
        raise InputError(
            "RUN",
            str(run),
            "the folder of a finished run, with plan.json, summary.json and trace.nc",
        )
    if (run / ".checkpoint" / "about.json").exists():
        raise InputError(
            "RUN",
            str(run),
            f"a finished run; `wflmc run --resume {run}` finishes this one",
        )
    plan = read_document(run / "plan.json", PlanFile, "RUN")
    scenario = validate(plan.scenario, f"{run / 'plan.json'}: ")
    return plan, scenario, [item for item in plan.not_covered if item.published]


def _check_promise(run: Path, plan: PlanFile, scenario: Scenario, chains: int) -> None:
    """Refuse a run of which no finite ε is true, or not the promised one."""
    promise, power = build_privacy(scenario), scenario.policy.power
    if plan.privacy.spent is None or not policy_named(power).private:
        allowed = f"a run that clips and keeps to its budget; policy.power = {power!r} does not: no epsilon is promised"
        raise InputError("RUN", str(run), allowed)
    if promise.epsilon is None:
        raise InputError(
            "RUN",
            str(run),
            "a run with privacy.epsilon and privacy.delta: this one promises nothing",
        )
    spent, total = np.asarray(plan.privacy.spent), np.asarray(plan.privacy.total)
    if np.any(total > promise.budget(spent.size) * (1 + ROUNDING)):
        raise InputError(
            "RUN", str(run), "a run within its budget; this one has spent more"
        )
    if chains != 1:
        one, several = (
            promise.epsilon_spent(total),
            promise.epsilon_spent(total + max(0, chains - 1) * spent),
        )
        cost = f"{chains} times the loss, ε = {several:.4g} instead of {one:.4g}"
        raise InputError(
            "--chains", chains, f"1: {chains} chains of the same devices cost {cost}"
        )


def _first_chain(run: Path, plan: PlanFile) -> NDArray[np.float32]:
    """Return theta[draw, m] of the first chain."""
    return _first_of(run, "posterior/theta")[: plan.constants.samples]


def _first_of(run: Path, name: str) -> NDArray[np.float32]:
    """Return what trace.nc has of the first chain."""
    import h5netcdf

    try:
        with h5netcdf.File(run / "trace.nc") as file:
            return np.asarray(file[name][0], np.float32)
    except (OSError, KeyError, ValueError, IndexError):
        raise InputError("RUN", str(run / "trace.nc"), "as wflmc wrote it") from None


def _kept_moments(run: Path, what: str) -> tuple[str, dict[str, Any]]:
    """Return what may be published of a run that kept no draws."""
    if what != "moments":
        raise InputError(
            "--what",
            what,
            "moments of a run with sampler.keep = 'predictions', which kept no draws",
        )
    return "moments", {
        name: (("parameter",), _first_of(run, f"posterior/{name}"))
        for name in ("mean", "variance")
    }


def _noise_aware(run: Path, moments: Path) -> NDArray[np.float32]:
    """Return draws[draw, m] of the noise-aware posterior of the first chain, by public moments alone."""
    import h5netcdf

    loaded = load_plan(run, option="RUN")
    plan = loaded.plan
    space = loaded.inputs.posterior.coordinates
    content = read_arrays(
        moments,
        key="--features",
        requirement="an .npz file with gram, prior and examples",
    )
    try:
        with h5netcdf.File(run / "trace.nc") as file:
            part = file["transcript"]
            position, gradient, noise = (
                part[name][:, :1] for name in ("position", "gradient", "noise")
            )
            told = Transcript(
                position, gradient, noise, part["round"][...], len(plan.rounds)
            )
            trace = Trace(
                file["posterior/theta"][:1],
                np.zeros((1, 1)),
                np.zeros(0),
                None,
                (plan,),
                transcript=told,
            )
        known = Moments(
            content["gram"],
            content["prior"],
            content["examples"],
            content.get("deviation"),
            space,
        )
    except (OSError, KeyError, ValueError, IndexError):
        allowed = "a run with sampler.transcript = true, and an .npz file with gram, prior and examples"
        raise InputError("RUN", str(run), allowed) from None
    return noise_aware(trace, known).draws[0].astype(np.float32)


def _group(
    what: str,
    theta: NDArray[np.float32],
    plan: PlanFile,
    scenario: Scenario,
    features: Path | None,
) -> tuple[str, dict[str, Any]]:
    """Return a name, and variables with their axes; only a function of theta[draw, m] and of what is public."""
    if what in ("draws", "noise-aware"):
        return "posterior", {"theta": (("chain", "draw", "parameter"), theta[None])}
    if what == "moments":
        if len(theta) < 2:
            raise InputError(
                "--what", what, "draws: a covariance takes at least two of them"
            )
        covariance = np.atleast_2d(np.cov(theta.T))
        mean = (("parameter",), theta.mean(0, dtype=float))
        return "moments", {
            "mean": mean,
            "covariance": (("parameter", "parameter_bis"), covariance),
        }
    assert features is not None
    classes = len(plan.classes or [0])
    rows, axes = (
        _rows(features, scenario.posterior.adds_ones, theta.shape[1] // classes),
        ("observation", "class"),
    )
    if plan.classes is None:
        each = rows @ theta.T.astype(float)
        # The variance is that of the noise, and of what the draws disagree in.
        return "predictions", {
            "mean": (axes[:1], each.mean(1)),
            "variance": (axes[:1], 1 + each.var(1)),
        }
    return "predictions", {
        "probability": (axes, mean_probabilities(theta, rows, classes))
    }


def _rows(path: Path, intercept: bool, size: int) -> NDArray[np.float64]:
    """Return the rows of a file, [n, d], a column of ones added where the model has an intercept."""
    requirement = "an .npy file, or an .npz file with an array X"
    if zipfile.is_zipfile(path):
        features = read_arrays(
            path, key="--features", requirement=requirement, names=("X",)
        ).get("X")
    else:
        features = read_array(path, key="--features", requirement=requirement)
    if features is None:
        raise InputError("--features", str(path), requirement)
    numeric = features.ndim == 2 and features.size > 0 and features.dtype.kind in "fiub"
    if (
        not numeric
        or not np.isfinite(features).all()
        or features.shape[1] + intercept != size
    ):
        requirement = (
            f"finite rows of {size - intercept} numbers, as the model has features"
        )
        raise InputError("--features", str(path), requirement)
    rows = features.astype(float)
    return with_intercept(rows) if intercept else rows


def _statement(
    what: str, plan: PlanFile, scenario: Scenario, uncovered: Sequence[NotCovered]
) -> dict[str, Any]:
    """Return what is promised to whom, by which accountant, unit and adjacency."""
    section, adjacency = scenario.privacy, plan.privacy.adjacency
    largest = f"({np.max(section.epsilon or 0):g}, {np.max(section.delta or 0):g})"
    but = (
        "Epsilon does not hold for what is listed as not covered. " if uncovered else ""
    )
    if any(item.name == "sampler.seed" for item in uncovered):
        but += (
            "As the seed of the noise can be guessed, it holds for nobody who tries. "
        )
    noise = "in float32: attacks on its low-order bits are not excluded"
    if plan.noise != "simulated":
        noise = "exactly, on a lattice, from the operating system's entropy"
    return {
        "what": what,
        **{
            name: getattr(section, name)
            for name in ("epsilon", "delta", "accountant", "unit")
        },
        "adjacency": adjacency,
        "promise": (
            f"{but}Every device is promised (ε, δ) = {largest} differential privacy against whoever sees this file and "
            f"nothing else of its run, by the {section.accountant} accountant. It hides "
            f"{HIDDEN[section.unit, adjacency]} (unit = {section.unit}, adjacency = {adjacency}). The file is made of "
            "one chain; one more chain of the same devices, published or observed, adds its loss."
        ),
        "assumes": "The numbers of devices and of their examples, the channels and the schedule are public. Noise was "
        f"drawn {noise}.",
        "not_covered": [item.text for item in uncovered],
    }
