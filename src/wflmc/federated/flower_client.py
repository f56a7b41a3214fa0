"""What a device runs on its own machine: its folder is named by the SuperNode's --node-config, `folder='…'`."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context

from wflmc.errors import InputError
from wflmc.federated.apps import client_app
from wflmc.federated.device import Device
from wflmc.federated.folder import open_device


def own_device(context: Context) -> Device:
    """The device of this machine."""
    folder = context.node_config.get("folder")
    if not isinstance(folder, str) or not folder:
        raise InputError("node-config", folder, "folder='PATH' with the folder of this device")
    return open_device(Path(folder))


app = client_app(own_device)
