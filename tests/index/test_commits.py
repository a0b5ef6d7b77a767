"""Commits in groups: order, bounds, and whose they are."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixd_server.base.errors import LimitReached
from prefixd_server.index.commits import CommitQueue, settle
from prefixd_server.index.frames import GROUP_RECORDS_MAX, HEAD, SECTION_ROW_BYTES, Section, pairs, sections
from prefixd_server.index.records import KEY, NamespaceRecord, keys_of

from tests.support.stores import FINGERPRINT, run_records


def contents(message: bytes) -> list[tuple[Section, bytes]]:
    """What a group does, one entry a record."""
    found = []
    for kind, count, payload in sections(memoryview(message)[HEAD.size :]):
        size = SECTION_ROW_BYTES.get(kind, len(payload))
        assert len(payload) == count * size
        found += [(kind, bytes(payload[at : at + size])) for at in range(0, len(payload), size)]
    return found


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400)), max_size=4))
def test_records_leave_in_the_order_they_came_and_each_commit_ends_with_its_last(
    commits: list[tuple[bool, int]],
) -> None:
    async def run() -> None:
        queue = CommitQueue(100_000)
        expected, waiters, ends = [], [], []
        for number, (put, count) in enumerate(commits):
            records = run_records(count, number)
            rows = records if put else keys_of(records)
            waiters.append(queue.add(rows if put else None, None if put else rows, ()))
            kind = Section.PUT_BLOCKS if put else Section.DELETE_BLOCKS
            expected += [(kind, row.tobytes()) for row in rows]
            ends.append(len(expected))
        assert queue.record_count == len(expected)
        done: list[tuple[Section, bytes]] = []
        while group := queue.take():
            assert 0 < group.record_count <= GROUP_RECORDS_MAX
            before = [waiter.done() for waiter in waiters]
            assert before == [
                end <= len(done) or not count for end, (_, count) in zip(ends, commits, strict=True)
            ]
            done += contents(group.message)
            settle(group)
        assert done == expected
        assert queue.record_count == 0
        assert all(waiter.done() for waiter in waiters)

    asyncio.run(run())


async def test_full_groups_are_made_of_many_small_commits() -> None:
    queue = CommitQueue(10_000)
    for number in range(600):
        queue.add(run_records(2, number), None, ())
    group = queue.take()
    assert group is not None
    assert group.record_count == GROUP_RECORDS_MAX


async def test_namespaces_go_before_deletes_and_deletes_before_puts() -> None:
    queue = CommitQueue(10)
    name = NamespaceRecord("red", FINGERPRINT, 2, None, 0.0)
    records = run_records(2)
    forgotten = NamespaceRecord("blue", FINGERPRINT, 2, None, 0.0).key()
    queue.add(records[:1], keys_of(records[1:]), [name], [forgotten])
    group = queue.take()
    assert group is not None
    kinds = contents(group.message)
    assert [kind for kind, _ in kinds] == [
        Section.PUT_PAIR,
        Section.DELETE_BLOCKS,
        Section.DELETE_NAMESPACES,
        Section.PUT_BLOCKS,
    ]
    assert kinds[2][1] == forgotten
    assert list(pairs(memoryview(kinds[0][1]))) == [(name.key(), name.encode())]


async def test_more_than_the_bound_is_refused_whole() -> None:
    queue = CommitQueue(10)
    queue.add(run_records(8), None, ())
    with pytest.raises(LimitReached, match="limit of 10"):
        queue.add(run_records(3), None, ())
    assert queue.record_count == 8
    queue.add(run_records(2), None, ())


async def test_a_commit_of_nothing_is_done_at_once() -> None:
    queue = CommitQueue(10)
    assert queue.add(None, np.zeros(0, dtype=KEY), ()).done()
    assert queue.take() is None


async def test_commits_that_wait_fail_together() -> None:
    queue = CommitQueue(10_000)
    waiters = [queue.add(run_records(GROUP_RECORDS_MAX + 1, number), None, ()) for number in range(2)]
    queue.take()
    queue.fail(OSError("gone"))
    assert all(isinstance(waiter.exception(), OSError) for waiter in waiters)
    assert queue.record_count == 0
    assert queue.take() is None
