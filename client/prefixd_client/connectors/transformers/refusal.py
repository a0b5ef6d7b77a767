"""Which models the connector does not serve, and why: a wrong hit is worse than none, so doubt refuses."""

from __future__ import annotations

from typing import Any

from prefixd_client.errors import CallerError

FULL_ATTENTION = "full_attention"
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""RoPE types whose rotation of an early token changes when the sequence grows long."""


class UnsupportedModel(CallerError, ValueError):
    """The model's KV does not follow the law of a prefix cache; the message says where."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}; run this model without prefixd")


def refuse_unsupported(model: Any) -> None:
    """Check what the configuration tells.

    A prefix cache needs that a token's KV depends on the tokens before it and on nothing else, and that
    every layer keeps every token. Sliding windows, recurrent state, encoders and length-dependent RoPE break
    that.

    Raises:
        UnsupportedModel: naming what breaks it.
    """
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModel("an encoder-decoder attends to more than the prefix")
    if getattr(config, "sliding_window", None) is not None:
        raise UnsupportedModel(f"sliding window of {config.sliding_window} tokens (sliding_window)")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {FULL_ATTENTION})
    if others:
        raise UnsupportedModel(f"layers with {', '.join(others)} (layer_types)")
    if getattr(config, "attention_chunk_size", None) is not None:
        raise UnsupportedModel(
            f"chunked attention of {config.attention_chunk_size} tokens (attention_chunk_size)"
        )
    moving = _rope_types(config) & LENGTH_DEPENDENT_ROPE
    if moving:
        raise UnsupportedModel(f"RoPE of type {min(moving)} rotates by the length of the whole sequence")
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise UnsupportedModel("an adapter is attached and can be switched; merge it into the weights first")
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise UnsupportedModel(f"weights on {', '.join(sorted(devices))}: this connector copies CPU memory")


def _rope_types(config: Any) -> set[str]:
    """RoPE types of a configuration, which holds one set of parameters or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    each = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    return {str(parameters.get("rope_type") or parameters.get("type")) for parameters in each}
