"""The chain sha256_u32le: stable for ever, prefix by prefix, injective."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixd_client import InvalidArgument
from prefixd_client.prefix_hash import chain_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_the_chain_is_what_the_documentation_says() -> None:
    root = hashlib.sha256(b"prefixd-prefix-v1\nseed").digest()
    first = hashlib.sha256(root + struct.pack("<2I", 1, 2)).digest()
    second = hashlib.sha256(first + struct.pack("<2I", 3, 2**32 - 1) + b"image").digest()
    assert chain_hashes([1, 2, 3, 2**32 - 1, 5], 2, seed=b"seed", extra=[None, b"image"]) == [first, second]


@given(TOKENS, TOKENS, st.integers(1, 7))
def test_a_longer_prompt_extends_the_run_of_its_prefix(prefix, rest, block_tokens) -> None:
    short, long = chain_hashes(prefix, block_tokens), chain_hashes(prefix + rest, block_tokens)
    assert long[: len(short)] == short
    assert len(long) == (len(prefix) + len(rest)) // block_tokens


@given(TOKENS, TOKENS, st.integers(1, 7))
def test_runs_agree_exactly_as_far_as_their_blocks_do(one, other, block_tokens) -> None:
    for index, (a, b) in enumerate(
        zip(chain_hashes(one, block_tokens), chain_hashes(other, block_tokens), strict=False)
    ):
        end = (index + 1) * block_tokens
        assert (a == b) == (one[:end] == other[:end])


def test_arrays_and_lists_of_tokens_are_the_same() -> None:
    tokens = list(range(20))
    for kind in (np.int32, np.int64, np.uint32):
        assert chain_hashes(np.array(tokens, kind), 4) == chain_hashes(tokens, 4)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (([-1] * 4, 4), "token_ids"),
        (([2**32] * 4, 4), "token_ids"),
        (([0.5] * 4, 4), "token_ids"),
        (([1] * 4, 0), "block_tokens"),
    ],
)
def test_what_cannot_be_hashed_is_named(arguments, field) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chain_hashes(*arguments)
    assert caught.value.field == field


def test_extra_bytes_come_one_per_full_block() -> None:
    with pytest.raises(InvalidArgument, match="extra"):
        chain_hashes([1] * 8, 4, extra=[b"x"])
