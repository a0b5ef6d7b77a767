"""What an operator can set: the keys of `kv_connector_extra_config` in vLLM's --kv-transfer-config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..engine_settings import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(EngineSettings):
    """What only vLLM's connector can do."""

    WHERE: ClassVar[str] = "kv_connector_extra_config."
    PAGE: ClassVar[str] = "docs/howto-vllm.md"

    async_load: bool = True
    """Load between steps, while other requests compute. False: within the step, before its forward pass,
    where vLLM's own prefix cache and its asynchronous scheduling are off."""
    save_decode: bool = True
    """Also save the blocks that fill up while tokens are generated: the next turn of a chat hits them."""
    min_load_tokens: int = 1
    """Fewer tokens than this beyond the engine's own hit are computed: a load costs two round trips."""
    load_if_sooner: bool = True
    """Load only what is estimated to come sooner than computing it, and wait no longer for it. False: load
    all that is kept, and wait up to wait_max_s for it."""
    adapters_never_overwritten: bool = False
    """You vouch that the files of a LoRA adapter never change once written. False: adapters whose files are
    newer than the engine are not shared, since it cannot be known which bytes the engine has loaded."""
    report_usage: bool = True
    """Tell the daemon each request's life: its policy learns from it, and queued requests are prefetched."""
    device_uuids: str = ""
    """GPUs of this engine's workers on this node, as nvidia-smi -L prints them, by commas in the order of
    their local ranks. Empty: as torch names them."""

    def device_of(self, local_rank: int) -> str:
        """The worker's entry of device_uuids; empty when there are none. Raises UnsupportedEngine."""
        if not self.device_uuids:
            return ""
        named = [name.strip() for name in self.device_uuids.split(",")]
        if local_rank >= len(named):
            raise self.wrong("device_uuids", self.device_uuids, f"names no GPU for local rank {local_rank}")
        return named[local_rank]

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)  # super() does not find a class that slots have made anew
        if self.min_load_tokens < 1:
            raise self.wrong("min_load_tokens", self.min_load_tokens, "must be 1 or more")
