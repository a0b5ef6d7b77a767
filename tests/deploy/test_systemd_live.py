"""deploy/systemd under a real systemd: ready, watched, restarted, drained, with all of its hardening."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import serving
from tests.support.nvme_daemon import Load, NvmeCalls
from tests.support.systemd_machine import SystemdMachine, needs_systemd
from tests.support.wire_engine import wire_engine

pytestmark = needs_systemd()

DROP_IN = "WatchdogSec=4s\n"
"""Shorter than shipped, so that a hung loop does not cost the tests half a minute."""
TOML = """\
socket = "/run/prefixd/prefixd.sock"
data_dir = "/var/lib/prefixd"
[dram]
size = "4MiB"
segment = "2MiB"
[nvme]
size = "32MiB"
segment = "2MiB"
retry_pause_s = 0.1
[drain]
timeout_s = 5
"""


@pytest.fixture(scope="module")
def machine() -> Iterator[SystemdMachine]:
    """A systemd whose prefixd is running."""
    with (
        tempfile.TemporaryDirectory(prefix="pfxsd") as scratch,
        SystemdMachine(Path(scratch), TOML, DROP_IN) as machine,
    ):
        machine.systemctl("start", "prefixd")
        yield machine


def connected(machine: SystemdMachine) -> NvmeCalls:
    """Calls to the daemon that runs now."""
    return NvmeCalls(machine.socket)


def test_start_returns_when_dram_serves_as_the_daemons_own_user(machine: SystemdMachine) -> None:
    assert machine.show("ActiveState") == "active"
    assert serving(machine.socket) is True
    assert machine.show("StatusText").startswith("serving: DRAM ready, NVME ")
    status = machine.path(f"proc/{machine.show('MainPID')}/status").read_text()
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert "0" not in facts["Uid"].split()
    assert (facts["CapEff"], facts["CapBnd"]) == ("0" * 16, "0" * 16)
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")


def test_a_killed_daemon_is_restarted_and_serves_what_nvme_had(machine: SystemdMachine) -> None:
    load, calls = Load(random.Random(7), drop_share=0.0), connected(machine)
    load.begin(calls)
    while calls.nvme.resident_slot_count < 32:
        load.run(calls, 4)
    calls.close()
    before = machine.show("MainPID")
    machine.systemctl("kill", "--signal=KILL", "--kill-whom=main", "prefixd")
    restarted(machine, before)
    calls = connected(machine)
    calls.wait_until_recovered()
    load.begin(calls)
    assert load.verify(calls) > 0
    assert calls.problems() == []
    calls.close()


def test_a_hung_loop_starves_the_watchdog_and_the_daemon_is_restarted(machine: SystemdMachine) -> None:
    before = machine.show("MainPID")
    machine.systemctl("kill", "--signal=STOP", "--kill-whom=main", "prefixd")
    restarted(machine, before)
    assert "Fatal Python error: Aborted" in machine.log


async def test_stop_drains_a_held_lease_and_ends_within_its_time(machine: SystemdMachine) -> None:
    async with wire_engine(machine.socket, attach=False) as engine:
        calls = connected(machine)
        key = random.Random(3).randbytes(32)
        ref = calls.open_namespace("held")
        calls.put(ref, [key])
        calls.close()
        await engine.acquire(ref, [key])
        began = time.monotonic()
        machine.systemctl("stop", "prefixd", "--no-block")
        machine.until("StatusText", "draining: DRAM ready, NVME ready; 1 sessions, 1 leases")
        assert machine.show("ActiveState") == "deactivating"
        machine.until("ActiveState", "inactive")
        assert 4.5 < time.monotonic() - began < 20
    assert machine.show("Result") == "success"
    assert '"remaining_leases": 1' in machine.log
    assert not machine.socket.exists()
    assert machine.socket.parent.is_dir()


def test_a_wrong_configuration_is_told_and_not_tried_again(machine: SystemdMachine) -> None:
    machine.path("etc/prefixd/prefixd.toml").write_text("dram.size = 'much'\n")
    machine.systemctl("start", "prefixd", check=False)
    assert (machine.show("ActiveState"), machine.show("ExecMainStatus")) == ("failed", "2")
    assert "dram.size = much" in machine.log


def restarted(machine: SystemdMachine, before: str) -> None:
    """Returns when another process is the daemon, and ready."""
    deadline = time.monotonic() + 60
    while machine.show("MainPID") in {before, "0"} or machine.show("ActiveState") != "active":
        assert time.monotonic() < deadline, machine.boot_log + machine.log
