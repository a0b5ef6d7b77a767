"""Sessions: one a process of an engine, from hello to the proof of its death.

A session is open while its stream and, once attached, its companion connection
are up. It ends when either is lost; what it held is then given up by the
callbacks. After its end the record of a session that had segments stays until its
process is known dead, or has another session that proves as much. Not here:
sockets (rpc floor) and what a lease is (catalog floor).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from prefixd_server.base.errors import LimitReached, NotFound, StateConflict
from prefixd_server.cache.quotas import Quotas

SESSION_ID_BYTES = 16
OUTBOX_NOTICE_COUNT_MAX = 256


@dataclass(frozen=True, slots=True)
class SegmentsRetiredNotice:
    """The client should unmap these segments."""

    segment_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrainingNotice:
    """The daemon will be gone in so many seconds."""

    gone_after_s: float


@dataclass(frozen=True, slots=True)
class FarewellNotice:
    """The daemon ends the session: another one serves, and nothing is held here any more."""


Notice: TypeAlias = SegmentsRetiredNotice | DrainingNotice | FarewellNotice


@dataclass(slots=True, eq=False)
class Session:
    """One process of an engine. `pid` comes from the companion's peer credentials; 0 before.

    readable_devices are UUIDs of the GPUs whose memory it, or who redeems its leases, can open.

    decode_latency_s (seconds per output token) and prefill_tokens_per_s are the
    last that it reported.
    """

    session_id: bytes
    tenant: str
    instance_id: str
    engine_name: str
    client_version: str
    declared_pid: int
    local: bool
    readable_devices: frozenset[str] = frozenset()
    pid: int = 0
    attached: bool = False
    ended: bool = False
    dead: bool = False
    decode_latency_s: float | None = None
    prefill_tokens_per_s: float | None = None
    outbox: asyncio.Queue[Notice] = field(default_factory=lambda: asyncio.Queue(OUTBOX_NOTICE_COUNT_MAX))

    def notify(self, notice: Notice) -> None:
        """Queues a notice; a client that does not listen loses the oldest."""
        if self.outbox.full():
            self.outbox.get_nowait()
        self.outbox.put_nowait(notice)


class Heirs(Protocol):
    """Who keeps a session's leases alive, and settles what it leaves behind."""

    def renew(self, session: Session, tokens: Iterable[bytes]) -> tuple[list[bytes], float]:
        """Renews leases. (tokens that are lost, new remaining life in seconds)."""
        ...

    def session_ended(self, session: Session, instance_is_open: bool) -> None:
        """The session is over; its instance has other sessions, or has none."""
        ...

    def process_died(self, session: Session) -> None:
        """Nothing of the session's process can write any more."""
        ...

    def has_quarantine(self, session: Session) -> bool:
        """Whether slots wait for the process's death: its record is kept until then."""
        ...


class Sessions:
    """Every session of this boot. Owned by the event loop.

    Args:
        quotas: how many open sessions a tenant may have.
        heirs: keeps leases alive, and settles what an ended session leaves.
    """

    def __init__(
        self,
        quotas: Quotas,
        heirs: Heirs,
    ) -> None:
        self._quotas = quotas
        self._heirs = heirs
        self._by_id: dict[bytes, Session] = {}

    def open(
        self,
        tenant: str,
        instance_id: str,
        engine_name: str,
        client_version: str,
        pid: int,
        local: bool,
        readable_devices: frozenset[str] = frozenset(),
    ) -> Session:
        """A new session. Raises LimitReached SESSION_LIMIT."""
        limit = self._quotas.sessions(tenant)
        if len(self.open_of(tenant)) >= limit:
            raise LimitReached(
                "SESSION_LIMIT",
                f"tenant {tenant!r} has {limit} open sessions; close some or raise its session_count_max or "
                "leases.session_count_max",
                limit=limit,
                retry_after_s=1.0,
            )
        session = Session(
            secrets.token_bytes(SESSION_ID_BYTES),
            tenant,
            instance_id,
            engine_name,
            client_version,
            pid,
            local,
            readable_devices,
        )
        self._by_id[session.session_id] = session
        return session

    def get(self, tenant: str, session_id: bytes) -> Session:
        """The tenant's open session. Raises NotFound SESSION_UNKNOWN."""
        session = self._by_id.get(session_id)
        if session is None or session.tenant != tenant or session.ended:
            raise _session_unknown(session_id)
        return session

    def writer(self, tenant: str, session_id: bytes) -> Session:
        """An open session whose death can be proved: only such a one may write to slots.

        Raises:
            NotFound: SESSION_UNKNOWN.
            StateConflict: COMPANION_MISSING.
        """
        session = self.get(tenant, session_id)
        if not session.attached:
            raise StateConflict(
                "COMPANION_MISSING",
                "this session has no companion connection, so its process's death could not be seen; "
                "connect to companion_path first, or use Put",
                field="session_id",
            )
        return session

    def heartbeat(self, session_id: bytes, tokens: Iterable[bytes]) -> tuple[list[bytes], float]:
        """Renews leases of an open session's instance. (lost tokens, remaining life of the others)."""
        session = self._by_id.get(session_id)
        if session is None or session.ended:
            raise _session_unknown(session_id)
        return self._heirs.renew(session, tokens)

    def open_of(self, tenant: str | None = None) -> list[Session]:
        """Open sessions of a tenant, or all."""
        return [s for s in self._by_id.values() if not s.ended and (tenant is None or s.tenant == tenant)]

    def instance_is_open(self, tenant: str, instance_id: str) -> bool:
        """Whether the engine instance has an open session."""
        return any(s.instance_id == instance_id for s in self.open_of(tenant))

    def living_writers(self, tenant: str) -> set[bytes]:
        """Sessions of the tenant whose processes may still have segments mapped."""
        return {
            s.session_id for s in self._by_id.values() if s.tenant == tenant and s.attached and not s.dead
        }

    def living_pids(self) -> set[int]:
        """Processes with a companion connection, now or once, that are not known dead."""
        return {s.pid for s in self._by_id.values() if s.attached and not s.dead}

    def pid_of(self, session_id: bytes) -> int:
        """The process of a session, also of one that has ended; 0 when unknown or forgotten."""
        session = self._by_id.get(session_id)
        return 0 if session is None else session.pid

    # -- what the sockets tell -----------------------------------------------------------------

    def attach(self, session_id: bytes, tenant: str, pid: int, _uid: int) -> None:
        """The companion connection of a session is up. Raises NotFound SESSION_UNKNOWN.

        Who may connect is decided by the socket's mode, not here.
        """
        session = self.get(tenant, session_id)
        session.pid = pid
        session.attached = True
        for earlier in [s for s in self._by_id.values() if s.ended and (s.tenant, s.pid) == (tenant, pid)]:
            # The new session's death proves as much as the old one's.
            self._forget_if_settled(earlier)

    def is_remembered(self, session_id: bytes) -> bool:
        """Whether the session is open, or something still waits for its process's death."""
        return session_id in self._by_id

    def transport_lost(self, session_id: bytes) -> None:
        """The session's stream is gone."""
        self._end(self._by_id.get(session_id))

    def companion_lost(self, session_id: bytes) -> None:
        """The session's companion connection is gone."""
        self._end(self._by_id.get(session_id))

    def process_dead(self, session_id: bytes) -> None:
        """The kernel says that the session's process is dead."""
        session = self._by_id.get(session_id)
        if session is None:
            return
        session.dead = True
        self._end(session)
        self._heirs.process_died(session)
        self._by_id.pop(session_id, None)

    def _end(self, session: Session | None) -> None:
        if session is None or session.ended:
            return
        session.ended = True
        self._heirs.session_ended(session, self.instance_is_open(session.tenant, session.instance_id))
        if not session.attached:
            self._forget_if_settled(session)

    def _forget_if_settled(self, session: Session) -> None:
        if not self._heirs.has_quarantine(session):
            self._by_id.pop(session.session_id, None)


def _session_unknown(session_id: bytes) -> NotFound:
    return NotFound(
        "SESSION_UNKNOWN",
        f"no open session {session_id[:4].hex()}...; it has ended or the daemon was restarted: "
        "open a new one",
        field="session_id",
        value=session_id[:4].hex(),
    )
