"""The device's side on Flower: its app, and what it tells a server whose request fails.

On a machine of its own a device's folder is named by the SuperNode's --node-config, `folder='…'`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from wflmc.errors import InputError, OverspendError
from wflmc.federated.device import Device
from wflmc.federated.folder import open_device
from wflmc.federated.messages import read_request, reply

log = logging.getLogger("wflmc.federated")

UNTOLD = "the device could not answer; its own log says why"


def client_app(find: Callable[[Context], Device]) -> ClientApp:
    """The app of the devices.

    Args:
        find: the device of a context, such as by its node_config; called for every message, so it should remember.
    """
    app, find = ClientApp(), untold(find)

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        about = ConfigRecord({"device": find(context).terms.device})
        return Message(RecordDict({"about": about}), reply_to=message)

    @app.query("gradient")
    def gradient(message: Message, context: Context) -> Message:
        with told_briefly():
            device = find(context)
            ask, nonce = read_request(message.content, device.terms.run)
            return reply(message, device.answer(ask), ask, device.terms.run, nonce)

    return app


@contextmanager
def told_briefly() -> Iterator[None]:
    """Flower tells the server the text of whatever a device raises: keep in it nothing that comes from the data."""
    try:
        yield
    except (InputError, OverspendError) as error:
        log.warning("Request refused: %s", error)
        raise PermissionError(f"refused by the device: {error}") from None
    except Exception:
        log.exception("The device could not answer.")
        raise RuntimeError(UNTOLD) from None


def untold(find: Callable[[Context], Device]) -> Callable[[Context], Device]:
    """The same function, but what it finds wrong, as with the data of a device, is for the device's own log alone."""

    def found(context: Context) -> Device:
        try:
            return find(context)
        except Exception:
            log.exception("The device could not be opened.")
            raise RuntimeError(UNTOLD) from None

    return found


def own_device(context: Context) -> Device:
    """The device of this machine."""
    folder = context.node_config.get("folder")
    if not isinstance(folder, str) or not folder:
        raise InputError("node-config", folder, "folder='PATH' with the folder of this device")
    return open_device(Path(folder))


app = client_app(own_device)
