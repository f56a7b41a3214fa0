"""Many devices on one machine: in this process, or in Flower's simulation engine, by the same two apps."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from wflmc.errors import InputError
from wflmc.federated.apps import Post, client_app
from wflmc.federated.folder import DEVICE, open_device
from wflmc.federated.grid import Fault, LocalGrid
from wflmc.federated.server import Server, serve

Progress = Callable[[int, int], None]


def devices_in(folder: Path) -> ClientApp:
    """The app of devices whose folders lie side by side, each found by its number."""

    def find(context: Context) -> Any:
        return open_device(folder / DEVICE.format(context.node_config["partition-id"]))

    return client_app(find)


def run_in_process(
    server: Server, app: ClientApp, *, progress: Progress | None = None, fault: Fault | None = None, wait: float = 10.0
) -> None:
    """All devices one after the other in this process; answers come at once, so what has not come will not.

    Args:
        wait: seconds to wait for devices that do not say who they are.
    """
    devices = server.job.plan.devices
    grid = LocalGrid(app, devices, fault)
    nodes = {node: k for k, node in enumerate(grid.get_node_ids())}
    serve(server, Post(grid, server.job, nodes, deadline=0.0, wait=wait), progress)


def run_in_engine(
    server: Server,
    app: ClientApp,
    *,
    progress: Progress | None = None,
    processes: int | None = None,
    deadline: float = 600.0,
) -> None:
    """All devices in Flower's simulation engine, which shares them out among processes (ray)."""
    if importlib.util.find_spec("ray") is None:
        allowed = "'process' where ray is missing: pip install 'wflmc[flower]' brings it"
        raise InputError("runtime", "simulation", allowed)
    cores = processes or os.cpu_count() or 1
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # one accelerator is not for all these processes
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    center = ServerApp()

    @center.main()
    def main(grid: Grid, context: Context) -> None:
        del context
        serve(server, Post(grid, server.job, deadline=deadline, wait=deadline), progress)

    backend: dict[str, Any] = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": cores, "logging_level": "ERROR", "log_to_driver": False},
    }
    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec, which leaves JAX's threads alone.
        warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
        run_simulation(center, app, server.job.plan.devices, backend_config=backend)
