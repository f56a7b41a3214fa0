"""A real federation on Flower: the server holds θ, the plan and the ledger, each device its own data."""

from wflmc.federated.device import Device
from wflmc.federated.flower_client import client_app
from wflmc.federated.folder import open_device, write_federation
from wflmc.federated.job import Job, federated_plan, make_job
from wflmc.federated.messages import Terms
from wflmc.federated.server import Server, open_server, serve, trace_of
from wflmc.federated.simulation import devices_in, run_in_engine, run_in_process

__all__ = [
    "Device",
    "Job",
    "Server",
    "Terms",
    "client_app",
    "devices_in",
    "federated_plan",
    "make_job",
    "open_device",
    "open_server",
    "run_in_engine",
    "run_in_process",
    "serve",
    "trace_of",
    "write_federation",
]
