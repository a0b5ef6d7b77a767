"""What lies on NVMe alone is found, waited for and loaded, also after the daemon's restart."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixd.v1 import types_pb2

from tests.support.daemon_command import DaemonCommand

pytest.importorskip("torch")

from tests.support.sglang_contract import Controller, host_pool, keys, scrambled

NVME = ("--set", "nvme.size=128MiB", "--set", "nvme.segment=4MiB", "--set", "dram.segment=2MiB")
BLOCKS = 20
PROMPT_COUNT = 6
"""120 blocks of 192 KiB: more than the daemon's memory leaves without copies on NVMe."""
COPY_TIMEOUT_S = 30.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[DaemonCommand]:
    """Memory for 80 blocks, and room for all on NVMe."""
    with (
        tempfile.TemporaryDirectory(prefix="pfx") as directory,
        DaemonCommand(Path(directory), "--data-dir", str(tmp_path), *NVME, dram="16MiB") as running,
    ):
        yield running
        assert running.problems() == []


def test_blocks_on_nvme_alone_are_found_and_loaded_after_a_restart(node, storage_of) -> None:
    pool = host_pool("page_first_direct", heads=64)
    controller = Controller(storage_of(node, pool), pool, zero_copy=True)
    source, target = controller.room(BLOCKS), controller.room(BLOCKS)
    expected = {}
    for seed in range(PROMPT_COUNT):
        scrambled(pool, seed)
        assert controller.save(keys(BLOCKS, seed), source)
        expected[seed] = controller.bytes_at(source)
    deadline = time.monotonic() + COPY_TIMEOUT_S
    while node.tier(types_pb2.TIER_NVME).resident_slot_count < BLOCKS:
        assert time.monotonic() < deadline, node.stats()
        time.sleep(0.05)  # polls another process: there is nothing to wait on
    node.kill()
    node.start()
    node.wait_until_attached(1)
    # It still opens its namespace; and the oldest prompts may be gone.
    while not any(controller.hits(keys(BLOCKS, seed)) for seed in range(PROMPT_COUNT)):
        assert time.monotonic() < deadline, node.stats()
    loaded = 0
    for seed in range(PROMPT_COUNT):
        found = controller.hits(keys(BLOCKS, seed))
        assert controller.load(keys(BLOCKS, seed), target) == found
        assert controller.bytes_at(target)[:found] == expected[seed][:found]
        loaded += found
    assert loaded >= BLOCKS
