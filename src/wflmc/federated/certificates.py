"""Certificates for TLS between server and devices, and the keys by which devices are known.

Where the authority lies,

    python -m wflmc.federated.certificates ca renewed 10.0.0.7 server.example.org

writes a new server.key and server.pem into the folder `renewed`, for the names and addresses that follow it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from wflmc.errors import InputError

CURVE = ec.SECP384R1()
"""Flower takes keys of devices on the NIST curves alone."""
CA_DAYS, SERVER_DAYS = 3650, 365
EARLIER = datetime.timedelta(minutes=5)
"""Certificates begin a little before now: clocks differ."""


def write_authority(key: Path, certificate: Path, name: str = "wflmc federation") -> None:
    """A certificate authority of the federation's own.

    Args:
        key: where its private key goes; who has it can pretend to be the server.
        certificate: what devices are given, to know the server by.
    """
    own, subject = ec.generate_private_key(CURVE), _name(name)
    public = own.public_key()
    made = (
        _begun(subject, subject, public, CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(own, hashes.SHA384())
    )
    write_secret(key, own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    certificate.write_bytes(made.public_bytes(Encoding.PEM))


def write_server_certificate(
    authority_key: Path, authority: Path, key: Path, certificate: Path, hosts: Sequence[str]
) -> None:
    """A certificate of the server, for the names and addresses by which devices reach it."""
    signer = load_pem_private_key(authority_key.read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(authority.read_bytes())
    own = ec.generate_private_key(CURVE)
    made = (
        _begun(_name("superlink"), issuer.subject, own.public_key(), SERVER_DAYS)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .sign(signer, hashes.SHA384())
    )
    write_secret(key, own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    certificate.write_bytes(made.public_bytes(Encoding.PEM))


def renew(authority: Path, folder: Path, hosts: Sequence[str]) -> None:
    """A new key and certificate of the server in a folder, by the authority in another one."""
    key, certificate = authority / "ca.key", authority / "ca.crt"
    for file in (key, certificate):
        if not file.exists():
            raise InputError("ca", str(authority), f"the folder of the authority, with {file.name}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_server_certificate(key, certificate, folder / "server.key", folder / "server.pem", hosts)


def write_device_key(private: Path, public: Path) -> None:
    """A key pair by which a device proves who it is, as `ssh-keygen -t ecdsa -b 384` makes them."""
    own = ec.generate_private_key(CURVE)
    write_secret(private, own.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public.write_bytes(own.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner reads, also where there was one that others could."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        os.chmod(path, 0o600)
        file.write(content)


def _begun(
    subject: x509.Name, issuer: x509.Name, public: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("python -m wflmc.federated.certificates FOLDER-OF-THE-AUTHORITY NEW-FOLDER HOST…")
    try:
        renew(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    except InputError as problem:
        sys.exit(str(problem))
