"""Where names are defined, for type checkers; at run time they are imported when asked for."""

from wflmc.federated.device import Device as Device
from wflmc.federated.device import client_app as client_app
from wflmc.federated.job import make_job as make_job
from wflmc.federated.messages import Terms as Terms
from wflmc.federated.server import open_server as open_server
from wflmc.federated.server import run_in_process as run_in_process
from wflmc.federated.server import trace_of as trace_of

__all__: list[str] = ["Device", "Terms", "client_app", "make_job", "open_server", "run_in_process", "trace_of"]
