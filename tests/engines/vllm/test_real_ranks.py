"""Two tensor-parallel workers of one vLLM engine, each a process: each saves and loads its own shard."""

from __future__ import annotations

import time
from pathlib import Path

from tests.support.daemon_command import DaemonCommand
from tests.support.vllm_models import TINY, make_model, prompt
from tests.support.vllm_process import PATIENT, EngineProcess, engine_options, transfer_config

TOKENS = prompt(1000, 1100)
SAVE_TIMEOUT_S = 60.0


def wait_until_committed(daemon: DaemonCommand, block_count: int) -> None:
    """Returns when so many blocks, shards counted, are in the cache."""
    deadline = time.monotonic() + SAVE_TIMEOUT_S
    while daemon.stats().committed_block_count < block_count:
        assert time.monotonic() < deadline, daemon.stats()
        time.sleep(0.05)  # polls another process: there is nothing to wait on


def test_two_workers_hit_what_they_have_saved(models: Path, short_path: Path) -> None:
    options = engine_options(
        make_model(models / "tiny-float32", TINY, "float32"),
        dtype="float32",
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
    )
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_WAIT_POLICY": "passive"}
    with DaemonCommand(short_path) as daemon:
        options["kv_transfer_config"] = transfer_config(daemon.socket, **PATIENT)
        with EngineProcess("ranks", options, models, **environment) as process:
            cold = process.generate(TOKENS)[0]
            wait_until_committed(daemon, 2 * 7)
            warm = process.generate(TOKENS)[0]
            assert (cold["cached_tokens"], warm["cached_tokens"]) == (0, 7 * 128)
            assert warm["tokens"] == cold["tokens"]
            assert warm["logprobs"] == cold["logprobs"]
            assert daemon.problems() == []
