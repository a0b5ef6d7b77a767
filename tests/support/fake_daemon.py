"""A daemon that does what a test says: CacheService on a real unix socket, segments on a real companion.

By itself it is a small, honest cache without limits: one memfd, one slot per block, whatever is committed is
hit. A test makes it hang (`hold`), answer nonsense (`answers`), refuse (`refuse`), die (`die`), or looks at
what it was asked (`asked`).
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import cache_service_pb2_grpc, types_pb2

SLOT_COUNT = 64
SLOT_BYTES = 4096
SEGMENT_ID = 7
WAIT_S = 20.0
"""For what a test waits for; a test that needs it has failed."""


_add_to_server: Any = cache_service_pb2_grpc.add_CacheServiceServicer_to_server
"""Generated without types."""


class FakeDaemon(cache_service_pb2_grpc.CacheServiceServicer):
    """See the module.

    Attributes:
        memory: the segment, as the daemon maps it.
        blocks: (slot, checksum) of each visible hash.
        asked: every request, as (method, message), in order.
        answers: method to a function that answers instead.
        lease_s: life of the leases it gives.
        lost_tokens: what heartbeats are told is lost.
        mute_heartbeats: whether heartbeats go unanswered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.boot_id = secrets.token_bytes(16)
        self.blocks: dict[bytes, tuple[int, int]] = {}
        self.asked: list[tuple[str, Any]] = []
        self.answers: dict[str, Callable[[Any, Any], Any]] = {}
        self.lease_s = 30.0
        self.heartbeat_s = 0.1
        self.lost_tokens: list[bytes] = []
        self.mute_heartbeats = threading.Event()
        self.epoch = 1
        self._held: dict[str, threading.Event] = {}
        self._arrived = threading.Condition()
        self._reserved: dict[bytes, list[tuple[bytes, int]]] = {}
        self._slots = itertools.count()
        """Of blocks to come; calls are answered on many threads."""
        self._fd = os.memfd_create("fake", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, SLOT_COUNT * SLOT_BYTES)
        self.memory = mmap.mmap(self._fd, SLOT_COUNT * SLOT_BYTES)
        self._streams: list[Any] = []
        self._companion = _Companion(path.with_name(path.name + ".fd"), self._fd)
        self._server = grpc.server(futures.ThreadPoolExecutor(32), options=[("grpc.so_reuseport", 0)])
        _add_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    # -- what a test does ------------------------------------------------------------------------------

    def hold(self, method: str) -> threading.Event:
        """Calls of a method hang until the event is set."""
        return self._held.setdefault(method, threading.Event())

    def refuse(self, method: str, code: grpc.StatusCode, reason: str) -> None:
        """Calls of a method are refused."""

        def answer(_request: Any, context: Any) -> Any:
            abort(context, code, reason)

        self.answers[method] = answer

    def count(self, method: str) -> int:
        """How often a method was called."""
        return sum(name == method for name, _ in self.asked)

    def wait_asked(self, method: str, count: int = 1) -> Any:
        """The request of the count-th call of a method, once it has come."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: self.count(method) >= count, WAIT_S), f"no {method}"
        return [request for name, request in self.asked if name == method][count - 1]

    def tell(self, message: wire.OpenSessionResponse) -> None:
        """Sends something to every open session."""
        for stream in self._streams:
            stream.put(message)

    def die(self) -> None:
        """Gone, with all it had."""
        for event in self._held.values():
            event.set()
        self._companion.close()
        self._server.stop(0).wait()
        self.path.unlink(missing_ok=True)
        self.memory.close()
        os.close(self._fd)

    # -- the service -----------------------------------------------------------------------------------

    def _take(self, method: str, request: Any, context: Any) -> Any:
        with self._arrived:
            self.asked.append((method, request))
            self._arrived.notify_all()
        if method in self._held:
            self._held[method].wait(WAIT_S)
        answer = self.answers.get(method)
        return answer(request, context) if answer else getattr(self, f"_{method.lower()}")(request)

    def _lease(self, token: bytes) -> types_pb2.Lease:
        life = Duration()
        life.FromNanoseconds(int(self.lease_s * 1e9))
        return types_pb2.Lease(token=token, expires_after=life, boot_id=self.boot_id)

    def _opennamespace(self, request: wire.OpenNamespaceRequest) -> wire.OpenNamespaceResponse:
        ref = types_pb2.NamespaceRef(fingerprint=bytes(32), epoch=self.epoch)
        return wire.OpenNamespaceResponse(namespace=ref, boot_id=self.boot_id)

    def _hits(self, hashes: Any) -> int:
        return next((i for i, key in enumerate(hashes) if key not in self.blocks), len(hashes))

    def _lookup(self, request: wire.LookupRequest) -> wire.LookupResponse:
        hit = self._hits(request.block_hashes)
        return wire.LookupResponse(
            hits=[types_pb2.TierHit(tier=types_pb2.TIER_DRAM, block_count=hit)] if hit else [],
            miss_block_count=len(request.block_hashes) - hit,
        )

    def _acquire(self, request: wire.AcquireRequest) -> wire.AcquireResponse:
        found = self._lookup(wire.LookupRequest(block_hashes=request.block_hashes))
        hit = self._hits(request.block_hashes)
        answer = wire.AcquireResponse(hits=found.hits, miss_block_count=found.miss_block_count)
        if hit > request.skip_block_count:
            answer.lease.CopyFrom(self._lease(request.token or secrets.token_bytes(16)))
            extents = [
                self._extent(index, *self.blocks[request.block_hashes[index]])
                for index in range(request.skip_block_count, hit)
            ]
            for shard in request.redeem_shards:
                answer.shard_extents.add(shard=shard, kv_group=0, extents=extents)
        return answer

    def _extent(self, index: int, slot: int, *checksums: int) -> types_pb2.Extent:
        return types_pb2.Extent(
            tier=types_pb2.TIER_DRAM,
            segment_id=SEGMENT_ID,
            offset_bytes=slot * SLOT_BYTES,
            stride_bytes=SLOT_BYTES,
            first_block=index,
            block_count=1,
            checksums=checksums,
        )

    def _reserve(self, request: wire.ReserveRequest) -> wire.ReserveResponse:
        token, entries, answer = request.token or secrets.token_bytes(16), [], wire.ReserveResponse()
        for index, key in enumerate(request.block_hashes):
            new = key not in self.blocks
            outcome = types_pb2.RESERVE_OUTCOME_RESERVED if new else types_pb2.RESERVE_OUTCOME_PRESENT
            answer.outcomes.add(outcome=outcome, block_count=1)
            if new:
                slot = next(self._slots)
                answer.extents.append(self._extent(index, slot))
                entries.append((key, slot))
        if entries:
            answer.lease.CopyFrom(self._lease(token))
            self._reserved[token] = entries
        return answer

    def _commit(self, request: wire.CommitRequest) -> wire.CommitResponse:
        entries = self._reserved[request.token][request.committed_before_count :]
        for (key, slot), checksum in zip(entries, request.checksums, strict=False):
            self.blocks[key] = (slot, checksum)
        return wire.CommitResponse(visible_count=len(request.checksums))

    def _abort(self, request: wire.AbortRequest) -> wire.AbortResponse:
        return wire.AbortResponse(freed_slot_count=len(self._reserved.pop(request.token, ())))

    def _release(self, request: wire.ReleaseRequest) -> wire.ReleaseResponse:
        return wire.ReleaseResponse(released_count=len(request.releases))

    def _prefetch(self, request: wire.PrefetchRequest) -> wire.PrefetchResponse:
        answer = wire.PrefetchResponse()
        for run in request.runs:
            hit = self._hits(run.block_hashes)
            missed = len(run.block_hashes) - hit
            answer.runs.add(prefetch_id=bytes(16), ready_block_count=hit, miss_block_count=missed)
        return answer

    def _cancelprefetch(self, request: wire.CancelPrefetchRequest) -> wire.CancelPrefetchResponse:
        return wire.CancelPrefetchResponse(cancelled_count=len(request.prefetch_ids))

    def _reportusage(self, request: wire.ReportUsageRequest) -> wire.ReportUsageResponse:
        return wire.ReportUsageResponse(accepted_count=len(request.reports))

    def OpenSession(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        """Opens, then answers heartbeats and sends what the test tells."""
        outbox = _Outbox()
        hello = next(requests).hello
        self._streams.append(outbox)
        context.add_callback(outbox.end)
        threading.Thread(target=self._hear, args=(requests, outbox), daemon=True).start()
        opened = self._take("OpenSession", hello, context)
        yield wire.OpenSessionResponse(opened=opened)
        yield from outbox

    def _opensession(self, _hello: wire.SessionHello) -> wire.SessionOpened:
        interval = Duration()
        interval.FromNanoseconds(int(self.heartbeat_s * 1e9))
        return wire.SessionOpened(
            session_id=secrets.token_bytes(16),
            boot_id=self.boot_id,
            companion_path=str(self._companion.path),
            heartbeat_interval=interval,
            hash_count_max=16_384,
        )

    def _hear(self, requests: Iterator[Any], outbox: _Outbox) -> None:
        with suppress(grpc.RpcError):
            for request in requests:
                with self._arrived:
                    self.asked.append(("Heartbeat", request.heartbeat))
                    self._arrived.notify_all()
                if not self.mute_heartbeats.is_set():
                    answer = wire.HeartbeatAnswer(lost_tokens=self.lost_tokens)
                    answer.expires_after.CopyFrom(self._lease(b"").expires_after)
                    outbox.put(wire.OpenSessionResponse(heartbeat=answer))


def _unary(method: str) -> Callable[[FakeDaemon, Any, Any], Any]:
    return lambda self, request, context: self._take(method, request, context)


for _name in (
    "OpenNamespace",
    "Lookup",
    "Acquire",
    "Reserve",
    "Commit",
    "Abort",
    "Release",
    "Prefetch",
    "CancelPrefetch",
    "ReportUsage",
):
    setattr(FakeDaemon, _name, _unary(_name))


class _Outbox:
    """Messages to one session, until it ends."""

    def __init__(self) -> None:
        self._messages: list[Any] = []
        self._changed = threading.Condition()
        self._ended = False

    def put(self, message: Any) -> None:
        with self._changed:
            self._messages.append(message)
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._messages or self._ended)
                if self._ended:
                    return
                message = self._messages.pop(0)
            yield message


class _Companion:
    """Hands out the one segment."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError, ValueError):
            connection.recv(4096)
            connection.send(json.dumps({"ok": True}).encode())
            while packet := connection.recv(4096):
                for number in json.loads(packet)["segments"]:
                    self._send(connection, number)

    def _send(self, connection: socket.socket, number: int) -> None:
        if number == SEGMENT_ID:
            answer = {"segment": number, "length_bytes": SLOT_COUNT * SLOT_BYTES}
            socket.send_fds(connection, [json.dumps(answer).encode()], [self._fd])
        else:
            connection.send(json.dumps({"segment": number, "error": "SEGMENT_UNKNOWN"}).encode())

    def close(self) -> None:
        for opened in (self._listener, *self._connections):
            with suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
            opened.close()
        self.path.unlink(missing_ok=True)


def abort(context: Any, code: grpc.StatusCode, reason: str, domain: str = "prefixd") -> None:
    """Ends a call as the daemon does: one Status with one ErrorInfo."""
    packed = AnyMessage()
    packed.Pack(error_details_pb2.ErrorInfo(reason=reason, domain=domain, metadata={"field": "f"}))
    status = status_pb2.Status(code=code.value[0], message="refused", details=[packed])
    context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
    context.abort(code, "refused")


@contextmanager
def fake_daemon(path: Path) -> Iterator[FakeDaemon]:
    """A fake daemon, gone at the end."""
    daemon = FakeDaemon(path)
    try:
        yield daemon
    finally:
        if path.exists():
            daemon.die()
