"""Credentials of the TCP address: TLS, mutual where callers have to show certificates.

Files are read again when they have changed, at the next handshake, so that a
renewed certificate needs no restart; files that cannot be used then are told in
the log, and what was in force stays.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import grpc

from prefixd_server.base.config import TlsConfig
from prefixd_server.base.errors import ConfigError
from prefixd_server.base.logs import logger

READABLE_BY_OTHERS = 0o007


def server_credentials(config: TlsConfig) -> grpc.ServerCredentials | None:
    """For a TCP address; None when there is no certificate.

    Raises:
        ConfigError: TLS_UNUSABLE, when files cannot be read, do not belong together, or leave the key open.
    """
    if config.certificate is None or config.key is None:
        return None
    files = _Files(config.certificate, config.key, config.client_ca)
    made: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        files.load(), files.renewed, require_client_authentication=config.client_ca is not None
    )
    return made


class _Files:
    """The PEM files of one address. `renewed` is called on gRPC's threads, one handshake after the other."""

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self._seen: tuple[tuple[int, int, int], ...] = ()

    def load(self) -> Any:
        """The configuration that the files give now. Raises ConfigError."""
        self._seen = self._state()
        self._check()
        try:
            roots = None if self._client_ca is None else self._client_ca.read_bytes()
            pair = (self._key.read_bytes(), self._certificate.read_bytes())
        except OSError as error:
            raise self._unusable(f"{error.filename}: {error.strerror}") from error
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=roots)

    def renewed(self) -> Any:
        """The configuration when the files have changed and can be used; else None: it stays as it is."""
        try:
            return self.load() if self._state() != self._seen else None
        except ConfigError as error:
            logger("prefixd.tls").error(
                "the new files cannot be used", reason=error.reason, detail=error.message
            )
            return None

    def _state(self) -> tuple[tuple[int, int, int], ...]:
        paths = [path for path in (self._certificate, self._key, self._client_ca) if path is not None]
        try:
            return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in map(Path.stat, paths))
        except OSError as error:
            raise self._unusable(f"{error.filename}: {error.strerror}") from error

    def _check(self) -> None:
        """gRPC accepts any bytes and fails at each handshake; OpenSSL says what is wrong with them."""
        if self._key.stat().st_mode & READABLE_BY_OTHERS:
            raise self._unusable(f"{self._key} is open to other users; chmod o= it")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self._certificate, self._key, password=_no_password)
            if self._client_ca is not None:
                context.load_verify_locations(self._client_ca)
        except (OSError, ValueError) as error:
            raise self._unusable(str(error) or type(error).__name__) from error

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            "TLS_UNUSABLE",
            f"tls.certificate = {self._certificate} with its key and authorities cannot be used: {why}",
            certificate=self._certificate,
            key=self._key,
        )


def _no_password() -> str:
    """A daemon has nobody to ask; OpenSSL would ask the terminal."""
    raise ValueError("the key is encrypted; give one that is not, readable by the daemon alone")
