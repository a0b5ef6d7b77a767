"""The daemon killed at any moment of its work on NVMe, and opened again (DESIGN laws 1, 4 and 9).

After each kill: no wrong byte is served, what was dropped stays dropped, no slot is lost, `check` is clean.
PREFIXD_CRASH_SEEDS says how many random kills there are; a seed replays the load, not the kernel's timing.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nvme_daemon import (
    MODELS,
    Load,
    NvmeDaemon,
    assert_balanced,
    assert_nothing_leaks,
    wait_for,
)
from tests.support.wire import short_directory

SEEDS = int(os.environ.get("PREFIXD_CRASH_SEEDS", "15"))
SEEDS_PER_STORE = 5
"""Each store lives through so many kills."""
DROP_SHARE = 0.003
"""Part of a random load's steps that drop a namespace."""
STEPS = 100_000
"""More than any daemon lives for."""
STORED_RUN_COUNT = 4
"""Runs of each namespace that NVMe has before a death: some outlast what comes, and segments are left."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with short_directory() as made:
        yield made


def fill_until_stored(daemon: NvmeDaemon, load: Load) -> None:
    """Puts until NVMe has runs of both namespaces, however slow the disk is; nothing is dropped meanwhile."""
    drop_share, load.drop_share = load.drop_share, 0.0
    while min(sum(model == one for one, _ in load.kept) for model in MODELS) < STORED_RUN_COUNT:
        load.run(daemon, 5)
        load.keep_stored(daemon)
    load.drop_share = drop_share


def die_under_load(daemon: NvmeDaemon, load: Load, rng: random.Random) -> None:
    """Kills the daemon at a random moment of the load."""
    timer = threading.Timer(rng.uniform(0.02, 0.4), daemon.signal, (signal.SIGKILL,))
    timer.start()
    load.run(daemon, STEPS)
    timer.join()
    assert daemon.wait() == -signal.SIGKILL


@pytest.mark.parametrize("first", range(1, SEEDS + 1, SEEDS_PER_STORE))
def test_a_daemon_killed_at_random_serves_nothing_wrong_and_loses_no_space(
    directory: Path, first: int
) -> None:
    rng = random.Random(first)
    load = Load(rng, drop_share=0.0)
    survived = 0
    with NvmeDaemon(directory) as daemon:
        daemon.wait_until_recovered()
        load.begin(daemon)
        fill_until_stored(daemon, load)
        die_under_load(daemon, load, rng)
    load.drop_share = DROP_SHARE
    for number in range(1, min(SEEDS_PER_STORE, SEEDS + 1 - first)):
        with NvmeDaemon(directory) as daemon:
            # Now and then the load begins while recovery is still at work.
            if rng.random() < 0.8:
                daemon.wait_until_recovered()
            load.begin(daemon)
            survived += load.verify(daemon, 1.0 if number == 1 else rng.choice((0.0, 1.0)))
            assert_balanced(daemon)
            die_under_load(daemon, load, rng)
    with NvmeDaemon(directory) as daemon:
        daemon.wait_until_recovered()
        load.begin(daemon)
        assert_balanced(daemon)
        survived += load.verify(daemon)
        assert_nothing_leaks(daemon, load.refs)
    assert survived > 0, "a store that forgets everything proves nothing"


IN_THE_DAEMON = {
    "nvme.generation_raised": 3,
    "demotion.begun": 8,
    "nvme.written": 9,
    "nvme.flushed": 6,
    "demotion.recorded": 7,
    "demotion.published": 5,
    "departures.begun": 4,
    "departures.deleted": 5,
    "departures.freed": 6,
    "drop.written": 1,
    "drop.renamed": 1,
    "drop.durable": 1,
}
"""Where the daemon dies under load, and at which time."""
IN_THE_INDEX = {"index.log_written": 6, "index.log_synced": 9}
IN_RECOVERY = {
    "recovery.loaded": 1,
    "recovery.step": 1,
    "recovery.space_done": 1,
    "recovery.deleted": 1,
    "recovery.forgotten": 1,
    "recovery.freed": 1,
    "index.log_written": 1,
    "index.log_synced": 1,
}
"""Where it dies, or its index does, while it recovers; the last two at the delete of what is no use."""


def reopened(directory: Path, load: Load) -> None:
    """What must hold after any death."""
    with NvmeDaemon(directory) as daemon:
        daemon.wait_until_recovered()
        load.begin(daemon)
        assert_balanced(daemon)
        assert load.verify(daemon) > 0, "a store that forgets everything proves nothing"
        assert_nothing_leaks(daemon, load.refs)


@pytest.mark.parametrize("name", IN_THE_DAEMON)
def test_a_daemon_that_dies_at_this_step_has_lied_about_nothing(directory: Path, name: str) -> None:
    load = Load(random.Random(name))
    with NvmeDaemon(directory) as daemon:
        daemon.wait_until_recovered()
        load.begin(daemon)
        fill_until_stored(daemon, load)
    # Elsewhere what room is made for departs, too, and leaves something to be found.
    load.drop_share = 0.05 if name.startswith("drop.") else 0.0
    with NvmeDaemon(directory, f"{name}={IN_THE_DAEMON[name]}") as daemon:
        daemon.wait_until_recovered()
        load.begin(daemon)
        load.run(daemon, STEPS)
        assert daemon.wait() == -signal.SIGKILL, "it died of the failpoint and of nothing else"
    reopened(directory, load)


@pytest.mark.parametrize("name", IN_THE_INDEX)
def test_an_index_that_dies_at_this_step_takes_nothing_along(directory: Path, name: str) -> None:
    load = Load(random.Random(name), drop_share=0.0)
    with NvmeDaemon(directory, f"{name}={IN_THE_INDEX[name]}") as daemon:
        daemon.wait_until_recovered()
        load.begin(daemon)
        while "index unavailable" not in daemon.log:
            load.run(daemon, 10)
            load.keep_stored(daemon)
        load.run(daemon, 20)
        load.keep_stored(daemon)
        assert load.kept, "it had stored something before its index died"
        assert daemon.problems() == []
    reopened(directory, load)


@pytest.mark.parametrize("name", IN_RECOVERY)
def test_a_death_while_recovering_changes_nothing(directory: Path, name: str) -> None:
    load = Load(random.Random(name), drop_share=0.05)
    with NvmeDaemon(directory, "drop.durable=1") as daemon:
        daemon.wait_until_recovered()
        load.begin(daemon)
        fill_until_stored(daemon, load)
        load.run(daemon, STEPS)
    with NvmeDaemon(directory, f"{name}={IN_RECOVERY[name]}") as daemon:
        if name.startswith("index."):
            wait_for(lambda: "index unavailable" in daemon.log, "the death of the index")
            daemon.kill()
        daemon.wait()
    reopened(directory, load)
