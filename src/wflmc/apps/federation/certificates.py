"""Certificates for TLS between server and devices, and keys that identify devices.

In the folder that has the authority's folder `ca`,

    python -m wflmc.apps.federation.certificates ca renewed 10.0.0.7 server.example.org

writes a new server.key and server.pem into the folder `renewed`, for the names and
addresses that follow it.
"""

import inspect
import ipaddress
import sys
from collections.abc import Mapping
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

from wflmc.support.errors import InputError
from wflmc.support.storage import replacing

Key = ec.EllipticCurvePrivateKey

Extensions = Mapping[x509.ExtensionType, bool]
"""Extensions of a certificate, and whether each is critical."""

CURVE = ec.SECP384R1()
"""Flower takes keys of devices on the NIST curves alone."""
AUTHORITY_NAME = "wflmc federation"
"""The subject of an authority's certificate."""
SERVER_NAME = "superlink"
"""The subject of a server's certificate."""
AUTHORITY_DAYS = 3650
"""How long an authority's certificate is valid."""
SERVER_DAYS = 365
"""How long a server's certificate is valid."""
CLOCK_TOLERANCE = timedelta(minutes=5)
"""How long before its creation a certificate becomes valid: clocks differ."""


def write_authority(folder: Path) -> None:
    """Write a certificate authority of the federation's own into a folder.

    Its ca.key signs certificates of the server: whoever has it can pretend to be the
    server. Devices get its ca.crt. An authority that exists is replaced; certificates
    that it has signed are not valid under the new one.

    Args:
        folder: exists already.
    """
    key = _write_key(folder / "ca.key")
    public_key = key.public_key()
    key_id = x509.SubjectKeyIdentifier.from_public_key(public_key)
    extensions = {
        x509.BasicConstraints(ca=True, path_length=0): True,
        _key_usage("key_cert_sign", "crl_sign"): True,
        key_id: False,
    }
    certificate = _signed_certificate(
        subject=AUTHORITY_NAME,
        public_key=public_key,
        issuer=_name(AUTHORITY_NAME),
        signer=key,
        days=AUTHORITY_DAYS,
        extensions=extensions,
    )
    (folder / "ca.crt").write_bytes(certificate)


def write_server_certificate(authority: Path, folder: Path, hosts: list[str]) -> None:
    """Write a new server.key and server.pem, signed by an authority.

    The certificate is valid for `SERVER_DAYS`. A new one can take the place of an older
    one at any time: devices trust the authority, not the certificate itself.

    Args:
        authority: folder with ca.key and ca.crt.
        folder: for the two files; created where it is missing.
        hosts: names and addresses by which devices reach the server.

    Raises:
        FileNotFoundError: the authority's files do not exist.
        InputError: a name is not in ASCII.
    """
    names = [_host(host) for host in hosts]
    key_bytes = (authority / "ca.key").read_bytes()
    signer = serialization.load_pem_private_key(key_bytes, None)
    assert isinstance(signer, Key)
    authority_bytes = (authority / "ca.crt").read_bytes()
    issuer = x509.load_pem_x509_certificate(authority_bytes).subject
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority_key = signer.public_key()
    extensions = {
        x509.BasicConstraints(ca=False, path_length=None): True,
        _key_usage("digital_signature"): True,
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]): False,
        x509.SubjectAlternativeName(names): False,
        x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key): False,
    }
    key = _write_key(folder / "server.key")
    certificate = _signed_certificate(
        subject=SERVER_NAME,
        public_key=key.public_key(),
        issuer=issuer,
        signer=signer,
        days=SERVER_DAYS,
        extensions=extensions,
    )
    (folder / "server.pem").write_bytes(certificate)


def write_device_key(folder: Path) -> None:
    """Write a new key and key.pub, by which a device proves who it is.

    The files have the format of `ssh-keygen -t ecdsa -b 384`, without a passphrase. The
    private key is for its owner alone; the public key is registered with the SuperLink
    (`wflmc.apps.federation.registration`).

    Args:
        folder: of the device; a key that exists is replaced.
    """
    key = _write_key(folder / "key", PrivateFormat.OpenSSH)
    public_key = key.public_key()
    line = public_key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (folder / "key.pub").write_bytes(line + b"\n")


def _write_key(path: Path, form: PrivateFormat = PrivateFormat.PKCS8) -> Key:
    """Draw a new private key and write it, for its owner alone."""
    key = ec.generate_private_key(CURVE)
    content = key.private_bytes(Encoding.PEM, form, serialization.NoEncryption())
    with replacing(path, mode=0o600) as file:
        file.write(content)
    return key


def _signed_certificate(
    *,
    subject: str,
    public_key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    signer: Key,
    days: int,
    extensions: Extensions,
) -> bytes:
    """Return a certificate in PEM that is valid from now on."""
    start = datetime.now(UTC)
    builder = x509.CertificateBuilder(
        issuer_name=issuer,
        subject_name=_name(subject),
        public_key=public_key,
        serial_number=x509.random_serial_number(),
    )
    builder = builder.not_valid_before(start - CLOCK_TOLERANCE)
    builder = builder.not_valid_after(start + timedelta(days=days))
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical)
    certificate = builder.sign(signer, hashes.SHA384())
    return certificate.public_bytes(Encoding.PEM)


def _name(text: str) -> x509.Name:
    """Return a subject or issuer with this common name."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _key_usage(*purposes: str) -> x509.KeyUsage:
    """Return the extension that allows a key these purposes alone."""
    names = inspect.signature(x509.KeyUsage).parameters
    return x509.KeyUsage(**{name: name in purposes for name in names})


def _host(text: str) -> x509.GeneralName:
    """Return an address or a name of the server, as a certificate has it."""
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        if not text.isascii():
            expected = "an address or a name in ASCII, such as xn--bcher-kva.example"
            raise InputError("host", text, expected) from None
        return x509.DNSName(text)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(
            "python -m wflmc.apps.federation.certificates "
            "FOLDER-OF-THE-AUTHORITY NEW-FOLDER HOST…"
        )
    try:
        write_server_certificate(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    except (OSError, InputError) as problem:
        sys.exit(str(problem))
