"""The old daemon's half of a takeover, step by step, with the test as the new daemon."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from prefixd.v1 import admin_service_pb2 as admin
from prefixd_server.app.daemon import Daemon
from prefixd_server.app.lock import AlreadyRunning, socket_lock

from tests.support.daemon import running_daemon
from tests.support.node import chain
from tests.support.wire import refusal_of, short_directory
from tests.support.wire_engine import WireEngine, put_messages, wire_engine

HASHES = chain("a", "b", "c")
BLOCKS = [bytes([index]) * 4096 for index in range(len(HASHES))]
ASKED, RELEASED, READY, YIELDED, SERVING = (
    admin.HAND_OVER_STEP_ASKED,
    admin.HAND_OVER_STEP_RELEASED,
    admin.HAND_OVER_STEP_READY,
    admin.HAND_OVER_STEP_YIELDED,
    admin.HAND_OVER_STEP_SERVING,
)


class Successor:
    """A new daemon's words."""

    def __init__(self, engine: WireEngine) -> None:
        self._call: Any = engine.admin.HandOver()

    async def say(self, step: int) -> int:
        """A step; the old daemon's answer, 0 at the end of the call."""
        await self._call.write(admin.HandOverRequest(step=step, pid=1, server_version="9.9.9"))
        answer = await self._call.read()
        return 0 if answer is grpc.aio.EOF else int(answer.step)

    async def refused(self, step: int) -> tuple[grpc.StatusCode, str]:
        """How a step is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.say(step)
        refusal = refusal_of(caught.value)
        return refusal.code, refusal.reason

    def vanish(self) -> None:
        """As by SIGKILL."""
        self._call.cancel()


@pytest.fixture
async def old() -> AsyncIterator[Daemon]:
    """The old daemon."""
    with short_directory() as directory:
        async with running_daemon("bob", data_dir=str(directory)) as daemon:
            yield daemon


@pytest.fixture
async def engine(old: Daemon) -> AsyncIterator[WireEngine]:
    """An engine with a session, at the old daemon's admin socket."""
    async with wire_engine(old.config.socket_path) as engine:
        yield engine


async def test_memory_serves_on_after_the_release_and_nothing_durable_changes(
    old: Daemon, engine: WireEngine
) -> None:
    ref = await engine.open_namespace(block_bytes=4096)
    await engine.put(*put_messages(ref, HASHES, BLOCKS))
    assert await Successor(engine).say(ASKED) == RELEASED
    assert await engine.get(ref, HASHES) == BLOCKS
    leased = await engine.acquire(ref, HASHES)
    assert len(await engine.read(leased.shard_extents[0].extents, 4096)) == len(HASHES)
    refusal = await engine.refused("DropNamespace", namespace=ref)
    assert (refusal.code, refusal.reason) == (grpc.StatusCode.UNAVAILABLE, "HANDING_OVER")
    assert refusal.retry_after_s
    assert (await engine.call("ListNamespaces")).namespaces[0].namespace == ref
    assert old.cache.check() == []


async def test_the_locks_are_the_new_daemons_from_the_release_on_and_not_before(
    old: Daemon, engine: WireEngine
) -> None:
    lock = socket_lock(old.config.socket_path)
    with pytest.raises(AlreadyRunning):
        lock.acquire()
    successor = Successor(engine)
    assert await successor.say(ASKED) == RELEASED
    lock.acquire()
    assert await successor.say(READY) == YIELDED
    assert await successor.say(SERVING) == 0
    assert old.handing_over.succeeded
    assert not await old.must_begin_anew()
    with pytest.raises(AlreadyRunning):
        socket_lock(old.config.socket_path).acquire()
    lock.release()


async def test_nothing_new_is_admitted_once_it_has_yielded(old: Daemon, engine: WireEngine) -> None:
    ref = await engine.open_namespace(block_bytes=4096)
    await engine.put(*put_messages(ref, HASHES, BLOCKS))
    successor = Successor(engine)
    assert await successor.say(ASKED) == RELEASED
    assert await successor.say(READY) == YIELDED
    refusal = await engine.refused(
        "Acquire", session_id=engine.session_id, namespace=ref, block_hashes=HASHES
    )
    assert refusal.reason == "DRAINING"
    assert (await engine.stream.read()).WhichOneof("message") == "draining"


async def test_sessions_end_one_by_one_as_their_leases_do(old: Daemon, engine: WireEngine) -> None:
    ref = await engine.open_namespace(block_bytes=4096)
    await engine.put(*put_messages(ref, HASHES, BLOCKS))
    token = (await engine.acquire(ref, HASHES)).lease.token
    async with wire_engine(old.config.socket_path, "idle") as idle:
        successor = Successor(engine)
        for step in (ASKED, READY, SERVING):
            await successor.say(step)
        leaving = asyncio.ensure_future(old.leave())
        assert (await idle.stream.read()).WhichOneof("message") == "draining"
        assert await idle.stream.read() is grpc.aio.EOF
        assert (await engine.stream.read()).WhichOneof("message") == "draining"
        assert not leaving.done()
        assert (await engine.heartbeat(token)).lost_tokens == []
        await engine.call("Release", session_id=engine.session_id, releases=[{"token": token}])
        assert await engine.stream.read() is grpc.aio.EOF
        await leaving


@pytest.mark.parametrize("steps", [(ASKED,), (ASKED, READY)], ids=["released", "yielded"])
async def test_a_successor_that_vanishes_has_the_old_daemon_begin_anew(
    old: Daemon, engine: WireEngine, steps: tuple[int, ...]
) -> None:
    successor = Successor(engine)
    for step in steps:
        await successor.say(step)
    assert not old.handing_over.is_over
    successor.vanish()
    await old.handing_over.wait()
    assert await old.must_begin_anew()


async def test_who_has_the_locks_keeps_the_node_even_if_it_vanished_from_the_call(
    old: Daemon, engine: WireEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prefixd_server.app.daemon.HOLDER_GOES_WITHIN_S", 0.0)
    lock = socket_lock(old.config.socket_path)
    successor = Successor(engine)
    await successor.say(ASKED)
    lock.acquire()
    successor.vanish()
    await old.handing_over.wait()
    assert not await old.must_begin_anew()
    await asyncio.gather(old.leave(), ended(engine))
    lock.release()


async def ended(engine: WireEngine) -> None:
    """Reads a session's stream to its end, which a drain announces."""
    assert (await engine.stream.read()).WhichOneof("message") == "draining"
    assert await engine.stream.read() is grpc.aio.EOF


async def test_one_takeover_at_a_time_and_its_steps_in_order(old: Daemon, engine: WireEngine) -> None:
    code = grpc.StatusCode
    assert await Successor(engine).refused(READY) == (code.INVALID_ARGUMENT, "STEP_EXPECTED")
    first = Successor(engine)
    assert await first.say(ASKED) == RELEASED
    assert await Successor(engine).refused(ASKED) == (code.FAILED_PRECONDITION, "TAKEOVER_UNDER_WAY")
    assert await first.refused(SERVING) == (code.INVALID_ARGUMENT, "STEP_EXPECTED")
    assert await old.must_begin_anew()


async def test_a_tenants_socket_cannot_take_the_node(old: Daemon) -> None:
    async with wire_engine(old.config.socket_path.with_name("bob.sock")) as bob:
        refused = await Successor(bob).refused(ASKED)
    assert refused == (grpc.StatusCode.PERMISSION_DENIED, "ADMIN_REQUIRED")
    with contextlib.suppress(AlreadyRunning):
        socket_lock(old.config.socket_path).acquire()
        pytest.fail("the lock was let go of")
