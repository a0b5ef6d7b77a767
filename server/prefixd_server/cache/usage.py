"""What engines report about their requests, booked for the policy and for people."""

from __future__ import annotations

from prefixd_server.base.errors import PrefixdError
from prefixd_server.base.runs import leading
from prefixd_server.base.types import RequestPhase, Rows, UsageReport
from prefixd_server.cache.sessions import Session, Sessions
from prefixd_server.cache.state import State
from prefixd_server.catalog.events import AttentionObserved, RunUsed


class Usage:
    """See the module."""

    def __init__(self, state: State, sessions: Sessions) -> None:
        self._state = state
        self._sessions = sessions

    def report(self, tenant: str, session_id: bytes, reports: list[UsageReport]) -> int:
        """Takes the reports whose namespace is known; how many."""
        session = self._sessions.get(tenant, session_id)
        return sum(self._take(session, report) for report in reports)

    def _take(self, session: Session, report: UsageReport) -> bool:
        catalog = self._state.catalog
        try:
            namespace = catalog.namespaces.get(session.tenant, report.namespace)
        except PrefixdError:
            return False
        if report.phase is RequestPhase.FINISHED:
            _measure(session, report)
        if report.hashes is None:
            return True
        first = report.phase is not RequestPhase.QUEUED and self._state.first_use(
            session.tenant, session.instance_id, report.request_id
        )
        for space in namespace.spaces.values():
            path = self._visible_path(space, report)
            if len(path) and first:
                self._state.apply(RunUsed(path))
            if len(path) and report.attention_mass is not None:
                self._state.apply(AttentionObserved(path, report.attention_mass[: len(path)]))
        return True

    def _visible_path(self, space: int, report: UsageReport) -> Rows:
        catalog = self._state.catalog
        assert report.hashes is not None, "asked only for reports that carry a run"
        rows = catalog.find(space, report.hashes)
        return rows[: leading(catalog.visible(rows))]


def _measure(session: Session, report: UsageReport) -> None:
    if report.decode_latency_s is not None:
        session.decode_latency_s = report.decode_latency_s
    if report.prefill_time_s and report.prefill_token_count:
        session.prefill_tokens_per_s = report.prefill_token_count / report.prefill_time_s
