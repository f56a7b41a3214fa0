"""Which key, and so which node of Flower's, is which device: the server's nodes.json.

A SuperLink with authentication admits nodes whose public key has been registered, and
gives each key a permanent node id. On the server's machine, in its folder,

    python -m wflmc.apps.federation.registration . wflmc

registers keys/device-0.pub, keys/device-1.pub, … with the SuperLink that Flower's
configuration calls wflmc. Called again, it registers keys that are new; a device whose
key has changed loses the previous one. A device whose file has been deleted stays
registered.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from wflmc.support.errors import InputError, UnfinishedError
from wflmc.support.storage import write_text

JsonObject = dict[str, Any]
"""What a command of Flower's prints."""

TABLE = "nodes.json"
"""In a server's folder: which node is which device."""
KEYS = "keys"
"""In a server's folder: the folder of the devices' public keys."""
DEVICE_PREFIX = "device-"
"""Before the number of a device, in the names of keys and nodes."""
MAX_REASON_LENGTH = 500
"""Characters that an error shows of the output of a command."""
UNREGISTERED = "unregistered"
"""The status by which Flower lists a node whose admission was withdrawn."""


class DeploymentError(UnfinishedError):
    """A part of Flower failed; the text says which and why."""


class Node(NamedTuple):
    """A node of Flower's, the device that it is, and the public key that proves it."""

    node: int
    device: int
    key: str


def register(
    server: Path,
    superlink: str,
    environment: Mapping[str, str],
    notify: Callable[[str], None] = print,
) -> list[Node]:
    """Register the keys in a server's folder with the SuperLink.

    Keys that are registered already are left as they are. The table of nodes is written
    after every device, so that a call that was stopped can be repeated. Flower never
    admits a key twice: a device needs a new one if its node was unregistered, or if the
    call was stopped after Flower's answer and before the table was written.

    Args:
        server: the server's folder, with keys/device-0.pub, keys/device-1.pub, ….
            Devices whose nodes are in the table need no file.
        superlink: its name in Flower's configuration.
        environment: of Flower's commands.
        notify: called with a sentence for every key that is new.

    Returns:
        One node for each device, in the order of the devices.

    Raises:
        InputError: the folder has no keys, a key file has no device number or that of
            another file, or a key or the table of nodes cannot be read.
        DeploymentError: a command of Flower's failed, such as for a key that it has
            admitted before.
    """
    key_files = _key_files(server)
    node_of_device = _registered_nodes(server, superlink, environment)
    for device, key_file in sorted(key_files.items()):
        key = _read_key(key_file)
        previous = node_of_device.get(device)
        if previous is None or previous.key != key:
            if previous is not None:
                _unregister(previous, superlink, environment)
            node_id = _register_key(key_file, superlink, environment)
            node_of_device[device] = Node(node_id, device, key)
            notify(f"{key_file.stem} is node {node_id}")
        _write_table(server, node_of_device)
    return [node_of_device[device] for device in sorted(node_of_device)]


def _key_files(server: Path) -> dict[int, Path]:
    """Return the files of the devices' public keys, by device."""
    folder = server / KEYS
    file_of_device: dict[int, Path] = {}
    for file in sorted(folder.glob(f"{DEVICE_PREFIX}*.pub")):
        number = file.stem.removeprefix(DEVICE_PREFIX)
        if not (number.isascii() and number.isdigit()):
            expected = "named after a device number, such as device-0.pub"
            raise InputError("keys", str(file), expected)
        first_file = file_of_device.setdefault(int(number), file)
        if first_file != file:
            expected = f"the only key of device {int(number)}; {first_file.name} is too"
            raise InputError("keys", str(file), expected)
    if not file_of_device:
        expected = "a folder with device-0.pub, device-1.pub, …"
        raise InputError("keys", str(folder), expected)
    return file_of_device


def _read_key(file: Path) -> str:
    """Return the type and the key of a public key file, without its comment."""
    try:
        words = file.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        raise InputError("keys", str(file), "a readable public key") from None
    return " ".join(words[:2])


def _registered_nodes(
    server: Path,
    superlink: str,
    environment: Mapping[str, str],
) -> dict[int, Node]:
    """Return the nodes of the table that the SuperLink still admits, by device."""
    answer = flwr(["supernode", "list", superlink], environment)
    registered = {
        int(row["node-id"])
        for row in answer["nodes"]
        if row.get("status") != UNREGISTERED
    }
    if not (server / TABLE).exists():
        return {}
    rows = read_nodes(server)
    return {row.device: row for row in rows if row.node in registered}


def _unregister(node: Node, superlink: str, environment: Mapping[str, str]) -> None:
    """Withdraw the admission of a node."""
    flwr(["supernode", "unregister", str(node.node), superlink], environment)


def _register_key(
    key_file: Path,
    superlink: str,
    environment: Mapping[str, str],
) -> int:
    """Register a public key under the name of its device, and return its node id."""
    command = ["supernode", "register", str(key_file), superlink]
    command += ["--name", key_file.stem]
    try:
        answer = flwr(command, environment)
    except DeploymentError as error:
        raise DeploymentError(f"{key_file.name}: {error}") from None
    return int(answer["node-id"])


def _write_table(server: Path, node_of_device: Mapping[int, Node]) -> None:
    """Write the table of nodes, in the order of the devices."""
    rows = [node_of_device[device]._asdict() for device in sorted(node_of_device)]
    write_text(server / TABLE, json.dumps(rows, indent=1))


def read_nodes(server: Path) -> list[Node]:
    """Read the table in a server's folder, which binds devices to their keys.

    No node and no device may be in it twice: otherwise one machine could answer for two
    devices, or two machines for one.

    Args:
        server: the folder.

    Returns:
        The nodes, in the order of the file.

    Raises:
        InputError: the table is missing or damaged, or has a node or device twice.
    """
    path = server / TABLE
    try:
        nodes = TypeAdapter(list[Node]).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        expected = f"a table that registration has written ({error})"
        raise InputError("nodes", str(path), expected) from None
    devices = {row.device for row in nodes}
    node_ids = {row.node for row in nodes}
    if len(devices) < len(nodes) or len(node_ids) < len(nodes):
        expected = "a table with every node and every device once"
        raise InputError("nodes", str(path), expected)
    return nodes


def flwr(
    arguments: list[str],
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> JsonObject:
    """Run a command of Flower's and read the JSON that it prints.

    Args:
        arguments: after `flwr`, without the option for JSON.
        environment: of the command; FLWR_HOME names Flower's configuration.
        folder: to run it in; None for the current one.

    Returns:
        What the command prints.

    Raises:
        DeploymentError: the command failed or is not installed; the text has the
            reason.
    """
    command = ["flwr", *arguments, "--format", "json"]
    try:
        process = subprocess.run(
            command,
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise DeploymentError(f"`flwr` cannot be started: {error}") from None
    # Anything before the first brace is no JSON.
    _, brace, content = process.stdout.partition("{")
    try:
        answer: JsonObject = json.loads(brace + content)
    except ValueError:
        answer = {}
    if process.returncode != 0 or not answer.get("success"):
        reason = answer.get("error-message")
        if not reason:
            output = process.stderr or process.stdout
            reason = output.strip()[-MAX_REASON_LENGTH:]
        raise DeploymentError(f"`flwr {' '.join(arguments[:2])}` failed: {reason}")
    return answer


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(
            "python -m wflmc.apps.federation.registration "
            "FOLDER-OF-THE-SERVER NAME-OF-THE-SUPERLINK"
        )
    try:
        register(Path(sys.argv[1]), sys.argv[2], os.environ)
    except (InputError, DeploymentError) as problem:
        sys.exit(str(problem))
