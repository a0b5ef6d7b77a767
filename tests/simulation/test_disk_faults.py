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

SEEDS = int(os.environ.get("PREFIXD_DISK_SEEDS", "6"))
STEPS = 250


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
def test_a_life_on_a_failing_disk_serves_nothing_wrong_and_leaks_nothing(tmp_path: Path, seed: int) -> None:
    simulation = DiskSimulation(tmp_path, seed)
    simulation.run(STEPS)
    assert simulation.seen["block served"] > 0, "a life that serves nothing proves nothing"


def test_a_seed_replays_its_life(tmp_path: Path) -> None:
    lives: list[Counter[str]] = []
    for name in ("first", "second"):
        simulation = DiskSimulation(tmp_path / name, 1)
        simulation.run(60)
        lives.append(simulation.seen)
    assert lives[0] == lives[1]
