"""app/lock.py."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixd_server.app.lock import AlreadyRunning, Lock, remove_sockets, socket_lock
from prefixd_server.base.errors import ConfigError
from prefixd_server.rpc.seat import companion_path, staging_directory

from tests.support.wire import short_directory

HOLD = """
import sys, pathlib
from prefixd_server.app.lock import Lock
Lock(pathlib.Path(sys.argv[1])).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short directory."""
    with short_directory() as path:
        yield path


def test_a_second_holder_is_told_the_first_ones_pid(directory: Path) -> None:
    lock, second = Lock(directory / "LOCK"), Lock(directory / "LOCK")
    lock.acquire()
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}"):
        second.acquire()
    lock.release()
    second.acquire()
    second.release()
    second.release()


@pytest.mark.parametrize("before", ["", "dead", "9" * 30])
def test_a_holder_that_has_not_written_its_pid_yet_is_waited_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    path = directory / "LOCK"
    dead = subprocess.Popen(["true"])
    dead.wait()
    path.write_text(str(dead.pid) if before == "dead" else before)
    with path.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        monkeypatch.setattr(time, "sleep", lambda _: path.write_text(f"{os.getpid()}\n"))
        with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()};"):
            Lock(path).acquire()


def test_a_killed_holder_leaves_no_lock(directory: Path) -> None:
    path = directory / "LOCK"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with pytest.raises(AlreadyRunning, match=f"pid {holder.pid}"):
            Lock(path).acquire()
        holder.kill()
    lock = Lock(path)
    lock.acquire()
    lock.release()


def test_a_lock_file_that_is_a_link_is_not_followed(directory: Path) -> None:
    (directory / "LOCK").symlink_to(directory / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be opened"):
        Lock(directory / "LOCK").acquire()
    assert not (directory / "elsewhere").exists()


def test_everything_that_a_dead_daemon_left_is_removed(directory: Path) -> None:
    path = directory / "p.sock"
    for leftover in (path, companion_path(path)):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(leftover))
        staging_directory(leftover).mkdir()
        (staging_directory(leftover) / "s").touch()
    remove_sockets(path)
    assert list(directory.iterdir()) == []
    remove_sockets(path)


def test_what_is_not_a_socket_is_never_removed(directory: Path) -> None:
    path = directory / "p.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        remove_sockets(path)
    assert path.read_text() == "precious"


def test_the_lock_of_a_socket_lies_beside_it() -> None:
    assert socket_lock(Path("/run/p.sock")).path == Path("/run/p.sock.lock")
