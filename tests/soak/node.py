"""The node of a soak: a daemon with DRAM and NVMe for two tenants, its disk, and engine processes."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.daemon_command import ROOT, DaemonCommand

BLOCK_BYTES = (4_096, 65_536, 262_144)
DISK_BYTES = 160 << 20
SETTINGS = ("dram.segment=2MiB", "nvme.size=96MiB", "nvme.segment=2MiB", "nvme.retry_pause_s=0.1")
END_TIMEOUT_S = 60.0


@contextmanager
def small_disk(where: Path) -> Iterator[bool]:
    """A file system of its own, that can be filled; whether there is one: it takes root."""
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(where)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(where)], check=True)


class Disk:
    """What befalls the disk. `mounted`: whether it can be filled in earnest."""

    def __init__(self, where: Path, control: Path, *, mounted: bool) -> None:
        self.where = where
        self._control = control
        self._mounted = mounted
        self._ballast = where / "ballast"

    def fill(self) -> None:
        """No room is left."""
        if not self._mounted:
            self._control.write_text("full")
            return
        with self._ballast.open("wb") as file:
            while (room := os.statvfs(self.where)).f_bavail:
                try:
                    os.posix_fallocate(file.fileno(), 0, room.f_bavail * room.f_frsize)
                except OSError as error:
                    if error.errno != errno.ENOSPC:  # else the daemon has written meanwhile
                        raise
                else:
                    return

    def slow(self, seconds: float) -> None:
        """Every read and write takes so much longer."""
        self._control.write_text(f"slow {seconds}")

    def heal(self) -> None:
        """All is well again."""
        self._ballast.unlink(missing_ok=True)
        self._control.unlink(missing_ok=True)


class SoakProcess:
    """One engine process; what it has seen last, read by a thread as it comes."""

    def __init__(self, socket: Path, seed: int, block_bytes: int) -> None:
        self.seen: dict[str, int] = {}
        self.error = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.engine", str(socket), str(seed), str(block_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def kill(self) -> None:
        """SIGKILL, wherever it is."""
        self.process.kill()
        self._close()

    def end(self) -> None:
        """Asks it to end. AssertionError when it does not end well."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        status = self.process.wait(END_TIMEOUT_S)
        self._close()
        assert status == 0, f"an engine ended with {status}"

    def _close(self) -> None:
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):
                told = json.loads(line)
                self.error = told.pop("error")
                self.seen = told


class SoakNode:
    """See the module. A context manager that leaves nothing running."""

    def __init__(self, directory: Path, disk: Disk, control: Path, rng: random.Random) -> None:
        self.directory = directory
        self.disk = disk
        self._rng = rng
        self._command = [sys.executable, "-m", "tests.soak.disk", str(control)]
        self.sockets = [directory / "p.sock", directory / "second.sock"]
        self.daemon = self._daemon()
        self.engines: list[SoakProcess] = []
        self.total: Counter[str] = Counter()
        self.errors: list[str] = []

    def _daemon(self, *flags: str) -> DaemonCommand:
        words = [word for setting in SETTINGS for word in ("--set", setting)]
        tenant = f"name=second,socket={self.sockets[1]}"
        arguments = ("--data-dir", str(self.disk.where / "data"), "--tenant", tenant, *words, *flags)
        return DaemonCommand(self.directory, *arguments, dram="24MiB", command=self._command)

    def __enter__(self) -> SoakNode:
        self.daemon.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.daemon.kill()
        for engine in self.engines:
            engine.kill()

    @property
    def pid(self) -> int:
        """Of the daemon that has the node."""
        assert self.daemon.process is not None
        return self.daemon.process.pid

    def restart(self) -> None:
        """SIGKILL, and a start."""
        self.daemon.kill()
        self.daemon.start()

    def take_over(self) -> None:
        """A new daemon takes the node over. AssertionError when the old one does not end well."""
        old, new = self.daemon, self._daemon("--takeover")
        new.start()
        self.daemon = new
        assert old.process is not None
        assert old.process.wait(END_TIMEOUT_S) == 0, f"the old daemon failed: {old.log[-4000:]}"

    def engine_comes(self) -> None:
        """One more, of a random tenant and block size."""
        rng = self._rng
        self.engines.append(
            SoakProcess(rng.choice(self.sockets), rng.randrange(1 << 30), rng.choice(BLOCK_BYTES))
        )

    def engine_goes(self, *, killed: bool) -> None:
        """A random one ends, or is killed."""
        engine = self.engines.pop(self._rng.randrange(len(self.engines)))
        if killed:
            engine.kill()
        else:
            engine.end()
        self.total.update(engine.seen)
        if engine.error:
            self.errors.append(engine.error)

    def empty(self) -> None:
        """Every engine ends."""
        while self.engines:
            self.engine_goes(killed=False)
        self.daemon.wait_until_idle()


@contextmanager
def soak_node(rng: random.Random) -> Iterator[SoakNode]:
    """A node in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="soak") as made:
        directory = Path(made)
        control = directory / "told"
        with (
            small_disk(directory / "disk") as mounted,
            SoakNode(directory, Disk(directory / "disk", control, mounted=mounted), control, rng) as node,
        ):
            yield node
