"""Certificates, made when they are needed."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """Signs certificates for 127.0.0.1."""

    def __init__(self, directory: Path):
        directory.mkdir()
        self._directory = directory
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, directory.name)])
        self.certificate = directory / "ca.pem"
        self._write(self.certificate, self._name, self._key.public_key(), True)

    def sign(self, name: str) -> tuple[Path, Path]:
        """Files of a certificate and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate_file, key_file = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        self._write(certificate_file, x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]),
                    key.public_key(), False)
        key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                               serialization.NoEncryption()))
        return certificate_file, key_file

    def _write(self, path, subject, public_key, ca: bool) -> None:
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder().subject_name(subject).issuer_name(self._name).public_key(public_key)
            .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
                           critical=False).sign(self._key, hashes.SHA256()))
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
