"""What a client needs to reach a daemon by TLS: authorities to trust, and a certificate or a token to show.

For "host:port" addresses; a unix socket needs none, its mode and group decide.
Contents are held, not paths: no call of an engine waits for a disk.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import grpc

from .errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM contents. Make one with from_files()."""

    authorities: bytes
    """Those whose certificates the daemon may show."""
    certificate: bytes | None = None
    """The client's own, with its chain; daemons beyond loopback ask for one."""
    key: bytes | None = field(default=None, repr=False)
    """Its private key."""
    token: str = field(default="", repr=False)
    """Tells the daemon whose the calls are, where a certificate does not; sent by TLS alone."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            missing = "certificate" if self.certificate is None else "key"
            raise InvalidArgument(missing, None, "must be given with the other", "give both or none")
        if not all("!" <= letter <= "~" for letter in self.token):
            raise InvalidArgument("token", "...", "is not printable ASCII without spaces", "give one line")

    @classmethod
    def from_files(
        cls,
        authorities: str | Path,
        certificate: str | Path | None = None,
        key: str | Path | None = None,
        token: str = "",
    ) -> ClientTls:
        """Reads PEM files now. Raises InvalidArgument when one cannot be read."""
        return cls(
            _contents("authorities", authorities),
            None if certificate is None else _contents("certificate", certificate),
            None if key is None else _contents("key", key),
            token,
        )

    def credentials(self) -> grpc.ChannelCredentials:
        """gRPC's form of it."""
        channel = grpc.ssl_channel_credentials(self.authorities, self.key, self.certificate)
        if not self.token:
            return channel
        return grpc.composite_channel_credentials(channel, grpc.access_token_call_credentials(self.token))


def _contents(field_name: str, path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise InvalidArgument(field_name, path, reason, "name a PEM file") from error
