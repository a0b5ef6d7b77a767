"""A daemon with one engine on one namespace, for tests over the wire."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_server.app.daemon import Daemon

from tests.support.node import chain
from tests.support.wire_engine import WireEngine

BLOCK_BYTES = 8192
HASHES = chain("a", "b", "c", "d")
BLOCKS = [bytes([index]) * BLOCK_BYTES for index in range(len(HASHES))]
Code = grpc.StatusCode


@dataclass
class Scene:
    """A daemon, an engine with a session, an open namespace."""

    daemon: Daemon
    engine: WireEngine
    ref: types_pb2.NamespaceRef

    @property
    def socket(self) -> Path:
        """The first tenant's socket."""
        return self.daemon.config.socket_path

    def nothing_leaks(self) -> None:
        """No lease and no slot is held, nothing is out of balance."""
        stats = self.daemon.cache.stats(None)
        assert self.daemon.cache.check() == []
        assert stats.lease_count == 0
        assert all(tier.reserved_slot_count == tier.quarantined_slot_count == 0 for tier in stats.tiers)


async def give_back(scene: Scene, read: bytes = b"", written: bytes = b"") -> None:
    """Ends leases as their holder."""
    session = {"session_id": scene.engine.session_id}
    if read:
        await scene.engine.call("Release", releases=[wire.LeaseRelease(token=read)], **session)
    if written:
        await scene.engine.call("Abort", token=written, **session)
