"""Engines that attach, work and die, one after the other: a process that has everything imported forks them.

python -m tests.gpu.engine_cycles SOCKET DEVICE_UUID COUNT
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections import Counter

from prefixd_client import Client, ClientOptions

from tests.gpu.device_process import DeviceCommands
from tests.support.engine_process import PATIENT

FAILED = 1
"""How Python ends after an exception: the first ends the cycles."""


def one_life(socket: str, device_uuid: str, number: int) -> int:
    """Attaches, works, and dies in one of four ways; blocks that it loaded, each of them right."""
    client = Client(socket, None, "cycle", ClientOptions(**PATIENT, device_uuid=device_uuid))
    engine = DeviceCommands(client)
    assert engine.wait_state("ready", timeout_s=60.0)["state"] == "ready"
    engine.open("n")
    engine.put_there("n", f"run {number % 7}", 8)
    seen = engine.get("n", f"run {number % 7}", 8)
    assert seen["good"] == seen["true"]
    if number % 4 == 0:
        client.close()
    elif number % 4 == 1:
        engine.acquire("n", f"run {number % 7}", 8)
    elif number % 4 == 2:
        engine.reserve("n", f"never written {number}", 4)
    return seen["true"]


def main() -> None:
    """Prints how many lives loaded how many blocks."""
    socket, device_uuid, count = sys.argv[1:]
    importlib.import_module("cuda.bindings.driver")
    lives: Counter[int] = Counter()
    for number in range(int(count)):
        child = os.fork()
        if child == 0:
            loaded = one_life(socket, device_uuid, number)
            if number % 4:
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(loaded)
        _, status = os.waitpid(child, 0)
        ended = os.waitstatus_to_exitcode(status)
        lives[ended] += 1
        if ended == FAILED:
            break
    print(json.dumps(lives))


if __name__ == "__main__":
    main()
