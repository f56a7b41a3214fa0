"""Where names are defined, for type checkers.

At run time they are imported when they are used first.
"""

from wflmc.apps.federation.device import Device as Device
from wflmc.apps.federation.device import client_app as client_app
from wflmc.apps.federation.job import make_job as make_job
from wflmc.apps.federation.messages import Terms as Terms
from wflmc.apps.federation.server import open_server as open_server
from wflmc.apps.federation.server import run_in_process as run_in_process
from wflmc.apps.federation.server import trace_of as trace_of

__all__: list[str] = [
    "Device",
    "Terms",
    "client_app",
    "make_job",
    "open_server",
    "run_in_process",
    "trace_of",
]
