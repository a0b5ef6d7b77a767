"""What a crash or a bad disk leaves behind: each is a miss with a counter of its own, and the node starts.

Every block that is served is compared with what was stored; see read_now().
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from prefixd_server.base.accounts import Fault
from prefixd_server.index.records import KIND_BLOCK, KIND_STORE
from prefixd_server.index.store import Store
from prefixd_server.media.nvme_format import HEADER_BYTES, MARKER_NAME, decode_marker, segment_name

from tests.support.engine import Engine
from tests.support.node import MIB, Node
from tests.support.nvme_node import (
    BLOCK_BYTES,
    NVME,
    cold,
    fill,
    make_engine,
    nvme_stats,
    place_of,
    read,
    start,
    storage_of,
    stored,
    until,
)

RUN = 5
DRAM_BYTES = 4 * MIB
Runs = list[list[bytes]]
Harm = Callable[[Path], None]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    """What a node that has lived and stopped well leaves, and the runs of which NVMe has every block."""
    data_dir = tmp_path_factory.mktemp("original")
    node = start(data_dir, NVME, dram_bytes=DRAM_BYTES)
    engine = make_engine(node)
    runs = fill(engine, 30)
    kept = cold(engine, runs)
    node.close()
    assert len(kept) > 10
    return data_dir, kept


@pytest.fixture
def runs(tmp_path: Path, original: tuple[Path, Runs]) -> Runs:
    """The same in tmp_path."""
    shutil.copytree(original[0], tmp_path, dirs_exist_ok=True)
    return original[1]


def reopened(data_dir: Path) -> tuple[Node, Engine]:
    """The node started again."""
    node = start(data_dir, NVME, dram_bytes=DRAM_BYTES)
    assert node.cache.check() == []
    return node, make_engine(node)


def count(node: Node, fault: Fault) -> int:
    """As GetStats tells it."""
    return nvme_stats(node).fault_counts[fault]


def close_whole(node: Node) -> None:
    """The books balance at the end."""
    assert node.cache.check() == []
    node.close()


def test_flipped_bits_cost_the_blocks_they_are_in_and_what_hangs_below(tmp_path: Path, runs: Runs) -> None:
    node, engine = reopened(tmp_path)
    places = [place_of(engine, hashes[number % RUN]) for number, hashes in enumerate(runs)]
    node.close()
    for segment, position in places:
        flip(tmp_path / "nvme" / segment_name(segment), HEADER_BYTES + position * BLOCK_BYTES + 4000)
    node, engine = reopened(tmp_path)
    assert [read(engine, hashes) for hashes in runs] == [number % RUN for number in range(len(runs))]
    assert count(node, Fault.BAD_CHECKSUM) == len(runs)
    assert [engine.hits(hashes) for hashes in runs] == [number % RUN for number in range(len(runs))]
    close_whole(node)


def flip(path: Path, offset: int) -> None:
    """One bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def truncated(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(HEADER_BYTES + 3 * BLOCK_BYTES)


def zeroed(path: Path) -> None:
    length = path.stat().st_size
    with path.open("r+b") as file:
        file.write(bytes(length))


def head_zeroed(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(HEADER_BYTES))


@pytest.mark.parametrize(
    ("harm", "fault"),
    [
        (truncated, Fault.SEGMENT_DAMAGED),
        (zeroed, Fault.SEGMENT_DAMAGED),
        (head_zeroed, Fault.SEGMENT_DAMAGED),
        (Path.unlink, Fault.SEGMENT_MISSING),
    ],
)
def test_a_segment_that_is_damaged_or_gone_costs_its_blocks(
    tmp_path: Path, runs: Runs, harm: Harm, fault: Fault
) -> None:
    node, engine = reopened(tmp_path)
    before = stored(node)
    lost = sum(place_of(engine, key)[0] == 0 for hashes in runs for key in hashes)
    assert lost > 0
    node.close()
    harm(tmp_path / "nvme" / segment_name(0))
    node, engine = reopened(tmp_path)
    assert count(node, fault) >= lost
    assert stored(node) + count(node, fault) + count(node, Fault.RECORD_ORPHANED) == before
    served = [read(engine, hashes) for hashes in runs]
    assert 0 < sum(served) < RUN * len(runs)
    assert count(node, Fault.BAD_CHECKSUM) == 0
    close_whole(node)


def test_a_segment_of_zeros_behind_a_good_header_is_found_when_it_is_read(tmp_path: Path, runs: Runs) -> None:
    path = tmp_path / "nvme" / segment_name(0)
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(bytes(path.stat().st_size - HEADER_BYTES))
    node, engine = reopened(tmp_path)
    served = [read(engine, hashes) for hashes in runs]
    assert 0 < sum(served) < RUN * len(runs)
    assert count(node, Fault.BAD_CHECKSUM) > 0
    close_whole(node)


# -- the index -------------------------------------------------------------------------------------


def index_of(data_dir: Path) -> Store:
    """The index of a node that is stopped."""
    directory = data_dir / "nvme"
    uuid = decode_marker((directory / MARKER_NAME).read_bytes()).store_uuid
    return Store(directory / "index", uuid)


def test_corrupt_records_are_misses_and_are_counted(tmp_path: Path, runs: Runs) -> None:
    store = index_of(tmp_path)
    doomed = [(key, value) for key, value in store.pairs(KIND_BLOCK)][::7]
    store.write([(key, value[:20] + bytes([value[20] ^ 1]) + value[21:]) for key, value in doomed])
    store.close()
    node, engine = reopened(tmp_path)
    assert count(node, Fault.RECORD_CORRUPT) == len(doomed)
    assert 0 < sum(read(engine, hashes) for hashes in runs) < RUN * len(runs)
    close_whole(node)
    node, engine = reopened(tmp_path)
    assert count(node, Fault.RECORD_CORRUPT) == 0
    close_whole(node)


def test_an_index_that_cannot_be_opened_costs_everything_and_is_counted(tmp_path: Path, runs: Runs) -> None:
    for manifest in (tmp_path / "nvme" / "index").glob("MANIFEST-*"):
        manifest.write_bytes(b"garbage")
    node, engine = reopened(tmp_path)
    assert count(node, Fault.INDEX_RESET) == 1
    assert [read(engine, hashes) for hashes in runs] == [0] * len(runs)
    assert stored(node) == 0
    again = fill(engine, 20, name="again")
    assert [read(engine, hashes) for hashes in again] == [RUN] * 20
    close_whole(node)


@pytest.mark.usefixtures("runs")
def test_a_damaged_claim_of_the_index_is_an_empty_index(tmp_path: Path) -> None:
    store = index_of(tmp_path)
    store.write([(bytes([KIND_STORE]), b"nonsense")])
    store.close()
    node, _ = reopened(tmp_path)
    assert count(node, Fault.INDEX_RESET) == 1
    close_whole(node)


def live_log(data_dir: Path) -> Path:
    """What the index process appends to."""
    return max((data_dir / "nvme" / "index").glob("*.log"))


def test_a_lost_tail_with_a_delete_and_a_reuse_in_it_serves_nothing_wrong(tmp_path: Path, runs: Runs) -> None:
    node, engine = reopened(tmp_path)
    fill(engine, 1)
    length = live_log(tmp_path).stat().st_size
    others = reuse(node, engine)
    node.close()
    log = live_log(tmp_path)
    log.write_bytes(log.read_bytes()[:length])
    node, engine = reopened(tmp_path)
    assert stored(node) > 0, "the records whose deletes were lost are back"
    assert sum(read(engine, hashes) for hashes in runs) < RUN * len(runs)
    assert count(node, Fault.BAD_CHECKSUM) > 0
    assert [read(engine, hashes) for hashes in others] == [0] * len(others)
    close_whole(node)


def reuse(node: Node, engine: Engine) -> Runs:
    """Everything is deleted, and other runs come in its place."""
    node.cache.evict("red", engine.ref, None, 0)
    node.settle()
    node.run(until(lambda: stored(node) == 0))
    return fill(engine, 30, name="others")


def test_two_records_for_one_slot_serve_nothing_wrong(tmp_path: Path, runs: Runs) -> None:
    store = index_of(tmp_path)
    before = list(store.pairs(KIND_BLOCK))
    store.close()
    node, engine = reopened(tmp_path)
    others = reuse(node, engine)
    node.close()
    store = index_of(tmp_path)
    store.write(before)
    store.close()
    node, engine = reopened(tmp_path)
    assert count(node, Fault.RECORD_CONFLICT) > 0
    served = [read(engine, hashes) for hashes in [*runs, *others]]
    assert sum(served) > 0
    close_whole(node)


def test_records_of_an_earlier_use_of_their_segment_do_not_count(tmp_path: Path, runs: Runs) -> None:
    node, engine = reopened(tmp_path)
    before = stored(node)
    storage_of(node).nvme.medium.raise_generation(0, BLOCK_BYTES)
    node.close()
    node, engine = reopened(tmp_path)
    assert count(node, Fault.RECORD_STALE) > 0
    assert stored(node) + count(node, Fault.RECORD_STALE) + count(node, Fault.RECORD_ORPHANED) == before
    assert sum(read(engine, hashes) for hashes in runs) < RUN * len(runs)
    assert count(node, Fault.BAD_CHECKSUM) == 0
    close_whole(node)
