"""What all calls of one client share: breaker, session, namespaces, leases, counters, outbox.

Engine threads read it, the keeper thread and a session's threads change it. Whatever a call needs for its
whole way (session, namespace ref) it takes once, at its beginning.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from prefixd.v1 import cache_service_pb2 as wire

from .breaker import Breaker
from .calls import usable_until
from .errors import CallerError, ClientClosed, DaemonRefused, ForkedError
from .failures import Failure, Verdict
from .namespace import NamespaceSpec
from .options import ClientOptions
from .outbox import Abort, Outbox
from .session import Beat, Session
from .statistics import Statistics
from .values import ClientStatus

log = logging.getLogger("prefixd_client")

RENEWED_LEASE_COUNT_MAX = 4_096
"""Tokens in one heartbeat; leases beyond it are renewed by the next, or expire."""


class Renewable(Protocol):
    """A lease that a caller holds."""

    token: bytes
    session: Session
    is_held: bool

    def renewed(self, until: float) -> None:
        """It may be used until then, monotonic seconds."""
        ...

    def lost(self) -> None:
        """It must not be used any more."""
        ...

    def give_up(self) -> None:
        """Its client is closed, and nobody copies any more: the daemon is to be told."""
        ...


class Bell:
    """Wakes one thread that waits. Ringing takes no lock: a finalizer may do it, inside any code."""

    def __init__(self) -> None:
        self._silent = threading.Lock()
        """Held by nobody in particular, until somebody rings."""
        self._silent.acquire()

    def ring(self) -> None:
        """Ends a wait, or the next one. What rings before somebody waits is one ring."""
        with suppress(RuntimeError):  # it has rung already
            self._silent.release()

    def wait(self, timeout_s: float) -> None:
        """Until it rings; the ring is over then."""
        self._silent.acquire(timeout=timeout_s)


class Control:
    """See the module. Thread-safe."""

    def __init__(self, target: str, instance_id: str, engine_name: str, options: ClientOptions) -> None:
        self.target = target
        self.instance_id = instance_id
        self.engine_name = engine_name
        self.options = options
        self.now: Callable[[], float] = time.monotonic
        self.breaker = Breaker(self.now)
        self.session: Session | None = None
        self.statistics = Statistics()
        self.outbox = Outbox(options.release_queue_limit, options.usage_queue_limit)
        self.wake = Bell()
        """Rung when the keeper has something to do."""
        self.attempted = threading.Event()
        """Set once the keeper has tried to open a session, whether it could or not."""
        self.boot_id = b""
        self._lock = threading.Lock()
        """Guards the namespaces and the leases."""
        self._namespaces: dict[NamespaceSpec, str] = {}
        """Namespaces that the caller uses; why the daemon refuses to open one, or ""."""
        self._leases: weakref.WeakSet[Renewable] = weakref.WeakSet()
        self._unusable: CallerError | None = None
        _controls.add(self)

    # -- may a call go out? ----------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raises ClientClosed or ForkedError."""
        if self._unusable is not None:
            raise self._unusable

    @property
    def is_closed(self) -> bool:
        """Whether the client was closed, or belongs to the process that forked this one."""
        return self._unusable is not None

    def ready_session(self) -> Session | None:
        """The session to use for one call; None when the answer is a miss without asking."""
        self.check_usable()
        session = self.session
        return None if self.breaker.is_open or session is None or session.is_lost else session

    # -- namespaces and leases -------------------------------------------------------------------------

    def use(self, spec: NamespaceSpec) -> None:
        """Remembers a namespace, and opens it at once where a session is ready. Raises DaemonRefused."""
        with self._lock:
            self._namespaces.setdefault(spec, "")
        session = self.ready_session()
        if session is None or spec in session.refs:
            return
        failure = session.open_namespace(spec)
        if failure is None:
            return
        if failure.verdict is Verdict.REFUSED:
            self.refuse(spec, failure)
            raise failure.as_error()
        self.follow(failure, session, spec)

    def unopened(self, session: Session) -> list[NamespaceSpec]:
        """Namespaces that the session should open."""
        with self._lock:
            return [
                spec for spec, refusal in self._namespaces.items() if not refusal and spec not in session.refs
            ]

    def refuse(self, spec: NamespaceSpec, failure: Failure) -> None:
        """This boot of the daemon will not serve the namespace."""
        log.warning("the daemon refuses namespace %s: %s", spec.model_id, failure)
        with self._lock:
            self._namespaces[spec] = str(failure)

    def hold(self, lease: Renewable) -> None:
        """Renews a lease for as long as its caller holds it."""
        with self._lock:
            self._leases.add(lease)

    def held_leases(self) -> list[Renewable]:
        """Leases that callers hold now."""
        with self._lock:
            return [lease for lease in self._leases if lease.is_held]

    # -- what follows from failures and news -----------------------------------------------------------

    def follow(self, failure: Failure, session: Session, spec: NamespaceSpec | None) -> None:
        """Does what a failed call calls for. Raises DaemonRefused for the caller's bugs."""
        verdict = failure.verdict
        if failure.is_timeout:
            self.statistics.add(timeouts=1)
        if verdict is Verdict.REFUSED:
            raise DaemonRefused(failure.reason, failure.message, failure.code.name, failure.metadata)
        if verdict is Verdict.AWAY:
            self.open_breaker(str(failure))
        elif verdict is Verdict.SESSION_ENDED:
            self.session_lost(session, str(failure))
        elif verdict is Verdict.NAMESPACE_ENDED and spec is not None:
            session.refs.pop(spec, None)
            self.wake.ring()
        else:
            log.debug("a call failed and counts as a miss: %s", failure)

    def open_breaker(self, reason: str) -> None:
        """Law 2: fails all waiting calls at once, and those to come."""
        if self.breaker.open(reason):
            log.warning("the daemon at %s is away: %s", self.target, reason)
            self.wake.ring()

    def installed(self, session: Session) -> None:
        """A new session works: calls may go out."""
        if session.boot_id != self.boot_id:
            with self._lock:
                self._namespaces = dict.fromkeys(self._namespaces, "")
        self.boot_id = session.boot_id
        self.session = session

    def session_lost(self, session: Session, reason: str) -> None:
        """See session.Listener."""
        session.is_lost = True
        if session is self.session and not self.is_closed:
            self.open_breaker(reason)
            self.wake.ring()

    def heartbeat_answered(self, session: Session, answer: wire.HeartbeatAnswer, beat: Beat) -> None:
        """See session.Listener."""
        lost = set(answer.lost_tokens)
        until = usable_until(beat.sent_at, answer.expires_after)
        for lease in self.held_leases():
            if lease.token in lost:
                lease.lost()
            elif lease.token in beat.tokens:
                lease.renewed(until)
        if session is self.session:
            self.answers(session)
        self.wake.ring()

    def answers(self, session: Session) -> None:
        """The daemon has answered in this session: calls may go out, unless it drains."""
        if not session.is_draining and self.breaker.close():
            log.info("the daemon at %s answers, boot %s", self.target, session.boot_id.hex())
        # Looked at last, so that an end that came meanwhile is not forgotten.
        if session.is_lost:
            self.open_breaker("the session has ended")
        elif session.is_draining:
            self.open_breaker("the daemon drains")

    def draining(self, session: Session) -> None:
        """See session.Listener."""
        if session is self.session:
            self.open_breaker("the daemon drains")

    # -- endings -----------------------------------------------------------------------------------------

    def end_lease(self, boot_id: bytes, ending: wire.LeaseRelease | Abort) -> None:
        """Has the daemon told that a lease is over, off the caller's way."""
        self.outbox.end_lease(boot_id, ending)
        self.wake.ring()

    # -- status ------------------------------------------------------------------------------------------

    def status(self) -> ClientStatus:
        """How things stand."""
        session, state = self.session, "ready"
        if self.is_closed:
            state = "closed"
        elif session is not None and session.is_draining and not session.is_lost:
            state = "draining"
        elif self.breaker.is_open:
            state = "away"
        counts = self.statistics.total()
        return ClientStatus(
            state=state,
            boot_id=self.boot_id,
            away_reason=self.breaker.reason,
            away_s=self.breaker.open_s,
            breaker_opened_count=self.breaker.opened_count,
            read_block_count=counts.read_block_count,
            written_block_count=counts.written_block_count,
            bad_block_count=counts.bad_block_count,
            timeout_count=counts.timeout_count,
        )

    def closed(self, error: CallerError | None = None) -> None:
        """Every call from here on raises `error`, ClientClosed by default. Takes no lock."""
        self._unusable = self._unusable or error or ClientClosed()


_controls: weakref.WeakSet[Control] = weakref.WeakSet()
"""Of this process and, right after a fork, of its parent."""


def _disown_after_fork() -> None:
    """In the child: threads, channel and mappings of every client stayed in the parent."""
    for control in list(_controls):
        control.closed(ForkedError())


os.register_at_fork(after_in_child=_disown_after_fork)
