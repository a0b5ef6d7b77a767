"""Real GPUs behind the face of the stand-in: what they cannot do skips the test that asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from typing import NoReturn

import pytest

from tests.support.fake_cuda import UUIDS_VARIABLE, FakeCuda

_LIST = (
    "from cuda.bindings import driver as d; d.cuInit(0);"
    "ids = [d.cuDeviceGetUuid(d.cuDeviceGet(i)[1])[1] for i in range(d.cuDeviceGetCount()[1])];"
    "print(*(bytes(i.bytes).hex() for i in ids))"
)
_IN_USE = (
    "import sys; from cuda.bindings import driver as d; d.cuInit(0);"
    "d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(d.cuDeviceGet(int(sys.argv[1]))[1])[1]);"
    "_, free, total = d.cuMemGetInfo(); print(total - free)"
)


def _output(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout


def _refuse(*_: object, **__: object) -> NoReturn:
    pytest.skip("a real device neither fails on demand nor counts what is opened")


class RealCuda(FakeCuda):
    """The node's own GPUs. Names them for the whole test run."""

    def __init__(self) -> None:
        raw = _output(_LIST).split()
        texts = [f"GPU-{d[:8]}-{d[8:12]}-{d[12:16]}-{d[16:20]}-{d[20:]}" for d in raw]
        os.environ[UUIDS_VARIABLE] = ",".join(texts)

    @property
    def environment(self) -> dict[str, str]:
        return {UUIDS_VARIABLE: os.environ[UUIDS_VARIABLE]}

    def preload(self) -> None:
        """The real driver is found without us."""

    def forget(self) -> None:
        """What a real driver remembers, it remembers."""

    def heal(self) -> None:
        """It does not fail on demand."""

    def set_capacity(self, capacity_bytes: int, device: int = 0) -> None:
        _refuse()

    def lose(self, device: int = 0) -> None:
        _refuse()

    def hanging(self, pid: int, device: int | None = None) -> AbstractContextManager[None]:
        _refuse()

    def slow(self, extra_polls: int = 0, copy_delay_us: int = 0) -> None:
        _refuse()

    @property
    def opened_count(self) -> int:
        _refuse()

    @property
    def pinned_count(self) -> int:
        _refuse()

    @property
    def violations(self) -> list[str]:
        return []

    def in_use_bytes(self, device: int = 0) -> int:
        """Of everybody on the device, and the context of the process that looks."""
        return int(_output(_IN_USE, str(device)))
