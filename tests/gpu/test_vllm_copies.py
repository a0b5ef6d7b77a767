"""One direction of the vLLM connector's copies on a GPU: what it gives back, and what it never touches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prefixd_client.connectors.engine_settings import UnsupportedEngine
from prefixd_client.connectors.vllm.device_copies import DeviceCopies
from prefixd_client.connectors.vllm.kv_copies import HostCopies, open_copies
from prefixd_client.connectors.vllm.kv_memory import KvMemory
from prefixd_client.connectors.vllm.torch_paging import rows_of
from prefixd_client.device_driver import DeviceFault, Driver
from prefixd_client.device_memory import DeviceMemory
from prefixd_client.device_paged import gather, scatter

from tests.gpu.conftest import IS_REAL
from tests.gpu.vllm_worker import BLOCK_BYTES, BLOCKS, STAGING_BYTES, stand_in_gpu
from tests.support.fake_cuda import FakeCuda, uuid_of
from tests.support.stand_in_gpu import StandInGpu

pytestmark = pytest.mark.skipif(IS_REAL, reason="looks at what the stand-in counts")
BEFORE, DATA = b"b" * BLOCK_BYTES, b"d" * BLOCK_BYTES


class Scene:
    """An engine's GPU, and copies to it."""

    def __init__(self, machine: FakeCuda) -> None:
        self.machine = machine
        self.gpu = stand_in_gpu(uuid_of(0))
        self.copies = DeviceCopies(self.gpu.memory, Driver(uuid_of(0)), self.gpu, STAGING_BYTES, 0.3)
        self.device = SimpleNamespace(fault=None)
        self.loaded = 0
        self.staged = b""

    @property
    def lease(self) -> Any:
        """A lease of either kind, whose copies fill the staging piece with DATA."""
        session = SimpleNamespace(device=self.device)
        return SimpleNamespace(session=session, load=self.load, copy_in=self.copy_in)

    def load(self, targets: Sequence[DeviceMemory], _shard: int, *, start: int, stream: int) -> int:
        self.loaded += len(targets)
        for target in targets:
            self.gpu.fill(target.address, DATA, stream)
        return len(targets)

    def copy_in(self, sources: Sequence[DeviceMemory], _indexes: Sequence[int], _stream: int) -> str:
        """Looks at what was staged, and waits for no stream but its own."""
        self.staged = b"".join(self.gpu.peek(source.address) for source in sources)
        return "a commit"


@pytest.fixture
def scene(machine: FakeCuda) -> Iterator[Scene]:
    made = Scene(machine)
    yield made
    made.gpu.gate.is_open.set()


def test_closing_gives_back_all_that_was_taken(machine: FakeCuda) -> None:
    gpu = stand_in_gpu(uuid_of(0))
    memory, before = gpu.memory, machine.in_use_bytes()
    gpu.close()
    alone = DeviceCopies(memory, Driver(uuid_of(0)), gpu, STAGING_BYTES)
    assert machine.in_use_bytes() > 0
    alone.close()
    assert machine.in_use_bytes() == 0
    assert before > 0


def test_marks_are_given_back_whether_a_copy_took_them_or_not(scene: Scene) -> None:
    taken, left = scene.copies.mark(), scene.copies.mark()
    assert taken != left
    scene.copies.begin(taken)
    scene.copies.close()
    scene.gpu.close()
    assert scene.machine.in_use_bytes() == 0


def test_a_copy_begins_when_what_was_computed_before_its_mark_is_done(scene: Scene) -> None:
    scene.gpu.write(3, DATA)
    computed = scene.gpu.mark()
    mark = scene.copies.mark()
    assert not scene.gpu.driver.is_done(computed)
    scene.copies.begin(mark)
    assert scene.gpu.driver.is_done(computed)
    assert scene.copies.copy_in(scene.lease, [0], [3]) == "a commit"
    assert scene.staged == DATA


def test_a_source_may_change_when_its_copy_has_returned(scene: Scene) -> None:
    """Also where the lease has ended meanwhile, and copies nothing."""
    scene.gpu.write(3, DATA)
    scene.copies.begin(scene.copies.mark())
    lease = scene.lease
    lease.copy_in = lambda *_: "no copy"
    assert scene.copies.copy_in(lease, [0], [3]) == "no copy"
    scene.gpu.write(3, BEFORE)
    assert scene.gpu.read(3) == BEFORE
    assert scene.gpu.peek(scene.copies._staging) == DATA


def test_a_stuck_copy_comes_before_what_the_engine_computes_later(scene: Scene) -> None:
    lease = scene.lease
    scene.copies.begin(scene.copies.mark())

    def hangs_afterwards(run: DeviceMemory, block_ids: Sequence[int], stream: int) -> None:
        StandInGpu.scatter(scene.gpu, run, block_ids, stream)
        hanging.enter_context(scene.machine.hanging(os.getpid()))

    scene.gpu.scatter = hangs_afterwards  # type: ignore[method-assign]  # the part that torch plays, hanging
    with ExitStack() as hanging:
        assert scene.copies.load(lease, 0, 0, [3]) == 0
        assert scene.copies.is_lost
        scene.gpu.write(3, BEFORE)
    scene.gpu.read(3)
    scene.gpu.finish(scene.copies._stream)
    assert scene.gpu.read(3) == BEFORE


def test_a_lost_device_is_let_go_of_without_a_word(scene: Scene) -> None:
    marks = [scene.copies.mark() for _ in range(2)]
    scene.machine.lose(0)
    scene.copies.begin(marks[0])
    assert scene.copies.is_lost
    scene.copies.begin(marks[1])
    assert scene.copies.mark() == 0
    scene.copies.close()


def test_more_blocks_than_the_staging_piece_holds_come_in_parts(scene: Scene) -> None:
    blocks = list(range(10))
    assert scene.copies.load(scene.lease, 0, 0, blocks) == 10
    assert [scene.gpu.read(block) for block in blocks] == [DATA] * 10


def test_a_device_that_fails_its_session_is_given_up_before_the_kv_cache_is_written(scene: Scene) -> None:
    scene.gpu.write(4, BEFORE)
    scene.copies.begin(scene.copies.mark())
    lease = scene.lease

    def fails(targets: Sequence[DeviceMemory], shard: int, **more: Any) -> int:
        scene.device.fault = DeviceFault("CUDA_EVENT_STUCK", "a test")
        return scene.load(targets, shard, **more)

    lease.load = fails
    assert scene.copies.load(lease, 0, 0, [4, 5]) == 0
    assert scene.gpu.read(4) == BEFORE
    assert scene.copies.is_lost
    assert scene.copies.load(scene.lease, 0, 0, [4, 5]) == 0
    assert scene.copies.copy_in(scene.lease, [0], [4]) is None
    assert scene.loaded == 2
    assert scene.copies.mark() == 0
    scene.copies.begin(0)


def test_a_session_without_the_device_is_a_miss_of_its_own(scene: Scene) -> None:
    lease = scene.lease
    lease.session.device = None
    assert scene.copies.load(lease, 0, 0, [1]) == 0
    assert scene.copies.copy_in(lease, [0], [1]) is None
    assert not scene.copies.is_lost
    assert scene.copies.load(scene.lease, 0, 0, [1]) == 1


@pytest.mark.parametrize("block", [-1, BLOCKS])
def test_a_block_outside_the_kv_cache_is_never_touched(scene: Scene, block: int) -> None:
    for copy in (
        lambda: scene.copies.load(scene.lease, 0, 0, [3, block]),
        lambda: scene.copies.copy_in(scene.lease, [0, 1], [3, block]),
    ):
        with pytest.raises(IndexError, match="in a KV cache of"):
            copy()
    assert scene.gpu.read(3) != DATA


def test_what_was_begun_when_a_copy_fails_half_way_is_waited_for(scene: Scene) -> None:
    def half(run: DeviceMemory, block_ids: Sequence[int], stream: int) -> None:
        StandInGpu.scatter(scene.gpu, run, block_ids[:1], stream)
        raise MemoryError

    scene.gpu.scatter = half  # type: ignore[method-assign]  # the part that torch plays, failing
    with pytest.raises(MemoryError):
        scene.copies.load(scene.lease, 0, 0, [6, 7])
    scene.copies.close()  # which the stand-in does not suffer while a copy is pending
    assert scene.gpu.read(6) == DATA


def test_a_gpu_that_cannot_be_used_is_refused_with_the_remedy(scene: Scene) -> None:
    for uuid in ("", "GPU-of-another-machine"):
        with pytest.raises(UnsupportedEngine, match=r"DEVICE_UNKNOWN.*cuda-bindings.*64 MiB.*device_uuids"):
            open_copies(scene.gpu.memory, uuid)


def test_a_worker_with_kv_on_two_devices_is_refused(scene: Scene) -> None:
    layers = {"a": scene.gpu.tensors["layer0"], "b": torch.zeros(BLOCKS, 4)}
    with pytest.raises(UnsupportedEngine, match="give each worker one device"):
        KvMemory.of(layers, list(layers), BLOCKS)


def test_kv_in_host_memory_needs_no_gpu() -> None:
    memory = KvMemory.of({"a": torch.zeros(6, 4)}, ["a"], 6)
    assert open_copies(memory, "") == HostCopies(memory)


@pytest.mark.parametrize(
    "layer",
    [
        torch.randn(6, 2, 16, 8),
        torch.randn(6, 16, 2, 8).permute(0, 2, 1, 3),
        torch.randn(6, 3, 2, 16, 8)[:, 1],
        torch.randn(9, 2, 16, 8)[2:8],
        torch.randn(24, 2, 4, 8),
    ],
    ids=["dense", "heads behind tokens", "block outermost", "behind another layer", "split in four"],
)
def test_a_layer_is_rows_of_the_same_memory(layer: torch.Tensor) -> None:
    memory = KvMemory.of({"a": layer}, ["a"], 6)
    (rows,) = rows_of(memory)
    assert rows.shape == (6, memory.block_bytes)
    assert [row.data_ptr() for row in rows] == [pieces[0][0] for pieces in memory.pieces(range(6))]
    words, ids = rows.view(torch.int64), torch.tensor([4, 1])
    run = torch.zeros(2, words.shape[1], dtype=torch.int64)
    before = layer.clone()
    gather([words], ids, run)
    words[ids] = 0
    scatter(run, [words], ids)
    assert torch.equal(layer, before)
