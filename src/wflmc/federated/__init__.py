"""A real federation on Flower: the server holds θ, the plan and the ledger, each device its own data."""

from wflmc.federated.device import Device, open_device
from wflmc.federated.flower_client import client_app
from wflmc.federated.flower_server import devices_in, run_in_engine
from wflmc.federated.job import Job, federated_plan, make_job, write_federation
from wflmc.federated.messages import Terms
from wflmc.federated.server import Server, open_server, run_in_process, serve, trace_of

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
