"""An engine that speaks the wire by hand: what the client library does, without its protections."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import xxhash
from prefixd.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    cache_service_pb2,
    cache_service_pb2_grpc,
    types_pb2,
)
from prefixd_server.rpc.namespace_spec import spec_to_wire

from tests.support.specs import spec
from tests.support.wire import Refusal, refusal_of

CALL_TIMEOUT_S = 20.0


class Companion:
    """The companion connection of one session."""

    def __init__(self, path: str, session_id: bytes) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(CALL_TIMEOUT_S)
        self.socket.connect(path)
        self.answer = self._ask({"session": session_id.hex()})

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self.socket.send(json.dumps(message).encode())
        answer: dict[str, Any] = json.loads(self.socket.recv(65_536))
        return answer

    def segment(self, segment_id: int) -> tuple[dict[str, Any], int]:
        """(answer, file descriptor or -1) of one segment."""
        self.socket.send(json.dumps({"segments": [segment_id]}).encode())
        data, fds, _, _ = socket.recv_fds(self.socket, 65_536, 1)
        return json.loads(data), fds[0] if fds else -1

    def close(self) -> None:
        """Hangs up."""
        self.socket.close()


class WireEngine:
    """Stubs, a session and mapped segments on one socket."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.cache: Any = _stub(cache_service_pb2_grpc.CacheServiceStub, channel)
        self.admin: Any = _stub(admin_service_pb2_grpc.AdminServiceStub, channel)
        self.session_id = b""
        self.opened = cache_service_pb2.SessionOpened()
        self.companion: Companion | None = None
        self.stream: Any = None
        self._maps: dict[int, mmap.mmap] = {}

    async def call(self, method: str, **fields: Any) -> Any:
        """Calls a unary method of either service with a request of these fields."""
        ours = hasattr(self.cache, method)
        stub, module = (self.cache, cache_service_pb2) if ours else (self.admin, admin_service_pb2)
        request_type = getattr(module, f"{method}Request")
        return await getattr(stub, method)(request_type(**fields), timeout=CALL_TIMEOUT_S)

    async def refused(self, method: str, **fields: Any) -> Refusal:
        """How a unary call is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.call(method, **fields)
        return refusal_of(caught.value)

    async def open_namespace(self, **changes: Any) -> types_pb2.NamespaceRef:
        """A namespace of tests.support.specs.spec(**changes)."""
        answer = await self.call("OpenNamespace", spec=spec_to_wire(spec(**changes)))
        ref: types_pb2.NamespaceRef = answer.namespace
        return ref

    async def open_session(
        self, instance_id: str = "engine", *, attach: bool = True, devices: Sequence[str] = ()
    ) -> None:
        """Opens the session, and the companion connection unless told otherwise."""
        self.stream = self.cache.OpenSession()
        hello = cache_service_pb2.SessionHello(
            instance_id=instance_id, engine_name="test", pid=os.getpid(), readable_devices=devices
        )
        await self.stream.write(cache_service_pb2.OpenSessionRequest(hello=hello))
        self.opened = (await self.stream.read()).opened
        self.session_id = self.opened.session_id
        if attach:
            path, session_id = self.opened.companion_path, self.session_id
            self.companion = await asyncio.to_thread(Companion, path, session_id)
            assert self.companion.answer == {"ok": True}

    async def heartbeat(self, *tokens: bytes) -> Any:
        """The answer to one heartbeat."""
        beat = cache_service_pb2.SessionHeartbeat(renew_tokens=tokens)
        await self.stream.write(cache_service_pb2.OpenSessionRequest(heartbeat=beat))
        return (await self.stream.read()).heartbeat

    async def memory(self, segment_id: int) -> mmap.mmap:
        """The segment, mapped."""
        if segment_id not in self._maps:
            assert self.companion is not None
            answer, fd = await asyncio.to_thread(self.companion.segment, segment_id)
            assert fd >= 0, answer
            self._maps[segment_id] = mmap.mmap(fd, answer["length_bytes"])
            os.close(fd)
        return self._maps[segment_id]

    async def reserve(
        self, ref: types_pb2.NamespaceRef, hashes: Sequence[bytes], parent: bytes = b"", **fields: Any
    ) -> Any:
        """Reserves slots."""
        return await self.call(
            "Reserve",
            session_id=self.session_id,
            namespace=ref,
            block_hashes=hashes,
            parent_hash=parent,
            **fields,
        )

    async def write(self, extents: Sequence[types_pb2.Extent], blocks: Sequence[bytes]) -> None:
        """Writes blocks into the extents, in order."""
        pending = iter(blocks)
        for extent in extents:
            memory = await self.memory(extent.segment_id)
            for index in range(extent.block_count):
                data = next(pending)
                offset = extent.offset_bytes + index * extent.stride_bytes
                memory[offset : offset + len(data)] = data

    async def read(self, extents: Sequence[types_pb2.Extent], block_bytes: int) -> list[bytes]:
        """Blocks of the extents whose bytes match their checksums; b"" for the others."""
        blocks = []
        for extent in extents:
            memory = await self.memory(extent.segment_id)
            for index, checksum in enumerate(extent.checksums):
                offset = extent.offset_bytes + index * extent.stride_bytes
                data = memory[offset : offset + block_bytes]
                blocks.append(data if checksum_of(data) == checksum else b"")
        return blocks

    async def store(
        self, ref: types_pb2.NamespaceRef, hashes: Sequence[bytes], blocks: Sequence[bytes], **fields: Any
    ) -> Any:
        """Reserve, write, commit: the Commit's answer."""
        reserved = await self.reserve(ref, hashes, **fields)
        await self.write(reserved.extents, blocks)
        return await self.call(
            "Commit",
            session_id=self.session_id,
            token=reserved.lease.token,
            checksums=[checksum_of(block) for block in blocks],
        )

    async def acquire(self, ref: types_pb2.NamespaceRef, hashes: Sequence[bytes], **fields: Any) -> Any:
        """Leases the longest prefix, extents of shard 0 included."""
        return await self.call(
            "Acquire",
            session_id=self.session_id,
            namespace=ref,
            block_hashes=hashes,
            **({"redeem_shards": [0]} | fields),
        )

    async def put(self, *messages: cache_service_pb2.PutRequest) -> Any:
        """A portable put of these messages."""
        return await self.cache.Put(iter(messages), timeout=CALL_TIMEOUT_S)

    async def get(self, ref: types_pb2.NamespaceRef, hashes: Sequence[bytes]) -> list[bytes]:
        """A portable get: the blocks, put together."""
        blocks: list[bytes] = []
        request = cache_service_pb2.GetRequest(namespace=ref, block_hashes=hashes)
        async for message in self.cache.Get(request, timeout=CALL_TIMEOUT_S):
            if message.WhichOneof("message") == "block":
                blocks.append(message.block.data)
            elif message.WhichOneof("message") == "data":
                blocks[-1] += message.data
        return blocks

    async def lookup_counts(
        self, ref: types_pb2.NamespaceRef, hashes: Sequence[bytes]
    ) -> tuple[int, int, int]:
        """(hits, pending, misses)."""
        found = await self.call("Lookup", namespace=ref, block_hashes=hashes)
        return sum(hit.block_count for hit in found.hits), found.pending_block_count, found.miss_block_count

    async def close(self) -> None:
        """Hangs up everything."""
        for memory in self._maps.values():
            memory.close()
        if self.companion is not None:
            self.companion.close()
        if self.stream is not None:
            self.stream.cancel()


@asynccontextmanager
async def wire_engine(
    target: Path | str, instance_id: str | None = "engine", *, attach: bool = True
) -> AsyncIterator[WireEngine]:
    """An engine on a unix socket (a path) or on HOST:PORT; instance_id None opens no session."""
    address = f"unix:{target}" if isinstance(target, Path) else target
    options = [("grpc.max_receive_message_length", -1), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        engine = WireEngine(channel)
        try:
            if instance_id is not None:
                await engine.open_session(instance_id, attach=attach)
            yield engine
        finally:
            await engine.close()


def checksum_of(data: bytes) -> int:
    """XXH3_64, seed 0."""
    return xxhash.xxh3_64_intdigest(data)


def put_messages(
    ref: types_pb2.NamespaceRef, hashes: Sequence[bytes], blocks: Sequence[bytes], **header: Any
) -> list[cache_service_pb2.PutRequest]:
    """A right Put, one message per block."""
    messages = [cache_service_pb2.PutRequest(header=cache_service_pb2.PutHeader(namespace=ref, **header))]
    for key, data in zip(hashes, blocks, strict=True):
        block = cache_service_pb2.PutBlock(block_hash=key, checksum=checksum_of(data), data=data)
        messages.append(cache_service_pb2.PutRequest(block=block))
    return messages


def _stub(kind: Any, channel: grpc.aio.Channel) -> Any:
    return kind(channel)
