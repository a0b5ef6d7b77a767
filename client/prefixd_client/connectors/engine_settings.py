"""What an operator can set in every inference engine's own configuration, and how that is refused.

Each engine's connector adds its own settings and says where they stand. Values have the types of
their defaults: a configuration file's mistake is told at the start, with the remedy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from prefixd_client.options import ClientOptions

DEFAULT_SOCKET = "/run/prefixd/prefixd.sock"


class UnsupportedEngine(ValueError):
    """The engine's configuration cannot be served; the message says what to change."""

    def __init__(self, finding: str, remedy: str) -> None:
        super().__init__(f"prefixd: {finding}. Remedy: {remedy}")
        self.finding = finding
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Each field is a key of the engine's extra configuration; each default says why."""

    WHERE: ClassVar[str]
    """What stands before a key in messages."""
    PAGE: ClassVar[str]
    """The document that tells the settings."""
    OF_THE_ENGINE: ClassVar[frozenset[str]] = frozenset()
    """Keys of the same mapping that the engine reads itself."""

    socket: str = ""
    """The daemon's socket; $PREFIXD_SOCKET, else the daemon's own default."""
    model_id: str = ""
    """Name of the model in the cache. Empty: as the engine names it. Set it where that differs by engine."""
    weights_revision: str = ""
    """A revision that you vouch for. Empty: sha256 over the weight files, which is safe and needs a read."""
    wait_max_s: float = 2.0
    """Longest wait for blocks that come from NVMe; what the engine itself allows may end it sooner."""
    lookup_timeout_s: float = 0.05
    """How long a background thread waits for an answer before it counts as a miss."""
    save_patience_s: float = 1.0
    """How long a save keeps trying while the daemon makes room; the engine's blocks are held meanwhile."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, default = getattr(self, item.name), item.default
            fits = type(value) is type(default) or (isinstance(default, float) and type(value) is int)
            if not fits:
                raise self.wrong(item.name, value, f"must be of type {type(default).__name__}")
            if isinstance(default, float) and value <= 0:
                raise self.wrong(item.name, value, "must be above 0 seconds")

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Self:
        """Reads our keys. Raises UnsupportedEngine for an unknown key or a wrong value."""
        known = {item.name for item in fields(cls)}
        ours = {key: value for key, value in extra.items() if key not in cls.OF_THE_ENGINE}
        for key, value in ours.items():
            if key not in known:
                raise cls.wrong(key, value, "is not a setting; known are " + ", ".join(sorted(known)))
        return cls(**ours)

    @classmethod
    def wrong(cls, key: str, value: object, limit: str) -> UnsupportedEngine:
        """What is said of a setting."""
        return UnsupportedEngine(f"{cls.WHERE}{key} = {value!r} {limit}", f"see {cls.PAGE}")

    @property
    def address(self) -> str:
        """Where the daemon listens."""
        return self.socket or os.environ.get("PREFIXD_SOCKET", "") or DEFAULT_SOCKET

    def client_options(self, device_uuid: str = "", redeemer_devices: tuple[str, ...] = ()) -> ClientOptions:
        """Deadlines of the client library, and GPUs as ClientOptions names them."""
        usual = ClientOptions()
        return ClientOptions(
            lookup_timeout_s=self.lookup_timeout_s,
            write_timeout_s=max(usual.write_timeout_s, self.lookup_timeout_s),
            control_timeout_s=max(usual.control_timeout_s, self.lookup_timeout_s),
            device_uuid=device_uuid,
            redeemer_devices=redeemer_devices,
        )
