"""Two daemons that follow one another on a node, as processes: what tests of takeovers wait for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.daemon import DaemonProcess
from tests.support.nvme_daemon import NvmeDaemon, wait_for

BEGUN = "serving"
"""The log's event when a daemon serves."""


def successor(directory: Path, failpoints: str = "") -> NvmeDaemon:
    """A daemon that takes over whatever runs on the directory's socket and data."""
    return NvmeDaemon(directory, failpoints, None, "--takeover")


def events(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """What the daemons on this socket have logged; a line that is being written is left out."""
    lines = daemon.log.split("\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith("{")]


def begun_count(daemon: DaemonProcess) -> int:
    """How often this process has come to serve."""
    pid = daemon.process.pid
    return sum(event["event"] == BEGUN and event["pid"] == pid for event in events(daemon))


def wait_until_it_serves(daemon: DaemonProcess, count: int = 1) -> None:
    """Returns when this process, and not another one on its socket, has come to serve."""

    def serves() -> bool:
        assert daemon.process.poll() is None, f"the daemon ended: {daemon.log[-4000:]}"
        return begun_count(daemon) >= count

    wait_for(serves, "a daemon that serves")


def lock_holder(directory: Path) -> int:
    """Who has written its pid into the data directory's lock, last."""
    return int((directory / "data" / "LOCK").read_text())
