"""Whether the files in the folder of a run are all of that run: one that was put there from another is named."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wflmc.errors import InputError
from wflmc.privacy import Ledger
from wflmc.runs.documents import PlanFile, SummaryFile
from wflmc.scenario import validate

CLOSE = 1e-6
"""Relative difference of the same number worked out twice."""


def another(path: Path, why: str, stopped: bool = False) -> InputError:
    """The error for a file of another run."""
    end = f"; `wflmc run --resume {path.parent}` may mend it" if stopped else ""
    return InputError("report", str(path), f"of the same run as the other files of its folder ({why}){end}")


def one_scenario(folder: Path, plan: PlanFile | None, toml: str | None, trace: str | None, stopped: bool) -> None:
    """Refuse a folder whose scenario.toml, plan.json and trace.nc do not tell of the same scenario."""
    told = {"scenario.toml": toml, "trace.nc": trace}
    texts = {name: _dump(folder / name, text) for name, text in told.items() if text is not None}
    if plan is None:
        odd = ["trace.nc"] if len(texts) == 2 and texts["scenario.toml"] != texts["trace.nc"] else []
    else:
        try:
            accepted = _accepted(plan)
        except InputError as error:
            raise InputError("report", str(folder / "plan.json"), f"as wflmc wrote it ({error})") from None
        odd = [name for name, found in texts.items() if found not in accepted]
    if not odd:
        return
    alike = len(odd) == 2 and texts["scenario.toml"] == texts["trace.nc"]
    blamed = "plan.json" if alike or (odd == ["scenario.toml"] and len(texts) == 1) else odd[0]
    others = " and ".join(name for name in ("plan.json", *texts) if name != blamed)
    raise another(folder / blamed, f"its scenario is not that of {others}", stopped)


def _dump(path: Path, text: str) -> dict[str, Any]:
    try:
        return validate(tomllib.loads(text)).model_dump()
    except ValueError as error:
        raise InputError("report", str(path), f"as wflmc wrote it ({error})") from None


def _accepted(plan: PlanFile) -> list[dict[str, Any]]:
    """The plan's scenario as it is written in it, and with everything settled, as a run that was resumed leaves it."""
    steps = plan.step_size[0] if len(set(plan.step_size)) == 1 else plan.step_size
    settled: dict[str, Any] = {"burn_in": plan.constants.burn_in}
    fixed = {**settled, "step_schedule": "constant", "step_size": steps}
    if plan.constants.friction is not None:
        fixed["friction"] = plan.constants.friction
    given = plan.scenario
    merged = [{**given, "sampler": {**given.get("sampler", {}), **more}} for more in (settled, fixed)]
    return [validate(content).model_dump() for content in merged]


def summary_of_plan(path: Path, plan: PlanFile | None, summary: SummaryFile | None, stopped: bool) -> None:
    """Refuse a summary whose numbers are not those of the plan."""
    if plan is None or summary is None:
        return
    # That of a federation is the ledger's: some who were to send may not have sent.
    if summary.federation is None and not _alike([plan.privacy.epsilon_spent], [summary.epsilon_spent]):
        raise another(path, "its ε is not that of plan.json", stopped)
    if not _alike(plan.exact_w2_sq or [], summary.exact_w2_sq or []):
        raise another(path, "its exact law is not that of plan.json", stopped)
    if summary.w2_sq is not None and len(summary.w2_sq.per_round) != plan.constants.samples:
        raise another(path, f"it has not {plan.constants.samples} kept rounds as plan.json has", stopped)


def _alike(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
    return len(one) == len(other) and all(
        a == b or (a is not None and b is not None and math.isclose(a, b, rel_tol=CLOSE, abs_tol=1e-12))
        for a, b in zip(one, other, strict=True)
    )


def ledger_of_run(
    folder: Path, plan: PlanFile | None, summary: SummaryFile | None, ledger: Ledger | None, stopped: bool
) -> None:
    """Refuse a ledger without the rounds that the summary saw, or a summary that saw another ledger."""
    if summary is None or summary.ledger is None or ledger is None or summary.ledger.chain in ledger.chains:
        return
    path, total = folder / summary.ledger.file, None if plan is None else plan.privacy.total
    # The ledger has just what the plan spends: then it is the summary that is another run's.
    if total is not None and len(total) == ledger.devices and np.allclose(ledger.spent, total, rtol=CLOSE, atol=0):
        raise another(folder / "summary.json", f"it has seen another ledger than {path.name}", stopped)
    raise another(path, "rounds are missing that summary.json has seen, or it is another run's ledger", stopped)
