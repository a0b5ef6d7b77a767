"""What changes the bytes of KV changes the namespace; what does not, does not."""

from __future__ import annotations

import os

import pytest
import torch
from prefixd_client.connectors.transformers.identity import (
    config_fingerprint,
    files_fingerprint,
    namespace_spec,
    state_fingerprint,
)
from prefixd_client.connectors.transformers.kv_cache import probe_shape
from safetensors.torch import save_file

from tests.support.models import BLOCK_TOKENS, tiny_llama


def spec_of(model, block_tokens=BLOCK_TOKENS):
    """The namespace of a model."""
    with torch.no_grad():
        shape = probe_shape(model, block_tokens)
    return namespace_spec(model, shape, model_id="tiny", weights=state_fingerprint(model))


def test_two_loads_of_one_model_share_a_namespace() -> None:
    assert spec_of(tiny_llama()) == spec_of(tiny_llama())


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"dtype": torch.bfloat16},
        {"attn_implementation": "eager"},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"rms_norm_eps": 1e-5},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_changes_the_bytes_changes_the_namespace(changes) -> None:
    assert spec_of(tiny_llama(**changes)) != spec_of(tiny_llama())


def test_blocks_of_another_length_are_another_namespace() -> None:
    assert spec_of(tiny_llama(), 16) != spec_of(tiny_llama(), 32)


def test_the_number_of_threads_is_part_of_the_namespace() -> None:
    threads = torch.get_num_threads()
    before = spec_of(tiny_llama())
    torch.set_num_threads(threads + 1)
    try:
        assert spec_of(tiny_llama()) != before
    finally:
        torch.set_num_threads(threads)


def test_the_alignment_of_the_weights_is_part_of_the_namespace() -> None:
    model = tiny_llama()
    before = spec_of(model)
    weight = model.lm_head.weight
    memory = torch.empty(weight.numel() + 1)
    unaligned = memory[1:].view_as(weight).copy_(weight.detach())
    model.lm_head.weight = torch.nn.Parameter(unaligned)
    assert spec_of(model) != before


def test_where_a_model_was_loaded_from_is_not_part_of_its_configuration() -> None:
    model = tiny_llama()
    before = config_fingerprint(model)
    model.config._name_or_path = "elsewhere/tiny"
    assert config_fingerprint(model) == before


def test_the_block_is_as_large_as_its_layers_keys_and_values() -> None:
    (group,) = spec_of(tiny_llama()).kv_groups
    assert (group.block_bytes, group.layer_count) == (BLOCK_TOKENS * 2 * 2 * 2 * 16 * 4, 2)


def test_weight_files_that_change_change_the_fingerprint(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(4)}, path)
    before = files_fingerprint(tmp_path)
    assert files_fingerprint(tmp_path) == before
    save_file({"weight": torch.ones(4)}, path)
    later = path.stat().st_mtime_ns + 1_000_000_000
    os.utime(path, ns=(later, later))
    assert files_fingerprint(tmp_path) != before


def test_a_directory_without_weights_is_an_error(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no weight files"):
        files_fingerprint(tmp_path)
