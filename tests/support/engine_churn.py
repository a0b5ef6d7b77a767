"""Runs and bytes that every process of a test knows by name, and an engine thread that is always at work."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Sequence

from prefixd_client import Client
from prefixd_client.client import Namespace

CHURN_BLOCKS = 4
CHURN_PAUSE_S = 0.005
"""Between rounds: leaves the processors to the processes under test."""


def run_hashes(run: str, count: int) -> list[bytes]:
    """The chained hashes of a run's first blocks."""
    hashes, above = [], b""
    for index in range(count):
        above = hashlib.sha256(above + f"{run}/{index}".encode()).digest()
        hashes.append(above)
    return hashes


def block_data(key: bytes, shard: int, block_bytes: int) -> bytes:
    """A block's true bytes: any slice of them differs from any other."""
    return hashlib.shake_128(key + bytes([shard])).digest(block_bytes)


def true_count(hashes: Sequence[bytes], blocks: Sequence[bytearray], shard: int) -> int:
    """How many of the blocks hold their true bytes."""
    return sum(block_data(key, shard, len(block)) == block for key, block in zip(hashes, blocks, strict=True))


def read_run(namespace: Namespace, hashes: list[bytes], shard: int = 0) -> dict[str, int]:
    """Acquires and loads a run: blocks that hit, that the library calls good, and that truly are."""
    lease = namespace.acquire(hashes, shards=(shard,))
    if lease is None:
        return {"hit": 0, "good": 0, "true": 0}
    size = namespace.spec.kv_groups[0].block_bytes
    with lease:
        targets = [bytearray(size) for _ in range(lease.hit_count)]
        good = lease.load(targets, shard)
        return {
            "hit": lease.hit_count,
            "good": good,
            "true": true_count(hashes[:good], targets[:good], shard),
        }


class Churn:
    """Stores a short run and reads it back, over and over, and counts what should never be."""

    def __init__(self, client: Client, namespace: Namespace) -> None:
        self._client = client
        self._namespace = namespace
        self._name = uuid.uuid4().hex
        self._opened_before = client.status().breaker_opened_count
        self._rounds = self._unstored = self._missed = self._wrong = self._raised = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def counts(self) -> dict[str, int]:
        """Rounds done; blocks not stored, missed and wrong; exceptions; times the breaker opened."""
        return {
            "rounds": self._rounds,
            "unstored": self._unstored,
            "missed": self._missed,
            "wrong": self._wrong,
            "raised": self._raised,
            "opened": self._client.status().breaker_opened_count - self._opened_before,
        }

    def stop(self) -> dict[str, int]:
        """Ends after the round under way."""
        self._stopping.set()
        self._thread.join()
        return self.counts()

    def _run(self) -> None:
        while not self._stopping.wait(CHURN_PAUSE_S):
            try:
                self._round()
            except Exception:  # the outermost seam of the thread: any error at all is what is counted
                self._raised += 1
            self._rounds += 1

    def _round(self) -> None:
        hashes = run_hashes(f"{self._name} {self._rounds}", CHURN_BLOCKS)
        size = self._namespace.spec.kv_groups[0].block_bytes
        lease = self._namespace.reserve(hashes)
        if lease is None or len(lease.reserved_indexes) < CHURN_BLOCKS:
            self._unstored += 1
            return
        stored = lease.store([block_data(key, 0, size) for key in hashes])
        self._unstored += CHURN_BLOCKS - stored.visible
        seen = read_run(self._namespace, hashes)
        self._missed += CHURN_BLOCKS - seen["good"]
        self._wrong += seen["good"] - seen["true"]
