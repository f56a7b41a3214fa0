"""`wflmc federate`: the rounds of a scenario between a server and devices that hold their own data, on Flower.

The folder `federation` in the run's own holds what the server and every device hold, and how far they have got; the
files of a finished run stand beside it, as those of `wflmc run` do.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from wflmc.cli.federation import Request, as_heard, begin, begun
from wflmc.cli.run import draw_scores
from wflmc.cli.shared import AsJson, Overrides, ScenarioPath, cache_compilations, note, print_json, warn
from wflmc.errors import InputError
from wflmc.evaluation import evaluate, preload
from wflmc.progress import ProgressBar, progress_bar
from wflmc.report import diagnosis_lines
from wflmc.runs import diagnose, summary_document
from wflmc.runs.execution import Task, ledger_document, write_run
from wflmc.scenario import Inputs, Scenario, build, load_scenario
from wflmc.scenario.files import plain
from wflmc.storage import output_folder

if TYPE_CHECKING:
    from wflmc.federated.server import Server

Say = Callable[[str], None]

RUNTIMES = ("simulation", "process", "deployment")
NOISES = ("channel", "devices", "simulated")


def federate_command(request: Request, bar: ProgressBar, say: Say) -> tuple[dict[str, Any], str, list[Path]]:
    """The summary as JSON document and as text, and the files that were written."""
    _check(request)
    with output_folder(request.out) as folder:
        return _federated(request, folder, bar, say)


def _federated(request: Request, folder: Path, bar: ProgressBar, say: Say) -> tuple[dict[str, Any], str, list[Path]]:
    began = time.perf_counter()
    scenario = load_scenario(request.scenario, request.overrides)
    inputs = build(scenario)
    job, document = begun(folder, scenario, request) or begin(folder, scenario, inputs, request, began)
    from wflmc.federated.server import open_server

    place = folder / "federation"
    server = open_server(job, place / "server")
    done = server.checkpoint.load().rounds
    if done and done < job.plan.rounds:
        say(f"Going on with the federation in {place} after {done} rounds.")
    if request.prepare and done < job.plan.rounds:
        return {"folder": str(place), "rounds": done, "warnings": list(job.plan.warnings)}, _prepared(place), []
    if done < job.plan.rounds:
        try:
            with bar("rounds", job.plan.rounds) as advance:
                _run(server, place, request, lambda now, _: advance(now), say)
        except KeyboardInterrupt:
            say("The same command goes on with this federation.")
            raise
        server = open_server(job, place / "server")  # which another process may have charged
    return _finish(folder, scenario, inputs, server, document, request, began)


def _check(request: Request) -> None:
    if importlib.util.find_spec("flwr") is None:
        allowed = "used with Flower, which is missing: pip install 'wflmc[flower]' (in a checkout: -e '.[flower]')"
        raise InputError("--runtime", request.runtime, allowed)
    for option, given, known in (
        ("--runtime", request.runtime, RUNTIMES),
        ("--noise", request.noise, NOISES),
    ):
        if given not in known:
            raise InputError(option, given, f"one of {', '.join(known)}")
    if request.prepare and request.noise == "simulated":
        raise InputError("--noise", "simulated", "channel or devices with --prepare: simulated noise protects nobody")
    if request.tolerate and request.noise != "devices":
        raise InputError("--tolerate", request.tolerate, "given with --noise devices")
    if request.chains is not None and request.chains < 1:
        raise InputError("--chains", request.chains, "at least 1")
    if not 0 < request.deadline < np.inf:
        raise InputError("--deadline", request.deadline, "a number of seconds above 0")
    if request.ledger is not None and not Path(request.ledger).parent.is_dir():
        raise InputError("--ledger", request.ledger, "a file in a folder that is there")
    if request.address is not None and not request.prepare:
        raise InputError("--address", request.address, "given with --prepare: the runtimes are on this machine")
    if request.address is not None and not re.fullmatch(r"(\[[^]]+\]|[^:]+):[0-9]{1,5}", request.address):
        raise InputError("--address", request.address, "host and port, such as 10.0.0.7:8000")
    if request.own_data and not request.prepare:
        raise InputError("--own-data", True, "given with --prepare: devices then bring their data")
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")


def _run(server: Server, place: Path, request: Request, progress: Callable[[int, int], None], say: Say) -> None:
    from wflmc.federated.simulation import devices_in, run_in_engine, run_in_process

    match request.runtime:
        case "process":
            run_in_process(server, devices_in(place), progress=progress)
        case "simulation":
            run_in_engine(server, devices_in(place), progress=progress, deadline=request.deadline)
        case _:
            from wflmc.federated.deployment import prepare, run_on_loopback

            prepare(place, server.job.plan.devices)
            run_on_loopback(place, deadline=request.deadline, say=say, progress=progress)


def _prepared(place: Path) -> str:
    return f"Prepared in {place}: COMMANDS.md says what to type on the server and on every device."


def _finish(
    folder: Path,
    scenario: Scenario,
    inputs: Inputs,
    server: Server,
    document: dict[str, Any],
    request: Request,
    began: float,
) -> tuple[dict[str, Any], str, list[Path]]:
    """Evaluate the samples and write the files of a run."""
    from wflmc.federated.server import LOG, trace_of

    preload()
    job, plan, ledger = server.job, server.job.plan, server.ledger
    trace = replace(trace_of(server, inputs.posterior), plans=(as_heard(job),))
    known = not request.own_data
    evaluation = evaluate(trace, inputs.posterior if known else None, inputs.test if known else None)
    about = _account(server, request)
    alike = job.noise != "devices" and job.releases == 1  # else other plans cost more than the scenario's own
    causes = diagnose(scenario, inputs, as_heard(job), evaluation, changes=alike)
    warnings = (*plan.warnings, *_notes(server, about))
    summary = summary_document(
        evaluation, warnings, time.perf_counter() - began, causes, document.get("not_covered", [])
    )
    path = None if ledger is None else ledger.path
    settled = scenario.sampler.model_copy(update={"burn_in": plan.burn_in, "chains": job.chains})
    task = Task(scenario.model_copy(update={"sampler": settled}), inputs, plan, folder, path, 0, None, "")
    summary["ledger"] = None if ledger is None else ledger_document(ledger, task)
    summary["epsilon_spent"] = about["epsilon_spent"]
    summary["federation"] = about
    shutil.copyfile(server.folder / LOG, folder / LOG)
    written = write_run(task, trace, document, summary)
    written += draw_scores(evaluation, scenario, folder)
    untold = ("ε", "gradients clipped")  # of the plan, not of the ledger; and what devices do not tell
    measured = [line for line in str(evaluation).splitlines() if not line.startswith(untold)]
    return summary, "\n".join([*measured, _in_words(about), *diagnosis_lines(causes)]), [*written, folder / LOG]


def _account(server: Server, request: Request) -> dict[str, Any]:
    """What happened: who sent, and what that cost by the ledger."""
    from wflmc.federated.server import read_log

    job, ledger = server.job, server.ledger
    rounds = read_log(server.folder)
    each = None if ledger is None else job.plan.privacy.epsilons_spent(ledger.spent)
    result: dict[str, Any] = plain(
        {
            "runtime": "deployment" if request.prepare else request.runtime,
            "noise": job.noise,
            "tolerate": job.tolerate,
            "releases": job.releases,
            "asked": [line["asked"] for line in rounds],
            "sent": [line["sent"] for line in rounds],
            "absences": sum(len(line["absent"]) for line in rounds),
            "empty_rounds": sum(line["sent"] == 0 for line in rounds),
            "epsilon_spent": None if each is None else float(each.max()),
            "adjacency": job.plan.privacy.adjacency,
        }
    )
    return result


def _notes(server: Server, about: dict[str, Any]) -> list[str]:
    """What the numbers rest on, in sentences."""
    notes = []
    if server.job.noise != "devices":
        notes.append(
            "The radio channel is emulated: the server's process reads every device's message before it adds the "
            "channel's noise, and epsilon holds for what it keeps and shows, not against that process. "
            "--noise devices does not rely on it."
        )
        if server.job.lattice is None:
            notes.append(
                "The noise is simulated: it is that of `wflmc run`, by sampler.seed, and protects nobody from whoever "
                "knows the seed. --noise channel draws it from the operating system's entropy, on a lattice."
            )
    else:
        notes.append(
            "Devices add the noise themselves, and the server reads every message: each is hidden by its own share of "
            f"the noise alone, {int(server.job.quorum.max())} times the loss of the sum, which plan and ledger count."
        )
        if about["absences"]:
            notes.append(
                "Messages that came late or were rejected have left their devices all the same: they are not in this "
                "ledger, but in those of the devices."
            )
    if server.job.tolerate:
        plan, quorum = server.job.plan, server.job.quorum
        notes.append(
            f"For {server.job.tolerate} absences every device adds 1/{int(quorum.min())} of the noise: with all there, "
            f"sums have up to {float(np.max(plan.active_devices / quorum)):.3g} times the noise that they need. The "
            "exact law counts that; the bound and the plan's own warnings are for as many absent."
        )
    if about["absences"]:
        notes.append(
            f"{about['absences']} times a device was asked and did not send: bound and exact law are those of the "
            "plan, in which all do; ledger and chains are of what happened."
        )
    return notes


def _in_words(about: dict[str, Any]) -> str:
    asked, sent, spent = sum(about["asked"]), sum(about["sent"]), about["epsilon_spent"]
    lines = [f"messages                 {sent} of {asked} in {len(about['sent'])} rounds (absences: rounds.jsonl)"]
    lines += (
        [] if spent is None else [f"ε by the ledger          {spent:.4g} for the worst device ({about['adjacency']})"]
    )
    return "\n".join(lines)


def command(
    scenario: ScenarioPath,
    out: Annotated[
        str, typer.Option("--out", metavar="DIR", help="Folder for the federation and for the files of its run.")
    ],
    overrides: Overrides = None,
    runtime: Annotated[
        str,
        typer.Option(
            "--runtime",
            metavar="NAME",
            help="simulation (Flower's engine), process (all in this one), or deployment (SuperLink and SuperNodes as "
            "processes on this machine, with TLS and authentication).",
        ),
    ] = "simulation",
    noise: Annotated[
        str | None,
        typer.Option(
            "--noise",
            metavar="NAME",
            help="Who adds it: channel (emulated), devices (each its share), or simulated (from the seed, protects "
            "nobody: the default unless --prepare is given).",
        ),
    ] = None,
    tolerate: Annotated[
        int,
        typer.Option("--tolerate", metavar="N", help="With --noise devices: absences that a round survives."),
    ] = 0,
    chains: Annotated[
        int | None,
        typer.Option("--chains", metavar="N", help="Chains at a time; the scenario's, or 1 with --prepare."),
    ] = None,
    deadline: Annotated[
        float, typer.Option("--deadline", metavar="SECONDS", help="A device that is later did not transmit.")
    ] = 120.0,
    ledger: Annotated[
        str | None,
        typer.Option("--ledger", metavar="FILE", help="Spend from this ledger; one of its own by default."),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Write folders, keys and commands for real machines, and run nothing.")
    ] = False,
    own_data: Annotated[
        bool, typer.Option("--own-data", help="With --prepare: devices bring their own data.npz (X and y).")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            metavar="HOST:PORT",
            help="With --prepare: where devices reach the server; 127.0.0.1:8000 by default.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a scenario as a federation on Flower: the server holds the plan and the ledger, each device its own data.

    With simulated noise and the same seed the chains are those of `wflmc run`. The same command goes on with a
    federation that was stopped.

    Example: wflmc federate scenario.toml --out results
    """
    cache_compilations()
    asked = Request(
        scenario, out, overrides, runtime, noise, tolerate, chains, deadline, ledger, prepare,
        own_data, address,
    )  # fmt: skip
    summary, text, files = federate_command(asked, progress_bar, note)
    warn(summary["warnings"])
    if as_json:
        print_json(summary)
        return
    if files:
        print(summary["owner_only"])
    print(text)
    if files:
        print(f"Written to {out}: {', '.join(path.name for path in files)}")
