"""One rank's way to the daemon: what of a run is kept, into the host pool, and out of it.

Nothing here knows SGLang. Every wait is bounded by the client's deadlines and the operator's settings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from prefixd_client.client import Namespace
from prefixd_client.layout import Pieces
from prefixd_client.leases import WriteLease
from prefixd_client.values import ReserveOutcome

KEPT = (ReserveOutcome.PRESENT, ReserveOutcome.PENDING)
"""Another engine has the block here, or is about to."""


class RankBlocks:
    """The blocks of one shard. Any thread.

    Args:
        namespace: where they are kept.
        shard: whose bytes this rank has.
        wait_max_s: longest wait for blocks of slower tiers.
        save_patience_s: how long a save retries while the daemon makes room.
    """

    def __init__(
        self, namespace: Namespace, shard: int, *, wait_max_s: float, save_patience_s: float
    ) -> None:
        self._namespace = namespace
        self._shard = shard
        self._wait_max_s = wait_max_s
        self._save_patience_s = save_patience_s

    def kept_count(self, prefix: Sequence[bytes], run: Sequence[bytes]) -> int:
        """Leading blocks of the run that are kept for every rank, in whatever tier.

        Args:
            prefix: the blocks before the run, from the root.
            run: the blocks asked for.
        """
        return max(0, self._namespace.lookup([*prefix, *run]).hit_count - len(prefix))

    def load(self, prefix: Sequence[bytes], run: Sequence[bytes], targets: Sequence[Pieces]) -> int:
        """Copies blocks into the host pool and verifies them there; leading blocks that came out right.

        Each call is a use of prefix and run for the daemon's policy.

        Args:
            prefix: the blocks before the run, from the root.
            run: the blocks to load.
            targets: memory of each.
        """
        lease = self._namespace.acquire(
            [*prefix, *run], skip_blocks=len(prefix), shards=(self._shard,), max_wait_s=self._wait_max_s
        )
        if lease is None:
            return 0
        try:
            return lease.load(targets[: lease.block_count], self._shard)
        finally:
            lease.release(all_shards=True)

    def store(self, parent: bytes, run: Sequence[bytes], sources: Sequence[Pieces]) -> int:
        """Copies blocks out of the host pool; leading blocks that are kept.

        Args:
            parent: the block before the run; empty at the root.
            run: consecutive blocks.
            sources: memory of each, unchanged until this returns.
        """
        kept = 0
        until = time.monotonic() + self._save_patience_s
        while kept < len(run):
            lease = self._namespace.reserve(
                run[kept:], parent_hash=run[kept - 1] if kept else parent, shard=self._shard
            )
            if lease is None:
                break
            with lease:
                kept += _fill(lease, sources[kept:])
            pause_s = lease.retry_after_s
            if kept == len(run) or pause_s is None or time.monotonic() + pause_s > until:
                break
            time.sleep(pause_s)
        return kept


def _fill(lease: WriteLease, sources: Sequence[Pieces]) -> int:
    """Copies the reserved blocks of a lease; leading blocks of its run that are kept."""
    reserved = lease.reserved_indexes
    dropped = lease.store([sources[index] for index in reserved], reserved).dropped if reserved else 0
    written = set(reserved[: len(reserved) - dropped])
    for index, outcome in enumerate(lease.outcomes):
        if index not in written and outcome not in KEPT:
            return index
    return len(lease.outcomes)
