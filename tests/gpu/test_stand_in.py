"""The stand-in driver refuses what the real one refuses or leaves undefined."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fake_cuda import MIB, FakeCuda, uuid_of
from tests.support.repository import ROOT

SIZE = 64 * 1024


class Bench:
    """Device 0 with its context current, and what a test needs of it; a call's values, or its error."""

    def __init__(self, machine: FakeCuda) -> None:
        self.machine = machine
        self.driver = importlib.import_module("cuda.bindings.driver")
        self.result = self.driver.CUresult
        self.call("cuInit", 0)
        self.context = self.call("cuDevicePrimaryCtxRetain", 0)
        self.call("cuCtxSetCurrent", self.context)

    def attempt(self, name: str, *values: Any) -> tuple[Any, Any]:
        """(result, value or None)."""
        answer = getattr(self.driver, name)(*values)
        return answer[0], answer[1] if len(answer) > 1 else None

    def call(self, name: str, *values: Any) -> Any:
        """The value of a call that works."""
        result, value = self.attempt(name, *values)
        assert result == self.result.CUDA_SUCCESS, f"{name}: {result}"
        return value

    def refused(self, expected: str, name: str, *values: Any) -> None:
        """The call is refused with this error, and the violation is written down."""
        before = len(self.machine.violations)
        result, _ = self.attempt(name, *values)
        assert result.name == f"CUDA_ERROR_{expected}"
        assert len(self.machine.violations) == before + 1

    def wait(self, event: Any) -> int:
        """Polls until the event is done; how often that was."""
        polls = 1
        while self.attempt("cuEventQuery", event)[0] == self.result.CUDA_ERROR_NOT_READY:
            polls += 1
        return polls


@pytest.fixture
def bench(careless: FakeCuda) -> Iterator[Bench]:
    made = Bench(careless)
    yield made
    careless.heal()
    made.call("cuCtxSetCurrent", made.context)


def address(buffer: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def test_a_copy_happens_only_when_somebody_waits(bench: Bench) -> None:
    memory, stream, event = (
        bench.call("cuMemAlloc", SIZE),
        bench.call("cuStreamCreate", 1),
        bench.call("cuEventCreate", 2),
    )
    source, target = bytearray(b"x" * SIZE), bytearray(SIZE)
    bench.call("cuMemcpyHtoDAsync", memory, address(source), SIZE, stream)
    bench.call("cuMemcpyDtoHAsync", address(target), memory, SIZE, stream)
    bench.call("cuEventRecord", event, stream)
    assert target == bytearray(SIZE)
    assert bench.wait(event) > 1
    assert target == source


def test_a_source_changed_before_the_wait_shows(bench: Bench) -> None:
    memory, stream = bench.call("cuMemAlloc", SIZE), bench.call("cuStreamCreate", 1)
    source, target = bytearray(b"x" * SIZE), bytearray(SIZE)
    bench.call("cuMemcpyHtoDAsync", memory, address(source), SIZE, stream)
    source[:] = b"y" * SIZE
    bench.call("cuMemcpyDtoHAsync", address(target), memory, SIZE, stream)
    bench.call("cuStreamSynchronize", stream)
    assert target == b"y" * SIZE


def test_a_stream_waits_for_an_event_of_another(bench: Bench) -> None:
    memory, event = bench.call("cuMemAlloc", SIZE), bench.call("cuEventCreate", 2)
    first, second = bench.call("cuStreamCreate", 1), bench.call("cuStreamCreate", 1)
    source, target = bytearray(b"z" * SIZE), bytearray(SIZE)
    bench.call("cuMemcpyHtoDAsync", memory, address(source), SIZE, first)
    bench.call("cuEventRecord", event, first)
    bench.call("cuStreamWaitEvent", second, event, 0)
    bench.call("cuMemcpyDtoHAsync", address(target), memory, SIZE, second)
    bench.call("cuStreamSynchronize", second)
    assert target == source


def test_device_memory_cannot_be_touched_by_the_host(careless: FakeCuda) -> None:
    program = (
        "import ctypes; from cuda.bindings import driver as d; d.cuInit(0);"
        "d.cuCtxSetCurrent(d.cuDevicePrimaryCtxRetain(0)[1]);"
        "ctypes.string_at(int(d.cuMemAlloc(4096)[1]), 1)"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ | careless.environment, check=False)
    assert done.returncode == -11


def test_a_copy_out_of_bounds_is_refused(bench: Bench) -> None:
    memory, stream = bench.call("cuMemAlloc", SIZE), bench.call("cuStreamCreate", 1)
    beyond = bench.driver.CUdeviceptr(int(memory) + 1)
    bench.refused("INVALID_VALUE", "cuMemcpyDtoHAsync", address(bytearray(SIZE)), beyond, SIZE, stream)


def test_memory_that_was_freed_is_refused(bench: Bench) -> None:
    memory, stream = bench.call("cuMemAlloc", SIZE), bench.call("cuStreamCreate", 1)
    bench.call("cuMemFree", memory)
    bench.refused("INVALID_VALUE", "cuMemcpyDtoHAsync", address(bytearray(SIZE)), memory, SIZE, stream)
    bench.refused("INVALID_VALUE", "cuMemFree", memory)


def test_memory_that_a_pending_copy_uses_is_not_freed(bench: Bench) -> None:
    memory, stream = bench.call("cuMemAlloc", SIZE), bench.call("cuStreamCreate", 1)
    target = bytearray(SIZE)
    bench.call("cuMemcpyDtoHAsync", address(target), memory, SIZE, stream)
    bench.refused("INVALID_VALUE", "cuMemFree", memory)
    bench.call("cuStreamSynchronize", stream)
    bench.call("cuMemFree", memory)


def test_streams_and_events_that_are_gone_are_refused(bench: Bench) -> None:
    stream, event = bench.call("cuStreamCreate", 1), bench.call("cuEventCreate", 2)
    bench.call("cuEventDestroy", event)
    bench.refused("INVALID_HANDLE", "cuEventQuery", event)
    bench.refused("INVALID_HANDLE", "cuEventRecord", event, stream)
    bench.call("cuStreamDestroy", stream)
    bench.refused("INVALID_HANDLE", "cuStreamQuery", stream)


def test_a_stream_with_work_that_nobody_waited_for_is_not_destroyed_unseen(bench: Bench) -> None:
    memory, stream = bench.call("cuMemAlloc", SIZE), bench.call("cuStreamCreate", 1)
    bench.call("cuMemsetD8Async", memory, 1, SIZE, stream)
    before = len(bench.machine.violations)
    bench.call("cuStreamDestroy", stream)
    assert len(bench.machine.violations) == before + 1


def test_nothing_works_without_a_current_context(bench: Bench) -> None:
    bench.call("cuCtxSetCurrent", bench.driver.CUcontext(0))
    bench.refused("INVALID_CONTEXT", "cuMemAlloc", SIZE)
    bench.refused("INVALID_CONTEXT", "cuStreamCreate", 1)


def test_what_belongs_to_another_context_is_refused(bench: Bench) -> None:
    memory, stream = bench.call("cuMemAlloc", SIZE), bench.call("cuStreamCreate", 1)
    other = bench.call("cuDevicePrimaryCtxRetain", 1)
    bench.call("cuCtxSetCurrent", other)
    own = bench.call("cuStreamCreate", 1)
    bench.refused("INVALID_CONTEXT", "cuStreamQuery", stream)
    bench.refused("INVALID_CONTEXT", "cuMemcpyDtoHAsync", address(bytearray(SIZE)), memory, SIZE, own)
    bench.call("cuStreamDestroy", own)
    bench.call("cuDevicePrimaryCtxRelease", 1)


def test_a_context_is_not_released_with_something_left_in_it(bench: Bench) -> None:
    other = bench.call("cuDevicePrimaryCtxRetain", 1)
    bench.call("cuCtxSetCurrent", other)
    memory = bench.call("cuMemAlloc", SIZE)
    bench.refused("INVALID_VALUE", "cuDevicePrimaryCtxRelease", 1)
    bench.call("cuMemFree", memory)
    bench.call("cuDevicePrimaryCtxRelease", 1)
    bench.refused("INVALID_CONTEXT", "cuDevicePrimaryCtxRelease", 1)


def test_pinned_memory_is_pinned_once_and_unpinned_once(bench: Bench) -> None:
    raw = bytearray(4 * 4096)
    base = -(-address(raw) // 4096) * 4096
    bench.call("cuMemHostRegister", base, 8192, 1)
    bench.refused("HOST_MEMORY_ALREADY_REGISTERED", "cuMemHostRegister", base, 4096, 1)
    bench.call("cuMemHostUnregister", base)
    bench.refused("HOST_MEMORY_NOT_REGISTERED", "cuMemHostUnregister", base)


def test_memory_ends_where_the_capacity_does(bench: Bench) -> None:
    used = bench.machine.in_use_bytes()
    assert bench.attempt("cuMemAlloc", 65 * MIB)[0].name == "CUDA_ERROR_OUT_OF_MEMORY"
    memory = bench.call("cuMemAlloc", MIB)
    assert bench.machine.in_use_bytes() == used + MIB
    bench.call("cuMemFree", memory)
    assert bench.machine.in_use_bytes() == used


def test_a_lost_device_fails_every_call(bench: Bench) -> None:
    bench.machine.lose(0)
    assert bench.attempt("cuMemAlloc", SIZE)[0].name == "CUDA_ERROR_DEVICE_UNAVAILABLE"
    assert bench.attempt("cuDevicePrimaryCtxRetain", 0)[0].name == "CUDA_ERROR_DEVICE_UNAVAILABLE"


def test_an_event_of_a_hung_process_never_completes(bench: Bench) -> None:
    memory, stream, event = (
        bench.call("cuMemAlloc", SIZE),
        bench.call("cuStreamCreate", 1),
        bench.call("cuEventCreate", 2),
    )
    with bench.machine.hanging(os.getpid()):
        bench.call("cuMemsetD8Async", memory, 1, SIZE, stream)
        bench.call("cuEventRecord", event, stream)
        polls = {bench.attempt("cuEventQuery", event)[0].name for _ in range(20)}
    assert polls == {"CUDA_ERROR_NOT_READY"}
    bench.wait(event)


def test_slow_events_take_more_polls(bench: Bench) -> None:
    stream, event = bench.call("cuStreamCreate", 1), bench.call("cuEventCreate", 2)
    bench.call("cuEventRecord", event, stream)
    quick = bench.wait(event)
    bench.machine.slow(extra_polls=10)
    bench.call("cuEventRecord", event, stream)
    assert bench.wait(event) == quick + 10


def test_visible_devices_choose_and_order_by_uuid(careless: FakeCuda) -> None:
    program = (
        "from cuda.bindings import driver as d; d.cuInit(0);"
        "print(d.cuDeviceGetCount()[1], d.cuDeviceGetUuid(0)[1].bytes[0])"
    )
    chosen = {"CUDA_VISIBLE_DEVICES": uuid_of(1)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | careless.environment | chosen,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["1", str(0xB0)]
