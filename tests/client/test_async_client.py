"""The async client: the same answers on an event loop that is never held."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from prefixd_client import AsyncClient, ClientClosed, InvalidArgument, RequestPhase, RunHits, UsageReport

from tests.support.clients import PATIENT, HeldCopies, data_of, empty, run_of, spec
from tests.support.fake_daemon import fake_daemon

RUN = run_of(3)
MISS = RunHits((), 0, 3)
"""Without a daemon: when it could be read is not known."""
NOTHING_KEPT = RunHits((), 0, 3, ready_after_s=0.0)


async def stored(namespace, hashes) -> list[bytes]:
    data = data_of(hashes)
    lease = await namespace.reserve(hashes)
    assert (await lease.store(data)).visible == len(hashes)
    return data


async def until(holds) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.005)


async def test_what_is_stored_is_loaded(daemon) -> None:
    async with AsyncClient(daemon.path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        assert await namespace.lookup(RUN) == NOTHING_KEPT
        data = await stored(namespace, RUN)
        targets = empty(3)
        async with await namespace.acquire(RUN) as lease:
            assert await lease.load(targets) == 3
        assert [bytes(target) for target in targets] == data
        namespace.report_usage(UsageReport(request_id="1", phase=RequestPhase.STARTED, block_hashes=RUN))
    assert daemon.count("Release") == 1
    assert daemon.count("ReportUsage") == 1


async def test_an_event_loop_without_a_daemon_gets_misses(path) -> None:
    async with AsyncClient(path) as client:
        namespace = await client.namespace(spec())
        assert await namespace.lookup(RUN) == MISS
        assert await namespace.acquire(RUN) is None
        assert await namespace.reserve(RUN) is None
        assert await namespace.get(RUN) == []
        assert (await namespace.put(zip(RUN, data_of(RUN), strict=True))).declined_count == 3


async def test_the_first_timeout_fails_every_waiting_call_at_once(daemon) -> None:
    async with AsyncClient(daemon.path, options=replace(PATIENT, lookup_timeout_s=0.2)) as client:
        namespace = await client.namespace(spec())
        daemon.mute_heartbeats.set()
        held = [daemon.hold("Acquire"), daemon.hold("Lookup")]
        patient = [asyncio.create_task(namespace.acquire(RUN, timeout_s=600.0)) for _ in range(4)]
        await asyncio.to_thread(daemon.wait_asked, "Acquire", 4)
        assert await namespace.lookup(RUN) == MISS
        async with asyncio.timeout(20):
            assert await asyncio.gather(*patient) == [None] * 4
        for event in held:
            event.set()


async def test_a_cancelled_caller_is_cancelled_and_the_client_goes_on(daemon) -> None:
    async with AsyncClient(daemon.path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        held = daemon.hold("Lookup")
        task = asyncio.create_task(namespace.lookup(RUN))
        await asyncio.to_thread(daemon.wait_asked, "Lookup")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        held.set()
        assert client.status().breaker_opened_count == 0
        assert await namespace.lookup(RUN) == NOTHING_KEPT


async def test_a_cancelled_store_gives_its_blocks_up(daemon) -> None:
    async with AsyncClient(daemon.path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        held = daemon.hold("Commit")
        lease = await namespace.reserve(RUN)
        task = asyncio.create_task(lease.store(data_of(RUN)))
        await asyncio.to_thread(daemon.wait_asked, "Commit")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        abort = await asyncio.to_thread(daemon.wait_asked, "Abort")
        assert abort.token == lease.token
        held.set()


async def test_a_reserve_whose_caller_was_cancelled_is_given_up(daemon) -> None:
    async with AsyncClient(daemon.path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        held = daemon.hold("Reserve")
        task = asyncio.create_task(namespace.reserve(RUN))
        reserve = await asyncio.to_thread(daemon.wait_asked, "Reserve")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await asyncio.to_thread(daemon.wait_asked, "Abort")).token == reserve.token
        held.set()


async def test_an_acquire_whose_caller_was_cancelled_is_released(daemon) -> None:
    async with AsyncClient(daemon.path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        held = daemon.hold("Acquire")
        task = asyncio.create_task(namespace.acquire(RUN))
        acquire = await asyncio.to_thread(daemon.wait_asked, "Acquire")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release = await asyncio.to_thread(daemon.wait_asked, "Release")
        assert [(entry.token, list(entry.shards)) for entry in release.releases] == [(acquire.token, [])]
        held.set()


async def cancelled_again_and_again(held: HeldCopies) -> None:
    """Cancels every other task while a copy is under way: as scopes do that insist, and asyncio.run() at its
    end."""
    assert await asyncio.to_thread(held.reached.wait, 20)
    for _ in range(10):
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0)


async def test_a_cancelled_load_has_its_memory_back_when_nobody_writes_to_it(daemon) -> None:
    async with AsyncClient(daemon.path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        data = await stored(namespace, RUN)
        targets = empty(3)
        async with await namespace.acquire(RUN) as lease:
            with HeldCopies(client) as held:
                task = asyncio.create_task(lease.load(targets))
                await cancelled_again_and_again(held)
                assert not task.done()
                held.go()
                with pytest.raises(asyncio.CancelledError):
                    await task
        assert [bytes(target) for target in targets] == data


async def test_a_cancelled_store_gives_its_blocks_up_when_nobody_writes_to_them(daemon) -> None:
    async with AsyncClient(daemon.path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        lease = await namespace.reserve(RUN)
        with HeldCopies(client) as held:
            task = asyncio.create_task(lease.store(data_of(RUN)))
            await cancelled_again_and_again(held)
            assert lease.is_held
            held.go()
            with pytest.raises(asyncio.CancelledError):
                await task
        abort = await asyncio.to_thread(daemon.wait_asked, "Abort")
        assert abort.token == lease.token


async def test_who_waits_while_the_client_is_closed_gets_a_miss(daemon) -> None:
    async with AsyncClient(daemon.path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        held = [daemon.hold("Lookup"), daemon.hold("Acquire")]
        waiting = [asyncio.create_task(namespace.lookup(RUN)), asyncio.create_task(namespace.acquire(RUN))]
        for method in ("Lookup", "Acquire"):
            await asyncio.to_thread(daemon.wait_asked, method)
        await client.close()
        assert await asyncio.gather(*waiting) == [MISS, None]
        for event in held:
            event.set()


async def test_blocks_that_were_copied_when_the_client_is_closed_are_dropped(daemon) -> None:
    async with AsyncClient(daemon.path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        lease = await namespace.reserve(RUN)
        commit = await asyncio.to_thread(lease.copy_in, data_of(RUN), None)
        await client.close()
        assert (await client.run(commit)).dropped == 3
    assert daemon.count("Commit") == 0


async def test_after_a_restart_it_works_again(path) -> None:
    async with AsyncClient(path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        for _ in range(2):
            with fake_daemon(path):
                await until(lambda: client.status().state == "ready")
                await stored(namespace, RUN)
                assert (await namespace.lookup(RUN)).hit_count == 3
            await until(lambda: client.status().state == "away")


async def test_wrong_arguments_and_closed_clients_are_told(daemon) -> None:
    async with AsyncClient(daemon.path, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        with pytest.raises(InvalidArgument):
            await namespace.lookup([b"short"])
        with pytest.raises(InvalidArgument):
            await namespace.redeem(bytes(16), 1)
    with pytest.raises(ClientClosed):
        await namespace.lookup(RUN)
