"""The index process: durable commits, loading, and being killed, refused, hung up on."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from prefixd_server.base.errors import ConfigError, LimitReached
from prefixd_server.base.failpoints import VARIABLE
from prefixd_server.index import line
from prefixd_server.index.frames import GROUP_RECORDS_MAX
from prefixd_server.index.line import IndexUnavailable
from prefixd_server.index.process import Index, IndexOptions, IndexState
from prefixd_server.index.records import (
    KIND_BLOCK,
    KIND_NAMESPACE,
    RECORD,
    NamespaceRecord,
    Records,
    keys_of,
)
from prefixd_server.index.store import Store

from tests.support.specs import spec
from tests.support.stores import FINGERPRINT, UUID, run_records

OPTIONS = IndexOptions(restart_pause_min_s=0.01, restart_pause_max_s=0.05, reply_timeout_s=30)


@asynccontextmanager
async def running(
    tmp_path: Path, options: IndexOptions = OPTIONS, uuid: bytes = UUID
) -> AsyncIterator[Index]:
    index = Index(tmp_path / "index", uuid, options)
    try:
        await index.start()
        yield index
    finally:
        await index.close()


async def named(index: Index) -> list[NamespaceRecord]:
    return [record async for page in index.namespaces() for record in page]


async def loaded(index: Index) -> Records:
    batches = [batch async for batch in index.load()]
    return np.concatenate(batches) if batches else np.zeros(0, dtype=RECORD)


def same(found: Records, expected: Records) -> bool:
    return sorted(row.tobytes() for row in found) == sorted(row.tobytes() for row in expected)


async def unavailable(act: Callable[[], Awaitable[object]]) -> IndexUnavailable:
    with pytest.raises(IndexUnavailable) as raised:
        await act()
    return raised.value


async def test_what_was_committed_is_loaded_after_a_restart(tmp_path: Path) -> None:
    records = run_records(1000)
    async with running(tmp_path) as index:
        assert index.state is IndexState.READY
        await index.commit(puts=records)
        await index.commit(deletes=keys_of(records[900:]))
        assert index.counters.records == 1100
        assert index.counters.groups == 2
    async with running(tmp_path) as index:
        assert same(await loaded(index), records[:900])


async def test_records_are_loaded_in_key_order(tmp_path: Path) -> None:
    async with running(tmp_path) as index:
        await index.commit(puts=run_records(5000))
        found = [row.tobytes() for row in keys_of(await loaded(index))]
        assert found == sorted(found)
        assert len(found) == 5000


async def test_namespaces_keep_their_epochs(tmp_path: Path) -> None:
    live = NamespaceRecord("red", spec().fingerprint(), 1, spec(), 5.0)
    dropped = NamespaceRecord("red", FINGERPRINT, 7, None, 6.0)
    async with running(tmp_path) as index:
        await index.commit(namespaces=[live, NamespaceRecord("red", FINGERPRINT, 6, spec(), 6.0)])
        await index.commit(namespaces=[dropped])
    async with running(tmp_path) as index:
        found = await named(index)
        assert sorted(found, key=lambda record: record.epoch) == [live, dropped]


async def test_namespaces_are_read_however_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "FRAME_BYTES_MAX", 1 << 19)
    specs = [spec(f"{number:04}" * 256, kv_layout="é" * 512) for number in range(200)]
    records = [NamespaceRecord("red", wanted.fingerprint(), 1, wanted, 5.0) for wanted in specs]
    assert sum(len(record.encode()) for record in records) > line.FRAME_BYTES_MAX
    async with running(tmp_path) as index:
        await index.commit(namespaces=records)
        found = await named(index)
    assert sorted(record.key() for record in found) == sorted(record.key() for record in records)


async def test_forgotten_namespaces_are_gone(tmp_path: Path) -> None:
    kept, gone = (NamespaceRecord("red", spec(name).fingerprint(), 1, spec(name), 5.0) for name in "ab")
    async with running(tmp_path) as index:
        await index.commit(namespaces=[kept, gone])
        await index.commit(forgotten=[gone.key()])
        assert await named(index) == [kept]
    async with running(tmp_path) as index:
        assert await named(index) == [kept]


async def test_commits_of_many_callers_share_groups(tmp_path: Path) -> None:
    async with running(tmp_path) as index:
        await asyncio.gather(*(index.commit(puts=run_records(4, seed)) for seed in range(200)))
        assert index.counters.records == 800
        assert index.counters.groups < 20
        assert len(await loaded(index)) == 800


async def test_a_commit_that_nobody_waits_for_any_more_still_becomes_durable(tmp_path: Path) -> None:
    async with running(tmp_path) as index:
        waiting = asyncio.create_task(index.commit(puts=run_records(10)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert len(await loaded(index)) in {0, 10}
        await index.commit(puts=run_records(1, 99))
        assert len(await loaded(index)) == 11


async def test_the_bound_on_waiting_records_is_an_answer(tmp_path: Path) -> None:
    async with running(tmp_path, IndexOptions(pending_record_count_max=100)) as index:
        with pytest.raises(LimitReached):
            await index.commit(puts=run_records(101))
        assert index.pending_record_count == 0
        await index.commit(puts=run_records(100))


async def test_a_killed_index_is_noticed_and_started_again(tmp_path: Path) -> None:
    changes: list[IndexState] = []
    records = run_records(300)
    index = Index(tmp_path / "index", UUID, OPTIONS, lambda state, reason: changes.append(state))
    await index.start()
    await index.commit(puts=records)
    former = index.pid
    assert former is not None
    os.kill(former, signal.SIGKILL)
    while index.pid == former:
        await asyncio.sleep(0.001)
    await index.ready()
    assert index.pid != former
    assert index.counters.restarts == 1
    assert same(await loaded(index), records)
    await index.close()
    await index.close()
    assert changes == [IndexState.READY, IndexState.FAULTED, IndexState.READY, IndexState.CLOSED]
    assert (await unavailable(index.ready)).reason == "INDEX_UNAVAILABLE"


async def test_commits_under_way_fail_when_the_index_dies(tmp_path: Path) -> None:
    async with running(tmp_path) as index:
        assert index.pid is not None
        os.kill(index.pid, signal.SIGSTOP)
        waiting = [asyncio.create_task(index.commit(puts=run_records(2000, seed))) for seed in range(3)]
        while index.pending_record_count != 6000 - GROUP_RECORDS_MAX:
            await asyncio.sleep(0.001)
        os.kill(index.pid, signal.SIGKILL)
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == 3 * [IndexUnavailable]
        await index.ready()
        await index.commit(puts=run_records(5))


async def test_a_write_that_the_disk_refuses_is_a_fault_and_the_index_is_opened_again(tmp_path: Path) -> None:
    records = run_records(2000)
    async with running(tmp_path) as index:
        await index.commit(puts=records[:1000])
        former = index.pid
        assert former is not None
        # A file may not grow any more: what a full disk is to one process alone.
        resource.prlimit(former, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        error = await unavailable(lambda: index.commit(puts=records[1000:]))
        assert "too large" in str(error)
        while index.pid in {former, None}:
            await asyncio.sleep(0.001)
        await index.ready()
        assert {row.tobytes() for row in records[:1000]} <= {row.tobytes() for row in await loaded(index)}
        await index.commit(puts=records)
        assert same(await loaded(index), records)


async def test_an_index_that_does_not_answer_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path, IndexOptions(reply_timeout_s=1.0, restart_pause_min_s=0.01)) as index:
        assert index.pid is not None
        os.kill(index.pid, signal.SIGSTOP)
        await unavailable(lambda: index.commit(puts=run_records(5)))
        await index.ready()
        assert len(await loaded(index)) == 0


async def test_nothing_is_taken_while_there_is_no_index(tmp_path: Path) -> None:
    index = Index(tmp_path / "index", UUID)
    for act in (lambda: index.commit(puts=run_records(1)), lambda: named(index), lambda: loaded(index)):
        await unavailable(act)


@pytest.mark.parametrize(
    ("failpoint", "survives"), [("index.log_written", {0, 10}), ("index.log_synced", {10})]
)
async def test_an_index_killed_within_a_commit_loses_it_or_keeps_it_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failpoint: str, survives: set[int]
) -> None:
    async with running(tmp_path) as index:
        await index.commit(puts=run_records(20))
    with monkeypatch.context() as patched:
        patched.setenv(VARIABLE, f"{failpoint}=1")
        async with running(tmp_path) as index:
            await unavailable(lambda: index.commit(puts=run_records(10, 1)))
    async with running(tmp_path) as index:
        assert len(await loaded(index)) - 20 in survives


async def test_corrupt_records_are_ignored_counted_and_deleted(tmp_path: Path) -> None:
    records = run_records(100)
    rows = [bytearray(row.tobytes()) for row in records]
    rows[7][100] ^= 1
    rows[8] = rows[8][:-3]
    store = Store(tmp_path / "index", UUID)
    store.write([(bytes(row[:65]), bytes(row[65:])) for row in rows])
    store.write([(bytes([KIND_BLOCK]) + b"odd", b""), (bytes([KIND_NAMESPACE]) + b"odd", b"a value")])
    store.close()
    async with running(tmp_path) as index:
        assert same(await loaded(index), np.delete(records, [7, 8]))
        assert index.counters.corrupt_records == 3
        assert await named(index) == []
        assert index.counters.corrupt_records == 4
        assert len(await loaded(index)) == 98
        assert await named(index) == []
        assert index.counters.corrupt_records == 4


async def test_an_index_that_vanished_is_not_made_anew_and_is_used_once_it_is_back(tmp_path: Path) -> None:
    records = run_records(10)
    async with running(tmp_path) as index:
        await index.commit(puts=records)
        (tmp_path / "index").rename(tmp_path / "elsewhere")
        assert index.pid is not None
        os.kill(index.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            while "is gone" not in index.reason:
                await asyncio.sleep(0.005)
        assert index.state is IndexState.FAULTED
        assert not (tmp_path / "index").exists()
        (tmp_path / "elsewhere").rename(tmp_path / "index")
        await index.ready()
        assert same(await loaded(index), records)


async def test_damage_is_mended_while_loading(tmp_path: Path) -> None:
    async with running(tmp_path) as index:
        await index.commit(puts=run_records(20_000))
    async with running(tmp_path):
        pass
    table = max((tmp_path / "index").glob("*.sst"), key=lambda path: path.stat().st_size)
    content = bytearray(table.read_bytes())
    content[len(content) // 2] ^= 1
    table.write_bytes(content)
    async with running(tmp_path) as index:
        found = await loaded(index)
        assert 19_000 < len(found) < 20_000
        assert index.counters.rebuilds == 1
        assert same(await loaded(index), found)
        assert index.counters.rebuilds == 1
        await index.commit(puts=run_records(10, 1))


async def test_an_unreadable_database_gives_an_empty_index(tmp_path: Path) -> None:
    async with running(tmp_path) as index:
        await index.commit(puts=run_records(10))
    next((tmp_path / "index").glob("MANIFEST-*")).write_bytes(b"garbage")
    async with running(tmp_path) as index:
        assert index.state is IndexState.READY
        assert index.counters.resets == 1
        assert len(await loaded(index)) == 0


async def test_another_stores_index_is_refused_and_not_retried(tmp_path: Path) -> None:
    async with running(tmp_path):
        pass
    index = Index(tmp_path / "index", b"another store...", OPTIONS)
    with pytest.raises(ConfigError, match="belongs to store") as raised:
        await index.start()
    assert raised.value.reason == "INDEX_REFUSED"
    assert index.state is IndexState.CLOSED
    await index.close()


async def test_a_directory_that_cannot_be_made_is_tried_again_until_it_can(tmp_path: Path) -> None:
    (tmp_path / "in-the-way").write_text("")
    index = Index(tmp_path / "in-the-way" / "index", UUID, OPTIONS)
    assert await index.start() is IndexState.FAULTED
    assert index.reason
    (tmp_path / "in-the-way").unlink()
    await index.ready()
    await index.commit(puts=run_records(1))
    await index.close()


async def test_leaving_a_load_early_does_not_confuse_what_follows(tmp_path: Path) -> None:
    async with running(tmp_path) as index:
        await index.commit(puts=run_records(20_000))
        load = index.load()
        assert len(await anext(load)) > 0
        await load.aclose()
        await index.ready()
        assert len(await loaded(index)) == 20_000


async def test_the_size_of_the_index_is_known(tmp_path: Path) -> None:
    async with running(tmp_path) as index:
        before = await index.disk_bytes()
        await index.commit(puts=run_records(1000))
        assert await index.disk_bytes() - before > 100_000
