"""The scheduler's calls to the daemon: made on background threads, each bounded by the client's deadlines."""

from __future__ import annotations

from collections.abc import Sequence

from prefixd_client.leases import ReadLease
from prefixd_client.namespace import NamespaceSpec
from prefixd_client.values import UsageReport

from .namespaces import Namespaces


class DaemonCache:
    """See asking.Cache, which the scheduler's side knows it as."""

    def __init__(self, namespaces: Namespaces) -> None:
        self._namespaces = namespaces

    def acquire(
        self, spec: NamespaceSpec, hashes: Sequence[bytes], skip_blocks: int, request_id: str, wait_s: float
    ) -> ReadLease | None:
        """See asking.Cache. Workers redeem the lease, so no extents are asked for."""
        return self._namespaces.open(spec).acquire(
            hashes, skip_blocks=skip_blocks, shards=(), request_id=request_id, max_wait_s=wait_s
        )

    def stored_count(self, spec: NamespaceSpec, hashes: Sequence[bytes]) -> int:
        """See asking.Cache."""
        return self._namespaces.open(spec).lookup(hashes).hit_count

    def report_usage(self, spec: NamespaceSpec, report: UsageReport) -> None:
        """See asking.Cache."""
        self._namespaces.open(spec).report_usage(report)
