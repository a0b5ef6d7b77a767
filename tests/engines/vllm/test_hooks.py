"""The scheduler's hooks: they never wait, may be called again, and give back what nobody needs."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

from prefixd_client.connectors.vllm.metadata import StepOutcomes
from prefixd_client.connectors.vllm.scheduler import SchedulerSide
from prefixd_client.connectors.vllm.settings import Settings
from prefixd_client.connectors.vllm.tracked import Phase
from prefixd_client.values import RequestPhase, StopReason, Tier

from tests.support.vllm_hooks import TOKENS, FakeLease, answered, request, scheduled


def test_a_hook_answers_while_the_daemon_does_not(side, cache) -> None:
    cache.may_answer.clear()
    asked = request()
    side.new_request(asked)
    assert [side.matched_tokens(asked, 0) for _ in range(3)] == [(None, False)] * 3
    side.build(scheduled())
    side.outcomes(None, set())
    cache.may_answer.set()
    assert answered(side, asked) == (10 * TOKENS, True)
    assert cache.asked == [(12, 0)]


def test_asking_again_asks_the_daemon_once(side, cache) -> None:
    asked = request()
    assert answered(side, asked) == answered(side, asked) == (10 * TOKENS, True)
    assert len(cache.asked) == 1


def test_a_miss_is_not_asked_again_while_the_request_waits_for_blocks(side, cache) -> None:
    cache.lease = None
    asked = request()
    assert [answered(side, asked) for _ in range(3)] == [(0, False)] * 3
    assert len(cache.asked) == 1


def test_an_allocation_that_is_told_twice_loads_once(side, cache) -> None:
    asked = request()
    answered(side, asked)
    side.allocated(asked, range(50), 10 * TOKENS)
    side.allocated(asked, range(50), 10 * TOKENS)
    side.allocated(asked, range(50), 0)
    (load,) = side.build(scheduled()).loads
    assert load.block_ids == tuple(range(10))
    assert not cache.lease.released.is_set()


def test_a_load_starts_behind_the_engines_own_blocks_as_they_are_now(side) -> None:
    asked = request()
    answered(side, asked, computed=2 * TOKENS)
    assert answered(side, asked, computed=5 * TOKENS) == (5 * TOKENS, True)
    side.allocated(asked, range(50), 5 * TOKENS)
    (load,) = side.build(scheduled()).loads
    assert (load.start, load.block_ids) == (3, (5, 6, 7, 8, 9))


def test_an_engine_that_lost_blocks_since_is_asked_for_anew(side, cache) -> None:
    asked = request()
    answered(side, asked, computed=5 * TOKENS)
    first = cache.lease
    cache.lease = FakeLease(8)
    assert answered(side, asked, computed=2 * TOKENS) == (6 * TOKENS, True)
    assert first.released.is_set()
    assert cache.asked == [(12, 5), (12, 2)]


def test_an_expired_lease_is_asked_for_anew(side, cache) -> None:
    asked = request()
    answered(side, asked)
    cache.lease.is_over = True
    cache.lease = FakeLease(4)
    assert answered(side, asked) == (4 * TOKENS, True)


def test_an_allocation_without_external_tokens_gives_the_lease_back(side, cache) -> None:
    asked = request()
    answered(side, asked)
    side.allocated(asked, range(50), 0)
    assert cache.lease.released.is_set()
    assert side.build(scheduled()).loads == []


def test_an_abort_gives_back_the_lease_whether_it_has_come_or_not(side, cache) -> None:
    asked = request()
    answered(side, asked)
    assert side.finished(asked, []) is False
    assert cache.lease.released.is_set()
    cache.lease = FakeLease(3)
    cache.may_answer.clear()
    late = request("late")
    side.matched_tokens(late, 0)
    side.finished(late, [])
    assert not cache.lease.released.is_set()
    cache.may_answer.set()
    assert cache.lease.released.wait(10)


def test_a_load_that_ended_gives_the_lease_back(side, cache) -> None:
    asked = request()
    answered(side, asked)
    side.allocated(asked, range(50), 10 * TOKENS)
    (load,) = side.build(scheduled()).loads
    side.outcomes(StepOutcomes(loaded={load.job_id: (1, 10)}), set())
    assert cache.lease.released.wait(10)


def test_giving_back_a_lease_takes_none_of_the_step_s_time(side, cache) -> None:
    asked = request()
    answered(side, asked)
    side.allocated(asked, range(50), 10 * TOKENS)
    (load,) = side.build(scheduled()).loads
    released_on: queue.SimpleQueue[int] = queue.SimpleQueue()
    cache.lease.release = lambda: released_on.put(threading.get_ident())
    side.outcomes(StepOutcomes(loaded={load.job_id: (1, 10)}), set())
    assert released_on.get(timeout=10) != threading.get_ident()


def test_a_step_looks_only_at_requests_with_something_new(side, monkeypatch) -> None:
    looked_at = []
    stepping = side._stepping
    monkeypatch.setattr(
        side, "_stepping", lambda *step: looked_at.append(asked.num_computed_tokens) or stepping(*step)
    )
    asked = request(tokens=40, block_hashes=[bytes([index]) * 32 for index in range(5)])
    side.new_request(asked)
    saved = []
    for computed in range(0, 5 * TOKENS + 1, TOKENS // 4):
        asked.num_computed_tokens, asked.num_output_tokens = computed, max(0, computed - 40)
        saved += [len(save.hashes) for save in side.build(scheduled("r")).saves]
    assert saved == [1] * 5
    assert looked_at == [0, 16, 32, 40, 44, 48, 64, 80], "start, whole blocks, the prompt's end and after it"


def test_a_preempted_request_is_looked_at_again(side, cache) -> None:
    asked = request(tokens=200)
    cache.lease = None
    assert answered(side, asked) == (0, False)
    for asked.num_computed_tokens in (0, 96, 128):
        side.build(scheduled("r"))
    asked.num_computed_tokens = 0
    assert answered(side, asked) == (0, False)
    side.build(scheduled("r"))
    cache.lease = FakeLease(10)
    assert answered(side, asked) == (10 * TOKENS, True), "a miss is forgotten once its request has run"


def test_a_step_waits_while_it_has_no_tokens_and_requests_wait_for_the_cache(side, cache) -> None:
    def is_waiting(*names: str) -> bool:
        return side.build(scheduled(*names)).is_waiting

    asked = request()
    assert not is_waiting()
    cache.may_answer.clear()
    side.matched_tokens(asked, 0)
    assert (is_waiting(), is_waiting("another")) == (True, False)
    cache.may_answer.set()
    answered(side, asked)
    assert not is_waiting()
    side.allocated(asked, range(50), 10 * TOKENS)
    assert (is_waiting(), is_waiting("another")) == (True, False)
    side.outcomes(StepOutcomes(loaded={side._tracked["r"].load_job_id: (1, 10)}), set())
    assert not is_waiting()


def test_a_request_whose_load_failed_is_computed_and_saved_from_its_root(side, cache) -> None:
    asked = request()
    answered(side, asked)
    side.allocated(asked, range(50), 10 * TOKENS)
    (load,) = side.build(scheduled()).loads
    side.outcomes(StepOutcomes(loaded={load.job_id: (1, 4)}), {4})
    assert side.matched_tokens(asked, 0) == (0, False)
    assert len(cache.asked) == 1
    asked.num_computed_tokens = 200
    (save,) = side.build(scheduled("r")).saves
    assert len(save.hashes) == 12


def test_only_whole_blocks_of_steps_that_are_over_are_saved(side, cache) -> None:
    cache.lease = None
    asked = request()
    answered(side, asked)
    asked.num_computed_tokens, asked.num_in_flight_tokens = 100, 60
    (save,) = side.build(scheduled("r")).saves
    assert save.hashes == tuple(asked.block_hashes[:2])
    assert save.parent_hash == b""
    asked.num_in_flight_tokens = 0
    (save,) = side.build(scheduled("r")).saves
    assert save.hashes == tuple(asked.block_hashes[2:6])
    assert save.parent_hash == asked.block_hashes[1]
    assert save.block_ids == (2, 3, 4, 5)


def test_a_step_that_gives_away_blocks_being_saved_fences_their_save(side, cache) -> None:
    cache.lease = None
    asked = request()
    answered(side, asked)
    asked.num_computed_tokens = 64
    (save,) = side.build(scheduled("r")).saves
    new = SimpleNamespace(req_id="n", block_ids=([2, 77],), num_computed_tokens=0)
    assert side.build(scheduled(scheduled_new_reqs=[new])).fences == {save.job_id}
    shared = SimpleNamespace(req_id="n", block_ids=([2, 77],), num_computed_tokens=TOKENS)
    assert side.build(scheduled(scheduled_new_reqs=[shared])).fences == frozenset()
    side.outcomes(StepOutcomes(saved={save.job_id: (1, 4)}), set())
    assert side.build(scheduled(scheduled_new_reqs=[new])).fences == frozenset()


def test_a_finished_request_is_held_until_its_saves_are_over(side, cache) -> None:
    cache.lease = None
    asked = request()
    answered(side, asked)
    asked.num_computed_tokens = 200
    assert side.finished(asked, list(range(13))) is True
    jobs = side.build(scheduled())
    assert jobs.held_requests == {"r"}
    assert len(jobs.saves[0].hashes) == 12
    assert side.build(scheduled()).held_requests == frozenset()


def test_a_run_that_the_cache_did_not_keep_is_saved_once_more_at_the_end(side, cache) -> None:
    cache.lease = None
    asked = request()
    answered(side, asked)
    asked.num_computed_tokens = 96
    (save,) = side.build(scheduled("r")).saves
    side.outcomes(StepOutcomes(saved={save.job_id: (1, 0)}), set())
    asked.num_computed_tokens = 128
    (second,) = side.build(scheduled("r")).saves
    assert len(second.hashes) == 2
    side.finished(asked, list(range(8)))
    (last,) = side.build(scheduled()).saves
    assert len(last.hashes) == 8


def test_hits_are_told_by_the_tier_that_holds_them(side) -> None:
    asked = request()
    answered(side, asked, computed=2 * TOKENS)
    side.allocated(asked, range(50), 8 * TOKENS)
    assert side.hit_sources(asked, 8 * TOKENS) == {Tier.DRAM: 7 * TOKENS, Tier.NVME: TOKENS}


def test_a_request_that_asks_for_no_cache_gets_none(side, cache) -> None:
    assert side.matched_tokens(request(skip_reading_prefix_cache=True), 0) == (0, False)
    assert cache.asked == []


def test_few_tokens_are_computed_rather_than_loaded(cache) -> None:
    side = SchedulerSide(Settings(min_load_tokens=161), TOKENS, 1, cache)
    side.use_namespace("namespace")
    assert answered(side, request()) == (0, False)
    assert cache.lease.released.is_set()
    side.close()


def test_each_requests_life_is_reported_once(side, cache) -> None:
    asked = request()
    side.new_request(asked)
    answered(side, asked)
    side.allocated(asked, range(50), 10 * TOKENS)
    asked.num_computed_tokens = 10 * TOKENS
    side.build(scheduled("r"))
    asked.num_output_tokens = 3
    side.build(scheduled("r"))
    asked.num_output_tokens = 7
    side.finished(asked, [])
    side.build(scheduled())
    for _ in range(5000):
        if len(cache.reports) == 3:
            break
        threading.Event().wait(0.001)
    queued, started, finished = cache.reports
    assert (queued.phase, started.phase, finished.phase) == (
        RequestPhase.QUEUED,
        RequestPhase.STARTED,
        RequestPhase.FINISHED,
    )
    assert list(queued.block_hashes) == asked.block_hashes
    assert started.engine_hit_block_count == 0
    assert (finished.output_token_count, finished.stop_reason) == (7, StopReason.LENGTH)
    assert finished.prefill_token_count == 40
    assert not started.block_hashes
    assert not finished.block_hashes


def test_a_preempted_request_asks_again(side, cache) -> None:
    cache.lease = None
    asked = request()
    answered(side, asked)
    asked.num_computed_tokens = 96
    side.build(scheduled("r"))
    asked.num_computed_tokens = 0
    cache.lease = FakeLease(6)
    assert answered(side, asked) == (6 * TOKENS, True)
    assert side._tracked["r"].phase is Phase.FOUND


def test_a_queued_request_is_told_with_its_place_in_the_queue(side, cache) -> None:
    cache.lease = None
    for name in ("first", "second"):
        side.new_request(request(name))
    side.build(scheduled("first"))
    side.new_request(request("third"))
    side.finished(request("second"), [])
    side.new_request(request("fourth"))
    side.build(scheduled())
    for _ in range(5000):
        queued = {r.request_id: r for r in list(cache.reports) if r.phase is RequestPhase.QUEUED}
        if len(queued) == 4:
            break
        threading.Event().wait(0.001)
    assert {name: report.queue_position for name, report in queued.items()} == {
        "first": 0,
        "second": 1,
        "third": 1,
        "fourth": 1,
    }
    assert all(len(report.block_hashes) == 12 for report in queued.values())
