"""The namespace: whatever the KV's bytes depend on besides tokens keeps engines apart."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from prefixd_client.connectors.vllm import UnsupportedEngine
from prefixd_client.connectors.vllm.adapters import Adapters
from prefixd_client.connectors.vllm.identity import (
    FORMATS_OF_FILES,
    WorkerFacts,
    agreed_facts,
    engine_weights,
    model_config_fingerprint,
    namespace_spec,
)
from prefixd_client.connectors.vllm.kv_memory import LayerLayout
from prefixd_client.connectors.vllm.settings import Settings
from prefixd_client.connectors.vllm.shards import ShardPlan
from prefixd_client.namespace import ChecksumAlgorithm, KvGroup, NamespaceSpec
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import LoadFormats

from tests.support.vllm_harness import model_directory

LAYOUT = LayerLayout((2, 32, 64), (2048, 64, 1), "bfloat16", 8192)
FACTS = WorkerFacts((LAYOUT, LAYOUT), "CPU_ATTN", "x86_64:avx512f;vec")
OLD_NS, NEW_NS = 10**18, 2 * 10**18


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with weight files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = model_directory(tmp_path / "model")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def spec_of(model: Path, facts: WorkerFacts = FACTS, **changes: Any) -> NamespaceSpec:
    """The namespace of an engine over this model, through vLLM's own configuration."""
    arguments = {"skip_tokenizer_init": True, "dtype": "bfloat16", "block_size": 32, "enforce_eager": True}
    config = EngineArgs(model=str(model), **(arguments | changes)).create_engine_config()
    return namespace_spec(
        config,
        facts,
        ShardPlan.of(config),
        Settings(),
        weights=engine_weights(config, Settings()),
        version="0.32.0",
        kv_cache_layout="LBHNC",
    )


def test_the_same_engine_twice_has_one_namespace(model) -> None:
    assert spec_of(model) == spec_of(model)


def test_everything_is_filled_in(model) -> None:
    spec = spec_of(model)
    assert spec.weights_fingerprint.startswith("sha256:")
    assert (spec.block_tokens, spec.hash_algorithm, spec.kv_dtype) == (32, "vllm-sha256", "bfloat16")
    assert spec.kv_groups == (KvGroup(block_bytes=16384, layer_count=2),)
    assert spec.engine_name == "vllm"
    assert "LBHNC" in spec.kv_layout


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float32"},
        {"block_size": 64},
        {"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}},
        {"prefix_caching_hash_algo": "sha256_cbor"},
        {"tensor_parallel_size": 2},
        {"load_format": "pt"},
        {"facts": replace(FACTS, attention_backend="OTHER")},
        {"facts": replace(FACTS, cpu_isa_class="x86_64:amx_bf16;amx")},
        {"facts": replace(FACTS, on_device=True)},
        {"facts": WorkerFacts((LAYOUT,) * 3, FACTS.attention_backend, FACTS.cpu_isa_class)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_engines_that_write_other_bytes_are_kept_apart(model, changes) -> None:
    assert spec_of(model, **changes) != spec_of(model)


def test_how_an_engine_looks_at_images_is_part_of_it(model) -> None:
    config = EngineArgs(model=str(model), skip_tokenizer_init=True, enforce_eager=True).create_engine_config()
    text, engine_model = model_config_fingerprint(config), config.model_config
    engine_model.multimodal_config = MultiModalConfig()
    ways = [model_config_fingerprint(config)]
    for changes in ({"mm_processor_kwargs": {"fps": 2}}, {"media_io_kwargs": {"video": {"num_frames": 8}}}):
        engine_model.multimodal_config = MultiModalConfig(**changes)
        ways.append(model_config_fingerprint(config))
    engine_model.multimodal_config = MultiModalConfig()
    engine_model.hf_image_processor_config = {"do_normalize": False}
    ways.append(model_config_fingerprint(config))
    assert len({text, *ways}) == 5


def test_settings_that_choose_among_kernels_keep_engines_apart(model, monkeypatch) -> None:
    """A backend that is named is the one that would have been chosen: the workers tell which it is."""
    plain = spec_of(model)
    assert spec_of(model, attention_config={"backend": "CPU_ATTN"}) == plain
    ways = [
        spec_of(model, attention_config={"flash_attn_version": 2}),
        spec_of(model, attention_config={"use_prefill_query_quantization": True}),
        spec_of(model, enforce_eager=False),
    ]
    for name, value in (("VLLM_FLOAT32_MATMUL_PRECISION", "medium"), ("VLLM_BATCH_INVARIANT", "1")):
        with monkeypatch.context() as environment:
            environment.setenv(name, value)
            ways.append(spec_of(model))
    assert len({spec.model_config_fingerprint for spec in (plain, *ways)}) == 6
    assert {replace(spec, model_config_fingerprint="") for spec in (plain, *ways)} == {
        replace(plain, model_config_fingerprint="")
    }


def test_kv_on_gpus_has_the_checksum_that_gpus_compute(model) -> None:
    assert spec_of(model).checksum_algorithm is ChecksumAlgorithm.XXH3_64
    on_device = replace(FACTS, on_device=True)
    assert spec_of(model, facts=on_device).checksum_algorithm is ChecksumAlgorithm.LANES_64


def test_two_revisions_of_one_model_are_kept_apart(model) -> None:
    before = spec_of(model)
    (model / "model.safetensors").write_bytes(b"retrained weights")
    after = spec_of(model)
    assert after.weights_fingerprint != before.weights_fingerprint
    assert replace(after, weights_fingerprint="") == replace(before, weights_fingerprint="")


def test_the_seed_of_the_hashes_is_part_of_it(model, monkeypatch) -> None:
    before = spec_of(model)
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert spec_of(model).hash_seed == "5" != before.hash_seed


def test_a_model_without_weight_files_needs_the_operators_word(model) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(UnsupportedEngine, match="weights_revision"):
        spec_of(model)


def test_weights_that_did_not_come_from_the_models_files_need_the_operators_word(model) -> None:
    """The formats are vLLM's own: one that a later release or a plugin adds is refused."""
    refused = {*get_args(LoadFormats), "a plugin's"} - FORMATS_OF_FILES
    assert refused >= {"dummy", "runai_streamer", "tensorizer", "modelexpress", "ipc_cache", "npcache"}
    for load_format in refused:
        config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))
        with pytest.raises(UnsupportedEngine, match="weights_revision"):
            engine_weights(config, Settings())
        assert engine_weights(config, Settings(weights_revision="v7")) == "revision:v7"


def test_ranks_that_lay_out_their_kv_differently_are_refused() -> None:
    assert agreed_facts({(0, 0): FACTS, (0, 1): FACTS}) == FACTS
    with pytest.raises(UnsupportedEngine, match="rank"):
        agreed_facts({(0, 0): FACTS, (1, 0): replace(FACTS, layouts=(LAYOUT,))})


# -- adapters -------------------------------------------------------------------------------------


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An adapter's directory, older than the engine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"r": 8}))
    write(directory, b"adapter")
    return directory


def write(directory: Path, content: bytes, at_ns: int = OLD_NS) -> None:
    """Replaces the adapter's weights."""
    path = directory / "adapter_model.safetensors"
    path.write_bytes(content)
    for file in directory.iterdir():
        os.utime(file, ns=(at_ns, at_ns))


def resolved(adapters: Adapters, base: Any, path: Path, number: int = 1, **fields: Any) -> Any:
    """The namespace of a request with this adapter."""
    return adapters.resolver(base, LoRARequest("name", number, str(path), **fields))()


@pytest.fixture
def base() -> NamespaceSpec:
    """A namespace without an adapter."""
    return NamespaceSpec(
        model_id="m",
        weights_fingerprint="revision:1",
        model_config_fingerprint="c",
        kv_dtype="d",
        kv_layout="l",
        attention_backend="a",
        block_tokens=32,
        kv_groups=(KvGroup(block_bytes=64, layer_count=1),),
        hash_algorithm="vllm-sha256",
        engine_name="vllm",
        layout_version="1",
    )


def engine_adapters(**fields: Any) -> Adapters:
    """A new engine."""
    return Adapters((OLD_NS + NEW_NS) // 2, **({"never_overwritten": False} | fields))


def test_requests_without_an_adapter_live_in_the_base_namespace(base) -> None:
    assert engine_adapters().resolver(base, None)() is base


def test_one_adapter_has_one_namespace_in_every_engine(base, adapter) -> None:
    first, second = (resolved(engine_adapters(), base, adapter) for _ in range(2))
    assert first == second != base


def test_new_weights_under_one_path_are_another_namespace_in_another_engine(base, adapter) -> None:
    before = resolved(engine_adapters(), base, adapter)
    write(adapter, b"another adapter")
    after = resolved(engine_adapters(), base, adapter)
    assert None not in (before, after)
    assert before != after


def test_an_adapter_overwritten_under_a_running_engine_is_not_shared(base, adapter) -> None:
    adapters = engine_adapters()
    lora = LoRARequest("name", 1, str(adapter))
    assert adapters.resolver(base, lora)() is not None
    assert adapters.unchanged(lora)()
    write(adapter, b"overwritten")
    assert not adapters.unchanged(lora)()
    assert adapters.resolver(base, lora)() is None
    assert resolved(adapters, base, adapter, number=2) is not None


def test_an_adapter_loaded_in_place_is_not_shared(base, adapter) -> None:
    adapters = engine_adapters()
    assert resolved(adapters, base, adapter) is not None
    assert resolved(adapters, base, adapter, load_inplace=True) is None
    assert resolved(adapters, base, adapter) is None


def test_an_adapter_newer_than_the_engine_needs_the_operators_word(base, adapter) -> None:
    write(adapter, b"new", NEW_NS)
    assert resolved(engine_adapters(), base, adapter) is None
    assert resolved(engine_adapters(never_overwritten=True), base, adapter) is not None


def test_an_adapter_that_cannot_be_read_is_not_shared(base, tmp_path) -> None:
    assert resolved(engine_adapters(), base, tmp_path / "gone") is None
