"""What an operator can set: the keys of `kv_connector_extra_config` in vLLM's --kv-transfer-config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from prefixd_client.options import ClientOptions

from .refusals import UnsupportedEngine

DEFAULT_SOCKET = "/run/prefixd/prefixd.sock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Each field is a key of kv_connector_extra_config; each default says why."""

    socket: str = ""
    """The daemon's socket; $PREFIXD_SOCKET, else the daemon's own default."""
    model_id: str = ""
    """Name of the model in the cache. Empty: the engine's --model. Set it where it has several paths."""
    weights_revision: str = ""
    """A revision that you vouch for. Empty: sha256 over the weight files, which is safe and needs a read."""
    async_load: bool = True
    """Load between steps, while other requests compute. False: within the step, before its forward pass."""
    save_decode: bool = True
    """Also save the blocks that fill up while tokens are generated: the next turn of a chat hits them."""
    min_load_tokens: int = 1
    """Fewer tokens than this beyond the engine's own hit are computed: a load costs two round trips."""
    load_if_sooner: bool = True
    """Load only what is estimated to come sooner than computing it. False: load all that is kept."""
    wait_max_s: float = 2.0
    """Longest wait for blocks that come from NVMe; never longer than computing them is estimated to take."""
    adapters_never_overwritten: bool = False
    """You vouch that the files of a LoRA adapter never change once written. False: adapters whose files are
    newer than the engine are not shared, since it cannot be known which bytes the engine has loaded."""
    report_usage: bool = True
    """Tell the daemon each request's life: its policy learns from it, and queued requests are prefetched."""
    lookup_timeout_s: float = 0.05
    """How long a background thread waits for an answer before the request is computed."""
    save_patience_s: float = 1.0
    """How long a save keeps trying while the daemon makes room; the engine's blocks are held meanwhile."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, default = getattr(self, item.name), item.default
            fits = type(value) is type(default) or (isinstance(default, float) and type(value) is int)
            if not fits:
                raise _wrong(item.name, value, f"must be of type {type(default).__name__}")
            if isinstance(default, float) and value <= 0:
                raise _wrong(item.name, value, "must be above 0 seconds")
        if self.min_load_tokens < 1:
            raise _wrong("min_load_tokens", self.min_load_tokens, "must be 1 or more")

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Settings:
        """Reads kv_connector_extra_config. Raises UnsupportedEngine for an unknown key or a wrong value."""
        known = {item.name for item in fields(cls)}
        for key in extra:
            if key not in known:
                raise _wrong(key, extra[key], "is not a setting; known are " + ", ".join(sorted(known)))
        return cls(**extra)

    @property
    def address(self) -> str:
        """Where the daemon listens."""
        return self.socket or os.environ.get("PREFIXD_SOCKET", "") or DEFAULT_SOCKET

    def client_options(self) -> ClientOptions:
        """Deadlines of the client library."""
        usual = ClientOptions()
        return ClientOptions(
            lookup_timeout_s=self.lookup_timeout_s,
            write_timeout_s=max(usual.write_timeout_s, self.lookup_timeout_s),
        )


def _wrong(key: str, value: object, limit: str) -> UnsupportedEngine:
    return UnsupportedEngine(f"kv_connector_extra_config.{key} = {value!r} {limit}", "see docs/howto-vllm.md")
