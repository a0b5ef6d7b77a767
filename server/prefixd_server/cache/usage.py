"""What engines report about their requests, booked for the policy and for people."""

from __future__ import annotations

from prefixd_server.base.errors import PrefixdError
from prefixd_server.base.runs import leading
from prefixd_server.base.types import Hashes, RequestPhase, Rows, UsageReport
from prefixd_server.cache.migration import Migration
from prefixd_server.cache.prefetching import Prefetching
from prefixd_server.cache.sessions import Session, Sessions
from prefixd_server.cache.state import State
from prefixd_server.cache.workload import Workload
from prefixd_server.catalog.events import AttentionObserved
from prefixd_server.catalog.namespaces import Namespace


class Usage:
    """See the module."""

    def __init__(
        self,
        state: State,
        sessions: Sessions,
        workload: Workload,
        migration: Migration,
        prefetching: Prefetching,
    ) -> None:
        self._state = state
        self._sessions = sessions
        self._workload = workload
        self._migration = migration
        self._prefetching = prefetching

    def report(
        self, tenant: str, session_id: bytes, reports: list[UsageReport], quiet_s: float | None = None
    ) -> int:
        """Takes the reports whose namespace is known; how many.

        Args:
            quiet_s: so long from now the engine wants no background copies; 0 ends such a time.
        """
        session = self._sessions.get(tenant, session_id)
        if quiet_s is not None:
            self._migration.keep_quiet(session.instance_id, quiet_s)
        return sum(self._take(session, report) for report in reports)

    def _take(self, session: Session, report: UsageReport) -> bool:
        try:
            namespace = self._state.catalog.namespaces.get(session.tenant, report.namespace)
        except PrefixdError:
            return False
        name = (session.tenant, session.instance_id, report.request_id)
        if report.phase is RequestPhase.QUEUED:
            if report.hashes is not None:
                self._workload.queued(name, namespace, report.hashes)
            self._prefetching.queued(
                session, namespace, report.request_id, report.hashes, report.queue_position
            )
            return True
        self._prefetching.began(session, report.request_id)
        run = report.hashes if report.hashes is not None else self._workload.run_of(name)
        if run is not None and not self._workload.was_used(name):
            self._workload.used(name, namespace, run, self._parts(namespace, run))
        if report.hashes is not None and report.attention_mass is not None:
            for space in namespace.spaces.values():
                path = self._visible_path(space, report.hashes)
                if len(path):
                    self._state.apply(AttentionObserved(path, report.attention_mass[: len(path)]))
        if report.phase is RequestPhase.FINISHED:
            _measure(session, report)
            if run is not None and report.prefill_time_s:
                computed = report.prefill_token_count
                first = max(0, len(run) * namespace.spec.block_tokens - computed)
                self._state.costs.measured(namespace, first, computed, report.prefill_time_s)
            if report.decode_latency_s:
                self._migration.decoded(report.decode_latency_s)
            self._workload.ended(name, report.output_token_count, report.stop_reason)
        return True

    def _parts(self, namespace: Namespace, run: Hashes) -> dict[tuple[int, int], Rows]:
        """What is kept of the run, for every shard and KV group."""
        catalog = self._state.catalog
        parts = {}
        for part in namespace.spec.parts:
            parts[part] = catalog.find_prefix(catalog.namespaces.space(namespace, *part), run)
        return parts

    def _visible_path(self, space: int, run: Hashes) -> Rows:
        rows = self._state.catalog.find_prefix(space, run)
        return rows[: leading(self._state.catalog.visible(rows))]


def _measure(session: Session, report: UsageReport) -> None:
    if report.decode_latency_s is not None:
        session.decode_latency_s = report.decode_latency_s
    if report.prefill_time_s and report.prefill_token_count:
        session.prefill_tokens_per_s = report.prefill_token_count / report.prefill_time_s
