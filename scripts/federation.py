"""Compare the federation on Flower with the simulator.

    python scripts/federation.py simulation
    python scripts/federation.py deployment

`simulation` runs 30 devices for 20 rounds in Flower's simulation engine and compares
every chain with `wflmc.sample`.

`deployment` runs one SuperLink and three SuperNodes as separate processes on loopback,
with TLS and authentication. Three SuperNodes that must be refused are tried; one
SuperNode is killed and started again; SuperLink and ServerApp are killed, and the run
resumes from its checkpoint. Which devices sent in which round is then put into a plan,
and the chains must be those that `wflmc.sample` draws by that plan. It takes some five
minutes.

Each check prints a line; the exit code is 1 if one fails.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

import wflmc
from wflmc.apps.federation.certificates import write_authority, write_device_key
from wflmc.apps.federation.deployment import (
    SUPERLINK_NAME,
    Loopback,
    environment,
    free_port,
    kill,
    prepare,
    supernode_command,
)
from wflmc.apps.federation.device import devices_in
from wflmc.apps.federation.flower_server import run_in_engine
from wflmc.apps.federation.job import Job, make_job, write_federation
from wflmc.apps.federation.messages import DEVICE, SERVER
from wflmc.apps.federation.registration import flwr
from wflmc.apps.federation.server import open_server, read_log, trace_of
from wflmc.planning import Plan
from wflmc.runs.planning import make_plan
from wflmc.scenario import load_scenario
from wflmc.scenario.build import Inputs, build

EXAMPLE = Path(__file__).parents[1] / "examples" / "fading.toml"
"""The scenario of both studies: a Gaussian posterior over a fading channel."""
SEED = 0
"""Of the chains."""
DEPLOYED_DEVICES = 3
"""SuperNodes of the deployment."""
KILLED_DEVICE = 1
"""The device whose SuperNode is killed."""
FIRST_MISSED_ROUND = 3
"""The round, from 1, that this device cannot answer."""
REFUSED_SECONDS = 120
"""Seconds after which a SuperNode that has not ended counts as admitted."""
REFUSALS = {
    "a key that is not registered": "code: 2004",
    "no key": "code: 2001",
    "trust in another authority": "CERTIFICATE_VERIFY_FAILED",
}
"""SuperNodes that must be refused, and what Flower writes about them."""

JsonObject = dict[str, Any]
"""A line of a log or of a ledger."""


class Report:
    """Prints lines with the seconds since the start, and counts failures."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.failures = 0

    def note(self, text: str) -> None:
        """Print a line.

        It begins with the seconds since the report was begun, and is flushed at once,
        so that a run of minutes can be followed.

        Args:
            text: of one line.
        """
        seconds = time.monotonic() - self.start
        print(f"{seconds:7.1f} s  {text}", flush=True)

    def check(self, passed: bool, text: str) -> None:
        """Print the result of a check.

        A check that fails does not stop the script; the number of failures decides
        about its exit code at the end.

        Args:
            passed: whether the check is passed.
            text: what was checked.
        """
        if not passed:
            self.failures += 1
        self.note(f"{'PASS' if passed else 'FAIL'}  {text}")


class Study(NamedTuple):
    """A federation in a folder, and what it was prepared from."""

    folder: Path
    inputs: Inputs
    job: Job


def prepare_study(
    folder: Path,
    *,
    devices: int,
    burn_in: int,
    samples: int,
    chains: int,
) -> Study:
    """Write the folders of a federation for the example scenario.

    The noise is simulated from `SEED`, so that `wflmc.sample` can draw the same.

    Args:
        folder: of the federation.
        devices: K.
        burn_in: rounds before the first sample.
        samples: rounds with samples.
        chains: that are run at the same time.

    Returns:
        The federation, of which no round has been run.
    """
    settings = {
        "posterior.devices": devices,
        "sampler.burn_in": burn_in,
        "sampler.samples": samples,
        "link.snr_db": 10,
    }
    overrides = [f"{key}={value}" for key, value in settings.items()]
    scenario = load_scenario(EXAMPLE, overrides)
    inputs = build(scenario)
    plan = make_plan(scenario, inputs)
    key = jax.random.key(SEED)
    job = make_job(key, inputs.posterior, inputs.link, plan, chains=chains)
    write_federation(folder, scenario, inputs, job)
    return Study(folder, inputs, job)


def compare(report: Report, study: Study, plan: Plan, subject: str) -> None:
    """Check the federation's chains against the simulator's.

    They may differ by the rounding of float32 in every round.

    Args:
        report: gets the result.
        study: whose rounds are all finished.
        plan: of the simulator, which may have other senders than that of the job.
        subject: what is compared, for the line of the report.
    """
    posterior = study.inputs.posterior
    server = open_server(study.job, study.folder / SERVER)
    federated = np.asarray(trace_of(server, posterior).theta)
    key = jax.random.key(SEED)
    trace = wflmc.sample(key, posterior, plan, study.job.chains)
    expected = np.asarray(trace.theta)
    difference = float(np.max(np.abs(federated - expected)))
    scale = float(np.max(np.abs(expected)))
    limit = float(np.finfo(np.float32).eps) * scale * len(plan.rounds)
    text = (
        f"{subject}: largest difference {difference:.2g} of values up to {scale:.2g}; "
        f"rounding may be {limit:.2g}"
    )
    same_shape = federated.shape == expected.shape
    report.check(same_shape and difference <= limit, text)


def run_simulation(report: Report, folder: Path) -> None:
    """Run 30 devices for 20 rounds in Flower's simulation engine.

    All scheduled devices must send in every round, and the chains must be those of
    `wflmc.sample` with the plan of the job.

    Args:
        report: gets the results.
        folder: to work in.
    """
    study = prepare_study(folder, devices=30, burn_in=10, samples=10, chains=8)
    plan = study.job.plan
    server = open_server(study.job, folder / SERVER)
    report.note(
        f"{plan.devices} devices, {len(plan.rounds)} rounds, {study.job.chains} "
        "chains in Flower's simulation engine"
    )
    run_in_engine(server, devices_in(folder))
    rows = read_log(folder / SERVER)
    seconds = [row["seconds"] for row in rows]
    senders = [row["sent"] for row in rows]
    report.note(f"median round {np.median(seconds):.2f} s; senders {senders}")
    all_sent = senders == plan.active_devices.tolist()
    report.check(all_sent, "all scheduled devices sent")
    compare(report, study, plan, "chains of the engine and of wflmc.sample")


def run_deployment(
    report: Report,
    folder: Path,
    *,
    deadline: float,
    port: int | None,
) -> None:
    """Run separate processes on loopback, with refusals, kills and restarts.

    Args:
        report: gets the results.
        folder: to work in.
        deadline: seconds that a round waits for its devices.
        port: of the SuperLink; None for a free one.
    """
    study = prepare_study(
        folder, devices=DEPLOYED_DEVICES, burn_in=4, samples=4, chains=4
    )
    prepare(folder, DEPLOYED_DEVICES)
    rounds = len(study.job.plan.rounds)
    report.note(
        f"{DEPLOYED_DEVICES} devices, {rounds} rounds, {study.job.chains} chains; "
        f"a round waits at most {deadline:g} s"
    )
    with Loopback(folder, port=port, notify=report.note) as loopback:
        loopback.start_superlink()
        check_refusals(report, loopback)
        for device in range(DEPLOYED_DEVICES):
            loopback.start_supernode(device)
        _run_with_kills(report, loopback, deadline)
    rows = read_log(folder / SERVER)
    seconds = [row["seconds"] for row in rows if not row["absent"]]
    report.note(f"median of the rounds without absences: {np.median(seconds):.1f} s")
    check_run(report, study, rows)


def _run_with_kills(report: Report, loopback: Loopback, deadline: float) -> None:
    """Run all rounds; kill a SuperNode, then SuperLink and ServerApp, in between."""
    supernode = DEVICE.format(KILLED_DEVICE)
    subject = f"SuperNode of device {KILLED_DEVICE}"
    run = loopback.submit(deadline)
    loopback.wait(run, until=2)
    kill(loopback.processes.pop(supernode).tree())
    report.note(f"{subject} killed (SIGKILL) after 2 rounds")
    loopback.wait(run, until=3)
    loopback.start_supernode(KILLED_DEVICE)
    finished_rounds = len(read_log(loopback.server))
    report.note(f"{subject} started again, after {finished_rounds} rounds")
    loopback.wait(run, until=6)
    kill(loopback.processes.pop(SUPERLINK_NAME).tree())
    report.note("SuperLink and ServerApp killed (SIGKILL) after 6 rounds")
    loopback.start_superlink()
    resumed = loopback.submit(deadline)
    report.note("the run is submitted again")
    loopback.wait(resumed)


def check_refusals(report: Report, loopback: Loopback) -> None:
    """Check that SuperNodes are refused which must not be admitted.

    Args:
        report: gets the results.
        loopback: with a SuperLink, and no SuperNode yet.
    """
    for subject, reason in REFUSALS.items():
        attempt = attempt_connection(loopback, subject)
        refused = attempt.code not in (None, 0) and reason in attempt.output
        text = f"a SuperNode with {subject} is refused: exit code {attempt.code}"
        report.check(refused, f"{text}, {reason}")
    nodes = flwr(["supernode", "list", SUPERLINK_NAME], loopback.environment)["nodes"]
    states = [row["status"] for row in nodes]
    report.check(
        states == ["registered"] * DEPLOYED_DEVICES,
        f"the SuperLink has three nodes, none of them online: {states}",
    )


class Attempt(NamedTuple):
    """What became of a SuperNode that was started."""

    code: int | None
    """Its exit code; None where it went on running."""
    output: str


def attempt_connection(loopback: Loopback, subject: str) -> Attempt:
    """Start a SuperNode that must be refused, and wait until it ends.

    Args:
        loopback: with a SuperLink.
        subject: what is wrong with the SuperNode, a key of `REFUSALS`.

    Returns:
        Its exit code and its output.
    """
    folder = loopback.folder / "stranger"
    folder.mkdir()
    for name in ("ca.crt", "key"):
        shutil.copy(loopback.folder / DEVICE.format(0) / name, folder / name)
    command = supernode_command(loopback.address, free_port())
    if subject == "a key that is not registered":
        write_device_key(folder)
    elif subject == "no key":
        position = command.index("--auth-supernode-private-key")
        del command[position : position + 2]
    else:
        write_authority(folder)
    attempt = _run_supernode(command, folder, loopback.state / "stranger")
    shutil.rmtree(folder)
    return attempt


def _run_supernode(command: list[str], folder: Path, home: Path) -> Attempt:
    """Run a SuperNode until it ends, or until it counts as admitted."""
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(home), stdout=log, stderr=log
        )
        code: int | None = None
        try:
            code = process.wait(REFUSED_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.seek(0)
        return Attempt(code, log.read())


def check_run(report: Report, study: Study, rows: list[JsonObject]) -> None:
    """Check K_a, ledgers and chains against the devices that really sent.

    Args:
        report: gets the results.
        study: whose rounds are all finished.
        rows: the log of the server, one for each round.
    """
    plan = study.job.plan
    sent = _senders(plan, rows)
    check_log(report, plan, rows, sent)
    losses = check_server_ledger(report, study, sent)
    check_device_ledgers(report, study, losses)
    plan_of_senders = _plan_of_senders(plan, sent)
    subject = "chains of the deployment and of wflmc.sample by the senders"
    compare(report, study, plan_of_senders, subject)


def _senders(plan: Plan, rows: list[JsonObject]) -> NDArray[np.bool_]:
    """Return which devices sent, [S, K], by the absences in the log."""
    present = np.ones(plan.weight.shape, np.bool_)
    for round_index, row in enumerate(rows):
        absent = [int(device) for device in row["absent"]]
        present[round_index, absent] = False
    return present & (plan.weight > 0)


def check_log(
    report: Report,
    plan: Plan,
    rows: list[JsonObject],
    sent: NDArray[np.bool_],
) -> None:
    """Check that the log is complete, and that the killed device came back.

    Args:
        report: gets the results.
        plan: of the job.
        rows: the log.
        sent: which devices sent, [S, K].
    """
    scheduled = plan.weight > 0
    missed = scheduled[:, KILLED_DEVICE] & ~sent[:, KILLED_DEVICE]
    missed_rounds = [int(index) + 1 for index in np.flatnonzero(missed)]
    counts = sent.sum(1).tolist()
    report.note(f"senders by round: {counts} of {scheduled.sum(1).tolist()} scheduled")
    numbers = [row["round"] for row in rows]
    complete = numbers == list(range(len(plan.rounds)))
    report.check(complete, "every round is in the log, in order")
    counts_match = [row["sent"] for row in rows] == counts
    report.check(counts_match, "K_a of every round is the number of senders")
    report.check(
        FIRST_MISSED_ROUND in missed_rounds,
        f"device {KILLED_DEVICE} missed rounds {missed_rounds}",
    )
    last_missed = max(missed_rounds, default=0)
    later = int(sent[last_missed:, KILLED_DEVICE].sum())
    text = f"device {KILLED_DEVICE} sent {later} times after it was started again"
    report.check(later > 0, text)


def check_server_ledger(
    report: Report,
    study: Study,
    sent: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Check that the server's ledger charges every round once, for its senders.

    Args:
        report: gets the results.
        study: whose rounds are all finished.
        sent: which devices sent, [S, K].

    Returns:
        The losses of the ledger, [S, K].
    """
    plan = study.job.plan
    entries = _ledger_entries(study.folder / SERVER)
    numbers = [entry["round"] for entry in entries]
    once = numbers == list(range(len(plan.rounds)))
    report.check(once, "the ledger has every round once")
    runs = {entry["run"] for entry in entries}
    report.check(len(runs) == 1, "and all of them are of one run")
    losses = np.array([entry["loss"] for entry in entries])
    planned = np.where(sent, plan.loss, 0.0)
    as_planned = np.allclose(losses, planned, rtol=1e-12, atol=0)
    report.check(as_planned, "losses are the plan's of the devices that sent")
    free = not losses[~sent].any()
    report.check(free, "no device pays for a round that it missed")
    return losses


def check_device_ledgers(
    report: Report,
    study: Study,
    losses: NDArray[np.float64],
) -> None:
    """Check that devices charge themselves, and not twice for a repeated request.

    Args:
        report: gets the results.
        study: whose rounds are all finished.
        losses: of the server's ledger, [S, K].
    """
    totals = []
    charged_once = []
    for device in range(study.job.plan.devices):
        entries = _ledger_entries(study.folder / DEVICE.format(device))
        totals.append(sum(entry["loss"][0] for entry in entries))
        numbers = {entry["round"] for entry in entries}
        charged_once.append(len(numbers) == len(entries))
    server_totals = losses.sum(0)
    enough = np.array(totals) >= server_totals * (1 - 1e-9)
    rounded = [np.round(values, 6).tolist() for values in (totals, server_totals)]
    text = f"devices' own ledgers count no less: {rounded[0]} and {rounded[1]}"
    report.check(bool(enough.all()), text)
    report.check(
        all(charged_once),
        "devices' own ledgers have no round twice: a repeated request was the same",
    )


def _ledger_entries(folder: Path) -> list[JsonObject]:
    """Return the charges of the ledger in a folder, without its header."""
    text = (folder / "ledger.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()[1:]]


def _plan_of_senders(plan: Plan, sent: NDArray[np.bool_]) -> Plan:
    """Return the plan in which exactly those who sent are scheduled.

    Their number gives K/K_a, and the variance of all noise together stays the same.
    """
    rescaling = plan.active_devices / sent.sum(1)
    weight = np.where(sent, plan.scale[:, None] * rescaling[:, None], 0.0)
    if not np.any(plan.server_noise):
        return plan.with_rounds(weight=weight)
    channel_noise = plan.noise_power * (plan.step_size / plan.gain) ** 2
    scale = weight.max(1)
    total = plan.server_noise + channel_noise * (plan.scale**2 - scale**2)
    return plan.with_rounds(weight=weight, server_noise=np.maximum(total, 0.0))


def main() -> int:
    """Run the study that the command line names.

    It works in a temporary folder, unless another one is named, which is kept.

    Returns:
        The exit code: 1 if a check failed.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["simulation", "deployment"])
    parser.add_argument(
        "--folder", type=Path, help="an empty folder to work in, and to keep"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=75.0,
        help="seconds that a round of the deployment waits",
    )
    parser.add_argument(
        "--port", type=int, help="of the SuperLink; a free one by default"
    )
    options = parser.parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if options.what == "simulation":
            run_simulation(report, folder)
        else:
            run_deployment(report, folder, deadline=options.deadline, port=options.port)
    if report.failures:
        report.note(f"{report.failures} checks FAILED")
        return 1
    report.note("all checks passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
