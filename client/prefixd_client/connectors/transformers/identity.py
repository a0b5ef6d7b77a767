"""Fills a namespace from a model: everything the bytes of its KV depend on besides the tokens.

How the numbers are computed belongs to it. The connector promises bit-equal logits, and a CPU's kernels
differ by instruction set, number of threads, matmul precision and alignment of the weights; engines that
differ there do not share blocks.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from prefixd_client.namespace import KvGroup, NamespaceSpec, isa_class, weights_fingerprint
from prefixd_client.prefix_hash import HASH_ALGORITHM, HASH_BYTES

from .kv_cache import KV_LAYOUT, KvShape

ENGINE_NAME = "transformers"
WEIGHT_FILES = ("*.safetensors", "*.bin")
"""Patterns of weight files, best first."""

ALIGNED_BYTES = 64
"""A cache line, and the widest vector; torch allocates at multiples of it."""

NAMES_ONLY = ("_name_or_path", "transformers_version", "torch_dtype")
"""Entries of a configuration that no number depends on, or that stand elsewhere in the namespace."""


def namespace_spec(
    model: Any, shape: KvShape, *, model_id: str, weights: str, tokenizer_fingerprint: str = ""
) -> NamespaceSpec:
    """The namespace of a model's KV.

    Args:
        model: a causal language model on the CPU.
        shape: of its KV; gives the block's tokens, layers and bytes.
        model_id: the name the operator knows.
        weights: fingerprint of the weights, from files_fingerprint or state_fingerprint.
        tokenizer_fingerprint: empty when the caller vouches for its token ids.
    """
    kv_dtype = str(shape.dtype).removeprefix("torch.")
    return NamespaceSpec(
        model_id=model_id,
        weights_fingerprint=weights,
        model_config_fingerprint=config_fingerprint(model),
        tokenizer_fingerprint=tokenizer_fingerprint,
        kv_dtype=kv_dtype,
        kv_layout=KV_LAYOUT,
        attention_backend=_attention_backend(model),
        cpu_isa_class=f"{isa_class()};torch={torch.backends.cpu.get_cpu_capability()}",
        block_tokens=shape.block_tokens,
        kv_groups=(KvGroup(block_bytes=shape.block_bytes, layer_count=len(shape.layers)),),
        hash_algorithm=HASH_ALGORITHM,
        hash_bytes=HASH_BYTES,
        engine_name=ENGINE_NAME,
        layout_version=f"transformers-{transformers.__version__};torch-{torch.__version__}",
    )


def config_fingerprint(model: Any) -> str:
    """sha256 (hex) of the resolved configuration and the type the model computes in."""
    resolved = {key: value for key, value in model.config.to_dict().items() if key not in NAMES_ONLY}
    resolved["computes_in"] = str(model.dtype)
    resolved["class"] = type(model).__name__
    canonical = json.dumps(resolved, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


def files_fingerprint(directory: Path) -> str:
    """Fingerprint of the weight files in a model's directory.

    Raises:
        FileNotFoundError: there are none.
    """
    for pattern in WEIGHT_FILES:
        found = sorted(directory.glob(pattern))
        if found:
            return weights_fingerprint(found)
    raise FileNotFoundError(
        f"{directory}: no weight files ({', '.join(WEIGHT_FILES)}); give a model's directory"
    )


def state_fingerprint(model: Any) -> str:
    """Fingerprint of the weights in memory, for a model that did not come unchanged from files."""
    digest = hashlib.sha256()
    tensors = [*model.named_parameters(), *model.named_buffers()]
    for name, tensor in sorted(tensors, key=lambda named: named[0]):
        digest.update(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy())
    return f"sha256:{digest.hexdigest()}"


def _attention_backend(model: Any) -> str:
    """Which kernels compute attention and the matrices around it.

    Weights that are mapped from a file need not be aligned, and a BLAS takes another path for those: measured
    on float32, the last bits of KV differ.
    """
    implementation = model.config.get_text_config()._attn_implementation
    precision = torch.get_float32_matmul_precision()
    offsets = sorted({parameter.data_ptr() % ALIGNED_BYTES for parameter in model.parameters()})
    alignment = ",".join(map(str, offsets))
    return f"{implementation};threads={torch.get_num_threads()};matmul={precision};offsets={alignment}"
