"""Unix sockets that appear ready: made in a private directory, given mode and group, renamed into place.

Nobody can connect before the mode is right, and a path that exists has a
listener behind it. The caller holds the lock that makes the path ours.
"""

from __future__ import annotations

import grp
import os
import socket
from pathlib import Path

from prefixd_server.base.errors import ConfigError
from prefixd_server.rpc.seat import staging_directory

BACKLOG = 128


def publish(temporary: Path, path: Path, mode: int, group: str) -> None:
    """Gives a listening socket its mode and group, then renames it into place.

    Args:
        temporary: where it was made, in a directory that only we can enter.
        mode: permission bits.
        group: name or number of its group; empty keeps the daemon's own.

    Raises:
        ConfigError: SOCKET_GROUP, for a group that is not known or not ours to give;
            SOCKET_PATH, when the path cannot be taken.
    """
    if group:
        _give(temporary, path, group)
    try:
        temporary.chmod(mode)
        temporary.rename(path)
    except OSError as error:
        raise _cannot_make(path, error) from error


def bind_unix(path: Path, kind: int, mode: int, group: str) -> socket.socket:
    """A listening, non-blocking unix socket at `path`.

    Args:
        kind: socket.SOCK_SEQPACKET or socket.SOCK_STREAM.

    Raises:
        ConfigError: as publish().
    """
    private = staging_directory(path)
    made = socket.socket(socket.AF_UNIX, kind)
    try:
        made.setblocking(False)
        try:
            private.mkdir(mode=0o700)
            directory = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # Through the descriptor: the private path may be longer than the 107 bytes of an address.
                made.bind(f"/proc/self/fd/{directory}/s")
            finally:
                os.close(directory)
            made.listen(BACKLOG)
        except OSError as error:
            raise _cannot_make(path, error) from error
        publish(private / "s", path, mode, group)
        private.rmdir()
    except BaseException:
        made.close()
        raise
    return made


def _give(temporary: Path, path: Path, group: str) -> None:
    try:
        # A number where no name is known, as in a container.
        os.chown(temporary, -1, int(group) if group.isdecimal() else grp.getgrnam(group).gr_gid)
    except (KeyError, OSError, OverflowError) as error:
        why = (
            "there is no such group"
            if isinstance(error, KeyError)
            else "the daemon's user is not a member of it"
        )
        raise ConfigError(
            "SOCKET_GROUP",
            f"group {group!r} cannot be given the socket {path}: {why}; name another group or leave it empty",
            key="group",
            value=group,
        ) from error


def _cannot_make(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "SOCKET_PATH",
        f"the socket {path} cannot be made: {error.strerror}; choose a directory that the daemon can write",
        key="socket",
        value=path,
    )
