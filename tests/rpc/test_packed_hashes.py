"""rpc/packed_hashes.py: the fast way agrees with the plain one, or declines."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixd.v1 import admin_service_pb2, cache_service_pb2, types_pb2
from prefixd_server.base.errors import InvalidRequest
from prefixd_server.base.types import hashes_from_bytes
from prefixd_server.rpc import checks
from prefixd_server.rpc.packed_hashes import packed_hashes

CARRIERS = [
    message
    for module in (admin_service_pb2, cache_service_pb2)
    for message in vars(module).values()
    if isinstance(message, type) and "block_hashes" in message.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined]  # messages are made at run time
]


def filled(kind: Any, hashes: list[bytes]) -> Any:
    """A request of this kind with something in every other field, parsed from its bytes."""
    request = kind(block_hashes=hashes)
    request.namespace.CopyFrom(types_pb2.NamespaceRef(fingerprint=hashes[0], epoch=3))
    for field in kind.DESCRIPTOR.fields:
        if field.type == field.TYPE_BYTES and not field.is_repeated:
            setattr(request, field.name, hashes[0])
        if field.type == field.TYPE_UINT32 and not field.is_repeated:
            setattr(request, field.name, 7)
    return kind.FromString(request.SerializeToString())


@pytest.mark.parametrize("kind", CARRIERS)
@pytest.mark.parametrize("hash_bytes", [16, 32])
@settings(max_examples=20)
@given(words=st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=100))
def test_equally_long_hashes_are_packed_whatever_is_around_them(
    kind: Any, hash_bytes: int, words: list[bytes]
) -> None:
    hashes = [word[:hash_bytes] for word in words]
    packed = packed_hashes(filled(kind, hashes), hash_bytes)
    assert packed is not None
    assert packed.tolist() == hashes_from_bytes(hashes, hash_bytes).tolist()


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=100), st.sampled_from([16, 32]))
def test_other_lengths_are_declined(hashes: list[bytes], hash_bytes: int) -> None:
    request = filled(cache_service_pb2.LookupRequest, hashes)
    if {len(item) for item in hashes} != {hash_bytes}:
        assert packed_hashes(request, hash_bytes) is None


def test_fields_of_a_newer_version_do_no_harm() -> None:
    hashes = [bytes([index]) * 32 for index in range(64)]
    encoded = cache_service_pb2.LookupRequest(block_hashes=hashes).SerializeToString()
    unknown = b"\xfa\x01\x04\x12\x20ab"
    for data in (unknown + encoded, encoded + unknown, encoded[:34] + unknown + encoded[34:]):
        request = cache_service_pb2.LookupRequest.FromString(data)
        assert checks.run(request, 32).tobytes() == b"".join(hashes)


@pytest.mark.parametrize("wrong", [0, 30, 63])
def test_one_wrong_length_in_a_long_run_is_found_and_named(wrong: int) -> None:
    hashes = [bytes([index]) * 32 for index in range(64)]
    hashes[wrong] = b"short"
    with pytest.raises(InvalidRequest, match=rf"block_hashes\[{wrong}\] has 5 bytes"):
        checks.run(cache_service_pb2.LookupRequest(block_hashes=hashes), 32)
