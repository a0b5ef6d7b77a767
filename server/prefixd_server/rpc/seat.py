"""What a socket stands for, and the paths that go with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Seat:
    """The identity that every call on one socket has.

    local: whether callers can map shared memory; companion_path says where, and
        is empty when they cannot.
    admin: whether calls that concern the whole daemon are allowed.
    """

    tenant: str
    admin: bool
    companion_path: str

    @property
    def local(self) -> bool:
        """Whether segments can be handed to callers on this socket."""
        return bool(self.companion_path)


def companion_path(socket: Path) -> Path:
    """The companion socket of a tenant's socket."""
    return socket.with_name(socket.name + ".fd")


def staging_directory(path: Path) -> Path:
    """Where a socket is made before it is renamed into place."""
    return path.with_name(f".{path.name}.new")
