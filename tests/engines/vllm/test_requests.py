"""Requests through vLLM's own scheduler: right replies whatever the cache does, and nothing left behind."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.support.daemon_command import DaemonCommand
from tests.support.scribble import scribble
from tests.support.vllm_harness import BLOCK_TOKENS, VOCABULARY, Harness, right_reply

WAYS = [{"async_load": True}, {"async_load": False}, {"ranks": 2}, {"ranks": 2, "async_load": False}]


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt; with one seed, a longer one extends a shorter."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, count)]


def run_hashes(engine: Harness, prompt: list[int]) -> list[bytes]:
    """The prompt's prefix hashes."""
    request_id = engine.add(prompt, max_tokens=1)
    hashes = [bytes(key) for key in engine.scheduler.requests[request_id].block_hashes]
    engine.abort(request_id)
    engine.run()
    return hashes


def has_begun(engine: Harness, request_id: str) -> bool:
    """Whether anything of a request is computed or loaded."""
    return bool(engine.scheduler.requests[request_id].num_computed_tokens)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_what_one_engine_computed_another_loads(daemon, engine_of, way) -> None:
    prompt = tokens(500)
    with engine_of(daemon, **way) as first:
        assert first.ask(prompt, 40) == right_reply(prompt, 40)
        assert first.cached == {"r1": 0}
    with engine_of(daemon, **way) as second:
        assert second.ask(prompt, 40) == right_reply(prompt, 40)
        assert second.cached == {"r1": 500 // BLOCK_TOKENS * BLOCK_TOKENS}


@pytest.mark.parametrize("way", WAYS[:2], ids=str)
def test_a_hit_never_covers_the_whole_prompt(daemon, engine_of, way) -> None:
    prompt = tokens(4 * BLOCK_TOKENS)
    for expected in (0, 3 * BLOCK_TOKENS):
        with engine_of(daemon, **way) as engine:
            assert engine.ask(prompt) == right_reply(prompt, 4)
            assert engine.cached == {"r1": expected}


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_loads_follow_what_the_engine_has_in_its_own_cache(daemon, engine_of, way) -> None:
    prompt = tokens(640)
    with engine_of(daemon, **way) as writer:
        writer.ask(prompt)
    with engine_of(daemon, prefix_caching=True, **way) as reader:
        reader.ask(prompt[:300])
        assert reader.ask(prompt) == right_reply(prompt, 4)
        loaded = reader.cached["r2"]
        assert loaded == (640 // BLOCK_TOKENS - 1 - 300 // BLOCK_TOKENS) * BLOCK_TOKENS


def test_generated_blocks_are_saved_for_the_next_turn(daemon, engine_of) -> None:
    prompt = tokens(100)
    turn = prompt + right_reply(prompt, 3 * BLOCK_TOKENS) + tokens(50, seed=1)
    with engine_of(daemon) as engine:
        engine.ask(prompt, 3 * BLOCK_TOKENS)
        assert engine.ask(turn) == right_reply(turn, 4)
        assert engine.cached["r2"] == (100 + 3 * BLOCK_TOKENS - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def test_generated_blocks_are_not_saved_where_that_is_turned_off(daemon, engine_of) -> None:
    prompt = tokens(100)
    turn = prompt + right_reply(prompt, 3 * BLOCK_TOKENS) + tokens(50, seed=1)
    with engine_of(daemon, save_decode=False) as engine:
        engine.ask(prompt, 3 * BLOCK_TOKENS)
        engine.ask(turn)
        assert engine.cached["r2"] == 100 // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_damaged_block_is_computed_and_its_request_does_not_loop(daemon, engine_of, way) -> None:
    prompt = tokens(400)
    with engine_of(daemon, **way) as writer:
        writer.ask(prompt)
        spec = writer.connector._side.namespace
        hashes = run_hashes(writer, prompt)
    scribble(daemon.socket, spec, hashes, [0, 7], shard=spec.shard_count - 1)
    with engine_of(daemon, **way) as reader:
        request_id = reader.add(prompt)
        reader.run(steps_max=3000)
        assert reader.replies[request_id] == right_reply(prompt, 4)
        counted = reader.workers[-1].side.tallies.take()
        assert counted["unloaded_blocks"] == 400 // BLOCK_TOKENS


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_blocks_that_did_not_load_reach_no_other_request(daemon, engine_of, way) -> None:
    """vLLM's own prefix cache shares a block that is loaded within a step before it is known to be right, and
    leaves its repair to the request that loaded it, which may go first."""
    prompt = tokens(400)
    with engine_of(daemon, **way) as writer:
        writer.ask(prompt)
        spec = writer.connector._side.namespace
        hashes = run_hashes(writer, prompt)
    for steps in range(1, 8):
        scribble(daemon.socket, spec, hashes, [3], shard=spec.shard_count - 1)
        with engine_of(daemon, prefix_caching=True, **way) as reader:
            gone, beside = reader.add(prompt, 20), reader.add(prompt, 20)
            reader.run(until=partial(has_begun, reader, gone))
            for _ in range(steps):
                reader.step()
            reader.abort(gone)
            assert reader.ask(prompt) == right_reply(prompt, 4)
            assert reader.replies[beside] == right_reply(prompt, 20)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("block", [0, 7, 11])
def test_what_did_not_load_spoils_no_step_that_is_under_way(daemon, engine_of, way, block) -> None:
    """A step that was scheduled before a load within the one before is known to have failed has read it."""
    prompt = tokens(400)
    with engine_of(daemon, **way) as writer:
        writer.ask(prompt)
        spec = writer.connector._side.namespace
        hashes = run_hashes(writer, prompt)
    scribble(daemon.socket, spec, hashes, [block], shard=spec.shard_count - 1)
    with engine_of(daemon, runs_ahead=True, **way) as reader:
        assert reader.ask(prompt, 20) == right_reply(prompt, 20)


def test_a_block_found_damaged_is_a_miss_from_then_on(daemon, engine_of) -> None:
    prompt = tokens(400)
    with engine_of(daemon) as writer:
        writer.ask(prompt)
        hashes = run_hashes(writer, prompt)
        spec = writer.connector._side.namespace
        scribble(daemon.socket, spec, hashes, [5])
        damaged = writer.ask(prompt)
        again = writer.ask(prompt)
    assert damaged == again == right_reply(prompt, 4)
    with engine_of(daemon) as reader:
        assert reader.ask(prompt) == right_reply(prompt, 4)
        assert reader.cached["r1"] == 400 // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_preempted_requests_answer_right_and_leave_no_lease(daemon, engine_of, way) -> None:
    prompts = [tokens(150, seed=1) + tokens(100, seed=seed) for seed in range(10, 16)]
    with engine_of(daemon, block_count=40, **way) as engine:
        names = [engine.add(prompt, 120) for prompt in prompts]
        requests = list(engine.scheduler.requests.values())
        engine.run()
        assert any(request.num_preemptions for request in requests), "the KV cache was large enough for all"
        for name, prompt in zip(names, prompts, strict=True):
            assert engine.replies[name] == right_reply(prompt, 120)
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 39


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("abort_at", range(7))
def test_an_aborted_request_leaves_nothing_behind(daemon, engine_of, way, abort_at) -> None:
    prompt = tokens(300)
    with engine_of(daemon, **way) as writer:
        writer.ask(prompt[:200])
    with engine_of(daemon, **way) as engine:
        gone, stays = engine.add(prompt, 30), engine.add(tokens(90, seed=9), 10)
        for _ in range(abort_at):
            engine.step()
        engine.abort(gone)
        engine.run()
        assert engine.replies[stays] == right_reply(tokens(90, seed=9), 10)
        assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 63
        assert engine.ask(prompt) == right_reply(prompt, 4)


def test_a_reset_opens_a_namespace_that_nobody_has_written_to(daemon, engine_of) -> None:
    prompt = tokens(300)
    with engine_of(daemon) as engine:
        engine.ask(prompt)
        assert engine.scheduler.reset_prefix_cache(reset_connector=True)
        engine.ask(prompt)
        engine.ask(prompt)
        assert engine.cached == {"r1": 0, "r2": 0, "r3": 288}
    with engine_of(daemon) as other:
        other.ask(prompt)
        assert other.cached["r1"] == 288


def test_a_request_that_runs_through_a_reset_saves_nothing(daemon, engine_of) -> None:
    prompt = tokens(300)
    with engine_of(daemon) as engine:
        engine.add(prompt, 50)
        engine.run(until=lambda: engine.scheduler.running and engine.scheduler.running[0].num_computed_tokens)
        engine.connector.reset_cache()
        engine.run()
        engine.ask(prompt)
        assert engine.cached["r2"] == 0


def test_requests_with_other_salts_share_nothing(daemon, engine_of) -> None:
    prompt = tokens(300)
    with engine_of(daemon) as engine:
        for salt in ("a", "b", None, "a"):
            assert engine.ask(prompt, cache_salt=salt) == right_reply(prompt, 4)
        assert list(engine.cached.values()) == [0, 0, 0, 288]


def test_engines_of_other_weights_share_nothing(daemon, engine_of) -> None:
    prompt = tokens(300)
    for revision in ("one", "two"):
        with engine_of(daemon, weights_revision=revision) as engine:
            engine.ask(prompt)
            assert engine.cached == {"r1": 0}


def test_a_full_store_is_a_miss(short_path, engine_of) -> None:
    with DaemonCommand(short_path, "--set", "dram.segment=2MiB", dram="4MiB") as small:
        with engine_of(small, block_count=200, save_patience_s=0.2) as engine:
            for seed in range(12):
                prompt = tokens(1500, seed=seed)
                assert engine.ask(prompt) == right_reply(prompt, 4)
        assert small.leases() == []
        assert small.problems() == []
