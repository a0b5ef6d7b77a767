"""The connector for Hugging Face transformers: a causal language model over a node's shared prefix cache.

    client = Client("/run/prefixd/prefixd.sock", engine_name="transformers")
    model = PrefixCachedModel.from_pretrained("models/llama", client)
    prefill = model.prefill(token_ids)  # loads the longest cached prefix, computes and stores the rest
    reply = model.generate(token_ids, max_new_tokens=64)

Needs `pip install prefixd[transformers]`, or an environment that has torch and transformers.
"""

from .kv_cache import BlockCache, KvShape
from .model import PrefixCachedModel
from .refusal import UnsupportedModel
from .results import Generation, Prefill, PrefillStats

__all__ = [
    "BlockCache",
    "Generation",
    "KvShape",
    "Prefill",
    "PrefillStats",
    "PrefixCachedModel",
    "UnsupportedModel",
]
