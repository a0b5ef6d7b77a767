"""What the NVMe tier's directories and segment files look like: constants and codecs.

Shared by the medium, which reads and writes them, and by the offline tools.
docs/nvme-format.md tells the same for people. No I/O here.

A directory holds a marker and segment files. A segment file is a header block
of HEADER_BYTES and then the segment's bytes; `offset_bytes` of a medium counts
from the end of the header.
"""

from __future__ import annotations

import json
import re
import struct
from dataclasses import dataclass, replace

import xxhash

FORMAT_VERSION = 1
FORMAT_VERSION_MIN = 1
"""The oldest format that this release still reads."""

HEADER_BYTES = 4096
STORE_UUID_BYTES = 16
GENERATION_BITS = 62
"""A new file starts at a random generation below 2**62, so that one made anew never continues a lost one."""

MARKER_NAME = "PREFIXD-NVME"
MARKER_BYTES_MAX = 65_536
INDEX_NAME = "index"
"""Directory of the index, inside the first directory."""

_MAGIC = b"PFXDSEG\n"
_MARKER_KIND = "prefixd nvme directory"
_HEADER = struct.Struct("<8s I I Q Q I 4x 16s")
_CHECK = struct.Struct("<Q")
_SEGMENT_NAME = re.compile(r"segment-(\d{6})\.kv")


class FormatError(ValueError):
    """Not ours, or damaged: a bad magic, length or checksum."""


class VersionError(ValueError):
    """Ours, and of a format that this release does not read; `version` is what was found."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"format version {version}, this release reads {FORMAT_VERSION_MIN} to {FORMAT_VERSION}"
        )
        self.version = version


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """The header block of a segment file. slot_bytes is 0 while the segment was never assigned."""

    store_uuid: bytes
    segment_id: int
    generation: int
    segment_bytes: int
    slot_bytes: int

    def encode(self) -> bytes:
        """HEADER_BYTES bytes; what matters lies in the first 64, within one sector."""
        head = _HEADER.pack(
            _MAGIC,
            FORMAT_VERSION,
            self.segment_id,
            self.generation,
            self.segment_bytes,
            self.slot_bytes,
            self.store_uuid,
        )
        return (head + _CHECK.pack(xxhash.xxh3_64_intdigest(head))).ljust(HEADER_BYTES, b"\0")

    def raised(self, slot_bytes: int) -> SegmentHeader:
        """The header of the segment's next use."""
        return replace(self, generation=self.generation + 1, slot_bytes=slot_bytes)


def decode_header(block: bytes | memoryview) -> SegmentHeader:
    """The header in the first HEADER_BYTES of a segment file.

    Raises:
        VersionError: it is ours, and of a format not read here.
        FormatError: anything else.
    """
    if len(block) != HEADER_BYTES:
        raise FormatError(f"a header has {HEADER_BYTES} bytes, not {len(block)}")
    head = bytes(block[: _HEADER.size])
    magic, version, segment_id, generation, segment_bytes, slot_bytes, uuid = _HEADER.unpack(head)
    (check,) = _CHECK.unpack_from(block, _HEADER.size)
    if magic != _MAGIC:
        raise FormatError("not a segment of prefixd")
    if check != xxhash.xxh3_64_intdigest(head) or any(block[_HEADER.size + _CHECK.size :]):
        raise FormatError("the header does not match its checksum")
    _require_known(version)
    return SegmentHeader(uuid, segment_id, generation, segment_bytes, slot_bytes)


@dataclass(frozen=True, slots=True)
class Marker:
    """The marker file: that this directory is ours, of which store, and where the others are."""

    store_uuid: bytes
    directories: tuple[str, ...]

    def encode(self) -> bytes:
        """One line of JSON, with a checksum."""
        content: dict[str, object] = {
            "kind": _MARKER_KIND,
            "format_version": FORMAT_VERSION,
            "store_uuid": self.store_uuid.hex(),
            "directories": list(self.directories),
        }
        return json.dumps(content | {"check": _marker_check(content)}).encode() + b"\n"


def decode_marker(content: bytes) -> Marker:
    """The marker of a directory.

    Raises:
        VersionError: it is ours, and of a format not read here.
        FormatError: anything else.
    """
    try:
        return _marker(json.loads(content))
    except (FormatError, VersionError):
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
        raise FormatError(f"not a marker of prefixd ({error!r})") from error


def _marker(found: dict[str, object]) -> Marker:
    check = found.pop("check")
    if found["kind"] != _MARKER_KIND or check != _marker_check(found):
        raise FormatError("the marker does not match its checksum")
    _require_known(int(str(found["format_version"])))
    uuid, directories = bytes.fromhex(str(found["store_uuid"])), found["directories"]
    if len(uuid) != STORE_UUID_BYTES or not isinstance(directories, list):
        raise FormatError("the marker's fields are not what a marker holds")
    return Marker(uuid, tuple(map(str, directories)))


def segment_name(segment_id: int) -> str:
    """The file name of a segment."""
    return f"segment-{segment_id:06d}.kv"


def segment_of_name(name: str) -> int | None:
    """The segment that a file name stands for; None when it is not one of ours."""
    match = _SEGMENT_NAME.fullmatch(name)
    return int(match.group(1)) if match else None


def file_bytes(segment_bytes: int) -> int:
    """Bytes of the file of a segment."""
    return HEADER_BYTES + segment_bytes


def segments_within(cap_bytes: int, segment_bytes: int, index_bytes: int) -> int:
    """How many segments fit under a cap, with `index_bytes` of it kept for the index."""
    return max(0, cap_bytes - index_bytes) // file_bytes(segment_bytes)


def _require_known(version: int) -> None:
    if not FORMAT_VERSION_MIN <= version <= FORMAT_VERSION:
        raise VersionError(version)


def _marker_check(content: dict[str, object]) -> str:
    return f"{xxhash.xxh3_64_intdigest(json.dumps(content, sort_keys=True).encode()):016x}"
