"""The HBM tier's memory over the driver."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from prefixd_server.base.types import Tier
from prefixd_server.media.cuda import CudaFault
from prefixd_server.media.hbm import HbmMedium
from prefixd_server.media.memfd import Memfd

from tests.support.cuda_peer import CudaPeer
from tests.support.fake_cuda import MIB, FakeCuda, uuid_of

SEGMENT = 2 * MIB


@pytest.fixture
def medium(machine: FakeCuda) -> Iterator[HbmMedium]:
    made = HbmMedium(uuid_of(0), SEGMENT, 4, timeout_s=0.05)
    made.open()
    made.allocate(0)
    yield made
    made.close()


def test_bytes_come_back_as_they_were_written(medium: HbmMedium) -> None:
    data = bytes(range(256)) * 64
    medium.write(0, 4096, memoryview(data))
    target = bytearray(len(data))
    medium.read(0, 4096, memoryview(target))
    assert target == data


def test_fresh_memory_is_zeroed(medium: HbmMedium) -> None:
    medium.write(0, 0, memoryview(b"\1" * SEGMENT))
    medium.renew(0)
    target = bytearray(b"\1" * SEGMENT)
    medium.read(0, 0, memoryview(target))
    assert not any(target)


def test_another_process_reads_what_was_written(medium: HbmMedium, machine: FakeCuda) -> None:
    medium.write(0, 8192, memoryview(b"shared"))
    with CudaPeer(machine) as peer:
        opened = peer.ask("open", medium.handle(0).hex())
        assert peer.ask("read", opened + 8192, 6) == "shared"


def test_what_lies_beyond_a_segment_is_refused(medium: HbmMedium) -> None:
    with pytest.raises(ValueError, match="not within"):
        medium.write(0, SEGMENT - 1, memoryview(b"xx"))
    with pytest.raises(ValueError, match="not within"):
        medium.read(0, -1, memoryview(bytearray(1)))


def test_a_segment_without_memory_is_refused(medium: HbmMedium) -> None:
    assert [medium.is_present(index) for index in range(4)] == [True, False, False, False]
    with pytest.raises(CudaFault, match="SEGMENT_ABSENT"):
        medium.read(1, 0, memoryview(bytearray(1)))
    assert medium.fault is None


def test_want_of_memory_is_told_and_can_be_tried_again(medium: HbmMedium, machine: FakeCuda) -> None:
    machine.set_capacity(machine.in_use_bytes())
    with pytest.raises(CudaFault, match="CUDA_ERROR_OUT_OF_MEMORY"):
        medium.allocate(1)
    assert medium.fault is None
    machine.heal()
    medium.allocate(1)
    assert medium.allocated_bytes == 2 * SEGMENT


def test_a_lost_device_is_given_up(medium: HbmMedium, machine: FakeCuda) -> None:
    machine.lose(0)
    with pytest.raises(CudaFault, match="CUDA_ERROR_DEVICE_UNAVAILABLE"):
        medium.read(0, 0, memoryview(bytearray(1)))
    machine.heal()
    assert medium.fault is not None
    with pytest.raises(CudaFault, match="CUDA_ERROR_DEVICE_UNAVAILABLE"):
        medium.write(0, 0, memoryview(b"x"))


def test_a_copy_that_never_ends_is_given_up(medium: HbmMedium, machine: FakeCuda) -> None:
    target = bytearray(4)
    with machine.hanging(os.getpid()), pytest.raises(CudaFault, match="CUDA_EVENT_STUCK"):
        medium.read(0, 0, memoryview(target))
    assert medium.fault is not None
    assert medium.fault.reason == "CUDA_EVENT_STUCK"


def test_pinned_memory_is_copied_and_unpinned_before_it_goes(medium: HbmMedium, machine: FakeCuda) -> None:
    memory = Memfd(SEGMENT)
    medium.pin(memory.address, SEGMENT)
    medium.pin(memory.address, SEGMENT)
    memory.view(0, 5)[:] = b"bytes"
    medium.write(0, 0, memory.view(0, 5))
    medium.read(0, 0, memory.view(100, 5))
    assert bytes(memory.view(100, 5)) == b"bytes"
    medium.unpin(memory.address)
    medium.unpin(memory.address)
    memory.close()


def test_closing_gives_all_memory_back(machine: FakeCuda) -> None:
    before = machine.in_use_bytes()
    medium = HbmMedium(uuid_of(0), SEGMENT, 2)
    medium.open()
    medium.open()
    medium.allocate(0)
    medium.allocate(1)
    assert machine.in_use_bytes() >= before + 2 * SEGMENT
    medium.close()
    medium.close()
    assert machine.in_use_bytes() == before


def test_closing_leaves_what_another_process_has_open(machine: FakeCuda) -> None:
    before = machine.in_use_bytes()
    medium = HbmMedium(uuid_of(0), SEGMENT, 2)
    medium.open()
    medium.allocate(0)
    medium.allocate(1)
    with CudaPeer(machine) as peer:
        peer.ask("open", medium.handle(1).hex())
        medium.close(open_elsewhere=frozenset({1}))
    assert machine.in_use_bytes() >= before + SEGMENT


def test_the_device_is_chosen_by_uuid(machine: FakeCuda) -> None:
    medium = HbmMedium(uuid_of(1), SEGMENT, 1)
    try:
        medium.open()
    except CudaFault:
        pytest.skip("this machine has one device")
    before = machine.in_use_bytes(1)
    medium.allocate(0)
    assert medium.uuid == uuid_of(1)
    assert machine.in_use_bytes(1) == before + SEGMENT
    medium.close()


def test_an_unknown_device_is_refused(machine: FakeCuda) -> None:
    with pytest.raises(CudaFault, match="DEVICE_UNKNOWN"):
        HbmMedium("GPU-00000000-0000-0000-0000-000000000000", SEGMENT, 1).open()


def test_a_medium_is_no_view_and_knows_its_tier(medium: HbmMedium) -> None:
    assert medium.tier is Tier.HBM
    assert medium.view(0, 0, 1) is None


def test_before_it_is_open_it_refuses_and_pins_nothing(machine: FakeCuda) -> None:
    medium = HbmMedium(uuid_of(0), SEGMENT, 1)
    memory = Memfd(SEGMENT)
    medium.pin(memory.address, SEGMENT)
    medium.unpin(memory.address)
    with pytest.raises(CudaFault, match="CUDA_UNAVAILABLE"):
        medium.allocate(0)
    medium.close()
    memory.close()


def test_after_a_fault_nothing_is_pinned_unpinned_or_given_back(medium: HbmMedium, machine: FakeCuda) -> None:
    pinned, late = Memfd(SEGMENT), Memfd(SEGMENT)
    medium.pin(pinned.address, SEGMENT)
    with machine.hanging(os.getpid()), pytest.raises(CudaFault):
        medium.read(0, 0, pinned.view(0, 4096))
    first = medium.fault
    medium.pin(late.address, SEGMENT)
    assert medium.unpin(late.address)
    assert not medium.unpin(pinned.address)
    before = machine.in_use_bytes()
    medium.give_up(CudaFault("LATER", "something else"))
    medium.close()
    assert medium.fault is first
    assert machine.in_use_bytes() == before
    other = HbmMedium(uuid_of(0), SEGMENT, 1)
    other.open()
    other.pin(late.address, SEGMENT)
    other.close()
    memories = (pinned, late)
    machine.forget()
    for memory in memories:
        memory.close()


def test_a_context_is_left_as_it_was_found(medium: HbmMedium, machine: FakeCuda) -> None:
    for _ in range(20):
        medium.write(0, 0, memoryview(b"again"))
    with CudaPeer(machine) as peer:
        assert peer.ask("read", peer.ask("open", medium.handle(0).hex()), 5) == "again"


def test_unpinning_is_done_once_and_before_closing(machine: FakeCuda) -> None:
    memory = Memfd(SEGMENT)
    for _ in range(2):
        medium = HbmMedium(uuid_of(0), SEGMENT, 1)
        medium.open()
        medium.pin(memory.address, SEGMENT)
        assert machine.pinned_count == 1
        medium.unpin(memory.address)
        assert machine.pinned_count == 0
        medium.pin(memory.address, SEGMENT)
        medium.close()
        assert machine.pinned_count == 0
    memory.close()
