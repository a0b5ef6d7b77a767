"""An engine process that uses a device, and a daemon that owns a part of it: the tests' far and near ends.

Run as a program it is the engine process; its commands are those of tests/support/engine_commands.py and two
more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefixd_client import Client, ClientOptions, Committed
from prefixd_client.device_memory import DeviceMemory

from tests.support.daemon import DaemonProcess
from tests.support.engine_commands import EngineCommands, answer_commands, run_hashes
from tests.support.engine_process import PATIENT, EngineProcess
from tests.support.fake_cuda import FakeCuda, uuid_of
from tests.support.repository import ROOT

TIER_BYTES = 8 << 20
SEGMENT_BYTES = 2 << 20


def device_daemon(socket: Path, machine: FakeCuda, *more: str, **settings: str) -> DaemonProcess:
    """A daemon with an HBM tier of TIER_BYTES on device 0, given `more` arguments."""
    chosen = {
        "hbm.size": str(TIER_BYTES),
        "hbm.segment": str(SEGMENT_BYTES),
        "hbm.device": uuid_of(0),
        **{name.replace("__", "."): value for name, value in settings.items()},
    }
    arguments = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
    return DaemonProcess(socket, *arguments, *more, environment=machine.environment)


class DeviceProcess(EngineProcess):
    """One engine process on device 0."""

    def __init__(self, socket: Path, machine: FakeCuda, device: int = 0) -> None:
        options = PATIENT | {"device_uuid": uuid_of(device)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.device_process", str(socket), json.dumps(options)],
            env=os.environ | machine.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self.instance_id = ""


class DeviceCommands(EngineCommands):
    """What the process does for a test."""

    def put_there(self, name: str, run: str, count: int) -> int:
        """Stores a run, into HBM as far as there is room; blocks visible."""
        namespace, hashes = self._namespaces[name], run_hashes(run, count)
        lease = namespace.reserve(hashes, in_hbm=True)
        committed = Committed() if lease is None else self._store_all(namespace, lease, hashes, 0)
        return committed.visible

    def tiers(self, name: str, run: str, count: int) -> list[tuple[str, int]]:
        """Where a lease on the run finds its blocks."""
        with self._namespaces[name].acquire(run_hashes(run, count)) as lease:  # type: ignore[union-attr]  # it hits
            return [(tier.name, blocks) for tier, blocks in lease.run.hits]

    def load_to_device(self, name: str, run: str, count: int) -> dict[str, int]:
        """Loads a run into GPU memory of this process; blocks good, and how many truly are."""
        namespace, hashes = self._namespaces[name], run_hashes(run, count)
        block_bytes = namespace.spec.kv_groups[0].block_bytes
        driver = self._device()._driver
        with driver._current():
            base = int(driver._call("cuMemAlloc", count * block_bytes))
        lease = namespace.acquire(hashes)
        assert lease is not None
        targets = [DeviceMemory(base + index * block_bytes, block_bytes) for index in range(count)]
        good = lease.load(targets)
        lease.release()
        held = bytes(self._device().read(base, count * block_bytes, 0))
        true = sum(
            held[i * block_bytes : (i + 1) * block_bytes] == self._data(namespace, key)
            for i, key in enumerate(hashes)
        )
        with driver._current():
            driver._call("cuMemFree", base)
        return {"good": good, "true": true}

    def _device(self) -> Any:
        session = self._client.control.session
        assert session is not None
        assert session.device is not None
        return session.device


def main() -> None:
    """See the module."""
    socket, options = sys.argv[1:]
    with Client(socket, None, "test", ClientOptions(**json.loads(options))) as client:
        answer_commands(client, DeviceCommands(client))


if __name__ == "__main__":
    main()
