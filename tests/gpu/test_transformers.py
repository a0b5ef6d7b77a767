"""Two engines share a prefix by way of HBM: hits change the time and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from prefixd.v1 import types_pb2
from prefixd_client.connectors.transformers import PrefixCachedModel

from tests.gpu.device_process import device_daemon
from tests.gpu.far_tier import hbm, wait_for_all_memory
from tests.support.engine_process import Observer
from tests.support.fake_cuda import FakeCuda, uuid_of
from tests.support.models import BLOCK_TOKENS, prompt, tiny_llama
from tests.support.repository import ROOT
from tests.support.transformers_process import digest
from tests.support.wire import short_directory

BLOCKS = 9
TOKENS = BLOCKS * BLOCK_TOKENS + 5


def prefill(socket: Path, model: Path, machine: FakeCuda, prompt_count: int = 1) -> dict[str, Any]:
    """What an engine process of its own hits and computes for the prompt, the last time that it is given."""
    arguments = [socket, model, str(TOKENS), uuid_of(0), str(prompt_count)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.transformers_process", *arguments],
        env=os.environ | machine.environment,
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def hits_in_hbm(observer: Observer) -> int:
    return sum(hit.block_count for hit in observer.stats().hits if hit.tier == types_pb2.TIER_HBM)


def test_two_engines_share_a_prefix_through_hbm_and_their_logits_are_identical(
    tmp_path: Path, far_machine: FakeCuda
) -> None:
    model = tmp_path / "model"
    tiny_llama().save_pretrained(model)
    alone = PrefixCachedModel.from_pretrained(model, None, dtype=torch.float32, block_tokens=BLOCK_TOKENS)
    with (
        short_directory() as directory,
        device_daemon(directory / "p.sock", far_machine) as daemon,
        Observer(daemon.socket) as observer,
    ):
        wait_for_all_memory(observer)
        first = prefill(daemon.socket, model, far_machine)
        # Twice in one process: however long a process takes to start, the uses are close enough to share.
        second = prefill(daemon.socket, model, far_machine, prompt_count=2)
        observer.wait(
            lambda: hbm(observer), lambda tier: tier.resident_slot_count == BLOCKS, "the run is promoted"
        )
        before = hits_in_hbm(observer)
        third = prefill(daemon.socket, model, far_machine)
        assert hits_in_hbm(observer) - before == BLOCKS
        assert observer.problems() == []
    runs = (first, second, third)
    assert [run["hit"] for run in runs] == [0, BLOCKS * BLOCK_TOKENS, BLOCKS * BLOCK_TOKENS]
    assert {run["digest"] for run in runs} == {digest(alone.prefill(prompt(TOKENS)))}
