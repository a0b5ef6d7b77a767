"""Starts and ends the demo's processes: the daemon and the engines. Their output goes to log files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
LOG_TAIL_LINES = 15
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    # Engines share the cores: a thread that waits for its sibling must not spin.
    "OMP_WAIT_POLICY": "passive",
}


class ProcessFailed(Exception):
    """A process of the demo ended or did not start; carries the end of its log."""

    def __init__(self, name: str, log: Path) -> None:
        tail = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        super().__init__("\n".join([f"{name} failed; the end of {log}:", *tail]))


class Process:
    """A child process that is ended with its block."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as sink:
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **ENVIRONMENT},
                text=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.child.terminate()
        try:
            self.child.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.communicate()


class Daemon(Process):
    """prefixd itself."""

    def __init__(self, socket: Path, dram_size: str, log: Path) -> None:
        prefixd = str(Path(sys.executable).with_name("prefixd"))
        super().__init__(
            "the daemon", [prefixd, "serve", "--socket", str(socket), "--dram-size", dram_size], log
        )
        self._socket = socket

    def wait_until_serving(self) -> None:
        """Ask its health service until it says SERVING; ProcessFailed when it ends or takes too long."""
        deadline = time.monotonic() + START_TIMEOUT_S
        with grpc.insecure_channel(f"unix:{self._socket}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            while time.monotonic() < deadline and self.child.poll() is None:
                try:
                    answer = health.Check(health_pb2.HealthCheckRequest(), timeout=1.0, wait_for_ready=True)
                except grpc.RpcError:
                    continue
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
        raise ProcessFailed(self.name, self.log)


class Engine(Process):
    """An engine; see engine.py for its lines."""

    def __init__(self, name: str, model: Path, socket: Path, log: Path) -> None:
        command = [sys.executable, "-m", "bench.demo.engine", "--model", str(model), "--socket", str(socket)]
        super().__init__(name, command, log)

    def wait_until_ready(self) -> None:
        """Until the model is loaded."""
        self._read()

    def generate(self, tokens: list[int], new_tokens: int, *, cached: bool) -> dict[str, Any]:
        """Send a prompt and wait for the answer. Raises ProcessFailed when the engine ends instead."""
        line = json.dumps({"tokens": tokens, "new_tokens": new_tokens, "cached": cached})
        assert self.child.stdin is not None
        self.child.stdin.write(line + "\n")
        self.child.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        """One line of the engine."""
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            raise ProcessFailed(self.name, self.log)
        answer: dict[str, Any] = json.loads(line)
        return answer
