"""A federation on machines of its own: certificates, keys, Flower's app and the commands for every machine.

What `write_federation` has written gets, by `prepare`,

    ca/ca.key, ca.crt                         the authority; its key signs certificates of the server: keep it elsewhere
    server/ca.crt, server.pem, server.key     TLS
    server/keys/device-k.pub                  whom the server is to let in
    server/app/pyproject.toml                 Flower's app, which names two modules of wflmc and has no code
    server/flwr/config.toml                   where Flower's commands find the SuperLink
    device-k/ca.crt, key, key.pub             whom the device trusts, and what it proves itself with
    COMMANDS.md                               what to type on the server and on every device
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from wflmc.errors import InputError
from wflmc.federated.certificates import write_authority, write_device_key, write_server_certificate
from wflmc.federated.folder import DEVICE, SERVER
from wflmc.federated.registration import KEYS
from wflmc.version import __version__

LINK = "wflmc"
"""What the SuperLink is called in Flower's configuration."""
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
"""Flower asks its makers' servers nothing."""
FIRST_PORT = 9094
"""Of the SuperNodes' own processes, on their own machines."""

APP = """\
# Flower's app of this federation. It has no code: both parts are modules of the installed wflmc.
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "wflmc-federation"
version = "{version}"
description = "Langevin Monte Carlo over a federation"
license = "Apache-2.0"
dependencies = ["wflmc[flower]"]

[tool.hatch.build.targets.wheel]
bypass-selection = true

[tool.flwr.app]
publisher = "wflmc"

[tool.flwr.app.components]
serverapp = "wflmc.federated.flower_server:app"
clientapp = "wflmc.federated.flower_client:app"

[tool.flwr.app.config]
folder = "."
deadline = 60.0
wait = 600.0
"""

CONFIG = """\
[superlink]
default = {name}

[superlink.{bare}]
address = {address}
root-certificates = {certificate}
"""

COMMANDS = """\
# Commands of this federation

Every machine needs Python 3.11 or newer, `pip install 'wflmc[flower]'`, and its own folder of these: `server` for the
server, `device-0` for device 0, and so on. Move folders by a way that nobody else reads. Folder `ca` stays with whoever
set this up, and is for no machine of the federation.

The server's port must be reached by the devices alone: whoever else reaches it can register keys and run code.

## 1. On the server

In the folder `server`, in one terminal, the SuperLink:

```bash
{quiet}
{link}
```

In a second terminal, in the same folder, register the devices' keys (once, and again when a key has changed):

```bash
{quiet}
sed -i "s|^root-certificates = .*|root-certificates = \\"$PWD/ca.crt\\"|" flwr/config.toml  # the folder may have moved
python -m wflmc.federated.registration . {name}
```

## 2. On the devices

Each in its own folder, which is on this machine alone: a copy has a ledger of its own. Where it has no `data.npz`, put
there the device's own, with arrays X and y. A device that was killed is refused for about a minute: try again.
{nodes}
## 3. On the server

In the second terminal, start the run. Should it be stopped, the same command goes on where it was:

```bash
{run}
flwr list {name}
flwr log RUN_ID {name} --show   # RUN_ID is what `flwr run` and `flwr list` print
```

Each round is a line in `server/rounds.jsonl`; samples are in `server/theta.npy`, losses in `server/ledger.jsonl`.

## 4. When all rounds are done

End the SuperLink and the SuperNodes by Ctrl-C. Where this was prepared, with the folder `server` back in its place, the
command that prepared it, given again, writes trace.nc and summary.json.
"""

NODE = """
Device {k}, in the folder `{folder}`:

```bash
{quiet}
{command}
```
"""


def prepare(
    folder: Path,
    devices: int,
    *,
    hosts: Sequence[str] = ("127.0.0.1", "::1", "localhost"),
    address: str = "127.0.0.1:8000",
    deadline: float = 60.0,
) -> None:
    """Add to the folder of a federation what its machines need; certificates and keys that are there are kept.

    Args:
        hosts: names and addresses of the server, as devices write them; that of `address` is one of them.
        address: host and port at which devices reach the server.
        deadline: seconds that a round waits for its devices.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError("address", address, "host and port, such as 127.0.0.1:8000")
    server, bare = folder / SERVER, host.strip("[]")
    _write_certificates(folder, [*hosts, *([] if bare in hosts else [bare])])
    for k in range(devices):
        own = folder / DEVICE.format(k)
        if not own.is_dir():
            raise InputError("folder", str(folder), f"that of a federation of {devices} devices, with {own.name}")
        own.chmod(0o700)
        shutil.copyfile(server / "ca.crt", own / "ca.crt")
        if not (own / "key.pub").exists():
            write_device_key(own / "key", own / "key.pub")
        (server / KEYS).mkdir(exist_ok=True)
        shutil.copyfile(own / "key.pub", server / KEYS / f"{own.name}.pub")
    (server / "app").mkdir(exist_ok=True)
    (server / "app" / "pyproject.toml").write_text(APP.format(version=__version__), encoding="utf-8")
    write_config(server / "flwr", server.resolve() / "ca.crt", address)
    (folder / "COMMANDS.md").write_text(_commands(devices, address, deadline), encoding="utf-8")


def run_on_loopback(
    folder: Path,
    *,
    deadline: float,
    port: int | None = None,
    say: Callable[[str], None],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Run a prepared federation on this machine, as separate processes with TLS and authentication, to its end.

    A run that was stopped goes on where it was, with the same folder.

    Args:
        deadline: seconds that a round waits for its devices.
        port: of the server; a free one by default.
        say: told what happens.
        progress: called with (rounds done, rounds in all).
    """
    from wflmc.federated.loopback import Loopback

    with Loopback(folder, port=port, say=say) as loopback:
        loopback.start_link()
        loopback.register()
        for k in range(loopback.devices):
            loopback.start_node(k)
        loopback.wait(loopback.submit(deadline), progress)


def write_config(home: Path, certificate: Path, address: str) -> None:
    """Flower's own configuration file in a folder for FLWR_HOME: where the SuperLink is, and whom to trust as it."""
    home.mkdir(exist_ok=True, parents=True)
    texts = {"address": address, "certificate": str(certificate), "name": LINK}
    content = CONFIG.format(bare=LINK, **{name: json.dumps(text) for name, text in texts.items()})
    (home / "config.toml").write_text(content, encoding="utf-8")


def superlink_command(host: str, port: int, database: str = "superlink.db") -> list[str]:
    """What starts the SuperLink, in the server's folder."""
    certificates = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
    return [
        *["flower-superlink", "--host", host, "--port", str(port), *certificates],
        *["--enable-supernode-auth", "--disable-runtime-dependency-installation", "--database", database],
    ]


def supernode_command(address: str, port: int) -> list[str]:
    """What starts the SuperNode of a device, in its folder; its own port is for processes of its own machine."""
    return [
        *["flower-supernode", "--superlink", address, "--root-certificates", "ca.crt"],
        *["--auth-supernode-private-key", "key", "--port", str(port), "--node-config", "folder='.'"],
    ]


def run_command(deadline: float, wait: float) -> list[str]:
    """What starts the run, in the server's folder."""
    return ["run", "app", LINK, "--run-config", f"folder='.' deadline={float(deadline)} wait={float(wait)}"]


def _write_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Those that are missing, of the authority and of the server."""
    authority, server = folder / "ca", folder / SERVER
    if (server / "server.pem").exists() and (server / "ca.crt").exists():
        return
    if not server.is_dir():
        raise InputError("folder", str(folder), "that of a federation, with a folder `server`")
    authority.mkdir(exist_ok=True, mode=0o700)
    server.chmod(0o700)
    if not (authority / "ca.key").exists():
        write_authority(authority / "ca.key", authority / "ca.crt")
    shutil.copyfile(authority / "ca.crt", server / "ca.crt")
    write_server_certificate(
        authority / "ca.key", authority / "ca.crt", server / "server.key", server / "server.pem", hosts
    )


def _commands(devices: int, address: str, deadline: float) -> str:
    host, _, port = address.rpartition(":")
    quiet = "export " + " ".join(f"{name}={value}" for name, value in QUIET.items()) + ' FLWR_HOME="$PWD/flwr"'
    nodes = "".join(
        NODE.format(
            k=k,
            folder=DEVICE.format(k),
            quiet=quiet,
            command=_shown(supernode_command(address, FIRST_PORT + k)),
        )
        for k in range(devices)
    )
    link = _shown(superlink_command(host.strip("[]"), int(port)))
    run = _shown(["flwr", *run_command(deadline, 600)])
    return COMMANDS.format(quiet=quiet, link=link, name=LINK, nodes=nodes, run=run)


def _shown(words: list[str]) -> str:
    """A command as it is typed; options on lines of their own where it is long."""
    text = " ".join(f'"{word}"' if "'" in word else shlex.quote(word) for word in words)
    return text if len(text) < 110 else text.replace(" --", " \\\n  --")
