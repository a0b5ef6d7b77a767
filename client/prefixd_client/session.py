"""One session with one boot of the daemon: channel, stream, companion connection, opened namespaces.

A Session is made whole or not at all, and when anything of it breaks it is lost as a whole; the keeper then
makes another. The stream's reader thread tells the listener what comes in. Nothing here retries.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import cache_service_pb2_grpc, types_pb2

from .channel import open_channel
from .device import DeviceMap
from .device_driver import DeviceFault
from .failures import Failure, failure_of
from .namespace import NamespaceSpec
from .options import ClientOptions
from .segments import MappedSegment, SegmentMap, SegmentUnknown
from .version import __version__

log = logging.getLogger("prefixd_client")

_STUB: Any = cache_service_pb2_grpc.CacheServiceStub
"""Generated without types."""


class SessionFailed(ConnectionError):
    """No session could be opened; the message says why."""


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat under way: when it was sent (monotonic seconds), and the leases it renews."""

    sent_at: float
    tokens: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a segment is reached by this process. Hold it while its memory is used.

    Attributes:
        address: of its first byte.
        length_bytes: of the segment.
        device: who copies from and to it; None for the CPU.
        mapping: what keeps host memory mapped, also after the segment was retired.
    """

    address: int
    length_bytes: int
    device: DeviceMap | None
    mapping: MappedSegment | None = None


class Listener(Protocol):
    """Who hears what a session's stream brings. Called on the session's threads; must not block."""

    def session_lost(self, session: Session, reason: str) -> None:
        """Stream or companion connection have ended. Called once or more."""
        ...

    def heartbeat_answered(self, session: Session, answer: wire.HeartbeatAnswer, beat: Beat) -> None:
        """The daemon has answered a heartbeat."""
        ...

    def draining(self, session: Session) -> None:
        """The daemon is about to leave."""
        ...


class Session:
    """See the module. Attributes are set by open() and then only read, except the flags.

    Attributes:
        stub: of CacheService, on this session's channel.
        refs: namespaces opened in this session.
        segments: None when the daemon was reached by TCP; then only lookup, put and get work.
        known_segments: ids whose mapping was asked for already.
        beat: the heartbeat that is not answered yet; None when none is.
    """

    def __init__(
        self, target: str, options: ClientOptions, listener: Listener, now: Callable[[], float]
    ) -> None:
        self._options = options
        self._listener = listener
        self._now = now
        self._channel = open_channel(target, options)
        self.stub = _STUB(self._channel)
        self.opened = wire.SessionOpened()
        self.segments: SegmentMap | None = None
        self.device: DeviceMap | None = None
        self.refs: dict[NamespaceSpec, types_pb2.NamespaceRef] = {}
        self.known_segments: set[int] = set()
        self.is_lost = False
        self.is_draining = False
        self.beat: Beat | None = None
        self._answered = threading.Event()
        self._outgoing: queue.SimpleQueue[wire.OpenSessionRequest | None] = queue.SimpleQueue()
        self._stream: Any = None
        self._why = ""
        self._copying = 0
        self._copies = threading.Condition()
        """Guards _copying: copies to or from segments that are under way."""

    @property
    def session_id(self) -> bytes:
        """16 bytes; sent with every call."""
        return self.opened.session_id

    @property
    def boot_id(self) -> bytes:
        """16 bytes; which boot of the daemon this is."""
        return self.opened.boot_id

    # -- opening and closing -----------------------------------------------------------------------

    def open(self, instance_id: str, engine_name: str) -> None:
        """Says hello and connects the companion. Raises SessionFailed, with everything closed again."""
        self.device = _device_map(self._options.device_uuid)
        hello = wire.SessionHello(
            instance_id=instance_id,
            engine_name=engine_name,
            client_version=__version__,
            pid=os.getpid(),
            readable_devices={
                *self._options.redeemer_devices,
                *([] if self.device is None else [self.device.uuid]),
            },
        )
        self._outgoing.put(wire.OpenSessionRequest(hello=hello))
        self._stream = self.stub.OpenSession(iter(self._outgoing.get, None))
        threading.Thread(target=self._read, name="prefixd-session", daemon=True).start()
        try:
            if not self._answered.wait(self._options.control_timeout_s) or self.is_lost:
                raise SessionFailed(self._why or "no answer to hello in time")
            if self.opened.companion_path:
                self.segments = SegmentMap(
                    self.opened.companion_path,
                    self.session_id,
                    timeout_s=self._options.lookup_timeout_s,
                    connect_timeout_s=self._options.control_timeout_s,
                    on_lost=lambda: self._end("the companion connection has ended"),
                )
        except OSError as error:
            self.close()
            raise error if isinstance(error, SessionFailed) else SessionFailed(str(error)) from error

    def close(self) -> None:
        """Ends it in the order that the daemon relies on: copies, then mappings, then the stream."""
        self.is_lost = True
        self.wait_copied()
        if self.device is not None:
            self.device.close()
        if self.segments is not None:
            self.segments.close()
        self._outgoing.put(None)
        if self._stream is not None:
            self._stream.cancel()
        self._channel.close()

    def wait_copied(self) -> None:
        """Returns when no copy is under way. Those to come copy nothing once their leases are over."""
        with self._copies:
            self._copies.wait_for(lambda: self._copying == 0)

    # -- what engine threads do with it -----------------------------------------------------------------

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Around every copy to or from segments. close() waits for it, as the daemon takes the companion's
        end for our word that nothing is written any more. Copies ask before each block whether their lease is
        over."""
        with self._copies:
            self._copying += 1
        try:
            yield
        finally:
            with self._copies:
                self._copying -= 1
                self._unpin_retired()
                self._copies.notify_all()

    def place(self, segment_id: int, device: DeviceMap | None) -> Place:
        """Where a segment lies, mapped or opened now if it is not yet.

        Args:
            device: who copies from and to the engine's memory, when that is on a GPU.

        Raises:
            SegmentUnknown, DeviceFault: it cannot be reached: what lies there is a miss.
            CompanionLost: it is not mapped, and the daemon does not answer.
        """
        if self.device is not None and self.device.knows(segment_id):
            return Place(*self.device.segment(segment_id), self.device)
        if self.segments is None:
            raise SegmentUnknown(segment_id)
        segment = self.segments.segment(segment_id)
        if device is not None:
            device.pin(segment)
        return Place(segment.address, segment.length_bytes, device, segment)

    def _unpin_retired(self) -> None:
        """Lets the device go of segments that are gone, when nobody copies. The caller holds _copies."""
        if self.device is not None and self.segments is not None and self._copying == 0:
            self.device.unpin_retired(self.segments.is_mapped)

    def learn(self, segments: Iterable[types_pb2.DeviceSegment]) -> None:
        """Takes what an answer says about segments in GPU memory."""
        if self.device is not None:
            self.device.learn(segments)

    def prefetch(self, segment_ids: set[int]) -> None:
        """Has segments mapped in the background, before somebody waits for them."""
        if self.device is not None:
            segment_ids = {number for number in segment_ids if not self.device.knows(number)}
        if self.segments is not None and not segment_ids <= self.known_segments:
            self.known_segments |= segment_ids
            self.segments.prefetch(segment_ids)

    def open_namespace(self, spec: NamespaceSpec) -> Failure | None:
        """Opens a namespace and remembers its ref; returns why not."""
        request = wire.OpenNamespaceRequest(spec=spec.to_wire())
        try:
            answer = self.stub.OpenNamespace(request, timeout=self._options.control_timeout_s)
        except grpc.RpcError as error:
            return failure_of(error, "OpenNamespace")
        except ValueError as error:  # the channel was closed meanwhile
            return Failure("OpenNamespace", grpc.StatusCode.CANCELLED, str(error))
        self.refs[spec] = answer.namespace
        return None

    # -- the stream ----------------------------------------------------------------------------------

    def send_heartbeat(self, renew_tokens: Sequence[bytes], statistics: wire.ClientStatistics) -> None:
        """Sends one; at most one is under way at a time, which the keeper sees to."""
        message = wire.SessionHeartbeat(renew_tokens=renew_tokens, statistics=statistics)
        self.beat = Beat(self._now(), frozenset(renew_tokens))
        self._outgoing.put(wire.OpenSessionRequest(heartbeat=message))

    def _read(self) -> None:
        """The reader thread: takes what the daemon sends until the stream ends."""
        reason = "the daemon has ended the session"
        try:
            for message in self._stream:
                self._take(message)
        except grpc.RpcError as error:
            reason = str(failure_of(error, "OpenSession"))
        finally:
            self._end(reason)

    def _take(self, message: wire.OpenSessionResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "opened":
            self.opened = message.opened
            self._answered.set()
        elif kind == "heartbeat":
            beat, self.beat = self.beat, None
            if beat is not None:
                self._listener.heartbeat_answered(self, message.heartbeat, beat)
        elif kind == "segments_retired" and self.segments is not None:
            self.segments.retire(message.segments_retired.segment_ids)
            with self._copies:
                self._unpin_retired()
        elif kind == "draining":
            self.is_draining = True
            self._listener.draining(self)

    def _end(self, reason: str) -> None:
        self._why = self._why or reason
        self.is_lost = True
        self._answered.set()
        self._listener.session_lost(self, reason)


def _device_map(uuid: str) -> DeviceMap | None:
    """The engine's GPU; None when it named none, or there is none: HBM is not used then."""
    if not uuid:
        return None
    try:
        return DeviceMap(uuid)
    except DeviceFault as fault:
        log.warning("HBM is not used: %s", fault)
        return None


def open_session(
    target: str, options: ClientOptions, instance_id: str, engine_name: str, listener: Listener
) -> Session:
    """A session that works. Raises SessionFailed."""
    session = Session(target, options, listener, time.monotonic)
    session.open(instance_id, engine_name)
    return session
