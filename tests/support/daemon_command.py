"""`prefixd serve` as a process, for tests in an engine's environment, where only the client is installed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
from prefixd.v1 import admin_service_pb2 as admin
from prefixd.v1 import admin_service_pb2_grpc as admin_grpc
from prefixd.v1 import types_pb2
from prefixd_client.client import Client

ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 30.0
RELEASE_TIMEOUT_S = 10.0
"""Releases travel in the background, in company; an engine's leases live longer than this."""


def prefixd_command() -> str:
    """The daemon's command: $PREFIXD_COMMAND, else that of the repository's own environment."""
    return os.environ.get("PREFIXD_COMMAND") or str(ROOT / ".venv/bin/prefixd")


class DaemonCommand:
    """One daemon; a context manager that leaves nothing running. start() again after kill() is a restart.

    Args:
        directory: short, for the socket and the log.
        dram: size of its memory.
        arguments: further arguments of serve.
        command: what to run instead of `prefixd`.
    """

    def __init__(
        self, directory: Path, *arguments: str, dram: str = "64MiB", command: Sequence[str] = ()
    ) -> None:
        self.socket = directory / "p.sock"
        self._command = list(command) or [prefixd_command()]
        self._log_path = directory / "daemon.log"
        self._arguments = ["--dram-size", dram, *arguments]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *changes: str) -> None:
        """Returns when it serves. changes: arguments that come after the others, for this time."""
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*self._command, "serve", "--socket", str(self.socket), *self._arguments, *changes],
                stderr=log,
                stdout=log,
                cwd=ROOT,
                env={"PATH": os.environ.get("PATH", "")},
            )
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._ready():
            assert self.process.poll() is None, f"the daemon ended: {self.log}"
            assert time.monotonic() < deadline, f"the daemon is not serving: {self.log}"

    def leases(self) -> list[str]:
        """The leases that it still knows once those released before have had time to come."""
        deadline = time.monotonic() + RELEASE_TIMEOUT_S
        while True:
            known = self._admin("ListLeases", admin.ListLeasesRequest()).leases
            if not known or time.monotonic() > deadline:
                return [lease.token_prefix for lease in known]
            time.sleep(0.02)  # polls another process: there is nothing to wait on

    def problems(self) -> list[str]:
        """What its own check finds wrong."""
        return list(self._admin("Check", admin.CheckRequest()).problems)

    def stats(self) -> admin.GetStatsResponse:
        """Its counters."""
        answer: admin.GetStatsResponse = self._admin("GetStats", admin.GetStatsRequest())
        return answer

    def tier(self, tier: types_pb2.Tier) -> admin.TierStats:
        """Statistics of one tier that is on."""
        (found,) = [stats for stats in self.stats().tiers if stats.tier == tier]
        return found

    def wait_until_attached(self, session_count: int) -> None:
        """Returns when so many engine processes have a session, and NVMe, where it is on, is read in."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            stats = self.stats()
            states = {tier.state for tier in stats.tiers if tier.tier == types_pb2.TIER_NVME}
            if stats.session_count >= session_count and states <= {"ready"}:
                return
            assert time.monotonic() < deadline, f"{stats.session_count} sessions: {self.log[-4000:]}"
            time.sleep(0.05)  # polls another process: there is nothing to wait on

    def wait_until_idle(self) -> None:
        """Returns when nobody has a session or a lease."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (stats := self.stats()).session_count or stats.lease_count:
            assert time.monotonic() < deadline, f"{stats.session_count} sessions, {stats.lease_count} leases"
            time.sleep(0.05)  # polls another process: there is nothing to wait on

    def signal(self, number: int) -> None:
        """Sends a signal."""
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self._log_path.read_text()

    def __enter__(self) -> DaemonCommand:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()

    def _admin(self, method: str, request: Any) -> Any:
        with grpc.insecure_channel(f"unix:{self.socket}") as channel:
            return getattr(admin_grpc.AdminServiceStub(channel), method)(request, timeout=10.0)

    def _ready(self) -> bool:
        if not self.socket.exists():
            time.sleep(0.02)  # polls another process: there is nothing to wait on
            return False
        with Client(self.socket, engine_name="probe") as client:
            return client.status().state == "ready"
