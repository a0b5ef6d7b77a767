"""Recovery: from the index alone, interrupted and begun again; commits whose answer was lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefixd_server.base.clock import ManualClock
from prefixd_server.base.types import SlotState, Tier
from prefixd_server.cache.build import DiskSeams
from prefixd_server.cache.epochs import Epochs
from prefixd_server.index import line
from prefixd_server.index.process import IndexOptions
from prefixd_server.index.records import NamespaceRecord
from prefixd_server.media.nvme_format import segment_of_name

from tests.support.engine import Engine
from tests.support.faulty_files import FaultyFiles
from tests.support.faulty_index import FaultyIndex
from tests.support.node import Node
from tests.support.nvme_node import NVME, fill, make_engine, read, start, storage_of, stored, until
from tests.support.specs import spec

OPTIONS = IndexOptions(reply_timeout_s=5.0, restart_pause_min_s=0.01, restart_pause_max_s=0.05)


def begin(data_dir: Path, index: FaultyIndex | None = None, files: FaultyFiles | None = None) -> Node:
    opened = index or FaultyIndex()
    return start(data_dir, NVME, DiskSeams(files=files, index_options=OPTIONS, open_index=opened.open))


def assert_no_slot_is_lost(node: Node) -> None:
    """Every slot holds a block that is known, or is free."""
    assert node.cache.check() == []
    table = node.cache.state.catalog.slots[Tier.NVME]
    assert not (table.state == SlotState.RESERVED).any()
    assert len(table.slots_with_row()) == table.counts().resident


def segment_reads(files: FaultyFiles) -> list[str]:
    """Names of the segments that were read, once a read."""
    return [name for call, name in files.calls if call == "read_at" and segment_of_name(name) is not None]


def filled(data_dir: Path) -> tuple[list[list[bytes]], int]:
    """A store of runs, closed; and how many blocks are in it."""
    node = begin(data_dir)
    runs = fill(make_engine(node), 60)
    count = stored(node)
    node.close()
    assert count > 0
    return runs, count


def test_no_data_file_is_read_while_recovering(tmp_path: Path) -> None:
    runs, count = filled(tmp_path)
    files = FaultyFiles()
    node = begin(tmp_path, files=files)
    assert stored(node) == count
    # The one read of each is its header, before anything is recovered.
    read_before = segment_reads(files)
    assert (
        len(read_before) == len(set(read_before)) == node.cache.state.catalog.slots[Tier.NVME].segment_count
    )
    engine = make_engine(node)
    assert sum(read(engine, hashes) for hashes in runs) == count
    assert len(segment_reads(files)) > len(read_before), (
        "the blocks themselves are read when they are asked for"
    )
    assert_no_slot_is_lost(node)
    node.close()


def test_a_load_that_is_cut_short_is_begun_again(tmp_path: Path) -> None:
    runs, count = filled(tmp_path)
    index = FaultyIndex(cut_loads=2)
    node = begin(tmp_path, index)
    assert index.opened == 3
    assert stored(node) == count
    assert_no_slot_is_lost(node)
    engine = make_engine(node)
    assert sum(read(engine, hashes) for hashes in runs) == count
    node.close()


def test_a_recovery_that_dies_at_its_deletes_finds_its_blocks_in_place_when_it_begins_again(
    tmp_path: Path,
) -> None:
    first = begin(tmp_path)
    engine = make_engine(first)
    kept = fill(engine, 30)
    other = make_engine(first, "other", "dropped")
    fill(other, 30)
    count = stored(first)
    first.close()
    # Dropped durably, and killed before its records are deleted.
    epochs = Epochs(tmp_path, ManualClock())
    epochs.after("red", other.ref.fingerprint, other.ref.epoch)
    epochs.save()
    index = FaultyIndex(lost_answers=1)
    node = begin(tmp_path, index)
    assert index.opened == 2
    report = storage_of(node).recovery.report
    assert 0 < report.recovered < count
    assert stored(node) == report.recovered
    assert_no_slot_is_lost(node)
    again = make_engine(node)
    assert sum(read(again, hashes) for hashes in kept) == report.recovered
    node.close()


def named(node: Node) -> list[NamespaceRecord]:
    """The namespaces that the index knows."""

    async def read_all() -> list[NamespaceRecord]:
        return [record async for page in storage_of(node).nvme.index.namespaces() for record in page]

    return node.run(read_all())


def record_of(number: int, epoch: int = 1) -> NamespaceRecord:
    """Of a namespace whose record is about as long as can be."""
    wanted = spec(f"{number:04}" * 256, kv_layout="é" * 512)
    return NamespaceRecord("red", wanted.fingerprint(), epoch, wanted, 5.0)


def test_more_namespaces_than_one_answer_of_the_index_holds_do_not_keep_the_tier_from_being_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = begin(tmp_path)
    runs = fill(make_engine(node), 60)
    count = stored(node)
    node.run(storage_of(node).nvme.index.commit(namespaces=[record_of(number) for number in range(400)]))
    node.close()
    monkeypatch.setattr(line, "FRAME_BYTES_MAX", 1 << 20)  # above LOAD_ROWS, below the namespaces
    node = begin(tmp_path)
    assert stored(node) == count
    engine = make_engine(node)
    assert sum(read(engine, hashes) for hashes in runs) == count
    node.close()


def test_namespaces_that_hold_no_block_are_forgotten(tmp_path: Path) -> None:
    node = begin(tmp_path)
    engine, other = make_engine(node), make_engine(node, "other", "dropped")
    fill(engine, 30)
    fill(other, 30)
    count = stored(node)
    node.run(node.cache.drop_namespace("red", other.ref))
    again = record_of(0)
    node.run(storage_of(node).nvme.index.commit(namespaces=[again, *map(record_of, range(1, 20))]))
    assert len(named(node)) == 22
    node.close()
    node = begin(tmp_path)
    assert [record.fingerprint for record in named(node)] == [engine.ref.fingerprint]
    assert 0 < stored(node) < count
    # Those that are used again are known again.
    reopened = Engine(node, node.open_session("red", "two"), node.cache.open_namespace("red", again.spec))
    runs = fill(reopened, 60)
    assert again.key() in {record.key() for record in named(node)}
    node.close()
    node = begin(tmp_path)
    reopened = Engine(node, node.open_session("red", "two"), node.cache.open_namespace("red", again.spec))
    assert sum(read(reopened, hashes) for hashes in runs) > 0
    node.close()


def test_a_namespace_whose_epoch_nothing_else_tells_is_not_forgotten(tmp_path: Path) -> None:
    node = begin(tmp_path)
    ahead = record_of(0, epoch=7)  # a drop that could not be saved, and blocks that came after it
    node.run(storage_of(node).nvme.index.commit(namespaces=[ahead]))
    node.close()
    node = begin(tmp_path)
    assert named(node) == [ahead]
    assert node.cache.open_namespace("red", ahead.spec).epoch == 7
    node.close()


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_a_copy_whose_record_is_durable_and_whose_answer_was_lost_is_forgotten_before_its_slot_is_used(
    tmp_path: Path, lost: int
) -> None:
    index = FaultyIndex()
    node = begin(tmp_path, index)
    engine = make_engine(node)
    runs = fill(engine, 40)
    index.lost_answers = lost
    runs += [engine.put(("more", number), *range(4)) for number in range(20)]

    async def resumed() -> None:
        def ready() -> bool:
            node.clock.advance(0.05)
            return index.lost_answers == 0 and storage_of(node).nvme.health.writable

        await until(ready)

    node.run(resumed())
    runs += fill(engine, 40, name="later")
    node.run(storage_of(node).nvme.flush_departures())
    assert node.cache.check() == []
    count = stored(node)
    node.close()
    reopened = begin(tmp_path)
    assert stored(reopened) == count, "each record that is durable has its copy, and none else is"
    assert_no_slot_is_lost(reopened)
    again = make_engine(reopened)
    assert sum(read(again, hashes) for hashes in runs) == count
    reopened.close()
