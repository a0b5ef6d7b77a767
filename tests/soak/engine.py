"""An engine of the soak: reads and stores runs that others read and store too, until its standard input ends.

python -m tests.soak.engine SOCKET SEED BLOCK_BYTES

It may be killed at any moment. What it has seen goes out as one JSON object a second: rounds, blocks stored
and read, blocks with wrong bytes, exceptions out of the library. Nothing that the daemon, its disk or other
engines go through may ever show in the last two.
"""

from __future__ import annotations

import json
import logging
import random
import select
import sys
import time
import traceback

from prefixd_client import Client, ClientOptions
from prefixd_client.client import Namespace
from prefixd_client.namespace import KvGroup, NamespaceSpec

from tests.support.engine_churn import block_data, read_run, run_hashes
from tests.support.engine_process import PATIENT

COMMON_RUN_COUNT = 40
"""Runs that all engines of a tenant and size share; a part of the rounds uses a run of its own."""
OWN_SHARE = 0.2
RUN_BLOCKS_MAX = 12
PAUSE_S = 0.02
REPORT_INTERVAL_S = 1.0


class SoakEngine:
    """Rounds on one namespace, and what they have seen."""

    def __init__(self, namespace: Namespace, rng: random.Random, block_bytes: int) -> None:
        self._namespace = namespace
        self._rng = rng
        self._block_bytes = block_bytes
        self.seen = {"rounds": 0, "stored": 0, "read": 0, "wrong": 0, "raised": 0}
        self.error = ""

    def round(self) -> None:
        """One request: what is kept of its run is read, the rest is stored or, sometimes, given up."""
        self.seen["rounds"] += 1
        try:
            self._request()
        except Exception:  # the outermost seam: any error at all is what the soak counts
            self.seen["raised"] += 1
            self.error = self.error or traceback.format_exc()

    def _request(self) -> None:
        rng = self._rng
        own = rng.random() < OWN_SHARE
        name = f"own {rng.random()}" if own else f"common {rng.randrange(COMMON_RUN_COUNT)}"
        hashes = run_hashes(name, rng.randint(1, RUN_BLOCKS_MAX))
        kind = rng.random()
        if kind < 0.1:
            self._namespace.prefetch(hashes, queue_position=rng.randrange(8))
        elif kind < 0.15:
            # Taken and let go without a word: the library gives it back.
            self._namespace.acquire(hashes)
            return
        seen = read_run(self._namespace, hashes)
        self.seen["read"] += seen["good"]
        self.seen["wrong"] += seen["good"] - seen["true"]
        if seen["good"] < len(hashes):
            self._store(hashes, give_up=rng.random() < 0.05)

    def _store(self, hashes: list[bytes], *, give_up: bool) -> None:
        lease = self._namespace.reserve(hashes)
        if lease is None or not lease.reserved_indexes:
            return
        if give_up:
            lease.abort()
            return
        sources = [block_data(hashes[index], 0, self._block_bytes) for index in lease.reserved_indexes]
        self.seen["stored"] += lease.store(sources).visible


def main() -> None:
    """See the module."""
    socket, seed, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    spec = NamespaceSpec(
        model_id=f"soak {size}",
        weights_fingerprint="revision:1",
        model_config_fingerprint="00",
        kv_dtype="float32",
        kv_layout="test",
        attention_backend="sdpa",
        block_tokens=16,
        kv_groups=(KvGroup(block_bytes=size, layer_count=2),),
        hash_algorithm="sha256",
        engine_name="test",
        layout_version="1",
    )
    logging.basicConfig(level=logging.ERROR)  # that a daemon is away is no news here
    with Client(socket, engine_name="soak", options=ClientOptions(**PATIENT)) as client:
        engine = SoakEngine(client.namespace(spec), random.Random(seed), size)
        told_at = 0.0
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            engine.round()
            if time.monotonic() - told_at > REPORT_INTERVAL_S:
                told_at = time.monotonic()
                tell(engine)
    tell(engine)


def tell(engine: SoakEngine) -> None:
    """Prints what was seen so far."""
    print(json.dumps({**engine.seen, "error": engine.error}), flush=True)


if __name__ == "__main__":
    main()
