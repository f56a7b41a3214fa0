"""Which key, and so which node of Flower's, is which device: the server's nodes.json.

A SuperLink with authentication lets in nodes whose public key has been registered, and gives each key a node id of its
own for good. On the server's machine, in its folder,

    python -m wflmc.apps.federation.registration . wflmc

registers keys/device-0.pub, keys/device-1.pub, … with the SuperLink that Flower's configuration calls wflmc. Called
again, it registers keys that are new; a device that has another key by now loses the old one.
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

TABLE, KEYS = "nodes.json", "keys"


class DeploymentError(UnfinishedError):
    """A part of Flower could not do what it was asked; the text says which and why."""


class Node(NamedTuple):
    """A node of Flower's, the device that it is, and the public key that says so."""

    node: int
    device: int
    key: str


def register(
    server: Path, link: str, env: Mapping[str, str], say: Callable[[str], None] = print
) -> list[Node]:
    """Register the keys in a server's folder with the SuperLink, and write the table of nodes.

    Args:
        server: the server's folder, with keys/device-0.pub, keys/device-1.pub, ….
        link: the SuperLink's name in Flower's configuration.
        env: environment of Flower's commands.
        say: called with a sentence for every key that is new.

    Returns:
        One node for each device, in the order of the devices.
    """
    path, files = server / TABLE, list((server / KEYS).glob("device-*.pub"))
    if not files:
        raise InputError(
            "keys", str(server / KEYS), "a folder with device-0.pub, device-1.pub, …"
        )
    registered = {
        int(row["node-id"]) for row in flwr(["supernode", "list", link], env)["nodes"]
    }
    nodes = (
        {row.device: row for row in read_nodes(server) if row.node in registered}
        if path.exists()
        else {}
    )
    for device, file in sorted(
        (int(file.stem.removeprefix("device-")), file) for file in files
    ):
        key = " ".join(
            file.read_text(encoding="utf-8").split()[:2]
        )  # without ssh-keygen's comment
        old = nodes.get(device)
        if old is None or old.key != key:
            if old is not None:
                flwr(["supernode", "unregister", str(old.node), link], env)
            answer = flwr(
                ["supernode", "register", str(file), link, "--name", file.stem], env
            )
            nodes[device] = Node(int(answer["node-id"]), device, key)
            say(f"{file.stem} is node {nodes[device].node}")
        write_text(
            path, json.dumps([nodes[k]._asdict() for k in sorted(nodes)], indent=1)
        )
    return [nodes[k] for k in sorted(nodes)]


def read_nodes(server: Path) -> list[Node]:
    """Return the table in a server's folder."""
    path = server / TABLE
    try:
        nodes = TypeAdapter(list[Node]).validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(
            "nodes", str(path), f"a table that registration has written ({error})"
        ) from None
    if len({row.device for row in nodes}) < len(nodes) or len(
        {row.node for row in nodes}
    ) < len(nodes):
        raise InputError(
            "nodes", str(path), "a table with every node and every device once"
        )
    return nodes


def flwr(
    words: list[str], env: Mapping[str, str], folder: Path | None = None
) -> dict[str, Any]:
    """Return what a command of Flower's prints as JSON; DeploymentError where it fails."""
    command = ["flwr", *words, "--format", "json"]
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    _, brace, rest = done.stdout.partition("{")
    try:
        answer: dict[str, Any] = json.loads(brace + rest)
    except ValueError:
        answer = {}
    if done.returncode != 0 or not answer.get("success"):
        reason = (
            answer.get("error-message") or (done.stderr or done.stdout).strip()[-500:]
        )
        raise DeploymentError(f"`flwr {' '.join(words[:2])}` failed: {reason}")
    return answer


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(
            "python -m wflmc.apps.federation.registration FOLDER-OF-THE-SERVER NAME-OF-THE-SUPERLINK"
        )
    try:
        register(Path(sys.argv[1]), sys.argv[2], os.environ)
    except (InputError, DeploymentError) as problem:
        sys.exit(str(problem))
