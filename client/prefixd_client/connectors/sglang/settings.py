"""What an operator can set: keys of SGLang's --hicache-storage-backend-extra-config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..engine_settings import EngineSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(EngineSettings):
    """The settings that every engine has, and no others."""

    WHERE: ClassVar[str] = "hicache-storage-backend-extra-config: "
    PAGE: ClassVar[str] = "docs/howto-sglang.md"
    OF_THE_ENGINE: ClassVar[frozenset[str]] = frozenset(
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
