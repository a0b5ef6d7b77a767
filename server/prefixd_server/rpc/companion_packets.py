"""The companion socket's packets, docs/companion.md in code. Pure: bytes to values and back.

Each packet is one JSON object. Fields that are not known here are ignored, so
that a client one version newer works.
"""

from __future__ import annotations

import json

from prefixd_server.base.errors import InvalidRequest

PACKET_BYTES_MAX = 4096
SEGMENT_COUNT_MAX = 256
"""Segments in one request."""
SESSION_ID_BYTES = 16
_SEGMENT_ID_MAX = 2**64 - 1


def parse_hello(packet: bytes) -> bytes:
    """The session id of a client's first packet. Raises InvalidRequest PACKET_INVALID."""
    session = _object(packet).get("session")
    if isinstance(session, str) and len(session) == 2 * SESSION_ID_BYTES:
        try:
            return bytes.fromhex(session)
        except ValueError:
            pass
    raise _invalid(
        f'the first packet must be {{"session": "..."}} with {2 * SESSION_ID_BYTES} hexadecimal digits'
    )


def parse_request(packet: bytes) -> list[int]:
    """The segment ids that a client asks for. Raises InvalidRequest PACKET_INVALID."""
    segments = _object(packet).get("segments")
    if (
        isinstance(segments, list)
        and 0 < len(segments) <= SEGMENT_COUNT_MAX
        and all(map(_is_segment_id, segments))
    ):
        return segments
    raise _invalid(f'a request must be {{"segments": [...]}} with 1 to {SEGMENT_COUNT_MAX} segment ids')


def too_long() -> InvalidRequest:
    """For a packet beyond PACKET_BYTES_MAX."""
    return _invalid(f"a packet has at most {PACKET_BYTES_MAX} bytes")


def ok() -> bytes:
    """The answer to a good hello."""
    return _packed({"ok": True})


def segment(segment_id: int, length_bytes: int) -> bytes:
    """Goes with a descriptor."""
    return _packed({"segment": segment_id, "length_bytes": length_bytes})


def segment_unknown(segment_id: int) -> bytes:
    """No such segment for this tenant: retired, never there, or another's."""
    return _packed({"segment": segment_id, "error": "SEGMENT_UNKNOWN"})


def refusal(reason: str, message: str) -> bytes:
    """The connection's last packet."""
    return _packed({"error": reason, "message": message[: PACKET_BYTES_MAX // 2]})


def _object(packet: bytes) -> dict[str, object]:
    try:
        value = json.loads(packet)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _invalid("a packet is one JSON object")
    return value


def _is_segment_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _SEGMENT_ID_MAX


def _packed(value: dict[str, object]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _invalid(message: str) -> InvalidRequest:
    return InvalidRequest("PACKET_INVALID", message)
