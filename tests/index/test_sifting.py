"""Which loaded records count, and in what order their blocks go into a catalog."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from prefixd_server.index.records import Keys, Records, keys_of
from prefixd_server.index.sifting import CHAIN_BLOCKS_MAX, Layout, Recoverable, Sieve

from tests.support.stores import SEGMENT_BYTES, SLOT_BYTES, SPACE, UUID, run_records

GENERATION = 7
STRIDE = SEGMENT_BYTES // 4096
LAYOUT = Layout(
    UUID,
    np.array([GENERATION, 0, GENERATION], dtype=np.uint64),
    np.array([SLOT_BYTES, 0, 4096]),
    SEGMENT_BYTES,
    STRIDE,
)


def records(count: int = 8) -> Records:
    made = run_records(count)
    made["generation"] = GENERATION
    return made


def sifted(*batches: Records) -> Recoverable:
    sieve = Sieve(LAYOUT, SPACE, SLOT_BYTES, SLOT_BYTES)
    for batch in batches:
        sieve.add(batch)
    return sieve.sorted(np.random.default_rng(1))


def as_set(keys: Keys) -> set[bytes]:
    return {key.tobytes() for key in keys}


def test_a_run_comes_out_parents_first_whatever_batches_it_came_in() -> None:
    made = records()
    made["checksum"] = np.arange(8)
    shuffled = made[np.random.default_rng(0).permutation(8)]
    found = sifted(shuffled[:3], shuffled[3:])
    assert found.hashes.tolist() == made["hash"].tolist()
    assert found.slots.tolist() == list(range(8))
    assert found.checksums.tolist() == list(range(8))
    assert (found.starts.tolist(), found.parents.tolist(), found.segments) == ([0, 8], [-1], [0])
    assert (len(found.misplaced), len(found.orphaned)) == (0, 0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"store_uuid": 1},
        {"segment": 1},
        {"segment": 2},
        {"segment": 99},
        {"generation": 8},
        {"generation": 0},
        {"slot": SEGMENT_BYTES // SLOT_BYTES},
        {"block_bytes": SLOT_BYTES - 1},
    ],
)
def test_a_record_out_of_place_is_told_apart_and_orphans_what_follows(wrong: dict[str, Any]) -> None:
    made = records()
    for name, value in wrong.items():
        made[name][5] = value
    found = sifted(made)
    assert found.hashes.tolist() == made["hash"][:5].tolist()
    assert as_set(found.misplaced) == as_set(keys_of(made[5:6]))
    assert as_set(found.orphaned) == as_set(keys_of(made[6:]))


def test_of_two_records_for_one_slot_the_one_used_last_counts() -> None:
    old, new = records(1), run_records(1, seed=2)
    new["generation"] = GENERATION
    old["last_use"], new["last_use"] = 10.0, 20.0
    found = sifted(new, old)
    assert found.hashes.tolist() == new["hash"].tolist()
    assert as_set(found.misplaced) == as_set(keys_of(old))


def test_runs_come_in_the_order_of_their_last_use() -> None:
    runs = [run_records(2, seed=seed) for seed in range(5)]
    for number, run in enumerate(runs):
        run["generation"] = GENERATION
        run["slot"] += 2 * number
        run["last_use"] = [30.0, 10.0, 50.0, 20.0, 40.0][number]
    found = sifted(*runs)
    assert found.last_use.tolist() == [10.0, 20.0, 30.0, 40.0, 50.0]
    assert found.slots[found.starts[:-1]].tolist() == [2, 6, 0, 8, 4]


def test_a_long_chain_is_cut_and_each_piece_hangs_below_the_one_before() -> None:
    layout = Layout(UUID, LAYOUT.generations, LAYOUT.slot_bytes, SEGMENT_BYTES * 100, STRIDE * 100)
    sieve = Sieve(layout, SPACE, SLOT_BYTES, SLOT_BYTES)
    sieve.add(records(2 * CHAIN_BLOCKS_MAX + 5))
    found = sieve.sorted(np.random.default_rng(1))
    assert found.starts.tolist() == [0, CHAIN_BLOCKS_MAX, 2 * CHAIN_BLOCKS_MAX, 2 * CHAIN_BLOCKS_MAX + 5]
    assert found.parents.tolist() == [-1, CHAIN_BLOCKS_MAX - 1, 2 * CHAIN_BLOCKS_MAX - 1]


def test_nothing_comes_of_nothing() -> None:
    found = sifted(records(0))
    assert (len(found), len(found.hashes), found.segments) == (0, 0, [])
