"""A demotion that ends late: its blocks were forgotten and stored again, or dropped by name, meanwhile."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from prefixd_server.base.types import Rows
from prefixd_server.cache.build import DiskSeams
from prefixd_server.catalog.events import BlocksRemoved

from tests.support.engine import Engine
from tests.support.faulty_files import FaultyFiles
from tests.support.faulty_index import FaultyIndex
from tests.support.node import Node, packed
from tests.support.nvme_node import make_engine, read, start, storage_of, stored, until

ROUNDS = 5
"""Of the loop, from a mover's result to the one who waits for it, and a few more."""


class Late:
    """A node whose disk and index hang when told. Its NVMe tier has a segment for every engine here."""

    def __init__(self, data_dir: Path) -> None:
        self.files, self.index = FaultyFiles(), FaultyIndex()
        self.node = start(data_dir, disk=DiskSeams(files=self.files, open_index=self.index.open))
        first = make_engine(self.node, "first", "first")
        self.demote(rows_of(first, first.put("first")))
        self.wait(lambda: stored(self.node) == 1)

    def demote(self, rows: Rows) -> None:
        """Begins to, as the scheduler does."""

        async def begin() -> None:
            storage_of(self.node).transfers.begin_demotion(rows)

        self.node.loop.run_until_complete(begin())

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until the node is in this state; what hangs does."""
        self.node.loop.run_until_complete(until(condition))

    def hangs_in_its_flush(self, rows: Rows) -> None:
        """Begins to demote; until files.go_on() the flush does not end, and none but it hangs."""
        self.files.hold("sync_data")
        self.demote(rows)
        self.wait(self.files.held.is_set)
        self.files.hold_no_more()

    def is_flushed(self, rows: Rows, hanging: int = 0) -> None:
        """Begins to demote, and goes on as far as that can without the index. So many others hang."""
        disk, flushed = self.node.cache.state.disk, self.files.attempts["sync_data"]
        assert disk is not None
        self.demote(rows)
        self.wait(lambda: self.files.attempts["sync_data"] > flushed and disk.depth == hanging)

        async def heard_of() -> None:
            for _ in range(ROUNDS):
                await asyncio.sleep(0)

        self.node.loop.run_until_complete(heard_of())

    def end(self) -> int:
        """All ends that is under way; blocks on NVMe then."""
        self.files.go_on()
        self.index.commits_go_on.set()
        self.node.loop.run_until_complete(storage_of(self.node).transfers.drain())
        self.node.run(storage_of(self.node).nvme.flush_departures())
        assert self.node.cache.check() == []
        kept = stored(self.node)
        self.node.close()
        return kept


@pytest.fixture
def late(tmp_path: Path) -> Late:
    return Late(tmp_path)


def rows_of(engine: Engine, hashes: list[bytes]) -> Rows:
    catalog = engine.node.cache.state.catalog
    space = catalog.namespaces.space(catalog.namespaces.get("red", engine.ref), 0, 0)
    return catalog.find(space, packed(hashes))


def forget(node: Node, rows: Rows) -> None:
    """As a copy found bad does, whoever holds them."""
    node.cache.state.apply(BlocksRemoved(rows))


def recovered(data_dir: Path, hashes: list[bytes]) -> tuple[int, int]:
    """Blocks on NVMe after a restart, and how many of the run are read."""
    node = start(data_dir)
    count = stored(node)
    hits = read(make_engine(node), hashes)
    node.close()
    return count, hits


def test_what_was_forgotten_during_its_flush_leaves_the_record_of_the_copy_that_came_after(
    tmp_path: Path, late: Late
) -> None:
    engine = make_engine(late.node)
    run = engine.put("run", *range(7))
    late.hangs_in_its_flush(rows_of(engine, run))
    forget(late.node, rows_of(engine, run))
    engine.put("run", *range(7))
    late.demote(rows_of(engine, run))
    late.wait(lambda: stored(late.node) == 1 + len(run))
    assert late.end() == 1 + len(run)
    assert recovered(tmp_path, run) == (1 + len(run), len(run))


def test_what_was_forgotten_while_its_record_is_written_leaves_that_of_the_copy_that_came_after(
    tmp_path: Path, late: Late
) -> None:
    engine = make_engine(late.node)
    run = engine.put("run", *range(7))
    late.index.commits_go_on.clear()
    late.demote(rows_of(engine, run))
    late.wait(lambda: late.index.hangs)
    forget(late.node, rows_of(engine, run))
    engine.put("run", *range(7))
    late.is_flushed(rows_of(engine, run))
    assert late.end() == 1 + len(run)
    assert recovered(tmp_path, run) == (1 + len(run), len(run))


def test_what_was_dropped_during_its_flush_leaves_the_record_of_the_namespace_that_came_after(
    tmp_path: Path, late: Late
) -> None:
    old = make_engine(late.node)
    late.hangs_in_its_flush(rows_of(old, old.put("old", *range(7))))
    late.node.loop.run_until_complete(late.node.cache.drop_namespace("red", old.ref))
    new = make_engine(late.node, "two")
    assert new.ref.epoch == old.ref.epoch + 1
    run = new.put("new", *range(7))
    late.demote(rows_of(new, run))
    late.wait(lambda: stored(late.node) == 1 + len(run))
    assert late.end() == 1 + len(run)
    assert recovered(tmp_path, run) == (1 + len(run), len(run))


def test_what_is_copied_sooner_than_its_parents_is_recorded_after_them(tmp_path: Path, late: Late) -> None:
    engine = make_engine(late.node)
    run = engine.put("run", *range(7))
    late.hangs_in_its_flush(rows_of(engine, run)[:4])
    late.index.commits_go_on.clear()
    late.is_flushed(rows_of(engine, run)[4:], hanging=1)
    assert not late.index.hangs
    assert late.end() == 1 + len(run)
    assert recovered(tmp_path, run) == (1 + len(run), len(run))


def test_what_lost_its_parents_on_the_way_is_not_recorded_and_other_runs_with_it_are(
    tmp_path: Path, late: Late
) -> None:
    engine = make_engine(late.node)
    run, other = engine.put("run", *range(7)), engine.put("other", *range(3))
    late.hangs_in_its_flush(rows_of(engine, run)[:4])
    late.is_flushed(np.concatenate([rows_of(engine, run)[4:], rows_of(engine, other)]), hanging=1)
    late.files.fail("sync_data", errno.ENOSPC)
    assert late.end() == 1 + len(other)
    assert recovered(tmp_path, other) == (1 + len(other), len(other))
