"""The portable path: blocks as bytes through gRPC, for what cannot map the daemon's memory. Pure.

Messages to send and messages received, for the sync and the async client alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2

from .calls import AnswerRejected, block_bytes_of, checked_hashes, decline_reason_of
from .device_memory import checksum_of
from .errors import InvalidArgument
from .namespace import ChecksumAlgorithm, NamespaceSpec
from .values import PutResult

PIECE_BYTES = 1 << 20
"""Of a block in one message."""


class PutStream:
    """The messages of one put, made as they are asked for.

    Attributes:
        given_count: blocks taken from the caller so far.
        error: what the caller's iterable raised, or what was wrong with its blocks; gRPC would hide it.
    """

    def __init__(
        self,
        spec: NamespaceSpec,
        blocks: Iterable[tuple[bytes, bytes]],
        *,
        parent_hash: bytes,
        shard: int,
        kv_group: int,
    ) -> None:
        self._spec = spec
        self._blocks = blocks
        self._block_bytes = block_bytes_of(spec, shard, kv_group)
        if parent_hash:
            checked_hashes([parent_hash], spec, "parent_hash")
        self._parent_hash = parent_hash
        self._shard = shard
        self._kv_group = kv_group
        self.given_count = 0
        self.error: BaseException | None = None

    def messages(self, ref: types_pb2.NamespaceRef) -> Iterator[wire.PutRequest]:
        """Header first, then each block in pieces. Ends early, with error set, at a wrong block."""
        header = wire.PutHeader(
            namespace=ref, shard=self._shard, kv_group=self._kv_group, parent_hash=self._parent_hash
        )
        yield wire.PutRequest(header=header)
        try:
            for block_hash, data in self._checked():
                first = wire.PutBlock(
                    block_hash=block_hash,
                    checksum=checksum_of(data, self._spec.checksum_algorithm),
                    data=data[:PIECE_BYTES],
                )
                yield wire.PutRequest(block=first)
                for start in range(PIECE_BYTES, len(data), PIECE_BYTES):
                    yield wire.PutRequest(data=data[start : start + PIECE_BYTES])
        except GeneratorExit:
            raise
        except BaseException as error:
            self.error = error
            raise

    def _checked(self) -> Iterator[tuple[bytes, bytes]]:
        for block_hash, data in self._blocks:
            checked_hashes([block_hash], self._spec, "block_hash")
            if len(data) != self._block_bytes:
                raise InvalidArgument(
                    "data",
                    f"{len(data)} bytes",
                    f"a block has {self._block_bytes} bytes",
                    "check the KV group",
                )
            self.given_count += 1
            yield block_hash, bytes(data)

    def drain(self) -> int:
        """Checks and counts what the caller gave beyond what was sent; the total."""
        for _ in self._checked():
            pass
        return self.given_count

    def result(self, answer: wire.PutResponse) -> PutResult:
        """What became of the blocks."""
        return PutResult(
            answer.stored_count, answer.present_count, answer.declined_count, decline_reason_of(answer)
        )


class GetAssembly:
    """Puts the blocks of one get together and verifies each."""

    def __init__(
        self,
        block_bytes: int,
        asked: int,
        algorithm: ChecksumAlgorithm = ChecksumAlgorithm.XXH3_64,
    ) -> None:
        self._algorithm = algorithm
        self._block_bytes = block_bytes
        self._asked = asked
        self.blocks: list[bytes] = []
        """Verified blocks, from the start of the run."""
        self._pending = bytearray()
        self._checksum = 0

    def take(self, message: wire.GetResponse) -> None:
        """One message. Raises AnswerRejected when it does not fit, or when a block's bytes are wrong."""
        kind = message.WhichOneof("message")
        if kind == "summary":
            if message.summary.hit_block_count and message.summary.block_bytes != self._block_bytes:
                raise AnswerRejected(
                    f"blocks of {message.summary.block_bytes} bytes, not {self._block_bytes}"
                )
        elif kind == "block":
            if (
                self._pending
                or message.block.block_index != len(self.blocks)
                or len(self.blocks) >= self._asked
            ):
                raise AnswerRejected(f"block {message.block.block_index} out of order")
            self._checksum = message.block.checksum
            self._add(message.block.data)
        elif kind == "data":
            self._add(message.data)

    def _add(self, data: bytes) -> None:
        self._pending += data
        if len(self._pending) > self._block_bytes:
            raise AnswerRejected(f"more than {self._block_bytes} bytes in a block")
        if len(self._pending) == self._block_bytes:
            block = bytes(self._pending)
            if checksum_of(block, self._algorithm) != self._checksum:
                raise AnswerRejected(f"block {len(self.blocks)} does not match its checksum")
            self.blocks.append(block)
            self._pending.clear()


def get_request(
    spec: NamespaceSpec,
    ref: types_pb2.NamespaceRef | None,
    hashes: Sequence[bytes],
    shard: int,
    kv_group: int,
    limit: int,
) -> wire.GetRequest:
    """The request for the first `limit` blocks of a run."""
    run = checked_hashes(hashes, spec)[:limit]
    return wire.GetRequest(namespace=ref, shard=shard, kv_group=kv_group, block_hashes=run)
