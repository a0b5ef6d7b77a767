"""transformers over NVMe: what a restart of the daemon leaves of a prompt is used, and changes no bit."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from prefixd.v1 import types_pb2
from prefixd_client import Client, ClientOptions
from prefixd_client.connectors.transformers import PrefixCachedModel
from prefixd_client.prefix_hash import chain_hashes
from prefixd_client.values import Tier

from tests.support.daemon_command import READY_TIMEOUT_S, DaemonCommand
from tests.support.models import BLOCK_TOKENS, prompt, tiny_llama
from tests.support.wire import short_directory

PATIENT = ClientOptions(lookup_timeout_s=10.0, write_timeout_s=10.0)
"""A busy machine must not turn a hit that a test is about into a miss."""
NEW_TOKENS = 4
PROMPT_BLOCKS = 8
PROMPT_COUNT = 45
CHECKED_COUNT = 4
DRAM_BLOCKS_SPARE = 12
"""Of 256: more than a prompt, less than the daemon keeps free or copied."""


def daemon(directory: Path) -> DaemonCommand:
    """Memory for 256 blocks of the model below, and a disk for ten times as many."""
    settings = ("dram.segment=2MiB", "nvme.size=64MiB", "nvme.segment=2MiB", "nvme.latency_max_s=60")
    words = [word for setting in settings for word in ("--set", setting)]
    return DaemonCommand(directory, "--data-dir", str(directory / "data"), *words, dram="4MiB")


def wait_until_copied(process: DaemonCommand, block_count: int) -> None:
    """Returns when what only memory holds leaves room for another prompt: so none is lost."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while True:
        copied = process.tier(types_pb2.TIER_NVME).resident_slot_count
        memory = process.tier(types_pb2.TIER_DRAM)
        if block_count - copied <= memory.capacity_bytes // memory_slot_bytes() - DRAM_BLOCKS_SPARE:
            return
        assert time.monotonic() < deadline, f"{copied} of {block_count} were copied: {process.log[-2000:]}"
        time.sleep(0.02)  # polls another process: there is nothing to wait on


def memory_slot_bytes() -> int:
    """Two layers, keys and values, two heads of 16, four bytes each."""
    return BLOCK_TOKENS * 2 * 2 * 2 * 16 * 4


def test_after_a_restart_prompts_hit_from_nvme_and_their_logits_are_identical() -> None:
    model = tiny_llama()
    prompts = [prompt(PROMPT_BLOCKS * BLOCK_TOKENS + 5, seed=number) for number in range(PROMPT_COUNT)]
    with short_directory() as directory, daemon(directory) as process:
        with Client(process.socket, engine_name="transformers", options=PATIENT) as client:
            process.wait_until_attached(1)
            writer = PrefixCachedModel(model, client, block_tokens=BLOCK_TOKENS)
            for number, tokens in enumerate(prompts):
                writer.prefill(tokens)
                wait_until_copied(process, (number + 1) * PROMPT_BLOCKS)
        process.kill()
        process.start()
        with Client(process.socket, engine_name="transformers", options=PATIENT) as client:
            process.wait_until_attached(1)
            reader = PrefixCachedModel(model, client, block_tokens=BLOCK_TOKENS)
            hits = [reader._namespace.lookup(chain_hashes(tokens, BLOCK_TOKENS)).hits for tokens in prompts]
            whole = [at for at, found in enumerate(hits) if found == ((Tier.NVME, PROMPT_BLOCKS),)]
            replies = [reader.generate(prompts[at], NEW_TOKENS) for at in whole[:CHECKED_COUNT]]
        assert process.problems() == []
    assert len(whole) >= CHECKED_COUNT, f"of {PROMPT_COUNT} prompts, more than memory holds: {hits}"
    reference = PrefixCachedModel(model, None, block_tokens=BLOCK_TOKENS)
    for at, reply in zip(whole, replies, strict=False):
        expected = reference.generate(prompts[at], NEW_TOKENS)
        assert reply.prefill.stats.hit_token_count == PROMPT_BLOCKS * BLOCK_TOKENS
        assert reply.tokens == expected.tokens
        assert torch.equal(reply.logits, expected.logits)
        assert torch.equal(reply.prefill.logits, expected.prefill.logits)
