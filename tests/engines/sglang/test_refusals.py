"""What cannot be served is refused when the storage is attached, in words that name the remedy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("torch")

from prefixd_client.connectors.sglang import PrefixdHiCache, UnsupportedEngine, refusals
from prefixd_client.connectors.sglang.engine import EngineFacts
from prefixd_client.connectors.sglang.host_pool import HostPool
from prefixd_client.connectors.sglang.identity import (
    FORMATS_OF_FILES,
    adapters_fingerprint,
    engine_weights,
)
from prefixd_client.connectors.sglang.settings import Settings
from prefixd_client.connectors.sglang.versions import refuse_unsupported_version

from tests.support.sglang_contract import TOKENS, attached, behind, host_pool, keys, storage_config


@pytest.fixture
def facts(engine_configuration: None) -> EngineFacts:
    """Of the published configuration."""
    return EngineFacts.read()


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"extra": {"interface_v1": 0}}, '"interface_v1": 1'),
        ({"attn_cp_size": 2}, "tensor parallelism alone"),
        ({"should_split_heads": True}, "leave tp_lcm_size out"),
        ({"extra": {"sockt": "/x"}}, "docs/howto-sglang.md"),
        ({"extra": {"wait_max_s": 0}}, "docs/howto-sglang.md"),
        ({"extra": {"wait_max_s": "2"}}, "docs/howto-sglang.md"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(engine_configuration, changes, remedy) -> None:
    with pytest.raises(UnsupportedEngine, match=remedy):
        PrefixdHiCache(storage_config(**changes), {})


def test_sglangs_own_loader_shows_the_refusal(engine_configuration) -> None:
    with pytest.raises(UnsupportedEngine, match="interface_v1"):
        attached(host_pool("page_first"), storage_config(extra={"interface_v1": 0}))


@pytest.mark.parametrize("name", ["mamba", "swa", "indexer", "draft"])
def test_a_pool_beside_the_kv_of_every_token_is_refused(
    shared_daemon, storage_of: Callable[..., Any], name: str
) -> None:
    pool = host_pool("page_first")
    storage = storage_of(shared_daemon, pool, is_complete=False)
    with pytest.raises(UnsupportedEngine, match=f"'{name}'"):
        storage.register_mem_host_pool_v2(pool, name)


def test_a_pool_that_comes_later_ends_the_sharing_and_not_the_engine(
    shared_daemon, storage_of: Callable[..., Any]
) -> None:
    pool = host_pool("page_first")
    storage = storage_of(shared_daemon, pool)
    run, indices = keys(2), pool.alloc(2 * TOKENS)
    assert storage.batch_set_v1(run, indices, behind()) == [True, True]
    storage.register_mem_host_pool_v2(pool, "mamba")
    assert storage.batch_exists(run, behind()) == 0
    assert storage.batch_set_v1(run, indices, behind()) == [False, False]
    assert storage.batch_exists_v2(run, [], behind()).kv_hit_pages == 0


def test_a_pool_of_another_kind_is_refused() -> None:
    class MambaPoolHost:
        layout = "page_first"

    with pytest.raises(UnsupportedEngine, match="MambaPoolHost"):
        HostPool(MambaPoolHost())


def test_a_layout_that_nobody_has_run_is_refused() -> None:
    with pytest.raises(UnsupportedEngine, match="page_head"):
        HostPool(host_pool("page_head"))


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0", "1.0"])
def test_a_release_that_nobody_has_run_is_refused(version: str) -> None:
    with pytest.raises(UnsupportedEngine, match=r"install SGLang 0\.5\.23"):
        refuse_unsupported_version(version)


@pytest.mark.parametrize(
    ("algorithm", "is_multimodal", "finding"),
    [("EAGLE", False, "draft layers"), (None, True, "images")],
)
def test_a_model_whose_blocks_depend_on_more_than_their_tokens_is_refused(
    algorithm, is_multimodal, finding
) -> None:
    with pytest.raises(UnsupportedEngine, match=finding):
        refusals.refuse_unsupported_model(algorithm, is_multimodal)
    refusals.refuse_unsupported_model("NGRAM", False)


def test_weights_that_cannot_be_told_need_a_revision(facts: EngineFacts, tmp_path) -> None:
    at_start = replace(facts, was_attached_at_start=True)
    assert engine_weights(at_start, Settings()).startswith("sha256:")
    empty = replace(at_start, model_path=str(tmp_path))
    for unknown in (facts, replace(at_start, load_format="dummy"), empty):
        with pytest.raises(UnsupportedEngine, match="weights_revision"):
            engine_weights(unknown, Settings())
        assert engine_weights(unknown, Settings(weights_revision="r1")) == "revision:r1"


def test_weights_that_did_not_come_from_the_models_files_alone_need_a_revision(facts: EngineFacts) -> None:
    """The formats are SGLang's own: one that a later release adds is refused until somebody has looked."""
    from sglang.srt.configs.load_config import LoadFormat  # noqa: PLC0415 - needs SGLang

    at_start = replace(facts, was_attached_at_start=True)
    by_files = engine_weights(at_start, Settings())
    refused = {str(load_format.value) for load_format in LoadFormat} - FORMATS_OF_FILES
    assert refused >= {"remote_instance", "remote", "private", "presharded", "npcache", "ipc_cache"}
    for name in refused:
        with pytest.raises(UnsupportedEngine, match="weights_revision"):
            engine_weights(replace(at_start, load_format=name), Settings())
    assert {engine_weights(replace(at_start, load_format=n), Settings()) for n in FORMATS_OF_FILES} == {
        by_files
    }


@pytest.mark.parametrize(
    ("group", "setting", "value"),
    [
        ("model", "weight_cache_mode", "client"),
        ("model", "modelopt_checkpoint_restore_path", "/elsewhere"),
        ("model", "modelopt_quant", "fp8"),
        ("moe", "kt_weight_path", "/elsewhere"),
    ],
)
def test_a_setting_that_brings_other_weights_needs_a_revision(facts, group, setting, value) -> None:
    from sglang.srt import runtime_context  # noqa: PLC0415 - needs SGLang

    groups = {"model": runtime_context.get_model(), "moe": runtime_context.get_exec().moe}
    with groups[group].override(**{setting: value}):
        changed = replace(EngineFacts.read(), was_attached_at_start=True)
    assert not facts.other_weight_sources
    with pytest.raises(UnsupportedEngine, match=f"{setting}.*weights_revision"):
        engine_weights(changed, Settings())


def test_adapters_are_told_by_their_content(tmp_path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    before = adapters_fingerprint([str(tmp_path)])
    (tmp_path / "adapter_model.safetensors").write_bytes(b"two")
    assert adapters_fingerprint([str(tmp_path)]) not in ("", before)
    assert adapters_fingerprint([]) == ""
    with pytest.raises(UnsupportedEngine, match="local directory"):
        adapters_fingerprint([str(tmp_path / "absent")])


def test_settings_of_the_model_and_the_kernels_are_in_its_fingerprint(facts: EngineFacts) -> None:
    from sglang.srt import runtime_context  # noqa: PLC0415 - needs SGLang

    model, execution = runtime_context.get_model(), runtime_context.get_exec()
    changed = []
    for group, change in [
        (model, {"json_model_override_args": '{"rope_scaling": {"factor": 2.0}}'}),
        (model, {"quantization": "fp8"}),
        (model, {"context_length": 512}),
        (execution.kernel, {"bf16_gemm_backend": "other"}),
        (execution.features, {"enable_tf32_matmul": True}),
        (execution.graph, {"enable_torch_compile": True}),
    ]:
        with group.override(**change):
            changed.append(EngineFacts.read().config_fingerprint)
    assert len({facts.config_fingerprint, *changed}) == 7
    with model.override(download_dir="/elsewhere", weight_loader_disable_mmap=True):
        assert EngineFacts.read().config_fingerprint == facts.config_fingerprint
