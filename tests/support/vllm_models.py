"""Small random-weight models and adapters on disk, for real engines."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
TINY = {
    "num_hidden_layers": 4,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
"""5 M parameters; 4 KiB of KV a token in float32."""
MID = {
    "num_hidden_layers": 12,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
}
"""150 M parameters; 24 KiB of KV a token in bfloat16."""


def make_model(directory: Path, sizes: dict[str, int], dtype: str, *, seed: int = 0) -> Path:
    """A Llama with random weights; made once per directory."""
    if not (directory / "config.json").exists():
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=16384,
            bos_token_id=1,
            eos_token_id=2,
            initializer_range=0.06,
            tie_word_embeddings=False,
            **sizes,
        )
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)
    return directory


def add_tokenizer(directory: Path) -> Path:
    """Gives a model a tokenizer: one word per token id."""
    words = {f"t{number}": number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t2").save_pretrained(
        directory
    )
    return directory


def make_adapter(directory: Path, sizes: dict[str, int], *, seed: int) -> Path:
    """A LoRA adapter of rank 8 on the query and value projections."""
    directory.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(seed)
    hidden, heads = sizes["hidden_size"], sizes["head_dim"]
    outputs = {"q_proj": sizes["num_attention_heads"] * heads, "v_proj": sizes["num_key_value_heads"] * heads}
    tensors = {}
    for layer in range(sizes["num_hidden_layers"]):
        for name, size in outputs.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(8, hidden, generator=random) * 0.1
            tensors[f"{stem}.lora_B.weight"] = torch.randn(size, 8, generator=random) * 0.1
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": sorted(outputs),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "",
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def prompt(token_count: int, seed: int = 0) -> list[int]:
    """Token ids without structure; with one seed, a longer prompt extends a shorter."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, token_count)]
