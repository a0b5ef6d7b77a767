"""Random lives of a node on a failing disk, from seeds: a fault in the middle of anything leaks nothing.

A failure names its seed, and the seed replays it: time, movers and index are all the test's.
PREFIXD_DISK_SEEDS says how many lives there are.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.support.disk_simulation import DiskSimulation
from tests.support.node import packed

SEEDS = int(os.environ.get("PREFIXD_DISK_SEEDS", "6"))
STEPS = 250


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_a_life_on_a_failing_disk_serves_nothing_wrong_and_leaks_nothing(tmp_path: Path, seed: int) -> None:
    simulation = DiskSimulation(tmp_path, seed)
    simulation.run(STEPS)
    assert simulation.seen["block served"] > 0, "a life that serves nothing proves nothing"


@pytest.mark.parametrize("replaced", [0, 1])
def test_rows_that_serve_another_namespace_before_a_demotion_begins_are_not_written_as_the_former(
    tmp_path: Path, replaced: int
) -> None:
    """A record under another namespace's name would serve foreign bytes after a restart."""
    simulation = DiskSimulation(tmp_path, 1)
    simulation.tell(lambda: reuse_rows(simulation, replaced))


async def reuse_rows(simulation: DiskSimulation, replaced: int) -> None:
    node, (one, two) = simulation.node, simulation.engines.values()
    assert node.cache.storage is not None
    runs = [one.put("one", number, *range(2)) for number in range(2)]
    catalog = node.cache.state.catalog
    space = catalog.namespaces.space(catalog.namespaces.get("red", one.ref), 0, 0)
    rows = catalog.find(space, packed([*runs[0], *runs[1]]))
    task = node.cache.storage.transfers.begin_demotion(rows)
    node.cache.evict("red", one.ref, packed(runs[replaced]), 0)
    others = two.put("two", *range(3))
    other_space = catalog.namespaces.space(catalog.namespaces.get("red", two.ref), 0, 0)
    assert set(catalog.find(other_space, packed(others))) < set(rows), "the rows are used again"
    await task


def test_a_seed_replays_its_life(tmp_path: Path) -> None:
    lives: list[Counter[str]] = []
    for name in ("first", "second"):
        simulation = DiskSimulation(tmp_path / name, 1)
        simulation.run(60)
        lives.append(simulation.seen)
    assert lives[0] == lives[1]
