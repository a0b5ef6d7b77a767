"""transformers over the real daemon: hits change the time and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
from prefixd_client import Client, ClientOptions
from prefixd_client.connectors.transformers import PrefixCachedModel
from prefixd_client.prefix_hash import chain_hashes

from tests.support.daemon import DaemonProcess
from tests.support.models import BLOCK_TOKENS, prompt, tiny_llama
from tests.support.repository import ROOT
from tests.support.transformers_process import digest
from tests.support.wire import short_directory
from tests.support.wire_engine import wire_engine

NEW_TOKENS = 4
PATIENT = ClientOptions(lookup_timeout_s=10.0, write_timeout_s=10.0)
"""A busy machine must not turn a hit that a test is about into a miss."""


@pytest.fixture(scope="module")
def daemon():
    with short_directory() as directory, DaemonProcess(directory / "p.sock") as process:
        yield process


@contextlib.contextmanager
def engine(daemon, model, **options):
    """The connector over a client of its own, as another engine process would have one."""
    with Client(daemon.socket, engine_name="transformers", options=PATIENT) as client:
        yield PrefixCachedModel(model, client, block_tokens=BLOCK_TOKENS, **options)


def uncached(model):
    """The reference: no daemon, no cache."""
    return PrefixCachedModel(model, None, block_tokens=BLOCK_TOKENS)


def same(generation, expected) -> bool:
    """Whether two replies agree in every token and in every bit of every logit."""
    return (
        generation.tokens == expected.tokens
        and torch.equal(generation.logits, expected.logits)
        and torch.equal(generation.prefill.logits, expected.prefill.logits)
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_with_a_hit_are_bit_equal_to_logits_without(daemon, dtype, attention) -> None:
    model = tiny_llama(dtype=dtype, attn_implementation=attention)
    tokens = prompt(9 * BLOCK_TOKENS + 5)
    expected = uncached(model).generate(tokens, NEW_TOKENS)
    with engine(daemon, model) as writer, engine(daemon, model) as reader:
        cold = writer.generate(tokens, NEW_TOKENS)
        warm = reader.generate(tokens, NEW_TOKENS)
    assert cold.prefill.stats.hit_token_count == 0
    assert cold.prefill.stats.stored_token_count == 9 * BLOCK_TOKENS
    assert warm.prefill.stats.hit_token_count == 9 * BLOCK_TOKENS
    assert same(cold, expected)
    assert same(warm, expected)


def test_the_block_of_the_last_token_is_computed_even_when_it_is_kept(daemon) -> None:
    model = tiny_llama(seed=1)
    tokens = prompt(4 * BLOCK_TOKENS)
    expected = uncached(model).generate(tokens, NEW_TOKENS)
    with engine(daemon, model) as cached:
        cached.prefill(tokens)
        warm = cached.generate(tokens, NEW_TOKENS)
    assert warm.prefill.stats.hit_token_count == 3 * BLOCK_TOKENS
    assert same(warm, expected)


def test_prompts_that_part_share_the_blocks_before(daemon) -> None:
    model = tiny_llama(seed=2)
    shared = prompt(5 * BLOCK_TOKENS + 7)
    first, second = (shared + prompt(3 * BLOCK_TOKENS, seed=seed) for seed in (11, 12))
    with engine(daemon, model) as cached:
        cached.prefill(first)
        warm = cached.generate(second, NEW_TOKENS)
        again = cached.prefill(second)
    assert warm.prefill.stats.hit_token_count == 5 * BLOCK_TOKENS
    assert warm.prefill.stats.stored_token_count == 3 * BLOCK_TOKENS
    assert again.stats.hit_token_count == 8 * BLOCK_TOKENS
    assert same(warm, uncached(model).generate(second, NEW_TOKENS))


def test_a_prompt_shorter_than_a_block_is_computed(daemon) -> None:
    model = tiny_llama(seed=3)
    with engine(daemon, model) as cached:
        for _ in range(2):
            prefill = cached.prefill(prompt(BLOCK_TOKENS - 1))
            assert (prefill.stats.hit_token_count, prefill.stats.stored_token_count) == (0, 0)


def test_a_second_process_hits_what_the_first_stored(daemon, tmp_path) -> None:
    tiny_llama(seed=4).save_pretrained(tmp_path)
    answers = []
    for _ in range(2):
        finished = subprocess.run(
            [sys.executable, "-m", "tests.support.transformers_process", daemon.socket, tmp_path, "150"],
            cwd=ROOT,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            check=True,
            timeout=90,
        )
        answers.append(json.loads(finished.stdout))
    first, second = answers
    assert (first["hit"], second["hit"]) == (0, 150 // BLOCK_TOKENS * BLOCK_TOKENS)
    reference = PrefixCachedModel.from_pretrained(
        tmp_path, None, dtype=torch.float32, block_tokens=BLOCK_TOKENS
    )
    assert first["digest"] == second["digest"] == digest(reference.prefill(prompt(150)))


async def test_a_corrupted_slot_is_a_miss_and_the_logits_are_right(daemon) -> None:
    model = tiny_llama(seed=5)
    tokens = prompt(6 * BLOCK_TOKENS + 1, seed=13)
    expected = uncached(model).generate(tokens, NEW_TOKENS)
    with engine(daemon, model) as cached:
        cached.prefill(tokens)
        await scribble(daemon, tokens, block=2)
        damaged = cached.generate(tokens, NEW_TOKENS)
    assert damaged.prefill.stats.hit_token_count == 2 * BLOCK_TOKENS
    assert same(damaged, expected)


async def scribble(daemon, tokens, *, block: int) -> None:
    """Flip a bit of one kept block, as a process of the same tenant could."""
    hashes = chain_hashes(tokens, BLOCK_TOKENS)
    async with wire_engine(daemon.socket) as intruder:
        for entry in (await intruder.call("ListNamespaces")).namespaces:
            leased = await intruder.acquire(entry.namespace, hashes)
            if leased.hits:
                break
        else:
            pytest.fail("no namespace holds the prompt")
        for extent in (extent for part in leased.shard_extents for extent in part.extents):
            if extent.first_block <= block < extent.first_block + extent.block_count:
                memory = await intruder.memory(extent.segment_id)
                memory[extent.offset_bytes + (block - extent.first_block) * extent.stride_bytes] ^= 1


@pytest.mark.parametrize(
    "changes",
    [{"seed": 7}, {"dtype": torch.bfloat16}, {"rms_norm_eps": 1e-5}, {"attn_implementation": "eager"}],
)
def test_a_model_that_differs_anywhere_never_hits(daemon, changes) -> None:
    tokens = prompt(4 * BLOCK_TOKENS + 2)
    other = tiny_llama(**{"seed": 6, **changes})
    with engine(daemon, tiny_llama(seed=6)) as cached:
        cached.prefill(tokens)
    with engine(daemon, other) as cached:
        generation = cached.generate(tokens, NEW_TOKENS)
    assert generation.prefill.stats.hit_token_count == 0
    assert same(generation, uncached(other).generate(tokens, NEW_TOKENS))


def test_weights_changed_in_place_open_a_new_namespace(daemon) -> None:
    model = tiny_llama(seed=8)
    tokens = prompt(4 * BLOCK_TOKENS + 2)
    with engine(daemon, model) as cached:
        cached.prefill(tokens)
        with torch.no_grad():
            next(model.parameters()).add_(0.25)
        cached.weights_changed()
        generation = cached.generate(tokens, NEW_TOKENS)
    assert generation.prefill.stats.hit_token_count == 0
    assert same(generation, uncached(model).generate(tokens, NEW_TOKENS))


def test_a_daemon_that_dies_costs_hits_and_nothing_else() -> None:
    model = tiny_llama(seed=9)
    tokens = prompt(6 * BLOCK_TOKENS + 3)
    expected = uncached(model).generate(tokens, NEW_TOKENS)
    with (
        short_directory() as directory,
        DaemonProcess(directory / "p.sock") as mortal,
        engine(mortal, model) as cached,
    ):
        cached.prefill(tokens)
        assert cached.prefill(tokens).stats.hit_token_count == 6 * BLOCK_TOKENS
        mortal.kill()
        orphaned = cached.generate(tokens, NEW_TOKENS)
    assert orphaned.prefill.stats.hit_token_count == 0
    assert same(orphaned, expected)


def test_an_engine_starts_without_a_daemon() -> None:
    model = tiny_llama(seed=10)
    tokens = prompt(3 * BLOCK_TOKENS + 3)
    with short_directory() as directory, Client(str(directory / "p.sock")) as client:
        generation = PrefixCachedModel(model, client, block_tokens=BLOCK_TOKENS).generate(tokens, NEW_TOKENS)
    assert same(generation, uncached(model).generate(tokens, NEW_TOKENS))
