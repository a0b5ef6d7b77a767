"""The connector's small parts: memory, shards, settings, refusals, versions, counters."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prefixd_client.connectors.vllm import UnsupportedEngine
from prefixd_client.connectors.vllm.asking import Asking, hits_beyond
from prefixd_client.connectors.vllm.jobs import SaveJob
from prefixd_client.connectors.vllm.kv_memory import KvMemory
from prefixd_client.connectors.vllm.metadata import StepOutcomes
from prefixd_client.connectors.vllm.refusals import hash_bytes, refuse_unsupported_engine
from prefixd_client.connectors.vllm.save_book import SaveBook
from prefixd_client.connectors.vllm.settings import Settings
from prefixd_client.connectors.vllm.shards import ShardPlan
from prefixd_client.connectors.vllm.stats import PrefixdStats
from prefixd_client.connectors.vllm.tallies import COUNTERS, Tallies
from prefixd_client.connectors.vllm.versions import layout_version, refuse_unsupported_version
from prefixd_client.values import Tier
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, MambaSpec, SlidingWindowSpec

FULL = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
WINDOW = SlidingWindowSpec(
    block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=128
)
MAMBA = MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,))


def model(**changes: Any) -> Any:
    """ModelConfig as far as refusals look."""
    facts = {"enable_sleep_mode": False, "is_prefix_caching_supported": True, "multimodal_config": None}
    return SimpleNamespace(**(facts | changes))


def speculative(method: str) -> Any:
    """SpeculativeConfig as far as refusals look."""
    return SimpleNamespace(method=method, use_eagle=lambda: method == "eagle")


def engine(*specs: Any, **changes: Any) -> tuple[Any, Any]:
    """(VllmConfig, KVCacheConfig) as far as refusals look."""
    config = {
        "kv_transfer_config": SimpleNamespace(kv_load_failure_policy="recompute"),
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        "cache_config": SimpleNamespace(prefix_caching_hash_algo="sha256", enable_prefix_caching=True),
        "speculative_config": None,
        "model_config": model(),
        "device_config": SimpleNamespace(device_type="cuda"),
    }
    groups = [KVCacheGroupSpec(["layer"], spec) for spec in specs]
    return SimpleNamespace(**(config | changes)), SimpleNamespace(kv_cache_groups=groups)


def test_full_attention_is_served() -> None:
    refuse_unsupported_engine(*engine(FULL))
    refuse_unsupported_engine(*engine(FULL, speculative_config=speculative("ngram")))
    images = model(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0))
    refuse_unsupported_engine(*engine(FULL, model_config=images))


@pytest.mark.parametrize(
    ("made", "remedy"),
    [
        (engine(FULL, WINDOW), "--disable-hybrid-kv-cache-manager"),
        (engine(WINDOW), "--disable-hybrid-kv-cache-manager"),
        (engine(FULL, MAMBA), "recurrent models"),
        (
            engine(FULL, kv_transfer_config=SimpleNamespace(kv_load_failure_policy="fail")),
            '"kv_load_failure_policy": "recompute"',
        ),
        (engine(FULL, parallel_config=SimpleNamespace(decode_context_parallel_size=2)), "tensor parallelism"),
        (
            engine(
                FULL,
                cache_config=SimpleNamespace(
                    prefix_caching_hash_algo="sha256", enable_prefix_caching=True, calculate_kv_scales=True
                ),
            ),
            "checkpoint with scales",
        ),
        (engine(FULL, speculative_config=speculative("eagle")), "ngram"),
        (engine(FULL, speculative_config=speculative("draft_model")), "ngram"),
        (engine(FULL, model_config=model(enable_sleep_mode=True)), "--enable-sleep-mode"),
        (engine(FULL, model_config=model(is_prefix_caching_supported=False)), "pool the last token"),
        (
            engine(
                FULL,
                cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", enable_prefix_caching=False),
                model_config=model(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0)),
            ),
            "leave out --mm-processor-cache-gb 0",
        ),
    ],
    ids=[
        *("hybrid", "window", "recurrent", "policy", "context", "scales"),
        *("eagle", "draft", "sleep", "pooling", "images"),
    ],
)
def test_what_cannot_be_served_is_refused_with_its_remedy(made, remedy) -> None:
    with pytest.raises(UnsupportedEngine, match="Remedy: ") as refusal:
        refuse_unsupported_engine(*made)
    assert remedy in str(refusal.value)


def test_hashes_that_are_random_per_process_are_refused_unless_seeded(monkeypatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert (hash_bytes("sha256"), hash_bytes("sha256_cbor")) == (32, 32)
    with pytest.raises(UnsupportedEngine, match="set PYTHONHASHSEED to the same number in every engine"):
        hash_bytes("xxhash")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert hash_bytes("xxhash") == 16


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0+cpu", "0.32.1"])
def test_known_releases_are_served(version) -> None:
    refuse_unsupported_version(version)


@pytest.mark.parametrize("version", ["0.30.9", "0.33.0", "1.0.0", "dev"])
def test_other_releases_are_refused_at_start(version) -> None:
    with pytest.raises(UnsupportedEngine, match=r"install vLLM 0\.31 to 0\.32"):
        refuse_unsupported_version(version)


def test_releases_of_one_line_share_their_blocks() -> None:
    assert layout_version("0.32.0+cpu") == layout_version("0.32.4") != layout_version("0.31.0")


def test_gpus_are_named_by_local_rank() -> None:
    assert Settings().device_of(1) == ""
    named = Settings(device_uuids="GPU-a, GPU-b")
    assert [named.device_of(rank) for rank in (0, 1)] == ["GPU-a", "GPU-b"]
    with pytest.raises(UnsupportedEngine, match="names no GPU for local rank 2"):
        named.device_of(2)


@pytest.mark.parametrize(
    "extra",
    [{"sockett": "x"}, {"async_load": "yes"}, {"min_load_tokens": 0}, {"save_patience_s": 0.0}],
    ids=str,
)
def test_a_wrong_setting_is_named(extra) -> None:
    with pytest.raises(UnsupportedEngine, match=next(iter(extra))):
        Settings.from_extra_config(extra)


def test_a_blocks_pieces_are_its_layers_in_the_groups_order() -> None:
    caches = {"b": torch.zeros(6, 2, 32, 8), "a": torch.zeros(6, 2, 32, 8), "shares": torch.empty(0)}
    caches["shares"] = caches["a"]
    memory = KvMemory.of(caches, ["a", "b", "shares"], 6)
    assert memory.block_bytes == 2 * 2 * 32 * 8 * 4
    assert memory.pieces([5, 0]) == [
        tuple((caches[name][block].data_ptr(), 2048) for name in ("a", "b")) for block in (5, 0)
    ]


def test_blocks_of_a_block_outermost_layout_are_found() -> None:
    whole = torch.zeros(6, 2, 2, 32, 8)
    memory = KvMemory.of({"a": whole[:, 0], "b": whole[:, 1]}, ["a", "b"], 6)
    assert memory.pieces([3]) == [((whole[3, 0].data_ptr(), 2048), (whole[3, 1].data_ptr(), 2048))]


def test_a_block_that_the_attention_backend_splits_is_all_its_parts() -> None:
    layer = torch.zeros(12, 2, 16, 8)
    memory = KvMemory.of({"a": layer}, ["a"], 6)
    assert memory.pieces([4]) == [((layer[8].data_ptr(), 2048),)]
    assert memory.layouts[0].shape == (2, 2, 16, 8)


def test_blocks_are_dense_in_any_order_of_their_dimensions() -> None:
    memory = KvMemory.of({"a": torch.zeros(6, 32, 2, 8).permute(0, 2, 1, 3)}, ["a"], 6)
    assert memory.layouts[0].strides == (8, 16, 1)
    other = KvMemory.of({"a": torch.zeros(6, 2, 32, 8)}, ["a"], 6)
    assert other.layouts != memory.layouts


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(6, 2, 32, 16)[..., :8],
        torch.zeros(6, 4, device="meta"),
        [1, 2],
        torch.zeros(2, 6, 32, 8),
        torch.zeros(12, 2, 2, 16, 8)[:, 0],
    ],
    ids=["scattered", "on another device", "no tensor", "K and V outermost", "parts apart"],
)
def test_memory_that_cannot_be_copied_block_by_block_is_refused(tensor) -> None:
    with pytest.raises(UnsupportedEngine):
        KvMemory.of({"a": tensor}, ["a"], 6)


def test_a_block_outside_the_kv_cache_is_never_touched() -> None:
    memory = KvMemory.of({"a": torch.zeros(6, 4)}, ["a"], 6)
    for block in (-1, 6):
        with pytest.raises(IndexError):
            memory.pieces([0, block])


@pytest.mark.parametrize(
    ("heads", "mla", "ranks", "stages", "shards", "writers"),
    [
        (8, False, 2, 1, [0, 1], [True, True]),
        (2, False, 4, 1, [0, 0, 1, 1], [True, False, True, False]),
        (8, True, 4, 1, [0, 0, 0, 0], [True, False, False, False]),
        (8, False, 2, 2, [0, 1, 2, 3], [True, True, True, True]),
    ],
)
def test_ranks_with_the_same_bytes_share_a_shard(heads, mla, ranks, stages, shards, writers) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, pipeline_parallel_size=stages),
        model_config=SimpleNamespace(use_mla=mla, get_total_num_kv_heads=lambda: heads),
    )
    plan = ShardPlan.of(config)
    places = [(stage, rank) for stage in range(stages) for rank in range(ranks)]
    assert [plan.shard_of(*place) for place in places] == shards
    assert [plan.writes(rank) for _, rank in places] == writers
    assert plan.shard_count == len(set(shards))


def test_workers_outcomes_add_up_to_the_worst_of_them() -> None:
    left = StepOutcomes(loaded={1: (1, 5)}, saved={7: (1, 3)})
    right = StepOutcomes(loaded={1: (1, 2), 2: (1, 9)})
    both = left.aggregate(right)
    assert (both.loaded, both.saved) == ({1: (2, 2), 2: (1, 9)}, {7: (1, 3)})
    assert not StepOutcomes()


def test_a_save_is_over_when_every_worker_has_said_so() -> None:
    book = SaveBook(2)
    book.opened(SaveJob(1, "r", None, b"", (b"h",) * 3, (4, 5, 6), None))
    assert book.fences([6, 9]) == {1}
    assert book.reported(1, 1, 3) is None
    assert book.is_saving("r")
    over = book.reported(1, 1, 2)
    assert (over.saved, over.dropped) == (2, 1)
    assert not book.is_saving("r")
    assert book.fences([6]) == frozenset()
    assert book.reported(1, 1, 2) is None


def test_what_nobody_waits_for_is_done_in_order_whatever_fails_and_keeps_nobody_alive() -> None:
    asking = Asking(None)
    done: list[int] = []
    threads = [thread for thread in threading.enumerate() if thread.name == "prefixd-tell"]
    asking.run(lambda: done.append(1))
    asking.run(lambda: done.append(1 // 0))
    asking.run(lambda: done.append(3))
    del asking
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert done == [1, 3]


def test_hits_behind_the_engines_own_blocks_are_split_by_tier() -> None:
    hits = ((Tier.HBM, 2), (Tier.DRAM, 5), (Tier.NVME, 3))
    assert hits_beyond(hits, 1, 7) == {Tier.HBM: 1, Tier.DRAM: 5, Tier.NVME: 1}
    assert hits_beyond(hits, 7, 2) == {Tier.NVME: 2}


def test_counters_add_up_and_start_anew() -> None:
    tallies = Tallies()
    assert tallies.take() == {}
    tallies.add(loaded_blocks=3, unloaded_blocks=0)
    tallies.add_hits({Tier.DRAM: 2})
    stats = PrefixdStats(data=tallies.take())
    assert stats.data == {"loaded_blocks": 3, "hit_blocks_dram": 2}
    assert tallies.take() == {}
    assert stats.aggregate(PrefixdStats(data={"loaded_blocks": 1})).data["loaded_blocks"] == 4
    assert set(stats.data) <= set(COUNTERS)
    rates = PrefixdStats(data={"loaded_bytes": 2e9, "load_seconds": 0.5}).reduce()
    assert rates["prefixd load GB/s"] == 4.0
