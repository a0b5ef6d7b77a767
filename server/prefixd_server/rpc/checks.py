"""The checks that all requests share: lengths, ranges, spans. Raises InvalidRequest, never anything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from prefixd_server.base.errors import InvalidRequest
from prefixd_server.base.types import HASH_COUNT_MAX, HASH_WORDS, Hashes, hashes_from_bytes
from prefixd_server.rpc.packed_hashes import packed_hashes

ID_BYTES = 16
"""Length of session ids and lease tokens."""
DURATION_S_MAX = 315_576_000_000
"""Ten thousand years: the range of google.protobuf.Duration."""


PACKED_COUNT_MIN = 48
"""From this many hashes on, taking them out of the encoded request is faster than one by one."""


class CarriesRun(Protocol):
    """Any request with the prefix hashes of a run."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """As they came."""
        ...

    def SerializeToString(self) -> bytes:  # noqa: N802 - protobuf's own name
        """See protobuf."""
        ...


def invalid(field: str, value: object, limit: str) -> InvalidRequest:
    """FIELD_INVALID: what the field must be is the remedy."""
    shown = str(value)
    shown = shown if len(shown) <= 64 else shown[:61] + "..."
    return InvalidRequest(
        "FIELD_INVALID", f"{field} = {shown}: {limit}", field=field, value=shown, limit=limit
    )


def present(message: Message, field: str) -> None:
    """A message field that must be set."""
    if not message.HasField(field):
        raise invalid(field, "unset", "must be set")


def within(field: str, value: int, minimum: int, maximum: int) -> int:
    """A whole number within its bounds."""
    if not minimum <= value <= maximum:
        raise invalid(field, value, f"must be {minimum:,} to {maximum:,}")
    return value


def utf8(field: str, value: str, maximum_bytes: int, *, required: bool = False) -> str:
    """A string of bounded length without NUL."""
    if required and not value:
        raise invalid(field, '""', "must not be empty")
    if len(value.encode()) > maximum_bytes:
        raise invalid(field, value, f"must be at most {maximum_bytes:,} bytes of UTF-8")
    if "\0" in value:
        raise invalid(field, value.replace("\0", "\\0"), "must not contain NUL")
    return value


def exactly(field: str, value: bytes, length: int) -> bytes:
    """Bytes of a fixed length."""
    if len(value) != length:
        raise invalid(field, f"{len(value)} bytes", f"must be exactly {length} bytes")
    return value


def span_s(message: Message, field: str, *, allow_zero: bool = False) -> float | None:
    """A Duration in seconds; None when absent."""
    if not message.HasField(field):
        return None
    span: Duration = getattr(message, field)
    seconds = span.seconds + span.nanos / 1e9
    in_range = abs(span.nanos) < 10**9 and 0 <= seconds <= DURATION_S_MAX
    if not in_range or (seconds == 0 and not allow_zero):
        raise invalid(field, f"{seconds:g}s", "must be " + ("0s or more" if allow_zero else "more than 0s"))
    return seconds


def run(request: CarriesRun, hash_bytes: int, *, allow_empty: bool = False) -> Hashes:
    """The prefix hashes of a request's run, shape (blocks, 4).

    Raises:
        InvalidRequest: EMPTY_RUN, TOO_MANY_HASHES or HASH_LENGTH_MISMATCH.
    """
    count = len(request.block_hashes)
    if count > HASH_COUNT_MAX:
        raise too_many_hashes(count)
    if count == 0 and not allow_empty:
        raise InvalidRequest(
            "EMPTY_RUN",
            f"block_hashes is empty: a run has 1 to {HASH_COUNT_MAX:,} blocks; send nothing for a prompt "
            "shorter than one block",
            field="block_hashes",
            value=0,
            limit=HASH_COUNT_MAX,
        )
    packed = packed_hashes(request, hash_bytes) if count >= PACKED_COUNT_MIN else None
    if packed is not None:
        return packed
    hashes = list(request.block_hashes)
    if count and set(map(len, hashes)) != {hash_bytes}:
        index = next(index for index, item in enumerate(hashes) if len(item) != hash_bytes)
        raise _hash_length(f"block_hashes[{index}]", hashes[index], hash_bytes)
    return hashes_from_bytes(hashes, hash_bytes)


def one_hash(field: str, value: bytes, hash_bytes: int) -> Hashes:
    """A single prefix hash, shape (1, 4). Raises InvalidRequest HASH_LENGTH_MISMATCH."""
    if len(value) != hash_bytes:
        raise _hash_length(field, value, hash_bytes)
    return hashes_from_bytes([value], hash_bytes).reshape(1, HASH_WORDS)


def too_many_hashes(count: int) -> InvalidRequest:
    """TOO_MANY_HASHES."""
    return InvalidRequest(
        "TOO_MANY_HASHES",
        f"{count:,} hashes, but a request carries at most {HASH_COUNT_MAX:,}; ask for the start of the run",
        field="block_hashes",
        value=count,
        limit=HASH_COUNT_MAX,
    )


def _hash_length(field: str, value: bytes, hash_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        "HASH_LENGTH_MISMATCH",
        f"{field} has {len(value)} bytes, but this namespace's prefix hashes have {hash_bytes}; send whole, "
        "raw hashes or open the namespace with their hash_bytes",
        field=field,
        value=len(value),
        limit=hash_bytes,
    )
