"""A real systemd as process 1 of namespaces of its own, that runs deploy/systemd's unit as it is shipped.

It knows no other unit of this machine, sees /etc, /opt and /var through
overlays, and all of it is gone when process 1 is killed. Needs root and cgroup2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests.support.repository import ROOT

UNITS = ROOT / "deploy/systemd"
TARGETS = (
    *("basic", "local-fs", "multi-user", "network", "paths", "shutdown"),
    *("slices", "sockets", "sysinit", "timers", "umount"),
)
START_TIMEOUT_S = 60.0
SEEN_ROOT = "/opt/repository"
"""Where the service sees this repository: it may lie in a home or in /tmp, which the unit may not see."""
PROBE = """\
mount --make-rprivate /
mkdir "$1/upper" "$1/work"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" /etc
mount -t cgroup2 cgroup2 /sys/fs/cgroup
"""
"""What systemd_machine.sh needs of the kernel and of the directory for scratch."""
COMMAND = """\
#!/bin/sh
export PYTHONHOME=/opt/python LD_LIBRARY_PATH=/opt/python/lib PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH={paths}
exec /opt/python/bin/python3 -c 'from prefixd_server.app.cli import main; main(prog_name="prefixd")' "$@"
"""


class SystemdMachine:
    """Use as a context manager.

    Args:
        scratch: an empty directory.
        settings: the daemon's configuration file.
        drop_in: changes to the unit, as a drop-in of systemd.
    """

    def __init__(self, scratch: Path, settings: str, drop_in: str = "") -> None:
        self._scratch = scratch
        self._cgroup = _cgroup2() / f"prefixd-test-{os.getpid()}"
        units = scratch / "units"
        (units / "prefixd.service.d").mkdir(parents=True)
        for name in TARGETS:
            (units / f"{name}.target").write_text(f"[Unit]\nDescription={name}\n")
        shutil.copy(UNITS / "prefixd.service", units)
        log = f"[Service]\nStandardError=append:{scratch}/log\n"
        (units / "prefixd.service.d/test.conf").write_text(log + drop_in)
        for name in ("sysusers.conf", "tmpfiles.conf"):
            shutil.copy(UNITS / name, scratch)
        (scratch / "prefixd.toml").write_text(settings)
        paths = [*site.getsitepackages(), *(str(ROOT / name) for name in ("server", "client", "proto"))]
        seen = [path.replace(str(ROOT), SEEN_ROOT, 1) for path in paths]
        (scratch / "prefixd").write_text(COMMAND.format(paths=":".join(seen)))
        (scratch / "prefixd").chmod(0o755)
        self.pid = 0

    def __enter__(self) -> Self:
        self._cgroup.mkdir()
        script = Path(__file__).with_suffix(".sh")
        with (self._scratch / "boot.log").open("wb") as log:
            # Into a cgroup of its own first: that is the root which the new cgroup namespace shows.
            enter = f'echo $$ >"{self._cgroup}/cgroup.procs"; exec unshare "$@"'
            self._unshare = subprocess.Popen(
                [
                    *("bash", "-c", enter, "bash", "--mount", "--pid", "--fork", "--ipc", "--uts", "--net"),
                    *("--cgroup", "--kill-child", str(script), str(self._scratch)),
                    *(sys.base_prefix, str(ROOT), SEEN_ROOT),
                ],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.pid == 0 or self.systemctl("is-system-running", check=False) not in {
            "running",
            "degraded",
        }:
            assert self._unshare.poll() is None, f"no systemd: {self.boot_log}"
            assert time.monotonic() < deadline, f"systemd does not come up: {self.boot_log}"
            self.pid = int((children.read_text().split() or ["0"])[0])
            time.sleep(0.05)  # polls another process: there is nothing to wait on
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._unshare.kill()
        self._unshare.wait()
        deadline = time.monotonic() + START_TIMEOUT_S
        for folder in sorted(self._cgroup.rglob("*/"), reverse=True):
            _remove(folder, deadline)
        _remove(self._cgroup, deadline)

    @property
    def boot_log(self) -> str:
        """What process 1 has said."""
        return (self._scratch / "boot.log").read_text()

    @property
    def log(self) -> str:
        """What the daemon has said, over all its starts."""
        path = self._scratch / "log"
        return path.read_text() if path.exists() else ""

    @property
    def socket(self) -> Path:
        """The daemon's socket, seen from outside."""
        return self.path("run/prefixd/prefixd.sock")

    def path(self, inside: str) -> Path:
        """A path as process 1 sees it, from its root, seen from outside."""
        return Path("/proc", str(self.pid), "root", inside)

    def systemctl(self, *arguments: str, check: bool = True) -> str:
        """What systemctl prints."""
        command = ["nsenter", "--target", str(self.pid), "--all", "--", "systemctl", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert not check or done.returncode == 0, f"{arguments}: {done.stderr}{self.boot_log}{self.log}"
        return done.stdout.strip()

    def show(self, name: str) -> str:
        """One property of the service."""
        return self.systemctl("show", "prefixd", "--property", name, "--value")

    def until(self, name: str, value: str) -> None:
        """Returns when a property of the service has the value."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while (found := self.show(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {found}, not {value}: {self.boot_log}{self.log}"


def why_not() -> str:
    """Why no systemd can be run here; empty when it can."""
    if os.geteuid() != 0:
        return "only root can make the namespaces"
    missing = [name for name in ("unshare", "nsenter", "systemctl") if shutil.which(name) is None]
    if missing or not Path("/lib/systemd/systemd").exists():
        return f"systemd or {missing} is not installed (Debian: systemd, util-linux)"
    if not os.access(_cgroup2(), os.W_OK):
        return "there is no cgroup2 mount that can be written"
    with tempfile.TemporaryDirectory() as scratch:
        probe = subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--cgroup", "sh", "-ec", PROBE, "sh", scratch],
            capture_output=True,
            text=True,
            check=False,
        )
    return "" if probe.returncode == 0 else f"this machine allows no such namespaces: {probe.stderr.strip()}"


def needs_systemd() -> pytest.MarkDecorator:
    """Skips with the reason where no systemd can be run."""
    reason = why_not()
    return pytest.mark.skipif(bool(reason), reason=reason)


def _cgroup2() -> Path:
    for line in Path("/proc/mounts").read_text().splitlines():
        _, target, kind, *_ = line.split()
        if kind == "cgroup2":
            return Path(target)
    return Path("/nonexistent")


def _remove(cgroup: Path, deadline: float) -> None:
    """A cgroup can go when its last process has been reaped."""
    while cgroup.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            cgroup.rmdir()
