"""The client's side of GPU memory: opened once, copied and waited for, closed."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from prefixd.v1 import types_pb2
from prefixd_client.copy import Span
from prefixd_client.device import DeviceMap, merged
from prefixd_client.device_copy import Way, read_by, write_by
from prefixd_client.device_driver import DeviceFault
from prefixd_client.device_memory import checksum_of
from prefixd_client.namespace import ChecksumAlgorithm
from prefixd_client.segments import MappedSegment
from prefixd_server.media.memfd import Memfd

from tests.support.cuda_peer import CudaPeer
from tests.support.fake_cuda import MIB, FakeCuda, uuid_of

SEGMENT = 2 * MIB
BLOCK = 8192
XXH3, LANES = ChecksumAlgorithm.XXH3_64, ChecksumAlgorithm.LANES_64


@dataclass
class Scene:
    """A daemon's process that owns one segment, and this process with a map of it."""

    machine: FakeCuda
    owner: CudaPeer
    memory: int
    device: DeviceMap
    kept: list[bytearray] = field(default_factory=list)

    def address(self, data: bytes) -> int:
        """Where a copy of the bytes lies, for as long as the scene."""
        self.kept.append(bytearray(data))
        return ctypes.addressof(ctypes.c_char.from_buffer(self.kept[-1]))

    def span(self, count: int) -> Span:
        """The segment's first slots."""
        return Span(self.device.segment(7)[0], BLOCK, 0, count)

    def way(self, algorithm: ChecksumAlgorithm = XXH3, *, on_device: bool = False) -> Way:
        return Way(algorithm, self.device, 0, on_device)


@pytest.fixture
def scene(machine: FakeCuda) -> Iterator[Scene]:
    with CudaPeer(machine) as owner:
        memory = owner.ask("allocate", SEGMENT)
        device = DeviceMap(uuid_of(0), timeout_s=0.3)
        device.learn(
            [
                types_pb2.DeviceSegment(
                    segment_id=7,
                    ipc_handle=bytes.fromhex(owner.ask("export", memory)),
                    device_uuid=uuid_of(0),
                    length_bytes=SEGMENT,
                )
            ]
        )
        yield Scene(machine, owner, memory, device)
        device.close()


def test_a_segment_is_opened_once(scene: Scene) -> None:
    before = scene.machine.opened_count
    first = scene.device.segment(7)
    assert scene.device.segment(7) == first
    assert first[1] == SEGMENT
    assert scene.machine.opened_count == before + 1


def test_what_nobody_told_of_cannot_be_opened(scene: Scene) -> None:
    scene.device.learn([types_pb2.DeviceSegment(segment_id=8, ipc_handle=bytes(64), device_uuid=uuid_of(1))])
    assert (scene.device.knows(7), scene.device.knows(9)) == (True, False)
    for unknown in (8, 9):
        with pytest.raises(DeviceFault, match="SEGMENT_UNKNOWN"):
            scene.device.segment(unknown)


def test_a_copy_is_over_when_copy_returns(scene: Scene) -> None:
    base, _ = scene.device.segment(7)
    source = scene.address(b"as it was")
    scene.device.copy([(base, source, 9)], 0)
    scene.kept[-1][:] = b"overwrote"
    assert scene.owner.ask("read", scene.memory, 9) == "as it was"
    assert scene.device.read(base, 9, 0) == b"as it was"


def test_copies_that_follow_each_other_travel_as_one() -> None:
    assert merged([(0, 100, 10), (10, 110, 10), (20, 130, 10), (40, 140, 5)]) == [
        (0, 100, 20),
        (20, 130, 10),
        (40, 140, 5),
    ]


def test_closing_lets_the_owner_have_its_memory_back(scene: Scene) -> None:
    scene.device.segment(7)
    scene.device.close()
    scene.device.close()
    assert scene.owner.ask("free", scene.memory) is None
    with pytest.raises(DeviceFault, match="SEGMENT_UNKNOWN"):
        scene.device.segment(7)


def test_closing_gives_the_context_back(machine: FakeCuda) -> None:
    before = machine.in_use_bytes()
    device = DeviceMap(uuid_of(0))
    assert machine.in_use_bytes() > before
    device.close()
    assert machine.in_use_bytes() == before


def test_a_copy_that_never_ends_gives_the_device_up(scene: Scene) -> None:
    base, _ = scene.device.segment(7)
    with scene.machine.hanging(os.getpid()):
        with pytest.raises(DeviceFault, match="CUDA_EVENT_STUCK"):
            scene.device.read(base, 16, 0)
        with pytest.raises(DeviceFault, match="SEGMENT_UNKNOWN"):
            scene.device.segment(7)
    with pytest.raises(DeviceFault, match="CUDA_EVENT_STUCK"):
        scene.device.copy([(base, scene.address(b"x"), 1)], 0)
    assert scene.owner.ask("read", scene.memory, 1) == "J"
    scene.device.close()


def test_slow_events_are_waited_for(scene: Scene) -> None:
    base, _ = scene.device.segment(7)
    scene.machine.slow(extra_polls=5)
    scene.device.copy([(base, scene.address(b"slow"), 4)], 0)
    assert scene.owner.ask("read", scene.memory, 4) == "slow"


def test_a_pinned_segment_is_unpinned_when_it_is_retired_and_when_all_ends(scene: Scene) -> None:
    files = [Memfd(SEGMENT), Memfd(SEGMENT)]
    segments = [MappedSegment(number, memory.fd, SEGMENT) for number, memory in enumerate(files)]
    for segment in segments:
        scene.device.pin(segment)
        scene.device.pin(segment)
    assert scene.machine.pinned_count == 2
    scene.device.unpin_retired(lambda segment: segment.segment_id == 1)
    assert scene.machine.pinned_count == 1
    other = DeviceMap(uuid_of(0))
    other.pin(segments[0])
    other.close()
    scene.device.close()
    assert scene.machine.pinned_count == 0
    scene.device.unpin_retired(lambda segment: False)
    for memory in files:
        memory.close()


@pytest.mark.parametrize("algorithm", [XXH3, LANES])
@pytest.mark.parametrize("on_device", [False, True])
def test_blocks_are_written_and_read_with_their_checksums(
    scene: Scene, algorithm: ChecksumAlgorithm, on_device: bool
) -> None:
    datas = [bytes([number]) * BLOCK for number in range(1, 4)]
    sums = [checksum_of(data, algorithm) for data in datas]
    where = [scene.address(data) for data in datas]
    if on_device:
        base, _ = scene.device.segment(7)
        room = [base + SEGMENT // 2 + index * BLOCK for index in range(6)]
        scene.device.copy([(to, source, BLOCK) for to, source in zip(room, where, strict=False)], 0)
        where, targets = room[:3], room[3:]
    else:
        targets = [scene.address(bytes(BLOCK)) for _ in datas]
    way = scene.way(algorithm, on_device=on_device)
    halves = [((at, BLOCK // 2), (at + BLOCK // 2, BLOCK // 2)) for at in where]
    assert write_by(way, scene.span(3), halves, lambda: False) == sums
    pieces = [((at, BLOCK),) for at in targets]
    assert read_by(way, scene.span(3), pieces, sums, lambda: False) == (3, False)
    assert [bytes(scene.device.read(at, BLOCK, 0)) for at in targets] == datas
    assert read_by(way, scene.span(3), pieces, [*sums[:2], 1], lambda: False) == (2, True)


def test_a_lease_that_is_over_is_neither_read_nor_written(scene: Scene) -> None:
    scene.owner.ask("write", scene.memory, "untouched")
    target = scene.address(bytes(BLOCK))
    pieces = [((target, BLOCK),)]
    assert read_by(scene.way(), scene.span(1), pieces, [0], lambda: True) == (0, False)
    assert scene.kept[-1] == bytes(BLOCK)
    assert write_by(scene.way(), scene.span(1), pieces, lambda: True) == []
    assert scene.owner.ask("read", scene.memory, 9) == "untouched"


def test_a_hung_device_never_writes_to_the_engines_host_memory(scene: Scene) -> None:
    scene.owner.ask("write", scene.memory, "late")
    target = scene.address(bytes(BLOCK))
    span = scene.span(1)
    with scene.machine.hanging(os.getpid()), pytest.raises(DeviceFault):
        read_by(scene.way(), span, [((target, BLOCK),)], [0], lambda: False)
    late = DeviceMap(uuid_of(0))
    late.read(span.address, 4, 0)
    assert scene.kept[-1] == bytes(BLOCK)


@pytest.mark.parametrize("algorithm", [XXH3, LANES])
def test_without_a_device_host_memory_is_copied_all_the_same(algorithm: ChecksumAlgorithm) -> None:
    slots, source, target = bytearray(2 * BLOCK), bytes([3]) * BLOCK, bytearray(BLOCK)
    kept = bytearray(source)
    base, at, to = (ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (slots, kept, target))
    way = Way(algorithm, None, 0, False)
    span = Span(base + BLOCK, BLOCK, 0, 1)
    sums = write_by(way, span, [((at, BLOCK),)], lambda: False)
    assert sums == [checksum_of(source, algorithm)]
    assert read_by(way, span, [((to, BLOCK),)], sums, lambda: False) == (1, False)
    assert target == source
