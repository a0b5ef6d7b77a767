"""The OpenAI server with 64 requests in flight: shared prefixes hit, also from NVMe after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefixd.v1 import types_pb2

from tests.support.at_work import wait_until_at_work
from tests.support.daemon_command import DaemonCommand
from tests.support.vllm_models import TINY, add_tokenizer, make_model, prompt
from tests.support.vllm_process import PATIENT, transfer_config
from tests.support.vllm_server import VllmServer

BLOCK = 128
FAMILIES, EACH = 8, 8
SHARED_TOKENS = 4 * BLOCK
REPLY_TOKENS = 8
PROMPTS = [
    [*prompt(SHARED_TOKENS, 500 + family), *prompt(40 + 10 * index, 600 + family * EACH + index)]
    for family in range(FAMILIES)
    for index in range(EACH)
]
"""64 prompts in 8 families that share 4 blocks."""


@pytest.fixture
def daemon(short_path: Path, tmp_path: Path) -> Iterator[DaemonCommand]:
    """Little memory, so that blocks go to NVMe, and room for all of them there."""
    arguments = ("--data-dir", str(tmp_path / "data"), "--set", "nvme.size=640MiB")
    settings = ("--set", "nvme.segment=16MiB", "--set", "dram.segment=4MiB")
    with DaemonCommand(short_path, *arguments, *settings, dram="48MiB") as running:
        yield running


@pytest.fixture
def server(daemon: DaemonCommand, tmp_path: Path) -> Iterator[VllmServer]:
    """The server over the tiny model."""
    model = add_tokenizer(make_model(tmp_path / "tiny", TINY, "float32"))
    options = {
        "model": str(model),
        "dtype": "float32",
        "max_model_len": 2048,
        "enforce_eager": True,
        "no_enable_prefix_caching": True,
        "enable_prompt_tokens_details": True,
        "kv_cache_memory_bytes": 192 << 20,
        "max_num_seqs": 64,
        "kv_transfer_config": transfer_config(daemon.socket, **PATIENT),
    }
    with VllmServer("server", options, tmp_path) as running:
        yield running


def test_64_requests_in_flight_hit_shared_prefixes_and_again_after_a_restart(server, daemon) -> None:
    cold = server.complete(PROMPTS, max_tokens=REPLY_TOKENS)
    warm = server.complete(PROMPTS, max_tokens=REPLY_TOKENS)
    assert [reply["cached"] for reply in warm] == [SHARED_TOKENS] * len(PROMPTS)
    # A salt of its own makes each of them a miss: what is right, and pressure that drives blocks to NVMe.
    salts = [f"salt{index}" for index in range(len(PROMPTS))]
    right = server.complete(PROMPTS, max_tokens=REPLY_TOKENS, salts=salts)
    assert [reply["cached"] for reply in right] == [0] * len(PROMPTS)
    expected = [reply["tokens"] for reply in right]
    assert [reply["tokens"] for reply in cold] == expected
    assert [reply["tokens"] for reply in warm] == expected
    assert daemon.leases() == []

    daemon.kill()
    daemon.start("--dram-size", "192MiB")  # room for all that 64 requests lease at once
    daemon.wait_until_attached(2)
    wait_until_at_work(lambda tokens: int(server.complete([tokens], max_tokens=1)[0]["cached"]))
    on_disk = daemon.tier(types_pb2.TIER_NVME).resident_slot_count
    assert on_disk >= FAMILIES * SHARED_TOKENS // BLOCK
    # What was still in memory alone is lost; the rest is read from disk, whichever blocks the policy chose.
    recovered = server.complete(PROMPTS, max_tokens=REPLY_TOKENS)
    salted = server.complete(PROMPTS, max_tokens=REPLY_TOKENS, salts=salts)
    assert [reply["tokens"] for reply in recovered] == expected
    assert [reply["tokens"] for reply in salted] == expected
    families = (recovered[first : first + EACH] for first in range(0, len(recovered), EACH))
    shared = sum(min(reply["cached"] for reply in family) for family in families)
    assert shared + sum(reply["cached"] for reply in salted) == on_disk * BLOCK
    assert daemon.leases() == []
    assert daemon.problems() == []
