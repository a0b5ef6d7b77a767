"""Authorities and certificates for tests, made by openssl in a moment."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

DAYS = "2"


@dataclass(frozen=True)
class Certificate:
    """A certificate with its key, PEM files."""

    certificate: Path
    key: Path


class Authority:
    """One authority, with its files in a directory of its own."""

    def __init__(self, directory: Path, name: str) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not installed")
        self._directory = directory / name
        self._directory.mkdir()
        self.certificate = self._directory / "ca.pem"
        self._key = self._directory / "ca.key"
        _openssl(
            *("req", "-x509", *_new_key(self._key), "-subj", f"/CN={name}", "-days", DAYS),
            *("-addext", "keyUsage=critical,keyCertSign", "-out", str(self.certificate)),
        )

    def issue(self, name: str, *, alternatives: str = "DNS:localhost,IP:127.0.0.1") -> Certificate:
        """A certificate for localhost and 127.0.0.1, or for other alternative names; good for both ends."""
        made = Certificate(self._directory / f"{name}.pem", self._directory / f"{name}.key")
        _openssl(
            *("req", "-x509", *_new_key(made.key), "-subj", f"/CN={name}", "-days", DAYS),
            *(("-addext", f"subjectAltName={alternatives}") if alternatives else ()),
            *("-addext", "basicConstraints=critical,CA:FALSE"),
            *("-CA", str(self.certificate), "-CAkey", str(self._key), "-out", str(made.certificate)),
        )
        return made


def _new_key(path: Path) -> tuple[str, ...]:
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(path))


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=30)
