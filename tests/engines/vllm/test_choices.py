"""Load or compute, how long to wait, and what a router is told: as the scheduler's hooks decide it."""

from __future__ import annotations

import threading

import pytest
from prefixd_client.connectors.vllm.metadata import StepOutcomes
from prefixd_client.connectors.vllm.scheduler import SchedulerSide
from prefixd_client.connectors.vllm.settings import Settings

from tests.support.vllm_hooks import TOKENS, FakeLease, answered, request, scheduled


def test_what_is_kept_on_nvme_is_waited_for(side, cache) -> None:
    cache.lease, cache.stored = None, 8
    cache.lease_after_waiting = FakeLease(8)
    assert answered(side, request()) == (8 * TOKENS, True)
    assert cache.waits == [pytest.approx(2.0, abs=0.5)]


def test_nothing_is_waited_for_where_nothing_more_is_kept(side, cache) -> None:
    cache.stored = 10
    assert answered(side, request("hit")) == (10 * TOKENS, True)
    cache.lease, cache.stored = None, 0
    assert answered(side, request("miss")) == (0, False)
    assert cache.waits == []


def test_a_wait_that_brings_more_gives_back_what_was_held_before_it(side, cache) -> None:
    first = cache.lease = FakeLease(4, pending=6)
    cache.stored, cache.lease_after_waiting = 10, FakeLease(10)
    assert answered(side, request()) == (10 * TOKENS, True)
    assert first.released.is_set()
    assert not cache.lease_after_waiting.released.is_set()


def test_a_wait_in_vain_leaves_what_was_there(side, cache) -> None:
    first = cache.lease = FakeLease(4, pending=6)
    cache.stored = 10
    assert answered(side, request()) == (4 * TOKENS, True)
    assert not first.released.is_set()


def test_nobody_waits_longer_than_computing_takes(side, cache) -> None:
    side._estimates.computed(0.001, 1000)
    cache.lease, cache.stored = None, 8
    cache.may_answer.clear()
    asked = request()
    side.matched_tokens(asked, 0)
    threading.Event().wait(0.01)
    cache.may_answer.set()
    assert answered(side, asked) == (0, False)
    assert cache.waits == []


def test_the_time_of_a_prefill_is_learned(side) -> None:
    times = iter([10.0, 10.5])
    side._now = lambda: next(times)
    asked = request(tokens=160)
    side.new_request(asked)
    side.build(scheduled("r"))
    asked.num_computed_tokens, asked.num_output_tokens = 160, 1
    side.build(scheduled("r"))
    assert side._estimates.compute_s(10) == pytest.approx(0.5)


def test_a_load_that_would_take_longer_than_computing_is_not_made(side, cache) -> None:
    side._estimates.computed(0.01, 1000)
    side._estimates.loaded(5.0, 10)
    asked = request()
    assert answered(side, asked) == (0, False)
    assert cache.lease.released.is_set()
    assert side.tallies.take()["passed_over_blocks"] == 10


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
    side = SchedulerSide(Settings(), TOKENS, 1, cache, tell_events=True)
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


def test_saves_that_a_reset_drops_are_forgotten(cache) -> None:
    side = SchedulerSide(Settings(), TOKENS, 1, cache, tell_events=True)
    side.use_namespace("namespace")
    cache.lease = None
    asked = request(all_token_ids=list(range(200)), num_computed_tokens=64)
    answered(side, asked)
    side.finished(asked, range(4))
    side.use_namespace("another")
    assert side.build(scheduled()).saves == []
    assert side.events.waiting_count == 0
    side.close()
