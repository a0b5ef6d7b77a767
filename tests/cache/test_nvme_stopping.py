"""The node stops while its disk hangs or fails, and starts again with what was durable."""

from __future__ import annotations

from pathlib import Path

from prefixd_server.cache.build import DiskSeams

from tests.support.faulty_files import DISK_BROKEN, FaultyFiles
from tests.support.node import MIB, packed
from tests.support.nvme_node import NVME, cold, fill, make_engine, read, start, storage_of, until


def test_a_disk_that_hangs_does_not_keep_the_daemon_from_ending(tmp_path: Path) -> None:
    files = FaultyFiles()
    node = start(tmp_path, NVME, DiskSeams(files=files), dram_bytes=2 * MIB)
    engine = make_engine(node)
    hashes = cold(engine, fill(engine, 14))[0]
    files.hold("read_at")
    node.loop.create_task(node.cache.wait_for("red", engine.ref, packed(hashes), 600.0))
    node.run(until(files.held.is_set))
    node.cache.state.drain_timeout_s = 0.2
    node.loop.run_until_complete(node.cache.stop())
    assert storage_of(node).nvme.index.pid is None
    files.go_on()
    node.loop.run_until_complete(storage_of(node).transfers.drain())
    node.loop.close()


def test_a_node_that_stops_on_a_broken_disk_starts_with_what_was_durable(tmp_path: Path) -> None:
    files = FaultyFiles()
    node = start(tmp_path, NVME, DiskSeams(files=files), dram_bytes=2 * MIB)
    engine = make_engine(node)
    runs = cold(engine, fill(engine, 14))
    files.always |= {"write_at": DISK_BROKEN, "sync_data": DISK_BROKEN}
    for number in range(16):
        engine.put(("refused", number), *range(4))
    node.run(until(lambda: not storage_of(node).nvme.health.writable))
    node.close()
    node = start(tmp_path, NVME, dram_bytes=2 * MIB)
    assert node.cache.check() == []
    engine = make_engine(node)
    assert [read(engine, hashes) for hashes in runs] == [len(hashes) for hashes in runs]
    node.close()
