"""What the connector cannot serve, told when the storage is attached and with the remedy.

The prefix law (a block is useless without its ancestors, and needs nothing else) holds for full attention;
KV that depends on later tokens, on a window or on a recurrent state has no place in the cache.
"""

from __future__ import annotations

from typing import Any

from ..engine_settings import UnsupportedEngine


def refuse_unsupported_storage(storage_config: Any) -> None:
    """Raises UnsupportedEngine for ways of sharing a block among ranks that are not served."""
    extra = storage_config.extra_config or {}
    if not extra.get("interface_v1"):
        raise UnsupportedEngine(
            "without interface_v1 SGLang does not say which blocks come before those it saves",
            'add "interface_v1": 1 to --hicache-storage-backend-extra-config',
        )
    for name in ("attn_cp_size", "dcp_size"):
        if getattr(storage_config, name) > 1:
            raise UnsupportedEngine(
                f"{name} = {getattr(storage_config, name)} spreads a block's tokens over ranks",
                "use tensor parallelism alone",
            )
    if storage_config.should_split_heads:
        raise UnsupportedEngine(
            "tp_lcm_size cuts blocks by heads so that other tensor-parallel sizes can read them",
            "leave tp_lcm_size out; engines share blocks where their tensor-parallel sizes are equal",
        )


def refuse_unsupported_model(speculative_algorithm: str | None, is_multimodal: bool) -> None:
    """Raises UnsupportedEngine where a block depends on more than the tokens before its end."""
    if speculative_algorithm not in (None, "NGRAM"):
        raise UnsupportedEngine(
            f"with {speculative_algorithm} SGLang keeps the KV of draft layers beside the model's, and that "
            "depends on the token behind it",
            "start without --speculative-algorithm, or with NGRAM",
        )
    if is_multimodal:
        raise UnsupportedEngine(
            "SGLang's keys name images, audio and video by a digest that is cut",
            "serve this model without the storage, or as text only",
        )


def refuse_further_pool(name: str) -> None:
    """Raises UnsupportedEngine: a second pool beside the KV of every token."""
    raise UnsupportedEngine(
        f"the model keeps a pool {name!r} beside the KV of every token (a window, a recurrent state, an "
        "indexer or draft layers): that does not follow the prefix law",
        "serve this model without --hicache-storage-backend",
    )
