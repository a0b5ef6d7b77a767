"""Puts the messages of a portable Put together into whole blocks, within bounded memory. No I/O."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from prefixd.v1 import cache_service_pb2 as wire

from prefixd_server.base.errors import InvalidRequest, LimitReached
from prefixd_server.base.types import HASH_COUNT_MAX, Hashes
from prefixd_server.rpc import checks, requests

BUFFER_BYTES_MAX = 256 << 20
"""Memory of one tenant's Puts on one address, in which blocks are put together."""


class PutBuffers:
    """The memory of all Puts of one tenant on one address: a block each, for as long as the call is open."""

    def __init__(self) -> None:
        self.held_bytes = 0

    @contextmanager
    def hold(self, block_bytes: int) -> Iterator[None]:
        """Memory for one block; one Put may go on however large its blocks are.

        Raises:
            LimitReached: PUT_LIMIT, when the Puts that are open have all there is.
        """
        if self.held_bytes and self.held_bytes + block_bytes > BUFFER_BYTES_MAX:
            raise LimitReached(
                "PUT_LIMIT",
                f"the open Puts of this tenant hold {self.held_bytes:,} bytes, of {BUFFER_BYTES_MAX:,}; end "
                "some, then repeat this one",
                value=self.held_bytes,
                limit=BUFFER_BYTES_MAX,
            )
        self.held_bytes += block_bytes
        try:
            yield
        finally:
            self.held_bytes -= block_bytes


@dataclass(frozen=True, slots=True)
class WholeBlock:
    """One block, ready to be stored; `data` has exactly block_bytes."""

    key: Hashes
    checksum: int
    data: bytes | bytearray


class PutAssembly:
    """Takes the messages after the header, gives whole blocks; holds at most one block.

    Args:
        block_bytes: bytes of each block of this KV group.
        hash_bytes: bytes of each prefix hash.
    """

    def __init__(self, block_bytes: int, hash_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._hash_bytes = hash_bytes
        self._key: Hashes | None = None
        self._checksum = 0
        self._data: bytes | bytearray = b""
        self._block_count = 0

    def take(self, message: wire.PutRequest) -> WholeBlock | None:
        """One message; the block that it completes, if it does.

        Raises:
            InvalidRequest: HEADER_REPEATED, BLOCK_NOT_STARTED, CHECKSUM_MISSING,
                DATA_TOO_SHORT, DATA_TOO_LONG, TOO_MANY_HASHES or HASH_LENGTH_MISMATCH.
        """
        kind = message.WhichOneof("message")
        if kind == "block":
            self._start(message.block)
        elif kind == "data":
            self._append(message.data)
        elif kind == "header":
            raise InvalidRequest(
                "HEADER_REPEATED", "only the first message of Put is a header; start another Put"
            )
        else:
            raise checks.invalid("message", "unset", "must be block or data")
        return self._completed()

    def finish(self) -> None:
        """The stream has ended. Raises InvalidRequest DATA_TOO_SHORT or EMPTY_RUN."""
        if self._key is not None:
            raise self._too_short()
        if self._block_count == 0:
            raise InvalidRequest("EMPTY_RUN", "the stream carried no block; send each block after the header")

    def _start(self, block: wire.PutBlock) -> None:
        if self._key is not None:
            raise self._too_short()
        if self._block_count == HASH_COUNT_MAX:
            raise checks.too_many_hashes(self._block_count + 1)
        if not block.HasField("checksum"):
            raise requests.checksum_missing("block.checksum")
        self._key = checks.one_hash("block.block_hash", block.block_hash, self._hash_bytes)
        self._checksum = block.checksum
        self._block_count += 1
        self._data = block.data
        self._check_length()

    def _append(self, data: bytes) -> None:
        if self._key is None:
            raise InvalidRequest(
                "BLOCK_NOT_STARTED", "data continues a block that is not complete; send block first"
            )
        if not isinstance(self._data, bytearray):
            self._data = bytearray(self._data)
        self._data += data
        self._check_length()

    def _completed(self) -> WholeBlock | None:
        if self._key is None or len(self._data) < self._block_bytes:
            return None
        whole = WholeBlock(self._key, self._checksum, self._data)
        self._key, self._data = None, b""
        return whole

    def _check_length(self) -> None:
        if len(self._data) > self._block_bytes:
            raise InvalidRequest(
                "DATA_TOO_LONG",
                f"block {self._block_count} of the stream has more than the namespace's "
                f"{self._block_bytes:,} bytes a block; send exactly that many",
                field="data",
                value=len(self._data),
                limit=self._block_bytes,
            )

    def _too_short(self) -> InvalidRequest:
        return InvalidRequest(
            "DATA_TOO_SHORT",
            f"block {self._block_count} of the stream ended after {len(self._data):,} of "
            f"{self._block_bytes:,} bytes; send the whole block before the next one",
            field="data",
            value=len(self._data),
            limit=self._block_bytes,
        )
