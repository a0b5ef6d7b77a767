"""The background thread of a client: keeps a session, renews leases, empties the outbox.

It alone opens and closes sessions, so after a restart of the daemon everything comes back with no call from
the engine. One step decides what is due, does it, and says how long to wait for the next; news wake it.
"""

from __future__ import annotations

import atexit
import math
import os
import threading

import grpc
from prefixd.v1 import cache_service_pb2 as wire

from .breaker import Backoff
from .control import RENEWED_LEASE_COUNT_MAX, Control, log
from .failures import Verdict, failure_of
from .session import Session, SessionFailed, open_session

OUTBOX_PAUSE_S = 0.2
"""After a batch that the daemon did not take."""
HEALTHY_S = 5.0
"""After so long without trouble the next trouble starts with short pauses again."""
BEAT_PAUSE_MIN_S = 0.05
"""Between two heartbeats, whatever the daemon asks for."""
NAMESPACE_PAUSE_S = 1.0
"""Between two attempts to open namespaces that the daemon has no room for."""


class Keeper:
    """See the module. Made and joined by the client; of a client that was forgotten, joined by nobody."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._options = control.options
        self._backoff = Backoff(self._options.probe_pause_min_s, self._options.probe_pause_max_s)
        self._probe_at = 0.0
        """Not before this: the next attempt to open a session, or to ask a silent daemon."""
        self._well_since: float | None = None
        self._namespaces_at = 0.0
        """Not before this: the next attempt to open namespaces."""
        self._outbox_at = 0.0
        """Not before this: the next batch of what the outbox holds."""
        self._beaten_at = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="prefixd-keeper", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Closes the control and has the thread end by itself, the session with it; waits for nothing.

        Held leases are given up; what the outbox holds is sent if the daemon answers. Safe in a finalizer: it
        takes no lock, and may run on any thread, this one or another that this one waits for.
        """
        self._control.closed()
        self._stopping = True
        self._control.wake.ring()

    def stop(self) -> None:
        """Ends the thread as end() does, and waits for it."""
        self.end()
        self._control.outbox.urgent.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the loop --------------------------------------------------------------------------------------

    def _run(self) -> None:
        _running.add(self)
        try:
            self._keep()
        finally:
            _running.discard(self)

    def _keep(self) -> None:
        control = self._control
        while not self._stopping:
            try:
                pause = self._step()
            except Exception:  # the thread's outermost seam: without it nothing would ever recover
                log.exception("the client's background thread made a mistake")
                pause = self._options.probe_pause_max_s
            control.attempted.set()
            control.wake.wait(max(0.0, pause))
        session = control.session
        if session is not None:
            session.wait_copied()
            for lease in control.held_leases():
                lease.give_up()
            self._outbox_at = 0.0
            while self._send_batch(session) == 0.0:
                pass
            session.close()
        control.session = None

    def _step(self) -> float:
        """Does what is due; returns seconds until something will be."""
        session = self._control.session
        self._note_health()
        if session is None or session.is_lost:
            return self._reopen(session)
        self._open_namespaces(session)
        next_batch_s = self._send_batch(session)
        return min(next_batch_s, self._beat(session))

    def _note_health(self) -> None:
        """Resets the pauses after a healthy while, and sets the pause when trouble has just begun."""
        now, control = self._control.now(), self._control
        if control.breaker.is_open:
            if self._well_since is not None:
                if now - self._well_since > HEALTHY_S:
                    self._backoff.reset()
                self._probe_at = now + self._backoff.next_pause_s()
            self._well_since = None
        elif self._well_since is None:
            self._well_since = now

    # -- the session -----------------------------------------------------------------------------------

    def _reopen(self, old: Session | None) -> float:
        """Opens a session, unless it is too early; returns seconds until the next attempt."""
        control = self._control
        if old is not None:
            old.close()
            control.session = None
        early = self._probe_at - control.now()
        if early > 0:
            return early
        try:
            session = open_session(
                control.target, self._options, control.instance_id, control.engine_name, control
            )
        except SessionFailed as error:
            if control.breaker.reason != str(error):
                control.breaker.reason = str(error)
                log.info("no session with the daemon at %s: %s", control.target, error)
            pause = self._backoff.next_pause_s()
            self._probe_at = control.now() + pause
            return pause
        control.installed(session)
        self._namespaces_at = 0.0
        self._open_namespaces(session)
        self._beaten_at = control.now()
        control.answers(session)
        return 0.0

    def _open_namespaces(self, session: Session) -> None:
        """Opens what the session lacks; after a failure that may pass, not again for a while."""
        control = self._control
        if control.now() < self._namespaces_at:
            return
        for spec in control.unopened(session):
            failure = session.open_namespace(spec)
            if failure is None:
                continue
            if failure.verdict is Verdict.REFUSED:
                control.refuse(spec, failure)
            else:
                self._namespaces_at = control.now() + NAMESPACE_PAUSE_S
                control.follow(failure, session, spec)
                return

    def _beat(self, session: Session) -> float:
        """Sends a heartbeat when one is due, and notices when one is not answered."""
        control, options = self._control, self._options
        now = control.now()
        beat = session.beat
        if beat is not None:
            silent_s = now - beat.sent_at
            if silent_s > options.answer_patience_s:
                control.session_lost(session, f"no answer to a heartbeat in {silent_s:.1f} s")
                return 0.0
            if silent_s > options.control_timeout_s:
                control.open_breaker(f"no answer to a heartbeat in {silent_s:.1f} s")
                return options.answer_patience_s - silent_s
            return options.control_timeout_s - silent_s + 0.001
        interval = max(BEAT_PAUSE_MIN_S, session.opened.heartbeat_interval.ToNanoseconds() / 1e9)
        is_probe = control.breaker.is_open and not session.is_draining
        due_at = min(self._probe_at, self._beaten_at + interval) if is_probe else self._beaten_at + interval
        if now < due_at:
            return due_at - now
        leases = [lease for lease in control.held_leases() if lease.session is session]
        tokens = list({lease.token for lease in leases})[:RENEWED_LEASE_COUNT_MAX]
        session.send_heartbeat(tokens, control.statistics.since_last())
        self._beaten_at = now
        return min(interval, options.control_timeout_s)

    # -- the outbox ------------------------------------------------------------------------------------

    def _send_batch(self, session: Session) -> float:
        """Sends one batch of what waits; returns seconds until the next, inf when there is none to send.

        One at a time: a busy engine always has more, and heartbeats are due in between.
        """
        control = self._control
        is_away = control.breaker.is_open and not session.is_draining
        if session.is_lost or is_away or not len(control.outbox):
            return math.inf
        early = self._outbox_at - control.now()
        if early > 0:
            return early
        if not self._stopping:
            control.outbox.urgent.wait(self._options.release_batch_pause_s)
        if not self._send_endings(session) or not self._send_usage(session):
            self._outbox_at = control.now() + OUTBOX_PAUSE_S
        return max(0.0, self._outbox_at - control.now())

    def _send_endings(self, session: Session) -> bool:
        """One batch of releases and aborts; False when the daemon did not take them and they wait on."""
        outbox = self._control.outbox
        releases, aborts = outbox.take_endings(session.boot_id)
        while aborts:
            abort = wire.AbortRequest(session_id=session.session_id, token=aborts[-1].token)
            if not self._sent(session, "Abort", abort):
                outbox.put_back(session.boot_id, releases, aborts)
                return False
            aborts.pop()
        if releases:
            release = wire.ReleaseRequest(session_id=session.session_id, releases=releases)
            if not self._sent(session, "Release", release):
                outbox.put_back(session.boot_id, releases, [])
                return False
        return True

    def _send_usage(self, session: Session) -> bool:
        """One batch of reports; those of namespaces that are not open are dropped."""
        reports = []
        for spec, report in self._control.outbox.take_usage(session.opened.hash_count_max):
            ref = session.refs.get(spec)
            if ref is not None:
                report.namespace.CopyFrom(ref)
                reports.append(report)
        if not reports:
            return True
        request = wire.ReportUsageRequest(session_id=session.session_id, reports=reports)
        return self._sent(session, "ReportUsage", request)

    def _sent(
        self,
        session: Session,
        method: str,
        request: wire.AbortRequest | wire.ReleaseRequest | wire.ReportUsageRequest,
    ) -> bool:
        """Sends one request; False when it is worth sending again, once the daemon answers or has room."""
        try:
            getattr(session.stub, method)(request, timeout=self._options.control_timeout_s)
        except grpc.RpcError as error:
            failure = failure_of(error, method)
            if failure.verdict is Verdict.REFUSED:
                log.warning("%s was refused: %s", method, failure)
                return True
            self._control.follow(failure, session, None)
            is_full = failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            return not is_full and failure.verdict not in (Verdict.AWAY, Verdict.SESSION_ENDED)
        except ValueError:  # the channel was closed meanwhile
            return False
        return True


_running: set[Keeper] = set()
"""Those of this process whose thread has not ended."""


def _stop_all() -> None:
    """At the end of the process: what waits is sent, also for clients that nobody closed."""
    for keeper in list(_running):
        keeper.stop()


atexit.register(_stop_all)
os.register_at_fork(after_in_child=_running.clear)
