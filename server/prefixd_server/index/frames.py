"""What the daemon and the index process say to each other: frames on one socket pair.

A frame is a head (body length, kind) and a body. The daemon asks one thing at a
time and reads answers until the last one; so there are no request numbers.
Both ends are ours and of one release: the pipe has no versions.

    COMMIT      sections, at most GROUP_RECORDS_MAX records   -> DONE
    BLOCKS      -                                             -> ROWS ..., LOADED
    NAMESPACES  -                                             -> PAIRS ..., DONE
    STATISTICS  -                                             -> NUMBERS
    (start)                                                   -> OPENED

FAULT may come instead of any answer; the index process ends after it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from enum import IntEnum

from prefixd_server.index.records import KEY_BYTES, NAMESPACE_KEY_BYTES, RECORD_BYTES

GROUP_RECORDS_MAX = 1024
"""Records that one group commit makes durable together: 64 MiB of 64 KiB blocks with one sync, 2 to 3 ms.
With 256 of them the index, not the disk, sets the pace of demotion."""
LOAD_ROWS = 4096
"""Rows of one ROWS frame, 0.7 MB: below 2 ms of the daemon's loop."""
LOAD_NAMESPACES = 8
"""Namespaces of one PAIRS frame: the daemon's loop decodes one in 0.15 to 0.3 ms."""
FRAME_BYTES_MAX = 64 << 20

HEAD = struct.Struct("<IB")
_SECTION = struct.Struct("<BII")
_PAIR = struct.Struct("<II")


class Frame(IntEnum):
    """Kinds of frames."""

    COMMIT = 1
    BLOCKS = 2
    NAMESPACES = 3
    STATISTICS = 4
    OPENED = 16
    DONE = 17
    ROWS = 18
    LOADED = 19
    PAIRS = 20
    NUMBERS = 21
    FAULT = 22


class Section(IntEnum):
    """Kinds of sections in a COMMIT; they are applied in their order."""

    PUT_BLOCKS = 1
    """Packed RECORD rows."""
    DELETE_BLOCKS = 2
    """Packed KEY rows."""
    PUT_PAIR = 3
    """One key and value of any length."""
    DELETE_NAMESPACES = 4
    """Packed keys of namespaces."""


SECTION_ROW_BYTES = {
    Section.PUT_BLOCKS: RECORD_BYTES,
    Section.DELETE_BLOCKS: KEY_BYTES,
    Section.DELETE_NAMESPACES: NAMESPACE_KEY_BYTES,
}


def frame(kind: Frame, body: bytes | memoryview = b"") -> bytes:
    """A frame, ready to send."""
    return HEAD.pack(len(body), kind) + body


def facts(kind: Frame, **values: object) -> bytes:
    """A frame of a few named values."""
    return frame(kind, json.dumps(values).encode())


def section(kind: Section, count: int, payload: bytes | memoryview) -> bytes:
    """A section of a COMMIT."""
    return _SECTION.pack(kind, count, len(payload)) + payload


def sections(body: memoryview) -> Iterator[tuple[Section, int, memoryview]]:
    """(kind, records, payload) of each section of a COMMIT's body."""
    at = 0
    while at < len(body):
        kind, count, length = _SECTION.unpack_from(body, at)
        at += _SECTION.size
        yield Section(kind), count, body[at : at + length]
        at += length


def pair(key: bytes, value: bytes) -> bytes:
    """A key and a value of any length, as PUT_PAIR and PAIRS hold them."""
    return _PAIR.pack(len(key), len(value)) + key + value


def pairs(body: memoryview) -> Iterator[tuple[bytes, bytes]]:
    """The keys and values of packed pairs."""
    at = 0
    while at < len(body):
        key_length, value_length = _PAIR.unpack_from(body, at)
        at += _PAIR.size
        middle, end = at + key_length, at + key_length + value_length
        yield bytes(body[at:middle]), bytes(body[middle:end])
        at = end
