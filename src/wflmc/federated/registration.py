"""Which key, and so which node of Flower's, is which device: the server's nodes.json.

A SuperLink with authentication lets in nodes whose public key has been registered, and gives each key a node id of its
own for good. On the server's machine, in its folder,

    python -m wflmc.federated.registration . wflmc

registers keys/device-0.pub, keys/device-1.pub, … with the SuperLink that Flower's configuration calls wflmc. Called
again, it registers keys that are new; a device that has another key by now loses the old one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wflmc.errors import InputError, UnfinishedError
from wflmc.storage import write_text

TABLE, KEYS = "nodes.json", "keys"


class DeploymentError(UnfinishedError):
    """A part of Flower could not do what it was asked; the text says which and why."""


class Node(NamedTuple):
    """A node of Flower's, the device that it is, and the public key that says so."""

    node: int
    device: int
    key: str


def register(server: Path, link: str, env: Mapping[str, str], say: Callable[[str], None] | None = None) -> list[Node]:
    """Register the keys in a server's folder and write its table.

    Args:
        link: the SuperLink's name in Flower's configuration.
        env: of Flower's commands.
    """
    path = server / TABLE
    listed = flwr(["supernode", "list", link], env)["nodes"]
    there = {int(row["node-id"]) for row in listed}
    known = {row.device: row for row in read_nodes(server) if row.node in there} if path.exists() else {}
    for device, file in _keys(server):
        key, old = _plain(file), known.get(device)
        if old is not None and old.key == key:
            continue
        if old is not None:
            flwr(["supernode", "unregister", str(old.node), link], env)
        found = flwr(["supernode", "register", str(file), link, "--name", file.stem], env)
        known[device] = Node(int(found["node-id"]), device, key)
        _write(path, known)
        if say is not None:
            say(f"{file.stem} is node {known[device].node}")
    _write(path, known)
    return [known[device] for device in sorted(known)]


def read_nodes(server: Path) -> list[Node]:
    """The table in a server's folder."""
    path = server / TABLE
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        nodes = [Node(int(row["node"]), int(row["device"]), str(row["key"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError("nodes", str(path), f"a table that registration has written ({error})") from None
    if len({row.device for row in nodes}) < len(nodes) or len({row.node for row in nodes}) < len(nodes):
        raise InputError("nodes", str(path), "a table with every node and every device once")
    return nodes


def flwr(words: list[str], env: Mapping[str, str], folder: Path | None = None) -> dict[str, Any]:
    """What a command of Flower's prints as JSON; DeploymentError where it fails."""
    command = ["flwr", *words, "--format", "json"]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        found = {}
    if done.returncode != 0 or not found.get("success"):
        said = found.get("error-message") or (done.stderr or done.stdout).strip()[-500:]
        raise DeploymentError(f"`flwr {' '.join(words[:2])}` failed: {said}")
    return found


def _keys(server: Path) -> list[tuple[int, Path]]:
    """(device, file of its public key)."""
    files = list((server / KEYS).glob("device-*.pub"))
    if not files:
        raise InputError("keys", str(server / KEYS), "a folder with device-0.pub, device-1.pub, …")
    return sorted((int(file.stem.removeprefix("device-")), file) for file in files)


def _plain(file: Path) -> str:
    """The kind and the numbers of a key, without what ssh-keygen writes behind them."""
    return " ".join(file.read_text(encoding="utf-8").split()[:2])


def _write(path: Path, known: Mapping[int, Node]) -> None:
    write_text(path, json.dumps([known[device]._asdict() for device in sorted(known)], indent=1))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("python -m wflmc.federated.registration FOLDER-OF-THE-SERVER NAME-OF-THE-SUPERLINK")
    try:
        register(Path(sys.argv[1]), sys.argv[2], os.environ, print)
    except (InputError, DeploymentError) as problem:
        sys.exit(str(problem))
