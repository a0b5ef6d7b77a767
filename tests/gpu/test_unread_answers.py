"""A read that was granted in an answer that nobody reads leaves no lease on a device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prefixd.v1 import types_pb2
from prefixd_client import AsyncClient, AsyncNamespace
from prefixd_server.app.daemon import Daemon
from prefixd_server.base.types import Tier

from tests.support.clients import BLOCK_BYTES, PATIENT, run_of, spec
from tests.support.companions import until
from tests.support.daemon import running_daemon
from tests.support.fake_cuda import FakeCuda, uuid_of
from tests.support.wire_engine import WireEngine, checksum_of, wire_engine

RUN = run_of(8)
SETTINGS = {"hbm__size": "4MiB", "hbm__segment": "2MiB", "hbm__device": uuid_of(0)}
SCHEDULER = replace(PATIENT, redeemer_devices=(uuid_of(0),))
"""A process whose workers open the device."""


@asynccontextmanager
async def relay(daemon: Path, socket: Path) -> AsyncIterator[asyncio.Event]:
    """Passes bytes on between callers and the daemon; back to them only while the event is set."""
    passes_back = asyncio.Event()
    passes_back.set()

    connections: list[asyncio.Task[None]] = []

    async def pass_on(
        source: asyncio.StreamReader, target: asyncio.StreamWriter, *gates: asyncio.Event
    ) -> None:
        while data := await source.read(65_536):
            for gate in gates:
                await gate.wait()
            target.write(data)
        target.close()

    async def connect(asking: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        answering, forth = await asyncio.open_unix_connection(daemon)
        try:
            await asyncio.gather(pass_on(asking, forth), pass_on(answering, back, passes_back))
        finally:
            for writer in (forth, back):
                writer.close()
            await asyncio.gather(forth.wait_closed(), back.wait_closed(), return_exceptions=True)

    def connected(asking: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        connections.append(asyncio.create_task(connect(asking, back)))

    async with await asyncio.start_unix_server(connected, socket):
        try:
            yield passes_back
        finally:
            for connection in connections:
                connection.cancel()
            await asyncio.gather(*connections, return_exceptions=True)


def leased(daemon: Daemon) -> int:
    """Leases on slots in HBM."""
    return daemon.cache.state.catalog.slots[Tier.HBM].lease_total()


async def put_there(engine: WireEngine, ref: types_pb2.NamespaceRef) -> None:
    """The run, in HBM; nobody looks at its bytes."""
    reserved = await engine.reserve(ref, RUN, wanted_tier=types_pb2.TIER_HBM)
    assert {extent.tier for extent in reserved.extents} == {types_pb2.TIER_HBM}
    ids = {"session_id": engine.session_id, "token": reserved.lease.token}
    await engine.call("Commit", checksums=[checksum_of(bytes(BLOCK_BYTES))] * len(RUN), **ids)


@dataclass
class Scene:
    """The run in HBM, and a client of the same instance as the engine that has put it there."""

    daemon: Daemon
    engine: WireEngine
    client: AsyncClient
    namespace: AsyncNamespace
    ref: types_pb2.NamespaceRef
    passes_back: asyncio.Event

    async def cancel_unread(self, work: Coroutine[Any, Any, object], granted: Callable[[], bool]) -> None:
        """Calls something, and cancels it when it was granted, before its answer comes."""
        self.passes_back.clear()
        asking = asyncio.create_task(work)
        await until(granted)
        asking.cancel()
        self.passes_back.set()
        with pytest.raises(asyncio.CancelledError):
            await asking


@pytest.fixture
async def scene(machine: FakeCuda) -> AsyncIterator[Scene]:
    """See Scene."""
    async with running_daemon(**SETTINGS) as daemon, wire_engine(daemon.config.socket_path, None) as engine:
        hbm = daemon.cache.hbm
        await until(lambda: hbm is not None and hbm.tier.reason == "")
        socket = daemon.config.socket_path.with_name("r.sock")
        async with (
            relay(daemon.config.socket_path, socket) as passes_back,
            AsyncClient(socket, options=SCHEDULER) as client,
        ):
            namespace = await client.namespace(spec())
            assert client.control.session is not None
            ((_, ref),) = client.control.session.refs.items()
            await engine.open_session(client.instance_id, devices=[uuid_of(0)])
            await put_there(engine, ref)
            # The connection is made, too.
            assert (await namespace.lookup(RUN)).hit_count == len(RUN)
            yield Scene(daemon, engine, client, namespace, ref, passes_back)


async def test_an_acquire_whose_answer_nobody_reads_is_given_up(scene: Scene) -> None:
    work = scene.namespace.acquire(RUN, shards=())
    await scene.cancel_unread(work, lambda: leased(scene.daemon) == len(RUN))
    await until(lambda: leased(scene.daemon) == 0)
    assert scene.daemon.cache.state.leases.orphans == {}


async def test_a_shard_that_was_redeemed_in_an_answer_that_nobody_reads_is_given_up(scene: Scene) -> None:
    token = (await scene.engine.acquire(scene.ref, RUN, redeem_shards=[])).lease.token
    (shard,) = scene.daemon.cache.state.leases.reads[token].shards.values()
    session = scene.client.control.session
    assert session is not None
    await scene.cancel_unread(scene.namespace.redeem(token, 0), lambda: shard.holder == session.session_id)
    await until(lambda: leased(scene.daemon) == 0)
    assert scene.daemon.cache.state.leases.orphans == {}
