"""Loaded records in chains, parents first; what hangs in the air is told apart."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from prefixd_server.index.chains import chains_of
from prefixd_server.index.records import RECORD, Records

from tests.support.stores import hashes, run_records


def forest(parents: list[int], seed: int = 0) -> Records:
    """Records by the place of each one's parent; -1 is a root. In key order, as they are loaded."""
    records = np.zeros(len(parents), dtype=RECORD)
    records["hash"] = hashes(len(parents), seed)
    for place, parent in enumerate(parents):
        if parent >= 0:
            records["parent"][place] = records["hash"][parent]
            records["depth"][place] = records["depth"][parent] + 1
    shuffled = np.random.default_rng(seed).permutation(len(parents))
    return records[shuffled]


def reachable(records: Records) -> set[bytes]:
    """Hashes with all their ancestors, found one at a time."""
    parent_of = {row["hash"].tobytes(): (row["parent"].tobytes(), int(row["depth"])) for row in records}
    found: set[bytes] = set()
    for place in np.argsort(records["depth"], kind="stable"):
        key = records["hash"][place].tobytes()
        parent, depth = parent_of[key]
        if (depth == 0 and not any(parent)) or (parent in found and parent_of[parent][1] == depth - 1):
            found.add(key)
    return found


@settings(deadline=None)
@given(st.data())
def test_every_block_comes_after_its_parent_and_orphans_never(data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 60))
    parents = [data.draw(st.integers(-1, place - 1)) for place in range(count)]
    records = forest(parents, data.draw(st.integers(0, 1000)))
    kept = np.array([data.draw(st.integers(0, 9)) > 0 for _ in range(count)], dtype=bool)
    records = records[kept]
    found = chains_of(records, np.random.default_rng(1))
    assert {records["hash"][place].tobytes() for place in found.order} == reachable(records)
    assert sorted([*found.order, *found.orphans]) == list(range(len(records)))
    seen: set[bytes] = {bytes(32)}
    for number in range(len(found)):
        places = found.order[found.starts[number] : found.starts[number + 1]]
        assert len(places)
        before = found.parents[number]
        assert (before == -1) == (records["depth"][places[0]] == 0)
        expected = records["hash"][before].tobytes() if before >= 0 else bytes(32)
        assert expected in seen
        for place in places:
            assert records["parent"][place].tobytes() == expected
            expected = records["hash"][place].tobytes()
            seen.add(expected)


def test_a_run_is_one_chain_whatever_the_order_of_its_records() -> None:
    records = run_records(500)
    shuffled = records[np.random.default_rng(0).permutation(500)]
    found = chains_of(shuffled, np.random.default_rng(1))
    assert len(found) == 1
    assert shuffled["depth"][found.order].tolist() == list(range(500))


def test_a_missing_block_orphans_all_that_hangs_below_it() -> None:
    records = np.delete(run_records(10), 4)
    found = chains_of(records, np.random.default_rng(1))
    assert sorted(records["depth"][found.order]) == [0, 1, 2, 3]
    assert sorted(records["depth"][found.orphans]) == [5, 6, 7, 8, 9]


def test_a_depth_that_does_not_fit_its_parent_makes_an_orphan() -> None:
    records = run_records(5)
    records["depth"][3] = 7
    found = chains_of(records, np.random.default_rng(1))
    assert sorted(found.order) == [0, 1, 2]


def test_no_records_make_no_chains_of() -> None:
    found = chains_of(np.zeros(0, dtype=RECORD), np.random.default_rng(1))
    assert (len(found), len(found.order), len(found.orphans)) == (0, 0, 0)
