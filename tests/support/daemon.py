"""A real daemon for tests: in the test's own process, or as a process that can be killed.

running_daemon() gives the object graph on the test's loop, on a clock that the
test moves; DaemonProcess is `prefixd serve` itself. Both listen on a socket in
a short directory of their own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prefixd_server.app.daemon import Daemon
from prefixd_server.base.clock import ManualClock
from prefixd_server.base.config_sources import load_config
from prefixd_server.base.failpoints import VARIABLE as FAILPOINTS
from prefixd_server.base.logs import route_to_standard_library

from tests.support.wire import short_directory

PREFIXD = Path(sys.executable).with_name("prefixd")
READY_TIMEOUT_S = 30.0
# What a daemon in the test's process says is pytest's to show.
route_to_standard_library()
SMALL = {"dram.size": "16MiB", "dram.segment": "2MiB", "dram.prefault": "false"}


@contextlib.asynccontextmanager
async def running_daemon(
    *tenants: str, clock: ManualClock | None = None, **settings: str
) -> AsyncIterator[Daemon]:
    """A daemon on the running loop; `check()` must be clean at the end.

    Args:
        tenants: names of further tenants, each with more of its settings or not ("bob,admin=true"); the
            socket of each is <name>.sock beside the first.
        settings: keys with "__" for the dot, for example leases__ttl_max_s="1".
    """
    with short_directory() as directory:
        flags = SMALL | {"socket": str(directory / "p.sock")}
        flags |= {name.replace("__", "."): value for name, value in settings.items()}
        config = load_config(
            flags=flags,
            tenants=[
                ",".join((f"name={name}", f"socket={directory / name}.sock", *more))
                for name, *more in (tenant.split(",") for tenant in tenants)
            ],
        )
        daemon = Daemon(config, clock)
        await daemon.start()
        try:
            yield daemon
            assert daemon.cache.check() == []
        finally:
            daemon.hurry()
            await daemon.stop()


class DaemonProcess:
    """`prefixd serve` as a process of its own; a context manager that leaves nothing running.

    Args:
        socket: the first tenant's socket, in a short directory.
        arguments: further arguments of serve.
        failpoints: where it is to die, see base/failpoints.py.
        environment: further variables.
    """

    def __init__(
        self,
        socket: Path,
        *arguments: str,
        failpoints: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.socket = socket
        self.log_path = socket.with_suffix(".log")
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    str(PREFIXD),
                    "serve",
                    "--socket",
                    str(socket),
                    "--dram-size",
                    "16MiB",
                    "--set",
                    "dram.segment=2MiB",
                    *arguments,
                ],
                stderr=log,
                stdout=log,
                env={
                    "PATH": os.environ.get("PATH", ""),
                    "PYTHONWARNINGS": "error::ResourceWarning",
                    FAILPOINTS: failpoints,
                    **(environment or {}),
                },
            )

    def __enter__(self) -> Self:
        self.wait_until_serving()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self.log_path.read_text()

    def wait_until_serving(self) -> None:
        """Returns when health says SERVING; AssertionError when it ends or the time is over."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not listening(self.socket) or not self.is_serving():
            assert self.process.poll() is None, f"the daemon ended: {self.log}"
            assert time.monotonic() < deadline, f"the daemon is not serving: {self.log}"
            time.sleep(0.02)

    def is_serving(self) -> bool:
        """What health says."""
        return serving(self.socket) is True

    def signal(self, number: int) -> None:
        """Sends a signal."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 20.0) -> int:
        """Its exit status."""
        return self.process.wait(timeout_s)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def listening(path: Path) -> bool:
    """Whether anybody accepts connections; gRPC is only asked then, for its channels do not end lightly."""
    with socket.socket(socket.AF_UNIX) as caller:
        return caller.connect_ex(str(path)) == 0


def serving(path: Path, service: str = "") -> bool | None:
    """What health says; None when nobody answers."""
    with grpc.insecure_channel(f"unix:{path}") as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=2.0
            )
        except grpc.RpcError:
            return None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
