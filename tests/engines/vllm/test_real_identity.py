"""Engines whose KV differs for the same tokens never hit each other's blocks, whatever else is equal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.daemon_command import DaemonCommand
from tests.support.vllm_models import TINY, make_model, prompt
from tests.support.vllm_process import PATIENT, EnginePool, engine_options, transfer_config

TOKENS = prompt(600, 900)
CACHED = 512
Reply = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """An engine: whose weights lie at `path`, and what else is set."""

    path: str = "model"
    seed: int = 0
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)


ROPE = {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}}
VARIANTS = {
    "the first": Variant(),
    "another model": Variant(path="other", seed=5),
    "another revision under the same name": Variant(seed=1),
    "another dtype": Variant(dtype="bfloat16"),
    "another RoPE": Variant(options=ROPE),
}


@pytest.fixture
def daemon(short_path: Path) -> Iterator[DaemonCommand]:
    """One cache for all of them."""
    with DaemonCommand(short_path) as running:
        yield running


def answers(engines: EnginePool, daemon: DaemonCommand, model: Path, variant: Variant) -> list[Reply]:
    """The prompt twice, and once with a salt: that reply owes nothing to the cache."""
    options = engine_options(model, dtype=variant.dtype, skip_tokenizer_init=True, **variant.options)
    options["kv_transfer_config"] = transfer_config(daemon.socket, model_id="one name", **PATIENT)
    with engines.engine(options) as process:
        replies = [process.generate(TOKENS)[0]]
        process.ask("settle")
        replies.append(process.generate(TOKENS)[0])
        replies += process.generate(TOKENS, salts=["own"])
        process.ask("settle")
    return replies


def test_no_engine_hits_what_another_has_computed_differently(engines, daemon, tmp_path) -> None:
    seen: dict[str, Reply] = {}
    for name, variant in VARIANTS.items():
        shutil.rmtree(tmp_path / variant.path, ignore_errors=True)
        model = make_model(tmp_path / variant.path, TINY, "float32", seed=variant.seed)
        first, again, salted = answers(engines, daemon, model, variant)
        assert [reply["cached_tokens"] for reply in (first, again, salted)] == [0, CACHED, 0], name
        assert first["logprobs"] == again["logprobs"] == salted["logprobs"], name
        assert all(first["logprobs"] != other["logprobs"] for other in seen.values()), name
        seen[name] = first
    shutil.rmtree(tmp_path / "model")
    model = make_model(tmp_path / "model", TINY, "float32", seed=0)
    back, _, _ = answers(engines, daemon, model, VARIANTS["the first"])
    assert back["cached_tokens"] == CACHED
    assert back["logprobs"] == seen["the first"]["logprobs"]
