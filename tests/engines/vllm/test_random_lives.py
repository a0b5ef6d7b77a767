"""Random lives of two engines on one daemon; a failure names the seed that replays it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tests.support.scribble import scribble_any
from tests.support.vllm_harness import VOCABULARY, Harness, right_reply

STEPS = 400
WAYS: list[dict[str, Any]] = [
    {"ranks": 2, "prefix_caching": True},
    {"prefix_caching": True},
    {"async_load": False},
    {"runs_ahead": True},
    {"runs_ahead": True, "ranks": 2, "prefix_caching": True},
    {},
]


def _prompt(rng: random.Random) -> list[int]:
    """One of a few families that share prefixes, of a random length."""
    family = np.random.default_rng(rng.randrange(4)).integers(3, VOCABULARY, 600)
    shared = rng.randrange(30, 600)
    own = np.random.default_rng(rng.randrange(3)).integers(3, VOCABULARY, rng.randrange(1, 200))
    return [int(token) for token in [*family[:shared], *own]]


def _add(engine: Harness, rng: random.Random, asked: dict[str, tuple[list[int], int]]) -> None:
    prompt, count = _prompt(rng), rng.choice([1, 2, 10, 70])
    asked[engine.add(prompt, count)] = (prompt, count)


@pytest.mark.parametrize("seed", range(8))
def test_every_reply_is_right_and_nothing_is_left(daemon, engine_of, seed) -> None:
    live(daemon, engine_of, seed, STEPS)


def live(daemon: Any, engine_of: Any, seed: int, steps: int, **more: Any) -> None:
    """Two engines' lives; every reply is right, and every block is free afterwards."""
    rng = random.Random(seed)
    way = WAYS[seed % len(WAYS)] | more
    with (
        engine_of(daemon, block_count=60, **way) as one,
        engine_of(daemon, block_count=45, **way) as two,
    ):
        engines: list[tuple[Harness, dict[str, tuple[list[int], int]]]] = [(one, {}), (two, {})]
        aborted: set[tuple[int, str]] = set()
        for _ in range(steps):
            engine, asked = engines[which := rng.randrange(2)]
            match rng.random():
                case chance if chance < 0.08:
                    _add(engine, rng, asked)
                case chance if chance < 0.10 and engine.scheduler.requests:
                    name = rng.choice(sorted(engine.scheduler.requests))
                    engine.abort(name)
                    aborted.add((which, name))
                case chance if chance < 0.11 and not engine.scheduler.has_requests():
                    assert engine.scheduler.reset_prefix_cache()
                case chance if chance < 0.12 and engine.scheduler.running:
                    hashes = [bytes(key) for key in engine.scheduler.running[0].block_hashes]
                    _damage(engine, hashes, rng)
                case _:
                    engine.step()
        for which, (engine, asked) in enumerate(engines):
            engine.run()
            for name, (prompt, count) in asked.items():
                expected = right_reply(prompt, count)
                if (which, name) in aborted:
                    expected = expected[: len(engine.replies[name])]
                assert engine.replies[name] == expected, f"seed {seed}: engine {which}, {name}"
            pool = engine.scheduler.kv_cache_manager.block_pool
            assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def _damage(engine: Harness, hashes: list[bytes], rng: random.Random) -> None:
    """Flips a byte in a kept block of the run, if any is kept."""
    spec = engine.connector._side.namespace
    assert spec is not None
    scribble_any(engine.connector._client._control.target.removeprefix("unix:"), spec, hashes, rng)
