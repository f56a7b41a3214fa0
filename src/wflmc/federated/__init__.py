"""A real federation on Flower: the server holds θ, the plan and the ledger, each device its own data."""

from wflmc.federated.device import Device, client_app
from wflmc.federated.job import make_job
from wflmc.federated.messages import Terms
from wflmc.federated.server import open_server, run_in_process, trace_of

__all__ = ["Device", "Terms", "client_app", "make_job", "open_server", "run_in_process", "trace_of"]
