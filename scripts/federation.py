"""The federation on Flower against the simulator: `python scripts/federation.py simulation`, or `deployment`.

`simulation` runs 30 devices for 20 rounds in Flower's simulation engine and compares every chain with `wflmc.sample`.

`deployment` runs one SuperLink and three SuperNodes as separate processes on loopback, with TLS and authentication.
Three SuperNodes that should be refused are tried; one SuperNode is killed and started again; SuperLink and ServerApp
are killed, and the run goes on from its checkpoint. Who sent in which round is then put into a plan, and the chains
must be those that `wflmc.sample` draws by that plan. It takes some five minutes.

Each check prints a line; the exit code is 1 if one fails.
"""

from __future__ import annotations

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

import wflmc
from wflmc.apps.federation.certificates import write_authority, write_device_key
from wflmc.apps.federation.deployment import (
    HOST,
    LINK,
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
SEED = 0
KILLED = 1
"""The device whose SuperNode is killed."""
REFUSALS = {
    "a key that is not registered": "code: 2004",
    "no key": "code: 2001",
    "trust in another authority": "CERTIFICATE_VERIFY_FAILED",
}
"""SuperNodes that must be refused, and what Flower says to them."""


class Account:
    """What happens, with the seconds since the beginning, and which checks have failed."""

    def __init__(self) -> None:
        self.began, self.failed = time.monotonic(), 0

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:7.1f} s  {text}", flush=True)

    def check(self, good: bool, text: str) -> None:
        self.failed += not good
        self.say(f"{'PASS' if good else 'FAIL'}  {text}")


class Study(NamedTuple):
    """A federation in a folder, and what it was made of."""

    folder: Path
    inputs: Inputs
    job: Job


def study(
    folder: Path, devices: int, burn_in: int, samples: int, chains: int, snr_db: float
) -> Study:
    """The Gaussian study over a fading channel, in a folder."""
    given: dict[str, float] = {
        "posterior.devices": devices,
        "sampler.burn_in": burn_in,
        "sampler.samples": samples,
    }
    given["link.snr_db"] = snr_db
    scenario = load_scenario(
        EXAMPLE, [f"{key}={value}" for key, value in given.items()]
    )
    inputs = build(scenario)
    job = make_job(
        jax.random.key(SEED),
        inputs.posterior,
        inputs.link,
        make_plan(scenario, inputs),
        chains=chains,
    )
    write_federation(folder, scenario, inputs, job)
    return Study(folder, inputs, job)


def compare(account: Account, made: Study, plan: Plan, what: str) -> None:
    """Check the federation's chains against the simulator's, by a plan."""
    server = open_server(made.job, made.folder / SERVER)
    found = trace_of(server, made.inputs.posterior).theta
    expected = wflmc.sample(
        jax.random.key(SEED), made.inputs.posterior, plan, made.job.chains
    ).theta
    difference = float(np.max(np.abs(np.asarray(found) - np.asarray(expected))))
    scale = float(np.max(np.abs(expected)))
    limit = float(np.finfo(np.float32).eps) * scale * len(plan.rounds)
    text = f"{what}: largest difference {difference:.2g} of values up to {scale:.2g}; rounding may be {limit:.2g}"
    account.check(found.shape == expected.shape and difference <= limit, text)


def simulation(account: Account, folder: Path) -> None:
    """Flower's simulation engine, 30 devices and 20 rounds."""
    made = study(folder, devices=30, burn_in=10, samples=10, chains=8, snr_db=10)
    server = open_server(made.job, folder / SERVER)
    account.say(
        f"30 devices, {len(made.job.plan.rounds)} rounds, {made.job.chains} chains in Flower's simulation engine"
    )
    run_in_engine(server, devices_in(folder))
    rows = read_log(folder / SERVER)
    account.say(
        f"median round {np.median([row['seconds'] for row in rows]):.2f} s; senders {[r['sent'] for r in rows]}"
    )
    account.check(
        [row["sent"] for row in rows] == made.job.plan.active_devices.tolist(),
        "all who were to send sent",
    )
    compare(account, made, made.job.plan, "chains of the engine and of wflmc.sample")


def deployment(
    account: Account, folder: Path, deadline: float, port: int | None
) -> None:
    """Separate processes on loopback, with TLS, authentication, kills and restarts."""
    made = study(folder, devices=3, burn_in=4, samples=4, chains=4, snr_db=10)
    prepare(folder, 3)
    plan = made.job.plan
    account.say(
        f"3 devices, {len(plan.rounds)} rounds, {made.job.chains} chains; a round waits at most {deadline:g} s"
    )
    with Loopback(folder, port=port, say=account.say) as loopback:
        loopback.start_link()
        refuse(account, loopback)
        for k in range(3):
            loopback.start_node(k)
        run = loopback.submit(deadline)
        loopback.wait(run, until=2)
        kill(loopback.parts.pop(DEVICE.format(KILLED)).tree())
        account.say(f"SuperNode of device {KILLED} killed (SIGKILL) after 2 rounds")
        loopback.wait(run, until=3)
        loopback.start_node(KILLED)
        account.say(
            f"SuperNode of device {KILLED} started again, after {len(read_log(loopback.server))} rounds"
        )
        loopback.wait(run, until=6)
        kill(loopback.parts.pop(LINK).tree())
        account.say("SuperLink and ServerApp killed (SIGKILL) after 6 rounds")
        loopback.start_link()
        again = loopback.submit(deadline)
        account.say("the run is submitted again")
        loopback.wait(again)
    rows = read_log(folder / SERVER)
    seconds = [row["seconds"] for row in rows if not row["absent"]]
    account.say(
        f"median of the rounds in which all answered: {np.median(seconds):.1f} s"
    )
    follow(account, made, rows)


def refuse(account: Account, loopback: Loopback) -> None:
    """Try SuperNodes that must not be let in."""
    for what, reason in REFUSALS.items():
        own = loopback.folder / "stranger"
        own.mkdir()
        for name in ("ca.crt", "key"):
            shutil.copy(loopback.folder / DEVICE.format(0) / name, own / name)
        command = supernode_command(f"{HOST}:{loopback.port}", free_port())
        if what == "a key that is not registered":
            write_device_key(own)
        elif what == "no key":
            at = command.index("--auth-supernode-private-key")
            del command[at : at + 2]
        else:
            write_authority(own)
        code, said = attempt(command, own, loopback.state / "stranger")
        good = code not in (None, 0) and reason in said
        account.check(
            good, f"a SuperNode with {what} is refused: exit code {code}, {reason}"
        )
        shutil.rmtree(own)
    states = [
        row["status"]
        for row in flwr(["supernode", "list", LINK], loopback.env)["nodes"]
    ]
    account.check(
        states == ["registered"] * 3,
        f"the SuperLink knows three nodes, none of them online: {states}",
    )


def attempt(command: list[str], folder: Path, home: Path) -> tuple[int | None, str]:
    """The exit code of a SuperNode, none where it goes on running, and what it said."""
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(home), stdout=log, stderr=log
        )
        try:
            code: int | None = process.wait(120)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        log.seek(0)
        return code, log.read()


def follow(account: Account, made: Study, rows: list[dict[str, Any]]) -> None:
    """Check K_a, ledgers and chains against who was there."""
    plan, server = made.job.plan, made.folder / SERVER
    planned = plan.weight > 0
    sent = (
        np.array(
            [
                [k not in map(int, row["absent"]) for k in range(plan.devices)]
                for row in rows
            ]
        )
        & planned
    )
    missed = [
        at + 1
        for at in range(len(plan.rounds))
        if planned[at, KILLED] and not sent[at, KILLED]
    ]
    account.say(
        f"senders by round: {sent.sum(1).tolist()} of {planned.sum(1).tolist()} that the plan lets send"
    )
    account.check(
        [row["round"] for row in rows] == list(range(len(plan.rounds))),
        "every round is there, in order",
    )
    account.check(
        [row["sent"] for row in rows] == sent.sum(1).tolist(),
        "K_a of every round is who really sent",
    )
    account.check(3 in missed, f"device {KILLED} missed rounds {missed}")
    back = sent[max(missed, default=0) :, KILLED].sum()
    account.check(
        bool(back), f"device {KILLED} sent {back} times after it was started again"
    )

    lines = [
        json.loads(line)
        for line in (server / "ledger.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()[1:]
    ]
    account.check(
        [line["round"] for line in lines] == list(range(len(plan.rounds))),
        "the ledger has every round once",
    )
    account.check(
        len({line["run"] for line in lines}) == 1, "and all of them are of one run"
    )
    losses = np.array([line["loss"] for line in lines])
    account.check(
        np.allclose(losses, np.where(sent, plan.loss, 0.0), rtol=1e-12, atol=0),
        "losses are the plan's of who sent",
    )
    account.check(not losses[~sent].any(), "nobody pays for a round that it missed")
    own = [
        [
            json.loads(line)
            for line in (made.folder / DEVICE.format(k) / "ledger.jsonl")
            .read_text()
            .splitlines()[1:]
        ]
        for k in range(plan.devices)
    ]
    spent = [sum(line["loss"][0] for line in lines) for lines in own]
    account.check(
        all(
            mine >= theirs * (1 - 1e-9)
            for mine, theirs in zip(spent, losses.sum(0), strict=True)
        ),
        f"devices' own ledgers count no less: {np.round(spent, 6).tolist()} and {np.round(losses.sum(0), 6).tolist()}",
    )
    once = [len({line["round"] for line in lines}) == len(lines) for lines in own]
    account.check(
        all(once),
        "devices' own ledgers have no round twice: what was asked again was the same",
    )
    compare(
        account,
        made,
        plan_of_those(plan, sent),
        "chains of the deployment and of wflmc.sample by who sent",
    )


def plan_of_those(plan: Plan, sent: Any) -> Plan:
    """A plan in which those who really sent are scheduled: K/K_a by their number, the same noise in all."""
    weight = np.where(
        sent, plan.scale[:, None] * (plan.active_devices / sent.sum(1))[:, None], 0.0
    )
    channel = plan.noise_power * (plan.step_size / plan.gain) ** 2
    fresh = weight.max(1)
    noise = np.maximum(plan.server_noise + channel * (plan.scale**2 - fresh**2), 0.0)
    return plan.with_rounds(
        weight=weight,
        server_noise=noise if np.any(plan.server_noise) else plan.server_noise,
    )


def main() -> int:
    """Run what was asked for, in a folder that goes away unless one is named."""
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
    given = parser.parse_args()
    account = Account()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        if given.what == "simulation":
            simulation(account, folder)
        else:
            deployment(account, folder, given.deadline, given.port)
    account.say(
        "all checks passed" if not account.failed else f"{account.failed} checks FAILED"
    )
    return int(account.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
