"""The index process: serves one Store over one socket until the daemon hangs up.

    python -m prefixd_server.index.child FD DIRECTORY STORE_UUID [make]

Any fault ends it: it says what is wrong and exits, and the daemon starts
another, which opens the database again. It dies with the daemon.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from prefixd_server.index.frames import (
    FRAME_BYTES_MAX,
    HEAD,
    LOAD_NAMESPACES,
    LOAD_ROWS,
    SECTION_ROW_BYTES,
    Frame,
    Section,
    facts,
    frame,
    pair,
    pairs,
    sections,
)
from prefixd_server.index.records import (
    KEY_BYTES,
    KIND_BLOCK,
    KIND_NAMESPACE,
    RECORD_BYTES,
    RECORD_VERSION,
    RecordError,
    decode_namespace,
    intact,
    records_from,
)
from prefixd_server.index.store import Change, Pair, Store, StoreFault, StoreRefused

_PR_SET_PDEATHSIG = 1
_VALUE_BYTES = RECORD_BYTES - KEY_BYTES
_FORGET_MAX = 4096
"""Bad records that one durable write deletes."""


class Child:
    """One connection to the daemon and the store behind it."""

    def __init__(self, line: socket.socket, store: Store) -> None:
        self._line = line
        self._store = store
        self._answers = {
            Frame.COMMIT: self._commit,
            Frame.BLOCKS: self._blocks,
            Frame.NAMESPACES: self._namespaces,
            Frame.STATISTICS: self._statistics,
        }

    def serve(self) -> None:
        """Answers until the daemon hangs up. Raises StoreFault."""
        while (head := self._receive(HEAD.size)) is not None:
            length, kind = HEAD.unpack(head)
            body = self._receive(length) if length <= FRAME_BYTES_MAX else None
            if body is None:
                return
            self._answers[Frame(kind)](body)

    def _receive(self, length: int) -> memoryview | None:
        """Exactly `length` bytes; None when the daemon has hung up."""
        buffer = memoryview(bytearray(length))
        done = 0
        while done < length:
            got = self._line.recv_into(buffer[done:])
            if got == 0:
                return None
            done += got
        return buffer

    def _commit(self, body: memoryview) -> None:
        self._store.write(list(_changes(body)))
        self._line.sendall(frame(Frame.DONE))

    def _blocks(self, _: memoryview) -> None:
        """Sends every intact record; the others are counted, and deleted at the end."""
        source = self._store.pairs(KIND_BLOCK)
        bad: list[bytes] = []
        count = 0
        while batch := list(islice(source, LOAD_ROWS)):
            rows, bad_keys = _sorted_out(batch)
            bad += bad_keys
            count += len(rows) // RECORD_BYTES
            self._line.sendall(frame(Frame.ROWS, rows))
        damaged = self._store.damaged
        if damaged:
            self._store.rebuild((KIND_NAMESPACE, KIND_BLOCK))
        self._forget(bad)
        self._line.sendall(facts(Frame.LOADED, records=count, corrupt=len(bad), damaged=damaged))

    def _namespaces(self, _: memoryview) -> None:
        """Sends every intact record; the others are counted, and deleted at the end."""
        source = self._store.pairs(KIND_NAMESPACE)
        bad: list[bytes] = []
        while batch := list(islice(source, LOAD_NAMESPACES)):
            good = []
            for key, value in batch:
                try:
                    decode_namespace(key, value)
                    good.append(pair(key, value))
                except RecordError:
                    bad.append(key)
            self._line.sendall(frame(Frame.PAIRS, b"".join(good)))
        self._forget(bad)
        self._line.sendall(facts(Frame.DONE, corrupt=len(bad)))

    def _forget(self, keys: list[bytes]) -> None:
        for start in range(0, len(keys), _FORGET_MAX):
            self._store.write([(key, None) for key in keys[start : start + _FORGET_MAX]])

    def _statistics(self, _: memoryview) -> None:
        self._line.sendall(facts(Frame.NUMBERS, disk_bytes=self._store.disk_bytes()))


def _changes(body: memoryview) -> Iterator[Change]:
    for kind, count, payload in sections(body):
        if kind is Section.PUT_PAIR:
            yield from pairs(payload)
        elif kind is Section.PUT_BLOCKS:
            rows = bytes(payload)
            for start in range(0, count * RECORD_BYTES, RECORD_BYTES):
                middle = start + KEY_BYTES
                yield rows[start:middle], rows[middle : start + RECORD_BYTES]
        else:
            keys, key_bytes = bytes(payload), SECTION_ROW_BYTES[kind]
            for start in range(0, count * key_bytes, key_bytes):
                yield keys[start : start + key_bytes], None


def _sorted_out(batch: list[Pair]) -> tuple[bytes, list[bytes]]:
    """The intact rows of a batch, packed, and the keys of the others."""
    odd = [key for key, value in batch if len(key) != KEY_BYTES or len(value) != _VALUE_BYTES]
    if odd:
        batch = [(k, v) for k, v in batch if len(k) == KEY_BYTES and len(v) == _VALUE_BYTES]
    rows = b"".join([key + value for key, value in batch])
    good = intact(rows, len(batch)) & (records_from(rows)["version"] == RECORD_VERSION)
    if good.all():
        return rows, odd
    bad = [batch[at][0] for at in np.flatnonzero(~good)]
    return records_from(rows)[good].tobytes(), odd + bad


def _die_with_parent() -> None:
    """A daemon that is killed takes us along; had it gone before, its end of the line is shut."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """See the module."""
    _die_with_parent()
    line = socket.socket(fileno=int(sys.argv[1]))
    try:
        store = Store(Path(sys.argv[2]), bytes.fromhex(sys.argv[3]), make="make" in sys.argv[4:])
        line.sendall(facts(Frame.OPENED, reset_reason=store.reset_reason))
        Child(line, store).serve()
        store.close()
    except StoreRefused as refusal:
        line.sendall(facts(Frame.FAULT, refused=True, disk_full=False, message=str(refusal)))
    except StoreFault as fault:
        line.sendall(facts(Frame.FAULT, refused=False, disk_full=fault.disk_full, message=str(fault)))
    except (BrokenPipeError, ConnectionResetError):
        pass
    # The binding's own end may hang or abort after a fault; whatever counts is on disk already.
    os._exit(0)


if __name__ == "__main__":
    main()
