"""rpc/put_assembly.py."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_server.base.errors import InvalidRequest
from prefixd_server.rpc.put_assembly import PutAssembly, WholeBlock

BLOCK_BYTES = 10
HASH = b"h" * 32


def start(data: bytes, checksum: int | None = 7, key: bytes = HASH) -> wire.PutRequest:
    """A message that starts a block."""
    return wire.PutRequest(block=wire.PutBlock(block_hash=key, checksum=checksum, data=data))


def more(data: bytes) -> wire.PutRequest:
    """A message that continues it."""
    return wire.PutRequest(data=data)


def fed(*messages: wire.PutRequest) -> list[WholeBlock]:
    """Whole blocks of a stream."""
    assembly = PutAssembly(BLOCK_BYTES, 32)
    whole = [block for message in messages if (block := assembly.take(message)) is not None]
    assembly.finish()
    return whole


@given(
    st.binary(min_size=BLOCK_BYTES, max_size=BLOCK_BYTES), st.lists(st.integers(0, BLOCK_BYTES), max_size=5)
)
def test_however_a_block_is_cut_it_comes_out_whole(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), BLOCK_BYTES]
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    while len(pieces) > 1 and not pieces[-1]:
        pieces.pop()
    blocks = fed(start(pieces[0]), *map(more, pieces[1:]), start(data[::-1]))
    assert [bytes(block.data) for block in blocks] == [data, data[::-1]]
    assert blocks[0].key.tobytes() == HASH
    assert blocks[0].checksum == 7


def test_a_block_that_comes_whole_is_not_copied() -> None:
    (block,) = fed(start(b"x" * BLOCK_BYTES))
    assert isinstance(block.data, bytes)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "EMPTY_RUN"),
        ([start(b"x" * 11)], "DATA_TOO_LONG"),
        ([start(b"x" * 9), more(b"xx")], "DATA_TOO_LONG"),
        ([start(b"x" * 9)], "DATA_TOO_SHORT"),
        ([start(b"x" * 9), start(b"x" * 10)], "DATA_TOO_SHORT"),
        ([start(b"x" * 10), more(b"x")], "BLOCK_NOT_STARTED"),
        ([more(b"x")], "BLOCK_NOT_STARTED"),
        ([start(b"x" * 10, checksum=None)], "CHECKSUM_MISSING"),
        ([start(b"x" * 10, key=b"short")], "HASH_LENGTH_MISMATCH"),
        ([start(b""), wire.PutRequest(header=wire.PutHeader())], "HEADER_REPEATED"),
        ([wire.PutRequest()], "FIELD_INVALID"),
    ],
)
def test_each_fault_of_a_stream_has_its_reason(messages: list[wire.PutRequest], reason: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        fed(*messages)
    assert caught.value.reason == reason


def test_a_checksum_of_zero_is_a_checksum() -> None:
    (block,) = fed(start(b"x" * BLOCK_BYTES, checksum=0))
    assert block.checksum == 0
