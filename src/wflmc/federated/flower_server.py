"""What the server runs beside its SuperLink: all rounds of the job in its folder that have not been run.

Its run config:

    folder      the server's folder, with job.npz and job.json
    deadline    seconds that a round waits; a device that is late did not transmit
    wait        seconds to wait for devices before the first round, and for any of them later on

Where the folder has a nodes.json, written when keys were registered, a device is the node with its key, and no other.
Without one nodes are asked who they are, and believed.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from wflmc.errors import InputError
from wflmc.federated.apps import Post
from wflmc.federated.job import Job
from wflmc.federated.registration import TABLE, DeploymentError, read_nodes
from wflmc.federated.server import Exchange, Server, open_server, serve
from wflmc.federated.terms import Ask, Heard
from wflmc.privacy.ledger import TOLERANCE

POLL = 0.5
"""Seconds between two looks for answers: each is a request to the SuperLink, which has others to serve."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the job; a line a round, to be read by `flwr log`."""
    config = context.run_config
    folder = Path(str(config["folder"]))
    deadline, wait = _seconds(config, "deadline"), _seconds(config, "wait")
    job = Job.load(folder)
    server = open_server(job, folder)
    _refuse_forgetful(server)
    done = server.checkpoint.load().rounds
    _say(f"{done} of {job.plan.rounds} rounds are done; waiting for {job.plan.devices} devices")
    nodes = {row.node: row.device for row in read_nodes(folder)} if (folder / TABLE).exists() else None
    serve(server, patient(Post(grid, job, nodes, deadline=deadline, wait=wait, poll=POLL), wait), say=_say)
    _say("all rounds are done")


def patient(exchange: Exchange, wait: float, pause: float = 5.0) -> Exchange:
    """Ask again as long as nobody answers: a server without a network would else run through all rounds for nothing.

    Devices answer the same request with the same numbers, so that nothing is paid twice.
    """

    def ask(asks: list[Ask]) -> Heard:
        end = time.monotonic() + wait
        while True:
            found = exchange(asks)
            if found.sent.any() or not asks:
                return found
            reasons = "; ".join(f"device {device}: {why}" for device, why in sorted(found.absent.items()))
            if time.monotonic() > end:
                text = f"No device has answered for {wait:g} s, so the run is stopped; it can go on later. {reasons}"
                raise DeploymentError(text)
            _say(f"nobody answered, asking again; {reasons}")
            time.sleep(pause)

    return ask


def _refuse_forgetful(server: Server) -> None:
    """InputError for a ledger that has less than the plan takes as spent: it may have stayed on another machine."""
    book, before = server.ledger, server.job.plan.ledger
    if book is not None and np.any(book.spent < before * (1 - TOLERANCE)):
        allowed = "the one with which the federation was prepared: it lacks what devices had spent before"
        raise InputError("ledger", str(book.path), allowed)


def _seconds(config: Any, name: str) -> float:
    value = config.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise InputError(name, value, "a number of seconds")
    return float(value)


def _say(line: str) -> None:
    print(line, flush=True)
