"""tests/soak/growth.py tells what grows from what does not: without that, a soak cannot fail."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.soak.growth import Holdings, at_rest, grown, holdings, memory_bytes, memory_grown

BEFORE = Holdings(50 << 20, 14, 93, 1, 47, 11, "93 sockets")
MIB = 1 << 20


@pytest.mark.parametrize(
    ("name", "more"), [("threads", 3), ("descriptors", 1), ("children", 1), ("files", 1), ("index_files", 60)]
)
def test_more_of_anything_is_growth(name: str, more: int) -> None:
    (problem,) = grown(BEFORE, replace(BEFORE, **{name: getattr(BEFORE, name) + more}))
    assert name.replace("_", " ") in problem
    assert grown(BEFORE, BEFORE) == []


def test_memory_that_goes_on_growing_is_growth_and_a_peak_is_not() -> None:
    steady = [50 * MIB + (7919 * n) % MIB for n in range(100)]
    assert memory_grown(steady) == []
    assert memory_grown([*steady[:40], 500 * MIB, *steady[40:]]) == []
    assert memory_grown([sample + n * MIB // 4 for n, sample in enumerate(steady)]) != []
    assert memory_grown([1, 2, 3]) != []


def test_what_a_process_holds_is_seen(tmp_path: Path) -> None:
    pid = os.getpid()
    before = holdings(pid, tmp_path)
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "table").touch()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    with (tmp_path / "kept").open("w"):
        after = at_rest(pid, tmp_path)
    stop.set()
    thread.join()
    assert after.descriptors == before.descriptors + 1
    assert after.threads == before.threads + 1
    assert (after.files, after.index_files) == (before.files + 1, before.index_files + 1)
    assert "kept" in after.kinds


def test_memory_is_the_processs_own() -> None:
    before = memory_bytes(os.getpid())
    held = bytearray(b"x") * (64 * MIB)
    assert 60 * MIB < memory_bytes(os.getpid()) - before < 80 * MIB
    assert len(held) == 64 * MIB
