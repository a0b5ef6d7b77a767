"""Engines come and go, and the device's memory in use stays what it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.gpu.conftest import IS_REAL
from tests.gpu.device_process import device_daemon
from tests.gpu.test_processes import hbm, wait_for_all_memory
from tests.support.engine_process import Observer
from tests.support.fake_cuda import FakeCuda, uuid_of
from tests.support.repository import ROOT
from tests.support.wire import short_directory

CYCLES = int(os.environ.get("PREFIXD_GPU_CYCLES", "200"))
"""1,000 with `make gpu-cycles`."""


def test_memory_in_use_is_what_it_was_after_many_engines_have_died(far_machine: FakeCuda) -> None:
    with (
        short_directory() as directory,
        device_daemon(directory / "p.sock", far_machine) as daemon,
        Observer(daemon.socket) as observer,
    ):
        wait_for_all_memory(observer)
        before = far_machine.in_use_bytes()
        lives = run_cycles(daemon.socket, far_machine)
        observer.wait(observer.leases, lambda leases: leases == [], "no lease is left")
        assert far_machine.in_use_bytes() == before
        tier = hbm(observer)
        assert (tier.state, tier.reserved_slot_count, tier.quarantined_slot_count) == ("ready", 0, 0)
        assert observer.problems() == []
    closed = CYCLES - CYCLES * 3 // 4
    assert lives == {"8": closed, str(-signal.SIGKILL): CYCLES - closed}
    if not IS_REAL:
        assert far_machine.opened_count >= CYCLES


def run_cycles(socket: Path, machine: FakeCuda) -> dict[str, int]:
    """How the lives ended: what those that closed had loaded, and the killed."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.engine_cycles", str(socket), uuid_of(0), str(CYCLES)],
        env=os.environ | machine.environment,
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    answer: dict[str, int] = json.loads(done.stdout)
    return answer
