"""One block between a slot and the engine's memory, whatever its pieces."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixd_client import InvalidArgument
from prefixd_client.copy import PART_BYTES, UNALIKE_PART_BYTES, checksum_of, read_block, write_block
from prefixd_client.layout import paged_blocks, pieces_of

SIZES = [
    1,
    4095,
    4096,
    PART_BYTES - 1,
    2 * PART_BYTES,
    2 * PART_BYTES + 1,
    5 * PART_BYTES + 17,
    2 * UNALIKE_PART_BYTES,
]


def memory(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_block_is_copied_whole_and_its_checksum_is_of_all_its_bytes(nbytes, pieces, shift) -> None:
    source, slot, target = memory(nbytes), np.zeros(nbytes + 64, np.uint8)[shift:], np.zeros(nbytes, np.uint8)
    cut = [part for part in np.array_split(source, pieces) if part.size]
    expected = xxhash.xxh3_64_intdigest(source)
    assert write_block(slot.ctypes.data, pieces_of(cut, nbytes, writable=False)) == expected
    assert (slot[:nbytes] == source).all()
    assert not slot[nbytes:].any()
    assert read_block(slot.ctypes.data, pieces_of(target, nbytes, writable=True)) == expected
    assert (target == source).all()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.lists(st.integers(1, 5000), max_size=12))
def test_pieces_of_any_sizes_hold_the_same_block(sizes, other) -> None:
    nbytes = sum(sizes)
    source, slot, target = memory(nbytes, 1), np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    cuts = np.cumsum(sizes)[:-1]
    other_cuts = [cut for cut in np.cumsum(other) if cut < nbytes]
    written = write_block(slot.ctypes.data, pieces_of(np.split(source, cuts), nbytes, writable=False))
    read = read_block(slot.ctypes.data, pieces_of(np.split(target, other_cuts), nbytes, writable=True))
    assert written == read == checksum_of(source.tobytes())
    assert (target == source).all()


def test_a_checksum_is_xxh3_64_of_seed_0() -> None:
    assert checksum_of(b"") == 0x2D06800538D394C2
    assert checksum_of(b"prefixd") == xxhash.xxh3_64(b"prefixd", seed=0).intdigest()


class Tensor:
    """What torch's tensors look like to the client."""

    def __init__(self, array, *, contiguous=True, device="cpu") -> None:
        self._array, self._contiguous = array, contiguous
        self.nbytes = array.nbytes
        self.device = type("Device", (), {"type": device})()

    def data_ptr(self):
        return self._array.ctypes.data

    def is_contiguous(self):
        return self._contiguous

    def __len__(self):
        return len(self._array)


@pytest.mark.parametrize(
    "wrap", [lambda a: a, memoryview, Tensor, lambda a: (a.ctypes.data, a.nbytes), lambda a: [a]]
)
def test_every_kind_of_memory_is_found(wrap) -> None:
    array = memory(64)
    assert pieces_of(wrap(array), 64, writable=True) == ((array.ctypes.data, 64),)


@pytest.mark.parametrize(
    "wrong",
    [
        Tensor(memory(64), contiguous=False),
        Tensor(memory(64), device="cuda"),
        memory(128)[::2],
        memory(65),
        [memory(32), memory(31)],
        [],
        (0, 64),
        "text",
    ],
)
def test_memory_that_cannot_be_copied_is_refused(wrong) -> None:
    with pytest.raises(InvalidArgument):
        pieces_of(wrong, 64, writable=False)


def test_a_paged_cache_gives_one_piece_per_layer() -> None:
    keys, values = memory(4 * 32).reshape(4, 32), memory(4 * 16).reshape(4, 16)
    (block,) = paged_blocks([keys, Tensor(values)], [2])
    assert block == ((keys[2].ctypes.data, 32), (values[2].ctypes.data, 16))
    with pytest.raises(InvalidArgument, match="block_ids"):
        paged_blocks([keys, values], [4])
