"""Load or compute, how long to wait, and what a router is told: as the scheduler's hooks decide it."""

from __future__ import annotations

import pytest
from prefixd_client.connectors.vllm.metadata import StepOutcomes
from prefixd_client.connectors.vllm.scheduler import SchedulerSide
from prefixd_client.connectors.vllm.settings import Settings

from tests.support.vllm_hooks import TOKENS, answered, request, scheduled


def test_a_load_waits_for_nvme_no_longer_than_computing_takes(side, cache) -> None:
    times = iter([0.0, 0.5])
    side._now = lambda: next(times, 1.0)
    cache.lease = None
    first = request("first", tokens=160)
    answered(side, first)
    side.build(scheduled("first"))
    first.num_output_tokens = 1
    side.build(scheduled("first"))
    answered(side, request("second", tokens=81))
    assert cache.waits[0] == pytest.approx(2.0, abs=0.5)
    assert 0.1 < cache.waits[1] <= 0.25


def test_a_load_that_would_take_longer_than_computing_is_not_made(side, cache) -> None:
    side._estimates.computed(0.01, 1000)
    side._estimates.loaded(5.0, 10)
    asked = request()
    assert answered(side, asked) == (0, False)
    assert cache.lease.released.is_set()


def test_a_loads_time_is_learned_from_the_workers(side) -> None:
    asked = request()
    answered(side, asked)
    side.allocated(asked, range(50), 10 * TOKENS)
    (load,) = side.build(scheduled()).loads
    side.outcomes(StepOutcomes(loaded={load.job_id: (1, 10)}, load_seconds={load.job_id: 5.0}), set())
    side._estimates.computed(0.01, 1000)
    assert not side._estimates.load_pays(10)


def test_saves_and_lost_blocks_become_events(cache, monkeypatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    side = SchedulerSide(Settings(), TOKENS, 1, cache.acquire, cache.report, tell_events=True)
    side.use_namespace("namespace")
    asked = request(all_token_ids=list(range(200)))
    answered(side, asked)
    side.allocated(asked, range(50), 10 * TOKENS)
    (load,) = side.build(scheduled()).loads
    side.outcomes(StepOutcomes(loaded={load.job_id: (1, 4)}), set())
    (removed,) = side.events.take()
    assert removed.block_hashes == asked.block_hashes[4:10]
    asked.num_computed_tokens = 64
    (save,) = side.build(scheduled("r")).saves
    side.outcomes(StepOutcomes(saved={save.job_id: (1, 4)}), set())
    (stored,) = side.events.take()
    assert stored.block_hashes == asked.block_hashes[:4]
    side.close()
