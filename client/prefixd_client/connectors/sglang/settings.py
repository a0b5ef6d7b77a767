"""What an operator can set: keys of SGLang's --hicache-storage-backend-extra-config."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from prefixd_client.options import ClientOptions

from .refusals import UnsupportedEngine

DEFAULT_SOCKET = "/run/prefixd/prefixd.sock"
OF_THE_ENGINE = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "tp_lcm_size",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
    }
)
"""Keys of the same JSON that SGLang reads itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Each field is a key of the extra config; each default says why."""

    socket: str = ""
    """The daemon's socket; $PREFIXD_SOCKET, else the daemon's own default."""
    model_id: str = ""
    """Name of the model in the cache. Empty: the served model name. Set it where that differs by engine."""
    weights_revision: str = ""
    """A revision that you vouch for. Empty: sha256 over the weight files, which is safe and needs a read."""
    wait_max_s: float = 2.0
    """Longest wait for blocks that come from NVMe; SGLang's own prefetch timeout may end it sooner."""
    lookup_timeout_s: float = 0.05
    """How long a storage thread waits for an answer before it counts as a miss."""
    save_patience_s: float = 1.0
    """How long a save keeps trying while the daemon makes room; the host pool's blocks are held meanwhile."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, default = getattr(self, item.name), item.default
            fits = type(value) is type(default) or (isinstance(default, float) and type(value) is int)
            if not fits:
                raise _wrong(item.name, value, f"must be of type {type(default).__name__}")
            if isinstance(default, float) and value <= 0:
                raise _wrong(item.name, value, "must be above 0 seconds")

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Settings:
        """Reads our keys. Raises UnsupportedEngine for an unknown key or a wrong value."""
        known = {item.name for item in fields(cls)}
        ours = {key: value for key, value in extra.items() if key not in OF_THE_ENGINE}
        for key, value in ours.items():
            if key not in known:
                raise _wrong(key, value, "is not a setting; known are " + ", ".join(sorted(known)))
        return cls(**ours)

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
    return UnsupportedEngine(
        f"hicache-storage-backend-extra-config: {key} = {value!r} {limit}", "see docs/howto-sglang.md"
    )
