"""Engine processes that tests steer, stop and kill, and what a test sees of the daemon meanwhile.

EngineProcess is the near half of engine_commands.py. Observer asks a daemon's admin service and waits for
what it should come to say; a process's state is known by nothing else, so it polls, up to a deadline.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from prefixd.v1 import admin_service_pb2 as admin
from prefixd.v1 import admin_service_pb2_grpc as admin_grpc

T = TypeVar("T")

_STUB: Any = admin_grpc.AdminServiceStub
"""Generated without types."""
ROOT = Path(__file__).parents[2]
ANSWER_TIMEOUT_S = 30.0
WAIT_TIMEOUT_S = 10.0
POLL_S = 0.005
PATIENT = {"lookup_timeout_s": 10.0, "write_timeout_s": 10.0}
"""Client options where deadlines are not what is tested: the machine may be slow."""


class EngineProcess:
    """One engine process; a context manager that leaves nothing running.

    Args:
        socket: the daemon's.
        instance_id: of the engine; random by default.
        options: changes to the client's options.
    """

    def __init__(self, socket: Path, instance_id: str = "", options: Mapping[str, float] = PATIENT) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.support.engine_commands",
                str(socket),
                instance_id,
                json.dumps(dict(options)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self.instance_id = ""

    def __enter__(self) -> Self:
        self.instance_id = self.receive()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def send(self, do: str, **arguments: Any) -> None:
        """Gives a command and does not wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """The next answer. AssertionError when it is an error, or none comes."""
        pipe = self.process.stdout
        assert pipe is not None
        assert select.select([pipe], [], [], ANSWER_TIMEOUT_S)[0], "the engine process does not answer"
        line = pipe.readline()
        assert line, f"the engine process ended with {self.process.wait()}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]

    def ask(self, do: str, **arguments: Any) -> Any:
        """Gives a command; its answer."""
        self.send(do, **arguments)
        return self.receive()

    def stop(self) -> None:
        """SIGSTOP; returns when the kernel says that it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        stopped = os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)
        assert stopped is not None
        assert stopped.si_status == signal.SIGSTOP

    def resume(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> float:
        """SIGKILL, if it still runs; when its death was seen, monotonic seconds."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        return time.monotonic()

    def segment_inodes(self) -> set[int]:
        """The segments that it has mapped, by the inodes of their memory."""
        maps = Path(f"/proc/{self.process.pid}/maps").read_text()
        return {int(inode) for inode in re.findall(r" (\d+) +/memfd:prefixd-segment", maps)}


class Observer:
    """The admin service of one daemon; a context manager. Survives the daemon's restarts."""

    def __init__(self, socket: Path) -> None:
        self._channel = grpc.insecure_channel(
            f"unix:{socket}", options=[("grpc.max_reconnect_backoff_ms", 100)]
        )
        self._stub = _STUB(self._channel)

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._channel.close()

    def stats(self) -> admin.GetStatsResponse:
        """Counters and gauges."""
        answer: admin.GetStatsResponse = self._stub.GetStats(
            admin.GetStatsRequest(), timeout=10.0, wait_for_ready=True
        )
        return answer

    def slots(self) -> admin.TierStats:
        """The DRAM tier's slots."""
        return self.stats().tiers[0]

    def leases(self) -> list[admin.LeaseInfo]:
        """Who holds what."""
        answer = self._stub.ListLeases(admin.ListLeasesRequest(), timeout=10.0, wait_for_ready=True)
        return list(answer.leases)

    def problems(self) -> list[str]:
        """What the daemon's own check finds wrong."""
        answer = self._stub.Check(admin.CheckRequest(), timeout=10.0, wait_for_ready=True)
        return list(answer.problems)

    def wait(
        self,
        look: Callable[[], T],
        wanted: Callable[[T], bool],
        what: str,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> float:
        """Looks until it is as wanted; when that was seen, monotonic seconds."""
        deadline = time.monotonic() + timeout_s
        while not wanted(seen := look()):
            assert time.monotonic() < deadline, f"{what}: still {seen}"
            time.sleep(POLL_S)
        return time.monotonic()
