"""Certificates for TLS between server and devices, and the keys by which devices are known.

Where the authority lies,

    python -m wflmc.apps.federation.certificates ca renewed 10.0.0.7 server.example.org

writes a new server.key and server.pem into the folder `renewed`, for the names and addresses that follow it.
"""

import inspect
import ipaddress
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wflmc.support.storage import replacing

Key = ec.EllipticCurvePrivateKey

CURVE = ec.SECP384R1()
"""Flower takes keys of devices on the NIST curves alone."""
CA_DAYS, SERVER_DAYS = 3650, 365
EARLIER = timedelta(minutes=5)
"""Certificates begin a little before now: clocks differ."""


def write_authority(folder: Path) -> None:
    """Write a certificate authority of the federation's own into a folder.

    Its ca.key signs certificates of the server: whoever has it can pretend to be the server. Devices get its ca.crt.
    """
    key, name = _write_key(folder / "ca.key"), "wflmc federation"
    extensions = {
        x509.BasicConstraints(ca=True, path_length=0): True,
        _usage("key_cert_sign", "crl_sign"): True,
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()): False,
    }
    (folder / "ca.crt").write_bytes(
        _certificate(name, key, _name(name), key, CA_DAYS, extensions)
    )


def write_server_certificate(authority: Path, folder: Path, hosts: list[str]) -> None:
    """Write a new server.key and server.pem into a folder, signed by the authority in another one.

    Args:
        authority: folder with ca.key and ca.crt.
        folder: created where it is missing.
        hosts: names and addresses by which devices reach the server.
    """
    signer = serialization.load_pem_private_key(
        (authority / "ca.key").read_bytes(), None
    )
    assert isinstance(signer, Key)
    issuer = x509.load_pem_x509_certificate((authority / "ca.crt").read_bytes()).subject
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    extensions = {
        x509.BasicConstraints(ca=False, path_length=None): True,
        _usage("digital_signature"): True,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]): False,
        x509.SubjectAlternativeName([_host(host) for host in hosts]): False,
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()): False,
    }
    key = _write_key(folder / "server.key")
    (folder / "server.pem").write_bytes(
        _certificate("superlink", key, issuer, signer, SERVER_DAYS, extensions)
    )


def write_device_key(folder: Path) -> None:
    """Write key and key.pub, by which a device proves who it is, as `ssh-keygen -t ecdsa -b 384` makes them."""
    key = _write_key(folder / "key", PrivateFormat.OpenSSH)
    (folder / "key.pub").write_bytes(
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    )


def _write_key(path: Path, form: PrivateFormat = PrivateFormat.PKCS8) -> Key:
    """Draw a new private key and write it, for its owner alone."""
    key = ec.generate_private_key(CURVE)
    with replacing(path, mode=0o600) as file:
        file.write(key.private_bytes(Encoding.PEM, form, serialization.NoEncryption()))
    return key


def _certificate(
    subject: str,
    key: Key,
    issuer: x509.Name,
    signer: Key,
    days: int,
    extensions: dict[x509.ExtensionType, bool],
) -> bytes:
    """Return a signed certificate; `extensions` says of each whether it is critical."""
    builder = x509.CertificateBuilder(
        issuer, _name(subject), key.public_key(), x509.random_serial_number()
    )
    builder = builder.not_valid_before(datetime.now(UTC) - EARLIER)
    builder = builder.not_valid_after(datetime.now(UTC) + timedelta(days=days))
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA384()).public_bytes(Encoding.PEM)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*purposes: str) -> x509.KeyUsage:
    """Allow a key these purposes alone."""
    return x509.KeyUsage(
        **{
            name: name in purposes
            for name in inspect.signature(x509.KeyUsage).parameters
        }
    )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(
            "python -m wflmc.apps.federation.certificates FOLDER-OF-THE-AUTHORITY NEW-FOLDER HOST…"
        )
    try:
        write_server_certificate(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    except OSError as problem:
        sys.exit(str(problem))
