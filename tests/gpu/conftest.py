"""The suite runs over the stand-in driver, or with PREFIXD_REAL_GPU=1 on a real one (docs/gpu.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gpu.tier import DeviceEngine, device_engine, end_all, is_off, settle, start_device_node
from tests.support import fake_cuda
from tests.support.fake_cuda import MIB, FakeCuda
from tests.support.node import Node
from tests.support.real_cuda import RealCuda
from tests.support.wire import short_directory

IS_REAL = os.environ.get("PREFIXD_REAL_GPU") == "1"
DEVICE_COUNT = 2


@pytest.fixture(scope="session")
def own_machine(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    """The stand-in that this process uses: a driver is initialised once."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    if IS_REAL:
        return RealCuda()
    if not fake_cuda.has_compiler():
        pytest.skip("the stand-in driver needs gcc to be built")
    machine = FakeCuda(tmp_path_factory.mktemp("cuda"), DEVICE_COUNT, 64 * MIB)
    machine.preload()
    return machine


@pytest.fixture
def machine(own_machine: FakeCuda) -> Iterator[FakeCuda]:
    """The stand-in without faults; afterwards no rule was broken."""
    before = len(own_machine.violations)
    own_machine.heal()
    yield own_machine
    own_machine.heal()
    own_machine.forget()
    assert own_machine.violations[before:] == []


@pytest.fixture
def careless(own_machine: FakeCuda) -> FakeCuda:
    """The stand-in for tests that break its rules on purpose."""
    if IS_REAL:
        pytest.skip("breaks rules that a real driver leaves undefined")
    own_machine.heal()
    own_machine.forget()
    return own_machine


@pytest.fixture
def socket() -> Iterator[Path]:
    """Where a daemon is to listen."""
    with short_directory() as directory:
        yield directory / "p.sock"


@pytest.fixture
def far_machine(tmp_path: Path) -> Iterator[FakeCuda]:
    """A machine of the test's own; no process breaks a rule of the driver."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    if IS_REAL:
        yield RealCuda()
        return
    if not fake_cuda.has_compiler():
        pytest.skip("the stand-in driver needs gcc to be built")
    made = FakeCuda(tmp_path / "cuda", DEVICE_COUNT, 64 * MIB)
    yield made
    assert made.violations == []
    assert [made.in_use_bytes(device) for device in range(DEVICE_COUNT)] == [0] * DEVICE_COUNT


@pytest.fixture
def pair(machine: FakeCuda) -> Iterator[Node]:
    """A node with two segments on each of two devices; all of it is given back but what a fault keeps."""
    before = [machine.in_use_bytes(device) for device in range(DEVICE_COUNT)]
    node = start_device_node(2, device_count=DEVICE_COUNT)
    yield node
    settle(node)
    assert node.cache.check() == []
    end_all(node)
    whole = [device for device in range(DEVICE_COUNT) if not is_off(node, device)]
    node.close()
    assert [machine.in_use_bytes(device) for device in whole] == [before[device] for device in whole]


@pytest.fixture
def near(pair: Node) -> DeviceEngine:
    """An engine on device 0."""
    return device_engine(pair)


@pytest.fixture
def far(pair: Node) -> DeviceEngine:
    """An engine on device 1."""
    return device_engine(pair, instance="two", devices=(1,))
