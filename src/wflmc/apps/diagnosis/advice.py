"""Advice on a scenario or on a run folder, and the file `advice.json`."""

import hashlib
import time
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from wflmc.apps.diagnosis.causes import find_causes
from wflmc.apps.diagnosis.replanning import Replanner
from wflmc.apps.diagnosis.values import NOTHING_MEASURED, Measured
from wflmc.planning import Plan
from wflmc.runs.documents import Causes, Document, SummaryFile
from wflmc.runs.folder import read_run
from wflmc.runs.planning import make_plan
from wflmc.scenario import (
    Inputs,
    NotCovered,
    Scenario,
    build,
    load_scenario,
    plain,
    plan_request,
    to_json,
    with_values,
)
from wflmc.support.errors import InputError, renamed_keys
from wflmc.support.storage import write_text
from wflmc.version import __version__

ADVICE_FILE = "advice.json"
"""In a run folder."""
RUN_FOLDER = "the folder of a run, as --out of `wflmc run` named it, or a scenario file"
LOOKS_AT_DATA = NotCovered(
    name="advice",
    text="The advice looks at the devices' data, which epsilon does not cover.",
    published=False,
)
FROM_PLAN_ALONE = "The run is not finished: this advice is from its plan alone."


class AdviceFile(Document):
    """advice.json: what keeps samples from the posterior, and what would help."""

    plan_sha256: str | None
    """Of the plan.json that it is about; None where a scenario was asked about."""
    finished: bool
    """Whether chains have provided evidence; else it is from the plan alone."""
    diagnosis: Causes
    not_covered: list[NotCovered]
    seconds: float
    version: str


class PlanSource(NamedTuple):
    """Where a plan comes from, and how far advice on it may go."""

    scenario: Scenario
    """That was planned."""
    inputs: Inputs
    """Its model and data, channels and promise."""
    can_try_changes: bool = True
    """Whether plans with other values tell about it; not where real devices add the
    noise or several chains are given away, which costs more than those plans know."""
    own_data: bool = False
    """Whether devices brought their own data. Those of the scenario only stand in for
    them and are not looked at; and where the plan has taken constants from the
    stand-in, no changes are tried."""

    @property
    def looks_at_data(self) -> bool:
        """Whether the advice depends on data.

        It does not where a promise is made and everything that the plan takes from the
        data was given as public, nor where devices bring data of their own. Advice that
        looks at data is for their owner.
        """
        return not (self.inputs.public or self.own_data)

    @property
    def not_covered(self) -> list[NotCovered]:
        """What of the advice ε does not cover: a list of one entry, or of none.

        There is none where nothing is promised, and where the advice looks at no data.
        """
        is_promised = self.scenario.privacy.epsilon is not None
        return [LOOKS_AT_DATA] if is_promised and self.looks_at_data else []


def diagnose_plan(
    source: PlanSource,
    plan: Plan,
    measured: Measured = NOTHING_MEASURED,
) -> list[dict[str, Any]]:
    """Return the causes that keep samples from the posterior, as plain data.

    They come worst first. Data are looked at only where the source allows it.

    Args:
        source: what the plan was made for.
        plan: the plan that is judged.
        measured: by chains of the plan.

    Returns:
        The causes, as `diagnosis` in JSON has them; none where samples are expected to
        be good.
    """
    scenario = with_values(source.scenario, {"sampler.burn_in": plan.burn_in})
    inputs = source.inputs
    replanner = None
    if source.can_try_changes and (inputs.public or not source.own_data):
        request = plan_request(scenario, inputs, plan.ledger)
        replanner = Replanner(inputs.posterior, request)
    posterior = inputs.posterior if source.looks_at_data else None
    causes = find_causes(plan, posterior, replanner, measured)
    return [plain(cause.document) for cause in causes]


def advise_scenario(path: str, overrides: list[str] | None = None) -> AdviceFile:
    """Plan a scenario, and return what would make the plan better.

    No chains are run and nothing is written: the evidence is the plan and forecasts.

    Args:
        path: of the scenario file.
        overrides: `section.key=value`, each.

    Returns:
        The advice, with no digest of a plan file.

    Raises:
        InputError: the scenario cannot be read or planned.
    """
    began = time.perf_counter()
    scenario = load_scenario(path, overrides)
    inputs = build(scenario)
    plan = make_plan(scenario, inputs)
    source = PlanSource(scenario, inputs)
    return AdviceFile(
        plan_sha256=None,
        finished=False,
        diagnosis=diagnose_plan(source, plan),
        not_covered=source.not_covered,
        seconds=time.perf_counter() - began,
        version=__version__,
    )


def advise_run(folder: Path) -> AdviceFile:
    """Return what would have made a run better.

    The evidence is what its summary has measured; of a run that was stopped there is
    the plan alone.

    Args:
        folder: of a run, finished or stopped, or of a finished federation.

    Returns:
        The advice, with the digest of the plan file that it is about.

    Raises:
        InputError: the folder is no run's, one of its files is damaged, or the data
            that its plan was made with are gone or have changed.
    """
    began = time.perf_counter()
    plan_path = _plan_path(folder)
    with renamed_keys({"report": "RUN"}):
        run = read_run(folder)
    if run.inputs is None or run.saved_plan is None:
        reason = run.no_inputs.rstrip(".")
        requirement = (
            f"a run whose data can be read again, to try other plans ({reason})"
        )
        raise InputError("RUN", str(folder), requirement)
    source = PlanSource(
        scenario=run.scenario,
        inputs=run.inputs,
        can_try_changes=_costs_as_planned(run.summary),
        own_data=run.plan.own_data,
    )
    diagnosis = diagnose_plan(source, run.saved_plan, _measured(run.summary))
    return AdviceFile(
        plan_sha256=_sha256(plan_path),
        finished=run.summary is not None,
        diagnosis=diagnosis,
        not_covered=source.not_covered,
        seconds=time.perf_counter() - began,
        version=__version__,
    )


def write_advice(folder: Path, advice: AdviceFile) -> Path:
    """Write advice.json into a run folder, complete or not at all.

    An earlier advice is replaced. `wflmc report` shows it with the run.

    Args:
        folder: of the run that the advice is about.
        advice: as `advise_run` returns it.

    Returns:
        The path of the file.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / ADVICE_FILE
    write_text(path, to_json(advice.model_dump(mode="json")))
    return path


def read_advice(folder: Path) -> AdviceFile | None:
    """Return the advice in a run folder, if it is about the run as it is.

    Args:
        folder: of a run, finished or stopped.

    Returns:
        None where there is none, or where it is about an earlier run in this folder or
        about this one before it was finished.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / ADVICE_FILE
    if not path.is_file():
        return None
    try:
        advice = AdviceFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        requirement = "as `wflmc advise` wrote it, or removed"
        raise InputError("report", str(path), requirement) from None
    plan_path = _plan_path(folder)
    is_finished = (folder / "summary.json").exists()
    if advice.plan_sha256 != _sha256(plan_path) or advice.finished != is_finished:
        return None
    return advice


def advice_lines(advice: AdviceFile) -> list[str]:
    """Return the advice in sentences, one line each, as the command prints it.

    Causes are numbered, worst first, with the changes that would help. What ε does not
    cover follows. Without causes, one line says that nothing stands out: samples are
    expected to be good.
    """
    lines = []
    for rank, cause in enumerate(advice.diagnosis, start=1):
        lines.append(f"{rank}. {cause['text']}")
    if not lines:
        lines = ["Nothing stands out: samples are expected to be good."]
    return [*lines, *(item.text for item in advice.not_covered)]


def _plan_path(folder: Path) -> Path:
    """Return the plan of a run folder: that of its checkpoint where it was stopped."""
    checkpoint = folder / ".checkpoint"
    is_finished = (folder / "summary.json").exists() or not checkpoint.is_dir()
    path = (folder if is_finished else checkpoint) / "plan.json"
    if path.is_file():
        return path
    if (folder / "federation").is_dir():
        requirement = "a finished federation; `wflmc federate` goes on with this one"
        raise InputError("RUN", str(folder), requirement)
    raise InputError("RUN", str(folder), RUN_FOLDER)


def _measured(summary: SummaryFile | None) -> Measured:
    """Return what the chains of a run have shown."""
    if summary is None:
        return NOTHING_MEASURED
    return Measured(
        rhat_max=summary.rhat_max,
        clip_rate=summary.clip_rate.samples,
        example_clip_rate=summary.example_clip_rate,
    )


def _costs_as_planned(summary: SummaryFile | None) -> bool:
    """Return whether rounds cost what plans of the scenario say they do.

    In a federation they do not where devices add the noise, or where several chains of
    the same devices are given away.
    """
    if summary is None or summary.federation is None:
        return True
    federation = summary.federation
    return federation.noise != "devices" and federation.releases == 1


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
