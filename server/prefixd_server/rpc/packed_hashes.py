"""Takes the hashes of a long run out of the encoded request: numpy calls instead of an object per hash.

In the wire format a repeated bytes field is a record per element: a tag byte, a
length byte, the bytes. Equally long elements therefore make an array. Encoding
a parsed message again is fast and puts the elements next to each other.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from prefixd_server.base.types import HASH_BYTES_MAX, HASH_WORDS, Hashes

_LENGTH_DELIMITED = 2


def packed_hashes(request: Any, hash_bytes: int) -> Hashes | None:
    """The block_hashes of a request, shape (blocks, 4).

    Args:
        request: a message with at least one block hash.
        hash_bytes: 16 or 32.

    Returns:
        None when the elements are not all `hash_bytes` long, or do not lie next
        to each other: then somebody must look at them one by one.
    """
    tag = _tag(request.DESCRIPTOR)
    encoded: bytes = request.SerializeToString()
    first: bytes = request.block_hashes[0]
    start = encoded.find(bytes((tag, hash_bytes)) + first)
    count = len(request.block_hashes)
    record = _record(hash_bytes)
    if start < 0 or len(encoded) - start < count * record.itemsize:
        return None
    records = np.frombuffer(encoded, record, count, start)
    if (records["head"] != tag + (hash_bytes << 8)).any():
        return None
    if hash_bytes == HASH_BYTES_MAX:
        return np.ascontiguousarray(records["hash"])
    padded = np.zeros((count, HASH_WORDS), dtype=np.uint64)
    padded[:, : hash_bytes // 8] = records["hash"]
    return padded


@lru_cache(maxsize=64)
def _tag(descriptor: Any) -> int:
    number: int = descriptor.fields_by_name["block_hashes"].number
    assert number < 16, "one tag byte"
    return number << 3 | _LENGTH_DELIMITED


@lru_cache(maxsize=4)
def _record(hash_bytes: int) -> np.dtype[Any]:
    return np.dtype([("head", "<u2"), ("hash", "<u8", hash_bytes // 8)])
