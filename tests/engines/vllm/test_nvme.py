"""What lies on NVMe: a request waits for it while that pays, and a queued one finds it in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prefixd.v1 import types_pb2
from prefixd_client.values import Tier

from tests.support.daemon_command import DaemonCommand
from tests.support.vllm_harness import BLOCK_TOKENS, VOCABULARY, Harness, right_reply

NVME = ("--set", "nvme.size=128MiB", "--set", "nvme.segment=4MiB", "--set", "dram.segment=2MiB")
PROMPT_BLOCKS = 30
PROMPT_COUNT = 16
"""480 blocks: less than memory holds, and more than the daemon leaves without copies."""
COPY_TIMEOUT_S = 30.0


def tokens(seed: int) -> list[int]:
    """A prompt of 30 blocks and a bit."""
    count = PROMPT_BLOCKS * BLOCK_TOKENS + 7
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, count)]


@pytest.fixture
def daemon(short_path: Path, tmp_path: Path) -> Iterator[DaemonCommand]:
    """Memory for 512 blocks, and room for all of them on NVMe."""
    with DaemonCommand(short_path, "--data-dir", str(tmp_path), *NVME, dram="16MiB") as running:
        yield running
        assert running.problems() == []
        assert running.leases() == []


def tiers(engine: Harness, hashes: list[bytes]) -> dict[Tier, int]:
    """Where the run lies."""
    spec = engine.connector._side.namespace
    assert spec is not None
    return dict(engine.connector._namespaces.open(spec).lookup(hashes).hits)


def on_nvme_alone(daemon: DaemonCommand, engine_of: Callable[..., Harness], **way: Any) -> int:
    """Fills memory until the daemon copies to NVMe, and restarts it; the prompt of which most is there."""
    with engine_of(daemon, **way) as writer:
        for seed in range(PROMPT_COUNT):
            writer.ask(tokens(seed), 1)
    deadline = time.monotonic() + COPY_TIMEOUT_S
    while daemon.tier(types_pb2.TIER_NVME).resident_slot_count < PROMPT_BLOCKS:
        assert time.monotonic() < deadline, daemon.stats()
        time.sleep(0.05)  # polls another process: there is nothing to wait on
    daemon.kill()
    daemon.start()
    with engine_of(daemon, **way) as looker:
        daemon.wait_until_attached(2)
        counts = [tiers(looker, hashes_of(looker, seed)).get(Tier.NVME, 0) for seed in range(PROMPT_COUNT)]
    assert max(counts) > 0
    return counts.index(max(counts))


def hashes_of(engine: Harness, seed: int) -> list[bytes]:
    """The prompt's prefix hashes."""
    request_id = engine.add(tokens(seed), max_tokens=1)
    hashes = [bytes(key) for key in engine.scheduler.requests[request_id].block_hashes]
    engine.abort(request_id)
    return hashes


@pytest.mark.parametrize("way", [{}, {"async_load": False}, {"ranks": 2}], ids=str)
def test_a_request_waits_for_what_lies_on_nvme(daemon, engine_of, way) -> None:
    seed = on_nvme_alone(daemon, engine_of, **way)
    with engine_of(daemon, wait_max_s=10.0, **way) as engine:
        kept = tiers(engine, hashes_of(engine, seed))[Tier.NVME]
        request_id = engine.add(tokens(seed))
        engine.run()
        assert engine.replies[request_id] == right_reply(tokens(seed), 4)
        assert engine.cached[request_id] == kept * BLOCK_TOKENS


def test_what_a_queued_request_will_ask_for_is_brought_ahead(daemon, engine_of) -> None:
    seed = on_nvme_alone(daemon, engine_of)
    with engine_of(daemon, max_requests=1) as engine:
        hashes = hashes_of(engine, seed)
        kept = tiers(engine, hashes)[Tier.NVME]
        busy = engine.add(tokens(100), max_tokens=900)
        engine.step()
        queued = engine.add(tokens(seed))
        while tiers(engine, hashes).get(Tier.DRAM) != kept:
            engine.step()
            assert busy in engine.scheduler.requests, f"not brought while it waited: {tiers(engine, hashes)}"
        assert not engine.replies[queued]
        engine.abort(busy)
        engine.run()
        assert engine.replies[queued] == right_reply(tokens(seed), 4)
        assert engine.cached[queued] == kept * BLOCK_TOKENS
