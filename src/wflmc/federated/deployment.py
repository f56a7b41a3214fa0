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
from collections.abc import Sequence
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
TEMPLATES = Path(__file__).with_name("templates")
NODE = "\nDevice {k}, in the folder `{folder}`:\n\n```bash\n{quiet}\n{command}\n```\n"


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
        folder: as `write_federation` left it.
        devices: K.
        hosts: names and addresses of the server, as devices write them; that of `address` is one of them.
        address: host and port at which devices reach the server.
        deadline: seconds that a round waits for its devices.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError("address", address, "host and port, such as 127.0.0.1:8000")
    server, places = folder / SERVER, [folder / DEVICE.format(k) for k in range(devices)]
    if missing := [place.name for place in (server, *places) if not place.is_dir()]:
        raise InputError("folder", str(folder), f"that of a federation of {devices} devices, with {missing[0]}")
    _write_certificates(folder / "ca", server, list(dict.fromkeys([*hosts, host.strip("[]")])))
    for place in (server / KEYS, server / "app"):
        place.mkdir(exist_ok=True)
    for place in places:
        place.chmod(0o700)
        shutil.copyfile(server / "ca.crt", place / "ca.crt")
        if not (place / "key.pub").exists():
            write_device_key(place)
        shutil.copyfile(place / "key.pub", server / KEYS / f"{place.name}.pub")
    app = (TEMPLATES / "app.toml").read_text(encoding="utf-8").format(version=__version__)
    (server / "app" / "pyproject.toml").write_text(app, encoding="utf-8")
    write_config(server / "flwr", server.resolve() / "ca.crt", address)
    (folder / "COMMANDS.md").write_text(_commands(devices, address, deadline), encoding="utf-8")


def write_config(home: Path, certificate: Path, address: str) -> None:
    """Write Flower's configuration into a folder for FLWR_HOME: where the SuperLink is, and whom to trust as it."""
    home.mkdir(exist_ok=True, parents=True)
    superlink = f"address = {json.dumps(address)}\nroot-certificates = {json.dumps(str(certificate))}\n"
    content = f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\n{superlink}'
    (home / "config.toml").write_text(content, encoding="utf-8")


def superlink_command(host: str, port: int | str, database: str = "superlink.db") -> list[str]:
    """Return what starts the SuperLink, in the server's folder."""
    tls = "--ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key"
    options = f"{tls} --enable-supernode-auth --disable-runtime-dependency-installation --database"
    return ["flower-superlink", "--host", host, "--port", str(port), *options.split(), database]


def supernode_command(address: str, port: int) -> list[str]:
    """Return what starts the SuperNode of a device, in its folder; its port is for processes of its own machine."""
    options = f"--root-certificates ca.crt --auth-supernode-private-key key --port {port} --node-config folder='.'"
    return ["flower-supernode", "--superlink", address, *options.split()]


def run_command(deadline: float, wait: float) -> list[str]:
    """Return the arguments of `flwr` that start the run, in the server's folder."""
    return ["run", "app", LINK, "--run-config", f"folder='.' deadline={float(deadline)} wait={float(wait)}"]


def _write_certificates(authority: Path, server: Path, hosts: Sequence[str]) -> None:
    """Write those that are missing, of the authority and of the server."""
    if (server / "server.pem").exists() and (server / "ca.crt").exists():
        return
    authority.mkdir(exist_ok=True, mode=0o700)
    server.chmod(0o700)
    if not (authority / "ca.key").exists():
        write_authority(authority)
    shutil.copyfile(authority / "ca.crt", server / "ca.crt")
    write_server_certificate(authority, server, hosts)


def _commands(devices: int, address: str, deadline: float) -> str:
    """Return the text of COMMANDS.md."""
    host, _, port = address.rpartition(":")
    quiet = "export " + " ".join(f"{name}={value}" for name, value in QUIET.items()) + ' FLWR_HOME="$PWD/flwr"'
    link, run = superlink_command(host.strip("[]"), port), ["flwr", *run_command(deadline, 600)]
    commands = [_shown(supernode_command(address, FIRST_PORT + k)) for k in range(devices)]
    nodes = [NODE.format(k=k, folder=DEVICE.format(k), quiet=quiet, command=text) for k, text in enumerate(commands)]
    page = (TEMPLATES / "commands.md").read_text(encoding="utf-8")
    return page.format(quiet=quiet, link=_shown(link), name=LINK, nodes="".join(nodes), run=_shown(run))


def _shown(words: list[str]) -> str:
    """Return a command as it is typed; options on lines of their own where it is long."""
    text = " ".join(f'"{word}"' if "'" in word else shlex.quote(word) for word in words)
    return text if len(text) < 110 else text.replace(" --", " \\\n  --")
