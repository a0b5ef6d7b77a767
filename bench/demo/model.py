"""Makes the demo's model: a small Llama with random weights and grouped-query attention, and a tokenizer.

Nothing is downloaded: the tokenizer is trained on the standard library's sources. Random weights compute as
much as trained ones; only the text that comes out is nonsense.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

VOCABULARY = 4096
CONTEXT_TOKENS = 8192
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>"]
COMPLETE = "complete"
"""Written last: a directory without it is made anew."""


def source_files() -> list[Path]:
    """The text that the demo trains on and asks about: modules of the standard library."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120]


def make_model(directory: Path) -> None:
    """Make the model and the tokenizer in a directory, unless they are there.

    8 layers, 8 query and 2 KV heads of 64: 4 KiB of bfloat16 KV per token, 27 million parameters.
    """
    if (directory / COMPLETE).exists():
        return
    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    _make_tokenizer().save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.06,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    (directory / COMPLETE).touch()


def _make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in source_files()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
