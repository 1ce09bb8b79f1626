"""Certificates for tests, made by the openssl command: authorities, and what they have signed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Certificate:
    """PEM files of a certificate and its key."""

    cert: str
    key: str


class Authority:
    """Signs certificates that name 127.0.0.1, or other names."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self._own = Certificate(str(self._folder / "ca.pem"), str(self._folder / "ca.key"))
        subject = ("-subj", f"/CN=authority {name}", "-days", "2")
        _openssl("req", "-x509", *_KEY, *subject, "-keyout", self._own.key, "-out", self._own.cert)

    @property
    def ca(self) -> str:
        """The PEM file to trust."""
        return self._own.cert

    def sign(self, name: str, alternative: str = "IP:127.0.0.1") -> Certificate:
        """A certificate with one subject alternative name."""
        signed = Certificate(str(self._folder / f"{name}.pem"), str(self._folder / f"{name}.key"))
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternative}\n")
        _openssl("req", "-new", *_KEY, "-subj", f"/CN={name}", "-keyout", signed.key, "-out", str(request))
        by = ("-CA", self._own.cert, "-CAkey", self._own.key, "-CAcreateserial", "-days", "2")
        _openssl("x509", "-req", "-in", str(request), *by, "-extfile", str(extensions), "-out", signed.cert)
        return signed


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
