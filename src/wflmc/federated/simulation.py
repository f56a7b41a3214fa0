"""Many devices on one machine: in this process, or in Flower's simulation engine."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from wflmc.errors import InputError, OverspendError
from wflmc.federated.device import Device
from wflmc.federated.flower_client import client_app
from wflmc.federated.flower_server import Transport
from wflmc.federated.folder import DEVICE, open_device
from wflmc.federated.messages import Reception, Request
from wflmc.federated.server import Server, serve, superpose

Progress = Callable[[int, int], None]


def devices_in(folder: Path) -> ClientApp:
    """Return the app of devices whose folders lie side by side, each named by its number."""
    return client_app(lambda context: open_device(folder / DEVICE.format(context.node_config["partition-id"])))


def run_in_process(server: Server, devices: Sequence[Device], progress: Progress | None = None) -> None:
    """Run all devices one after the other in this process, without messages.

    Rounds take milliseconds: for first steps, and for machines without room for Flower's simulation engine.

    Args:
        server: as `open_server` gives it.
        devices: in the order of the plan.
        progress: called with (rounds done, rounds in all).
    """

    def exchange(requests: list[Request]) -> Reception:
        signals, absent = {}, {}
        for request in requests:
            try:
                signals[request.device] = devices[request.device].answer(request)
            except (InputError, OverspendError) as error:
                absent[request.device] = f"refused by the device: {error}"
        return superpose(server.job, requests, signals, absent)

    serve(server, exchange, progress)


def run_in_engine(server: Server, app: ClientApp, *, progress: Progress | None = None, deadline: float = 600.0) -> None:
    """Run all devices in Flower's simulation engine, which shares them out among processes (ray).

    Args:
        server, progress: as of `run_in_process`.
        app: of the devices, such as `devices_in(folder)`.
        deadline: seconds that a round waits for its devices.
    """
    if importlib.util.find_spec("ray") is None:
        allowed = "'process' where ray is missing: pip install 'wflmc[flower]' brings it"
        raise InputError("runtime", "simulation", allowed)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # one accelerator is not for all these processes
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    center = ServerApp()

    @center.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        serve(server, Transport(grid, server.job, deadline=deadline, wait=deadline), progress)

    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": os.cpu_count() or 1, "logging_level": "ERROR", "log_to_driver": False},
    }
    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec, which leaves JAX's threads alone.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        run_simulation(center, app, server.job.plan.devices, backend_config=backend)
