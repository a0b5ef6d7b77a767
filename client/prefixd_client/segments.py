"""The daemon's segments, mapped into this process: the way of the bytes.

A SegmentMap is one companion connection (docs/companion.md) and the mappings
made through it. A mapping lives as long as somebody holds its MappedSegment or a
view of it: retiring and closing only let go of ours. Nothing here knows blocks,
leases or sessions beyond their id, and nothing reconnects.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np

PACKET_BYTES_MAX = 4096
SEGMENT_COUNT_MAX = 256
"""Segments in one request; more are asked for in turn."""
PREFAULT_PIECE_BYTES = 16 << 20
_ADDRESS_BYTES_MAX = 107
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class CompanionLost(ConnectionError):
    """The companion connection is gone or does not answer: the daemon is away, or hangs."""


class CompanionRefused(ConnectionError):
    """The daemon does not take the connection. reason is UPPER_SNAKE, as in docs/companion.md."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class SegmentUnknown(LookupError):
    """No such segment (any more): what lay there is a miss."""

    def __init__(self, segment_id: int) -> None:
        super().__init__(f"the daemon has no segment {segment_id} for this tenant; it was retired")
        self.segment_id = segment_id


class MappedSegment:
    """One segment's memory in this process, shared with the daemon and not inherited by forks.

    address is valid, and the memory mapped, as long as this object or a view of it lives. Python's
    mmap keeps a descriptor of its own for as long.
    """

    __slots__ = ("_map", "address", "length_bytes", "segment_id")

    def __init__(self, segment_id: int, fd: int, length_bytes: int) -> None:
        if os.fstat(fd).st_size < length_bytes:
            raise CompanionLost(f"segment {segment_id} is shorter than the daemon says")
        self.segment_id = segment_id
        self.length_bytes = length_bytes
        self._map = mmap.mmap(fd, length_bytes)
        self._map.madvise(mmap.MADV_DONTFORK)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """Bytes of the segment, writable. Raises ValueError beyond its end."""
        if not 0 <= offset_bytes <= offset_bytes + length_bytes <= self.length_bytes:
            raise ValueError(f"[{offset_bytes}, +{length_bytes}) is not within segment {self.segment_id}")
        return memoryview(self._map)[offset_bytes : offset_bytes + length_bytes]

    def prefault(self, offset_bytes: int) -> None:
        """Makes one piece of PREFAULT_PIECE_BYTES present and writable, unchanged, without the GIL."""
        length = min(PREFAULT_PIECE_BYTES, self.length_bytes - offset_bytes)
        if _libc.madvise(self.address + offset_bytes, length, _MADV_POPULATE_WRITE):
            # Before Linux 5.14: a read maps a page of shared memory writable.
            np.frombuffer(self._map, np.uint8, length, offset_bytes)[:: mmap.PAGESIZE].sum()


class SegmentMap:
    """See the module. Thread-safe.

    Args:
        companion_path: where segments are handed out, from SessionOpened.
        session_id: of the session that this process has open.
        timeout_s: for each answer.
        connect_timeout_s: for the connection; nobody but the background thread waits.
        on_lost: called once, on the background thread, when the daemon closes the connection or leaves a
            question unanswered.

    Raises:
        CompanionLost: nobody listens, or no answer came in time.
        CompanionRefused: the daemon does not know the session.
    """

    def __init__(
        self,
        companion_path: str,
        session_id: bytes,
        *,
        timeout_s: float = 2.0,
        connect_timeout_s: float = 2.0,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        self._on_lost = on_lost
        self._mapped: dict[int, MappedSegment] = {}
        self._wire = threading.Lock()
        """Held while a question is under way on the socket."""
        self._state = threading.Lock()
        """Guards _mapped, _work and _closed."""
        self._work: deque[tuple[MappedSegment, int] | int] = deque()
        """Segments to fetch, and (segment, offset) to prefault from, for the background thread."""
        self._closed = False
        self._lost = threading.Event()
        self._socket = _connect(companion_path, session_id, connect_timeout_s)
        self._socket.settimeout(timeout_s)
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="prefixd-segments", daemon=True)
        self._thread.start()

    # -- mappings ------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        """Whether the daemon is gone, or close() was called: no further segment can be mapped."""
        return self._lost.is_set()

    def segment(self, segment_id: int) -> MappedSegment:
        """The segment, mapped now if it is not yet. Hold the answer while using its address.

        Raises:
            SegmentUnknown: it was retired.
            CompanionLost: it is not mapped, and the daemon does not answer.
        """
        found = self._mapped.get(segment_id)
        return self._fetch([segment_id])[segment_id] if found is None else found

    def segments(self, segment_ids: Iterable[int]) -> dict[int, MappedSegment]:
        """Several segments, those not mapped yet fetched in one batch. Raises as segment() does."""
        wanted = dict.fromkeys(segment_ids)
        found = {number: self._mapped.get(number) for number in wanted}
        missing = [number for number, segment in found.items() if segment is None]
        fetched = self._fetch(missing) if missing else {}
        return {number: segment or fetched[number] for number, segment in found.items()}

    def view(self, segment_id: int, offset_bytes: int, length_bytes: int) -> memoryview:
        """Bytes of a segment; the mapping lives as long as the view. Raises as segment() does."""
        return self.segment(segment_id).view(offset_bytes, length_bytes)

    def prefetch(self, segment_ids: Iterable[int]) -> None:
        """Maps and prefaults segments on the background thread; failures are met again on use."""
        with self._state:
            missing = [number for number in segment_ids if number not in self._mapped]
            if missing:
                self._work.extend(missing)
                self._ring()

    def retire(self, segment_ids: Iterable[int]) -> None:
        """Lets go of mappings; the memory is unmapped when the last user has."""
        with self._state:
            for number in segment_ids:
                self._mapped.pop(number, None)

    def is_mapped(self, segment: MappedSegment) -> bool:
        """Whether this mapping is in use, and was not retired."""
        return self._mapped.get(segment.segment_id) is segment

    def close(self) -> None:
        """Lets go of all mappings, then of the connection. Idempotent.

        Nobody may be writing to a segment any more: a daemon that cannot see our pid takes the
        connection's end for the proof of it.
        """
        with self._state:
            if self._closed:
                return
            self._closed = True
            self._mapped.clear()
            self._work.clear()
            self._lost.set()
            os.eventfd_write(self._bell, 1)
        # Whoever waits for an answer is woken; only then can the lock be had.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._wire, self._state:
            self._socket.close()
            os.close(self._bell)

    # -- the wire ------------------------------------------------------------------------------

    def _fetch(self, segment_ids: list[int]) -> dict[int, MappedSegment]:
        """Asks for segments and maps them; prefaulting follows in the background."""
        fetched: dict[int, MappedSegment] = {}
        with self._wire:
            for first in range(0, len(segment_ids), SEGMENT_COUNT_MAX):
                batch = segment_ids[first : first + SEGMENT_COUNT_MAX]
                fetched.update({number: found for number in batch if (found := self._mapped.get(number))})
                missing = [number for number in batch if number not in fetched]
                if missing:
                    fetched.update(self._ask(missing))
        for number in segment_ids:
            if number not in fetched:
                raise SegmentUnknown(number)
        return fetched

    def _ask(self, segment_ids: list[int]) -> dict[int, MappedSegment]:
        """One request and its answers; those that the daemon does not know are left out."""
        if self.is_lost:
            raise CompanionLost("the companion connection is gone; the daemon is away")
        answered: dict[int, MappedSegment] = {}
        try:
            self._socket.send(json.dumps({"segments": segment_ids}).encode())
            for number in segment_ids:
                found = self._receive_segment(number)
                if found is not None:
                    answered[number] = found
        except (OSError, ValueError) as error:
            self._give_up()
            if isinstance(error, CompanionLost):
                raise
            raise CompanionLost(f"the companion connection failed: {error}") from error
        with self._state:
            if not self._closed:
                self._mapped.update(answered)
                self._work.extend((segment, 0) for segment in answered.values())
                self._ring()
        return answered

    def _receive_segment(self, segment_id: int) -> MappedSegment | None:
        packet, fds, _, _ = socket.recv_fds(self._socket, PACKET_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC)
        try:
            answer = _answer(packet)
            if answer.get("segment") != segment_id:
                raise CompanionLost("the daemon answered another question")
            if "error" in answer:
                return None
            if not fds:
                raise OSError(errno.EMFILE, "the segment's descriptor did not arrive: too many open files")
            length = answer.get("length_bytes")
            if not isinstance(length, int) or length <= 0:
                raise CompanionLost("the daemon sent a segment without a length")
            return MappedSegment(segment_id, fds[0], length)
        finally:
            for fd in fds:
                os.close(fd)

    def _give_up(self) -> None:
        """After a question without its answer the two sides no longer agree on what comes next.

        The connection stands until close(): others may be writing to segments, see there.
        """
        with self._state:
            self._lost.set()
            self._ring()

    # -- the background thread -----------------------------------------------------------------

    def _ring(self) -> None:
        """Wakes the background thread. The caller holds _state: a closed bell's number may be another's."""
        if not self._closed:
            os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        """Watches for the connection's end and does the work that nobody should wait for."""
        poll = select.poll()
        poll.register(self._bell, select.POLLIN)
        poll.register(self._socket, select.POLLRDHUP)
        while not self.is_lost:
            ready = dict(poll.poll(0 if self._work else None))
            if self._bell in ready:
                os.eventfd_read(self._bell)
            if len(ready) > (self._bell in ready):
                break
            self._step()
        self._lost.set()
        if not self._closed and self._on_lost is not None:
            self._on_lost()

    def _step(self) -> None:
        """One piece of work: a segment fetched, or one piece of one prefaulted."""
        with self._state:
            if not self._work:
                return
            work = self._work.popleft()
        if isinstance(work, int):
            with suppress(SegmentUnknown, ConnectionError):
                self.segment(work)
            return
        segment, offset = work
        if self._mapped.get(segment.segment_id) is not segment:
            return
        segment.prefault(offset)
        if offset + PREFAULT_PIECE_BYTES < segment.length_bytes:
            with self._state:
                self._work.append((segment, offset + PREFAULT_PIECE_BYTES))


def _connect(companion_path: str, session_id: bytes, timeout_s: float) -> socket.socket:
    """A connection that the daemon has taken."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        made.settimeout(timeout_s)
        _reach(made, companion_path)
        made.send(json.dumps({"session": session_id.hex()}).encode())
        _expect_ok(_answer(made.recv(PACKET_BYTES_MAX)))
    except (CompanionLost, CompanionRefused):
        made.close()
        raise
    except (OSError, ValueError) as error:
        made.close()
        raise CompanionLost(f"no answer on {companion_path}: {error}") from error
    return made


def _expect_ok(answer: dict[str, object]) -> None:
    if answer.get("ok") is not True:
        raise CompanionRefused(str(answer.get("error", "UNKNOWN")), str(answer.get("message", "")))


def _reach(made: socket.socket, companion_path: str) -> None:
    path = Path(companion_path)
    if len(os.fsencode(path)) <= _ADDRESS_BYTES_MAX:
        made.connect(str(path))
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        made.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def _answer(packet: bytes) -> dict[str, object]:
    if not packet:
        raise CompanionLost("the daemon closed the companion connection")
    value = json.loads(packet)
    if not isinstance(value, dict):
        raise CompanionLost("the daemon sent something else than a JSON object")
    return value
