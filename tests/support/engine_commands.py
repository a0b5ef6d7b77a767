"""An engine process that a test steers: commands as JSON lines in, answers as JSON lines out.

It uses the client library as an engine does. Where a test needs an engine that does what the library never
does (writes or commits after its lease), the command says so. The other half is engine_process.py.

python -m tests.support.engine_commands SOCKET INSTANCE_ID OPTIONS_JSON
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_client import Client, ClientOptions
from prefixd_client.client import Namespace
from prefixd_client.failures import failure_of
from prefixd_client.leases import ReadLease, WriteLease
from prefixd_client.namespace import KvGroup, NamespaceSpec
from prefixd_client.operations import Call
from prefixd_client.values import Committed, ReserveOutcome

from tests.support.engine_churn import Churn, block_data, read_run, run_hashes, true_count

POLL_S = 0.005
RETRY_PAUSE_S = 0.01
"""Where the daemon names no time to try again."""


class EngineCommands:
    """One method per command; what they return must be JSON."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._namespaces: dict[str, Namespace] = {}
        self._write: WriteLease | None = None
        self._read: ReadLease | None = None
        self._write_run: list[bytes] = []
        self._write_name = ""
        self._read_run: list[bytes] = []
        self._read_block_bytes = 0
        self._slots: list[memoryview] = []
        """Of the write lease; the views keep the memory mapped, whatever becomes of the lease."""
        self._commit: Call[Committed] | None = None
        self._churn: Churn | None = None

    def open(self, name: str, block_bytes: int = 65_536, shard_count: int = 1) -> None:
        """Opens a namespace under a name."""
        spec = NamespaceSpec(
            model_id=name,
            weights_fingerprint="revision:1",
            model_config_fingerprint="00",
            kv_dtype="float32",
            kv_layout="test",
            attention_backend="sdpa",
            block_tokens=16,
            kv_groups=(KvGroup(block_bytes=block_bytes, layer_count=2),),
            hash_algorithm="sha256",
            engine_name="test",
            layout_version="1",
            tensor_parallel_size=shard_count,
            shard_count=shard_count,
        )
        self._namespaces[name] = self._client.namespace(spec)

    # -- writing -----------------------------------------------------------------------------------

    def put(self, name: str, run: str, count: int, shard: int = 0, patience_s: float = 0.0) -> dict[str, Any]:
        """Stores a run; what was declined is tried again as the daemon says, for patience_s."""
        namespace, hashes = self._namespaces[name], run_hashes(run, count)
        began = time.monotonic()
        while True:
            lease = namespace.reserve(hashes, shard=shard)
            committed = Committed() if lease is None else self._store_all(namespace, lease, hashes, shard)
            declined = count if lease is None else lease.outcomes.count(ReserveOutcome.DECLINED)
            elapsed = time.monotonic() - began
            if declined + committed.dropped == 0 or elapsed > patience_s:
                reason = "AWAY" if lease is None else lease.decline_reason.name
                return {
                    "elapsed_s": elapsed,
                    "visible": committed.visible,
                    "dropped": committed.dropped,
                    "declined": declined,
                    "reason": reason if declined else "",
                }
            pause = lease.retry_after_s if lease is not None and lease.retry_after_s else RETRY_PAUSE_S
            threading.Event().wait(pause)

    def _store_all(
        self, namespace: Namespace, lease: WriteLease, hashes: Sequence[bytes], shard: int
    ) -> Committed:
        if not lease.reserved_indexes:
            return Committed()
        sources = [self._data(namespace, hashes[index], shard) for index in lease.reserved_indexes]
        return lease.store(sources)

    def turn_over(self, name: str, prefix: str, runs: int, count: int) -> dict[str, int]:
        """Stores many runs and reads each back at once: blocks stored, called good, and truly so."""
        stored = good = right = 0
        for index in range(runs):
            run = f"{prefix} {index}"
            stored += self.put(name, run, count)["visible"]
            seen = self.get(name, run, count)
            good, right = good + seen["good"], right + seen["true"]
        return {"stored": stored, "good": good, "true": right}

    def reserve(self, name: str, run: str, count: int, ttl_s: float | None = None) -> dict[str, Any]:
        """Takes a write lease and keeps it."""
        self._write_name, self._write_run = name, run_hashes(run, count)
        self._write = self._namespaces[name].reserve(self._write_run, ttl_s=ttl_s)
        assert self._write is not None, "the daemon is away"
        return {"reserved": len(self._write.reserved_indexes), "token": self._write.token.hex()}

    def write(self, count: int) -> int:
        """Copies the next blocks into their slots without committing; remembers the Commit to send."""
        assert self._write is not None
        namespace = self._namespaces[self._write_name]
        sources = [self._data(namespace, key) for key in self._write_run[:count]]
        self._commit = self._write.copy_in(sources, None)
        self._slots = self._slots_of(self._write, namespace.spec.kv_groups[0].block_bytes)
        return len(self._commit.request.checksums)

    def store(self, first: int, count: int) -> dict[str, int]:
        """Stores and commits the next blocks of the lease."""
        assert self._write is not None
        namespace = self._namespaces[self._write_name]
        done = self._write.store([self._data(namespace, key) for key in self._write_run[first:][:count]])
        return {"visible": done.visible, "waiting": done.waiting, "dropped": done.dropped}

    def write_late(self) -> int:
        """Scribbles over every slot of the lease, whatever has become of it: no library does that."""
        for slot in self._slots:
            slot[:] = b"\xee" * len(slot)
        return len(self._slots)

    def commit_late(self) -> str:
        """Sends the remembered Commit, whatever has become of the lease; the reason of its refusal."""
        assert self._commit is not None
        return self._refusal("Commit", self._commit.request)

    def abort(self) -> None:
        """Gives the write lease up, as the library does it."""
        assert self._write is not None
        self._write.abort()

    # -- reading -----------------------------------------------------------------------------------

    def get(self, name: str, run: str, count: int, shard: int = 0) -> dict[str, int]:
        """Acquires, loads and verifies a run."""
        return read_run(self._namespaces[name], run_hashes(run, count), shard)

    def acquire(self, name: str, run: str, count: int, shards: Sequence[int] = (0,)) -> dict[str, Any]:
        """Takes a read lease and keeps it."""
        self._read_run = run_hashes(run, count)
        self._read_block_bytes = self._namespaces[name].spec.kv_groups[0].block_bytes
        self._read = self._namespaces[name].acquire(self._read_run, shards=shards)
        if self._read is None:
            return {"hit": 0, "token": ""}
        return {"hit": self._read.hit_count, "token": self._read.token.hex()}

    def hand_over(self) -> None:
        """Leaves the read lease to those who redeem it."""
        assert self._read is not None
        self._read.hand_over()

    def redeem(self, name: str, run: str, count: int, token: str, shard: int) -> int:
        """Redeems one shard and keeps it; blocks that it holds, -1 when there is no such lease."""
        self._read_run = run_hashes(run, count)
        self._read_block_bytes = self._namespaces[name].spec.kv_groups[0].block_bytes
        self._read = self._namespaces[name].redeem(bytes.fromhex(token), shard)
        return -1 if self._read is None else self._read.hit_count

    def redeem_refused(self, token: str) -> str:
        """The reason why a token cannot be redeemed, as the daemon says it."""
        session = self._client.control.session
        assert session is not None
        request = wire.RedeemRequest(session_id=session.session_id, token=bytes.fromhex(token))
        return self._refusal("Redeem", request)

    def load(self, first: int, count: int, shard: int = 0) -> dict[str, int]:
        """Loads blocks of the read lease; how many the library calls good, and how many truly are."""
        lease = self._read
        assert lease is not None
        targets = [bytearray(self._read_block_bytes) for _ in range(count)]
        good = lease.load(targets, shard, start=first)
        wanted = self._read_run[first : first + good]
        return {"good": good, "true": true_count(wanted, targets[:good], shard)}

    def release(self) -> None:
        """Ends the read lease."""
        assert self._read is not None
        self._read.release()

    # -- how the client stands ---------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Client.status(), and whether the kept leases may still be used."""
        status = self._client.status()
        return {
            "state": status.state,
            "boot": status.boot_id.hex(),
            "reason": status.away_reason,
            "opened": status.breaker_opened_count,
            "read_expired": self._read is None or self._read.expired(),
            "write_expired": self._write is None or self._write.expired(),
        }

    def wait_state(self, state: str, not_boot: str = "", timeout_s: float = 15.0) -> dict[str, Any]:
        """Looks at status(), and calls nothing else, until it is `state`, in another boot than not_boot."""
        began = time.monotonic()
        while True:
            status, waited_s = self.status(), time.monotonic() - began
            if (status["state"] == state and status["boot"] != not_boot) or waited_s > timeout_s:
                return status | {"waited_s": waited_s}
            threading.Event().wait(POLL_S)

    def time_calls(self, name: str, run: str, count: int, repeats: int) -> list[dict[str, Any]]:
        """Alternates acquire and lookup, one after the other: seconds and hits of each."""
        namespace, hashes = self._namespaces[name], run_hashes(run, count)
        timed = []
        for index in range(repeats):
            began = time.perf_counter()
            if index % 2:
                hits = namespace.lookup(hashes).hit_count
            else:
                lease = namespace.acquire(hashes)
                hits = 0 if lease is None else lease.hit_count
            timed.append({"s": time.perf_counter() - began, "hits": hits})
        return timed

    def time_through(self, name: str, run: str, count: int, misses: int) -> list[float]:
        """Looks a kept run up until so many lookups in a row have missed: seconds of each of these."""
        namespace, hashes = self._namespaces[name], run_hashes(run, count)
        timed: list[float] = []
        while len(timed) < misses:
            began = time.perf_counter()
            hits = namespace.lookup(hashes).hit_count
            if hits:
                timed.clear()
            else:
                timed.append(time.perf_counter() - began)
        return timed

    def time_together(self, name: str, run: str, count: int, threads: int) -> list[dict[str, Any]]:
        """One acquire per thread at once, and a reserve, whose own deadline is ten times as long."""
        namespace, hashes = self._namespaces[name], run_hashes(run, count)
        fresh = run_hashes("never stored", 4)
        ready = threading.Barrier(threads + 1)
        timed: list[dict[str, Any]] = []

        def call(ask: Callable[[], object]) -> None:
            ready.wait()
            began = time.perf_counter()
            answer = ask()
            timed.append({"s": time.perf_counter() - began, "missed": answer is None})

        asks: list[Callable[[], object]] = [lambda: namespace.reserve(fresh)]
        asks += [lambda: namespace.acquire(hashes)] * threads
        workers = [threading.Thread(target=call, args=(ask,)) for ask in asks]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return timed

    # -- a busy engine -----------------------------------------------------------------------------

    def churn_start(self, name: str) -> None:
        """Puts and gets short runs in a thread until churn_stop."""
        self._churn = Churn(self._client, self._namespaces[name])

    def churn_counts(self) -> dict[str, int]:
        """What the thread has seen so far."""
        assert self._churn is not None
        return self._churn.counts()

    def churn_stop(self) -> dict[str, int]:
        """Ends the thread; what it has seen."""
        assert self._churn is not None
        return self._churn.stop()

    # -- helpers -----------------------------------------------------------------------------------

    def _data(self, namespace: Namespace, key: bytes, shard: int = 0) -> bytes:
        return block_data(key, shard, namespace.spec.kv_groups[0].block_bytes)

    @staticmethod
    def _slots_of(lease: WriteLease, block_bytes: int) -> list[memoryview]:
        segments = lease.session.segments
        assert segments is not None
        return [
            segments.view(extent.segment_id, extent.offset_bytes + index * extent.stride_bytes, block_bytes)
            for extent in lease._extents
            for index in range(extent.block_count)
        ]

    def _refusal(self, method: str, request: Any) -> str:
        session = self._client.control.session
        assert session is not None
        try:
            getattr(session.stub, method)(request, timeout=5.0)
        except grpc.RpcError as error:
            return failure_of(error, method).reason
        return ""


def answer_commands(client: Client, commands: object) -> None:
    """Carries out commands from standard input; an exception is an answer too."""
    print(json.dumps({"answer": client.instance_id}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"answer": getattr(commands, command.pop("do"))(**command)}
        except Exception as error:  # the outermost seam: the test process shows what it was
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def main() -> None:
    """See the module."""
    socket, instance_id, options = sys.argv[1:]
    with Client(socket, instance_id or None, "test", ClientOptions(**json.loads(options))) as client:
        answer_commands(client, EngineCommands(client))


if __name__ == "__main__":
    main()
