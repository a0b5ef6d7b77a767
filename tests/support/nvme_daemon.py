"""A daemon with a small NVMe tier that a test kills and opens again, and a load whose every byte is known.

A block's bytes follow from its hash and its namespace's epoch: a block that was
dropped with its namespace and comes back is as wrong as a torn one.
"""

from __future__ import annotations

import functools
import hashlib
import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prefixd.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    cache_service_pb2,
    cache_service_pb2_grpc,
    types_pb2,
)
from prefixd_server.rpc.namespace_spec import spec_to_wire

from tests.support.daemon import DaemonProcess
from tests.support.specs import spec
from tests.support.wire_engine import put_messages

BLOCK_BYTES = 65_536
CALL_TIMEOUT_S = 30.0
STATE_TIMEOUT_S = 60.0
RUN_BLOCKS_MAX = 8
REMEMBERED_RUNS = 60
MODELS = ("one", "two")
SETTINGS = {"dram.segment": "2MiB", "nvme.size": "32MiB", "nvme.segment": "2MiB", "nvme.retry_pause_s": "0.1"}
"""Some 220 slots: a second of load turns them over."""


@functools.cache
def channel_to(path: Path) -> grpc.Channel:
    """One channel for all daemons that ever listen there.

    Where thousands are opened and closed beside peers that are killed, gRPC's own threads crash now and then.
    """
    options = {
        "grpc.max_receive_message_length": -1,
        "grpc.use_local_subchannel_pool": 1,
        "grpc.initial_reconnect_backoff_ms": 20,
        "grpc.min_reconnect_backoff_ms": 20,
        "grpc.max_reconnect_backoff_ms": 100,
    }
    return grpc.insecure_channel(f"unix:{path}", options=list(options.items()))


def block_bytes_of(key: bytes, epoch: int) -> bytes:
    """The only right bytes of a block."""
    return hashlib.shake_128(key + epoch.to_bytes(8, "little")).digest(BLOCK_BYTES)


class NvmeCalls:
    """Calls for tests, to any daemon with an NVMe tier, one after the other on the same socket."""

    def __init__(self, socket: Path) -> None:
        self._channel = channel_to(socket)
        cache: Any = cache_service_pb2_grpc.CacheServiceStub
        admin: Any = admin_service_pb2_grpc.AdminServiceStub
        health: Any = health_pb2_grpc.HealthStub
        self._health: Any = health(self._channel)
        self._cache: Any = cache(self._channel)
        self._admin: Any = admin(self._channel)

    def close(self) -> None:
        """Hangs up for good: nobody listens there any more."""
        self._channel.close()
        channel_to.cache_clear()

    def is_serving(self) -> bool:
        """What health says."""
        request = health_pb2.HealthCheckRequest()
        try:
            answer = self._health.Check(request, wait_for_ready=True, timeout=CALL_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def open_namespace(self, model: str) -> types_pb2.NamespaceRef:
        """A namespace of this model."""
        request = cache_service_pb2.OpenNamespaceRequest(spec=spec_to_wire(spec(model)))
        ref: types_pb2.NamespaceRef = self._cache.OpenNamespace(request, timeout=CALL_TIMEOUT_S).namespace
        return ref

    def put(self, ref: types_pb2.NamespaceRef, hashes: list[bytes]) -> None:
        """Stores a run with its right bytes, as far as it is admitted."""
        self.put_blocks(ref, hashes, [block_bytes_of(key, ref.epoch) for key in hashes])

    def put_blocks(self, ref: types_pb2.NamespaceRef, hashes: list[bytes], blocks: list[bytes]) -> None:
        """Stores a run with these bytes, as far as it is admitted."""
        self._cache.Put(iter(put_messages(ref, hashes, blocks)), timeout=CALL_TIMEOUT_S)

    def get(self, ref: types_pb2.NamespaceRef, hashes: list[bytes]) -> list[bytes]:
        """What is served of a run."""
        blocks: list[bytearray] = []
        request = cache_service_pb2.GetRequest(namespace=ref, block_hashes=hashes)
        for message in self._cache.Get(request, timeout=CALL_TIMEOUT_S):
            if message.WhichOneof("message") == "block":
                blocks.append(bytearray(message.block.data))
            elif message.WhichOneof("message") == "data":
                blocks[-1] += message.data
        return [bytes(block) for block in blocks]

    def is_stored(self, ref: types_pb2.NamespaceRef, key: bytes) -> bool:
        """Whether NVMe has a copy of the block, that every later daemon will find."""
        request = admin_service_pb2.DescribeBlockRequest(namespace=ref, block_hash=key)
        copies = self._admin.DescribeBlock(request, timeout=CALL_TIMEOUT_S).copies
        return any(copy.tier == types_pb2.TIER_NVME and copy.state == "RESIDENT" for copy in copies)

    def evict(self, ref: types_pb2.NamespaceRef, hashes: list[bytes] | None = None) -> None:
        """Evicts a run, or all of the namespace."""
        request = admin_service_pb2.EvictRequest(namespace=ref, block_hashes=hashes or [])
        self._admin.Evict(request, timeout=CALL_TIMEOUT_S)

    def drop(self, ref: types_pb2.NamespaceRef) -> int:
        """Drops a namespace; the next epoch."""
        request = admin_service_pb2.DropNamespaceRequest(namespace=ref)
        return int(self._admin.DropNamespace(request, timeout=CALL_TIMEOUT_S).new_epoch)

    def problems(self) -> list[str]:
        """What its own check finds wrong."""
        return list(self._admin.Check(admin_service_pb2.CheckRequest(), timeout=CALL_TIMEOUT_S).problems)

    def tier(self, tier: types_pb2.Tier) -> admin_service_pb2.TierStats:
        """Statistics of one tier."""
        answer = self._admin.GetStats(admin_service_pb2.GetStatsRequest(), timeout=CALL_TIMEOUT_S)
        found: list[admin_service_pb2.TierStats] = [stats for stats in answer.tiers if stats.tier == tier]
        return found[0]

    @property
    def nvme(self) -> admin_service_pb2.TierStats:
        """Statistics of the NVMe tier."""
        return self.tier(types_pb2.TIER_NVME)

    def wait_until_recovered(self) -> None:
        """Returns when the NVMe tier is ready."""
        wait_for(lambda: self.nvme.state == "ready", "the NVMe tier")


class NvmeDaemon(NvmeCalls, DaemonProcess):
    """`prefixd serve` over a data directory, with calls for tests.

    Args:
        directory: short; holds the socket, the log and the data.
        failpoints: see base/failpoints.py.
        environment: further variables.
        flags: further arguments of serve.
    """

    def __init__(
        self,
        directory: Path,
        failpoints: str = "",
        environment: Mapping[str, str] | None = None,
        *flags: str,
    ) -> None:
        settings = [word for name, value in SETTINGS.items() for word in ("--set", f"{name}={value}")]
        arguments = ("--data-dir", str(directory / "data"), "--dram-size", "4MiB", *settings, *flags)
        socket = directory / "p.sock"
        DaemonProcess.__init__(self, socket, *arguments, failpoints=failpoints, environment=environment)
        NvmeCalls.__init__(self, socket)


@dataclass
class Load:
    """Puts, gets, evictions and drops in a random order of their own; remembers what may be asked for.

    Holds across daemons: begin() after each start.
    """

    rng: random.Random
    drop_share: float = 0.003
    """Part of the steps that drop a namespace."""
    runs: list[tuple[str, list[bytes]]] = field(default_factory=list)
    kept: list[tuple[str, list[bytes]]] = field(default_factory=list)
    """Runs that were on NVMe when that was looked at: these are to be found later, however slow the disk."""
    epochs: dict[str, int] = field(default_factory=dict)
    """Least epoch that each model may have: those before it were dropped, and the daemon said so."""
    refs: dict[str, types_pb2.NamespaceRef] = field(default_factory=dict)
    served: int = 0
    """Blocks served so far, every one right."""

    def begin(self, daemon: NvmeCalls) -> None:
        """Opens the namespaces; a dropped epoch must not be back."""
        for model in MODELS:
            self._open(daemon, model)

    def run(self, daemon: NvmeDaemon, steps: int) -> None:
        """Some steps, or as many as the daemon lives for."""
        try:
            for _ in range(steps):
                self._step(daemon)
        except grpc.RpcError as error:
            daemon.process.wait(STATE_TIMEOUT_S)
            if error.code() not in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}:
                raise

    def verify(self, daemon: NvmeCalls, share: float = 1.0) -> int:
        """Reads a share of all runs; blocks served, every one right."""
        before = self.served
        for model, hashes in [*self.runs, *self.kept]:
            if self.rng.random() < share:
                self._read(daemon, model, hashes)
        return self.served - before

    def keep_stored(self, daemon: NvmeCalls) -> None:
        """Looks which runs begin on NVMe now."""
        known = [*self.kept, *(run for run in self.runs if run not in self.kept)]
        self.kept = [(model, run) for model, run in known if daemon.is_stored(self.refs[model], run[0])]

    def _step(self, daemon: NvmeCalls) -> None:
        kind = self.rng.random()
        model = self.rng.choice(MODELS)
        if kind < 0.80 or not self.runs:
            hashes = self._new_run()
            self.runs = [*self.runs[-REMEMBERED_RUNS + 1 :], (model, hashes)]
            daemon.put(self.refs[model], hashes)
        elif kind < 0.95:
            self._read(daemon, *self.rng.choice(self.runs))
        elif kind < 1 - self.drop_share:
            model, hashes = self.rng.choice(self.runs)
            daemon.evict(self.refs[model], hashes[: self.rng.randint(1, len(hashes))])
        else:
            self.epochs[model] = max(self.epochs.get(model, 0), daemon.drop(self.refs[model]))
            self._open(daemon, model)

    def _open(self, daemon: NvmeCalls, model: str) -> None:
        ref = daemon.open_namespace(model)
        assert ref.epoch >= self.epochs.get(model, 0), "a dropped namespace is back"
        self.refs[model] = ref

    def _read(self, daemon: NvmeCalls, model: str, hashes: list[bytes]) -> None:
        ref = self.refs[model]
        blocks = daemon.get(ref, hashes)
        for key, block in zip(hashes, blocks, strict=False):
            assert block == block_bytes_of(key, ref.epoch), f"wrong bytes for {key.hex()} of {model}"
        self.served += len(blocks)

    def _new_run(self) -> list[bytes]:
        """A run of its own, or one that begins like another."""
        shared: list[bytes] = []
        if self.runs and self.rng.random() < 0.3:
            base = self.rng.choice(self.runs)[1]
            shared = base[: self.rng.randint(1, len(base))]
        fresh = [self.rng.randbytes(32) for _ in range(self.rng.randint(1, RUN_BLOCKS_MAX))]
        return [*shared, *fresh][: 2 * RUN_BLOCKS_MAX]


def assert_balanced(daemon: NvmeCalls) -> None:
    """Its own check is clean, and slots of every kind add up."""
    assert daemon.problems() == []
    for tier in (daemon.tier(types_pb2.TIER_DRAM), daemon.nvme):
        kinds = (tier.reserved_slot_count, tier.resident_slot_count, tier.quarantined_slot_count)
        assert tier.free_slot_count + sum(kinds) == tier.slot_count


def assert_nothing_leaks(daemon: NvmeCalls, refs: dict[str, types_pb2.NamespaceRef]) -> None:
    """Everything evicted, every slot of both tiers is free again."""
    for ref in refs.values():
        daemon.evict(ref)
    for tier in (types_pb2.TIER_DRAM, types_pb2.TIER_NVME):

        def all_free(tier: types_pb2.Tier = tier) -> bool:
            stats = daemon.tier(tier)
            return stats.free_slot_count == stats.slot_count

        wait_for(all_free, f"every free slot of {types_pb2.Tier.Name(tier)}")
    assert_balanced(daemon)


def wait_for(holds: Any, what: str) -> None:
    """Waits for a state of another process."""
    deadline = time.monotonic() + STATE_TIMEOUT_S
    for _ in _polls():
        if holds():
            return
        assert time.monotonic() < deadline, f"{what} did not come"


def _polls() -> Iterator[None]:
    while True:
        yield
        time.sleep(0.005)  # polls another process: there is nothing to wait on
