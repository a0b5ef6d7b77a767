"""LANES_64: the same on every side, and it sees what it says it sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from prefixd_client.device_memory import lanes_64, lanes_64_of
from prefixd_server.base.types import ChecksumAlgorithm
from prefixd_server.media.checksum import checksum

KNOWN = {
    1: 0xAF8B944A8A836970,
    4096: 0x573E82F09501DDB,
    65_536: 0x3E3E8ACF5AA4C4EF,
    100_000: 0x843E4A9358C8B4AF,
}
"""By length, of bytes 0, 1, 2, ... modulo 251."""


def pattern(length: int) -> bytes:
    return (np.arange(length, dtype=np.int64) % 251).astype(np.uint8).tobytes()


def server(data: bytes) -> int:
    return checksum(memoryview(data), ChecksumAlgorithm.LANES_64)


@pytest.mark.parametrize("length", [1, 7, 4096, 4097, 65_536, 100_000, 3 * 4096 * 128 + 5])
def test_daemon_client_and_tensors_agree(length: int) -> None:
    data = pattern(length)
    tensor = torch.frombuffer(bytearray(data * 2), dtype=torch.uint8).view(2, length)
    assert server(data) == lanes_64(data)
    assert lanes_64_of(tensor) == [lanes_64(data)] * 2


@pytest.mark.parametrize(("length", "expected"), KNOWN.items())
def test_it_is_what_it_was(length: int, expected: int) -> None:
    assert lanes_64(pattern(length)) == expected


def test_length_counts_though_the_padding_is_zeros() -> None:
    assert len({lanes_64(bytes(length)) for length in (1, 2, 4095, 4096, 4097, 8192)}) == 6


@pytest.mark.parametrize("words", [1, 2, 3])
def test_any_change_of_up_to_three_words_is_seen(words: int) -> None:
    rng = np.random.default_rng(words)
    data = np.frombuffer(rng.bytes(64 * 4096), "<u8").copy()
    before = lanes_64(data)
    for _ in range(200):
        changed = data.copy()
        where = rng.choice(len(data), words, replace=False)
        if words == 2:
            changed[where] = changed[where[::-1]]
        else:
            changed[where] ^= np.uint64(1) << np.uint64(63)
        assert lanes_64(changed) != before


def test_swapped_rows_and_blocks_torn_between_two_writers_are_seen() -> None:
    rng = np.random.default_rng(9)
    one, two = (np.frombuffer(rng.bytes(32 * 4096), "<u8").reshape(32, 512) for _ in range(2))
    swapped = one.copy()
    swapped[[3, 7]] = swapped[[7, 3]]
    assert lanes_64(swapped.tobytes()) != lanes_64(one.tobytes())
    torn = {lanes_64(np.concatenate([one[:at], two[at:]]).tobytes()) for at in range(33)}
    assert len(torn) == 33


def test_a_rectangle_of_changes_that_cancel_is_what_it_cannot_see() -> None:
    grid = np.zeros((4, 512), "<u8")
    changed = grid.copy()
    changed[0, 0] = changed[1, 1] = 5
    changed[0, 1] = changed[1, 0] = np.uint64(2**64 - 5)
    assert lanes_64(changed.tobytes()) == lanes_64(grid.tobytes())
