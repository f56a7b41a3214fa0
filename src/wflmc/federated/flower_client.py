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
from wflmc.federated.device import Device, open_device
from wflmc.federated.messages import read_request, write_reply

log = logging.getLogger("wflmc.federated")


def client_app(find: Callable[[Context], Device]) -> ClientApp:
    """Return the app of the devices.

    Args:
        find: the device of a context, such as by its node_config; called for every message, so it should remember.
    """
    app = ClientApp()

    @app.query("hello")
    def hello(message: Message, context: Context) -> Message:
        with _without_details():
            device = find(context)
        return Message(RecordDict({"about": ConfigRecord({"device": device.terms.device})}), reply_to=message)

    @app.query("gradient")
    def gradient(message: Message, context: Context) -> Message:
        with _without_details():
            device = find(context)
        with _without_details(InputError, OverspendError):
            request, nonce = read_request(message.content, device.terms.run)
            return write_reply(message, device.answer(request), request, device.terms.run, nonce)

    return app


@contextmanager
def _without_details(*shown: type[Exception]) -> Iterator[None]:
    """Keep from the server, which Flower tells the text of whatever a device raises, all that comes from the data.

    Args:
        shown: errors whose sentence is about the request alone.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, shown):
            log.warning("Request refused: %s", error)
            raise PermissionError(f"refused by the device: {error}") from None
        log.exception("The device could not answer.")
        raise RuntimeError("the device could not answer; its own log says why") from None


def configured_device(context: Context) -> Device:
    """Return the device whose folder the SuperNode was given."""
    folder = context.node_config.get("folder")
    if not isinstance(folder, str) or not folder:
        raise InputError("node-config", folder, "folder='PATH' with the folder of this device")
    return open_device(Path(folder))


app = client_app(configured_device)
