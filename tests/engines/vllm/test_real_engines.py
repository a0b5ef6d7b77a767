"""vLLM itself, each engine a process of its own: what is loaded answers like what is computed, bit by bit.

A step computes one block of one prompt, on one OpenMP thread: then a cold run is reproducible, and a warm one
must equal it exactly. Where prompts and replies share steps the engine's own results depend on the company by
a few parts in a million, which is what such replies are compared to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from prefixd_client.client import Client

from tests.support.daemon_command import DaemonCommand
from tests.support.scribble import scribble
from tests.support.vllm_models import TINY, make_adapter, make_model, prompt
from tests.support.vllm_process import PATIENT, EnginePool, EngineProcess, engine_options, transfer_config

BLOCK = 128
ALIGNED = {"max_num_batched_tokens": BLOCK, "skip_tokenizer_init": True}
BATCH = [prompt(blocks * BLOCK, seed) for seed, blocks in enumerate([2, 3, 8, 5, 6, 4, 10, 1])]
"""Whole blocks, and one token of reply: no step holds more than one prompt's block."""
MIXED = [prompt(count, 50 + seed) for seed, count in enumerate([200, 300, 1000, 1024, 640, 777, 500, 1300])]
SINGLE = [prompt(count, 100 + seed) for seed, count in enumerate([200, 1024, 4000, 8000])]
Reply = dict[str, Any]
MakeEngine = Callable[..., AbstractContextManager[EngineProcess]]


@pytest.fixture
def roomy_daemon(short_path: Path) -> Iterator[DaemonCommand]:
    """A daemon with room for every prompt here; its books balance at the end, and nobody holds anything."""
    with DaemonCommand(short_path, dram="256MiB") as running:
        yield running
        if running.process is not None and running.process.poll() is None:
            assert running.problems() == []
            assert running.leases() == []


@pytest.fixture
def engine(engines: EnginePool, models: Path) -> MakeEngine:
    """Makes engines over the tiny model; connector settings are those in `extra`."""

    def make(
        daemon: DaemonCommand | None, dtype: str = "float32", **changes: Any
    ) -> AbstractContextManager[EngineProcess]:
        extra = changes.pop("extra", {})
        model = changes.pop("model", None) or make_model(models / f"tiny-{dtype}", TINY, dtype)
        options = engine_options(model, dtype=dtype, **(ALIGNED | changes))
        if daemon is not None:
            options["kv_transfer_config"] = transfer_config(daemon.socket, **(PATIENT | extra))
        return engines.engine(options)

    return make


def replies(process: EngineProcess) -> list[Reply]:
    """The batch together, the single prompts one by one, and the mixed ones together."""
    batch = process.generate(*BATCH, max_tokens=1)
    singles = [process.generate(single)[0] for single in SINGLE]
    return [*batch, *singles, *process.generate(*MIXED)]


def same(left: Reply, right: Reply) -> bool:
    """Whether tokens and top-5 logprobs are equal to the last bit."""
    return bool(left["tokens"] == right["tokens"] and left["logprobs"] == right["logprobs"])


def close(left: Reply, right: Reply) -> bool:
    """Whether tokens are equal, and the top-5 logprobs to 1e-5."""
    return left["tokens"] == right["tokens"] and all(
        set(one) == set(other) and all(abs(one[token] - other[token]) <= 1e-5 for token in one)
        for one, other in zip(left["logprobs"], right["logprobs"], strict=True)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hit_answers_like_a_cold_run_to_the_last_bit(engine, roomy_daemon, dtype) -> None:
    with engine(None, dtype) as cold:
        expected = replies(cold)
    with engine(roomy_daemon, dtype) as first:
        computed = replies(first)
        first.ask("settle")
        damaged = first.identity(SINGLE[1])
    assert all(map(same, computed, expected))
    exact = len(BATCH) + len(SINGLE)
    hits = [(len(tokens) - 1) // BLOCK * BLOCK for tokens in (*BATCH, *SINGLE, *MIXED)]
    for extra in ({}, {"async_load": False}):
        with engine(roomy_daemon, dtype, extra=extra) as second:
            loaded = replies(second)
            assert [reply["cached_tokens"] for reply in loaded] == hits
            assert all(map(same, loaded[:exact], expected[:exact]))
            assert dtype == "bfloat16" or all(map(close, loaded[exact:], expected[exact:]))
            scribble(roomy_daemon.socket, *damaged, blocks=[2])
            assert same(second.generate(SINGLE[1])[0], expected[len(BATCH) + 1])
            second.ask("settle")
            assert second.ask("metrics")["metrics"]["vllm:prefixd_unloaded_blocks"] == 5
    assert roomy_daemon.stats().bad_block_count == 2


def test_bytes_that_were_never_the_models_change_the_reply(engine, roomy_daemon) -> None:
    """The comparison can fail: the engine really computes with what it loads."""
    tokens = prompt(1000, 50)
    with engine(roomy_daemon) as process:
        spec, hashes = process.identity(tokens)
        with Client(roomy_daemon.socket) as client:
            size = spec.kv_groups[0].block_bytes
            foreign = [(key, bytes([index + 1]) * size) for index, key in enumerate(hashes)]
            assert client.namespace(spec).put(foreign).stored_count == len(hashes)
        fed, salted = process.generate(tokens)[0], process.generate(tokens, salts=["own"])[0]
    assert (fed["cached_tokens"], salted["cached_tokens"]) == (896, 0)
    assert not same(fed, salted)


def test_with_the_engines_own_chunks_logprobs_agree_to_a_hundred_thousandth(engine, roomy_daemon) -> None:
    with engine(roomy_daemon, max_num_batched_tokens=2048) as first:
        cold = first.generate(SINGLE[2])[0]
        first.ask("settle")
    with engine(roomy_daemon, max_num_batched_tokens=2048) as second:
        warm = second.generate(SINGLE[2])[0]
    assert warm["cached_tokens"] == 3968
    assert close(warm, cold)


def test_an_engine_lives_through_aborts_salts_a_killed_daemon_and_new_weights(engine, roomy_daemon) -> None:
    with engine(None) as cold:
        expected = [cold.generate(tokens)[0] for tokens in SINGLE[:3]]
        cold.ask("scale_weights", factor=1.25)
        rescaled = cold.generate(SINGLE[1])[0]
    assert not same(rescaled, expected[1])
    with engine(roomy_daemon) as process:
        aborted, kept = process.generate(SINGLE[2], SINGLE[0], abort_after={"0": 6})
        assert aborted is None or aborted["finish_reason"] == "abort"
        assert kept["tokens"] == expected[0]["tokens"]
        process.ask("settle")
        assert roomy_daemon.leases() == []
        for salt, cached in (("mine", 0), ("yours", 0), ("mine", 896)):
            reply = process.generate(SINGLE[1], salts=[salt])[0]
            assert same(reply, expected[1])
            assert reply["cached_tokens"] == cached
        process.generate(SINGLE[1])
        process.ask("settle")
        process.ask("scale_weights", factor=1.25)
        assert process.ask("reset")["reset"]
        reply = process.generate(SINGLE[1])[0]
        assert reply["cached_tokens"] == 0
        assert same(reply, rescaled)
        process.ask("scale_weights", factor=0.8)
        assert process.ask("reset")["reset"]
        killer = threading.Timer(0.3, roomy_daemon.kill)
        killer.start()
        during = [process.generate(tokens)[0] for tokens in SINGLE[1:3]]
        killer.join()
        after = process.generate(SINGLE[2])[0]
        assert [reply["finish_reason"] for reply in (*during, after)] == ["length"] * 3
        assert during[1]["tokens"] == after["tokens"] == expected[2]["tokens"]


def test_preempted_requests_answer_right_and_leave_nothing(engine, roomy_daemon) -> None:
    tokens = [prompt(300, 200) + prompt(200, seed) for seed in range(201, 207)]
    with engine(None) as roomy:
        expected = roomy.generate(*tokens, max_tokens=150)
    with engine(roomy_daemon, kv_cache_memory_bytes=12 << 20, max_model_len=2048) as cramped:
        answer = cramped.ask("preemptions", prompts=tokens, max_tokens=150, logprobs=5)
        cramped.ask("settle")
        assert answer["preemptions"] > 0
        assert [reply["tokens"] for reply in answer["replies"]] == [reply["tokens"] for reply in expected]
        assert roomy_daemon.leases() == []


def test_adapters_and_their_contents_are_kept_apart(engine, roomy_daemon, models) -> None:
    paths = [make_adapter(models / f"adapter{seed}", TINY, seed=seed) for seed in (1, 2)]
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    adapters = [["one", 1, str(paths[0])], ["two", 2, str(paths[1])]]
    tokens = prompt(600, 300)

    def ask(process: EngineProcess, *adapter: Any) -> Reply:
        return process.generate(tokens, adapters={"0": adapter} if adapter else None)[0]

    with engine(roomy_daemon, **lora) as first:
        computed = [ask(first), ask(first, *adapters[0]), ask(first, *adapters[1])]
        first.ask("settle")
    assert [reply["cached_tokens"] for reply in computed] == [0, 0, 0]
    assert not any(same(computed[0], reply) for reply in computed[1:])
    make_adapter(paths[1], TINY, seed=3)
    with engine(roomy_daemon, **lora) as second:
        again = [ask(second), ask(second, *adapters[0]), ask(second, *adapters[1])]
    assert [reply["cached_tokens"] for reply in again] == [512, 512, 0]
    assert same(again[0], computed[0])
    assert same(again[1], computed[1])
    assert not same(again[2], computed[2])


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"prefix_caching_hash_algo": "xxhash"}, "PYTHONHASHSEED"),
        ({"extra": {"sockett": "x"}}, "sockett"),
        (
            {
                "runner": "pooling",
                "convert": "embed",
                "pooler_config": {"seq_pooling_type": "MEAN"},
                "max_num_batched_tokens": 8320,
            },
            "pool the last token",
        ),
    ],
    ids=["hashes", "settings", "pooling"],
)
def test_what_cannot_be_served_is_refused_at_start(engine, roomy_daemon, changes, remedy) -> None:
    with engine(roomy_daemon, **changes) as process:
        assert remedy in process.refused
