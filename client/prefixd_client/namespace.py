"""What a namespace is made of, and helpers that fill it from files and from the machine.

A namespace is everything the KV's bytes depend on besides the tokens. A field that is left out lets two
engines share bytes that differ: when in doubt, put it in.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from prefixd.v1 import types_pb2

from .errors import InvalidArgument
from .weights import weights_fingerprint

__all__ = ["ChecksumAlgorithm", "KvGroup", "KvGroupKind", "NamespaceSpec", "isa_class", "weights_fingerprint"]

HASH_SIZES = (16, 32)
CPU_INFO = Path("/proc/cpuinfo")
ISA_FEATURES = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve2", "sve", "bf16", "asimd")
"""Features that make kernels add up in another order, the strongest first, as /proc/cpuinfo names them."""


class KvGroupKind(IntEnum):
    """Law of attention of a KV group. Values are the wire's; the daemon serves FULL_ATTENTION."""

    FULL_ATTENTION = 1
    SLIDING_WINDOW = 2
    RECURRENT = 3


class ChecksumAlgorithm(IntEnum):
    """How a block's checksum is computed. Values are the wire's; LANES_64 is for engines on GPUs."""

    XXH3_64 = 1
    LANES_64 = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroup:
    """Layers that share a block table; block_bytes is one block, all layers of the group, one shard."""

    block_bytes: int
    layer_count: int
    kind: KvGroupKind = KvGroupKind.FULL_ATTENTION


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSpec:
    """Field by field the wire's NamespaceSpec (types.proto), with RAW encoding.

    Raises InvalidArgument where the client itself would go wrong; the daemon checks everything else.
    """

    model_id: str
    weights_fingerprint: str
    model_config_fingerprint: str
    kv_dtype: str
    kv_layout: str
    attention_backend: str
    block_tokens: int
    kv_groups: tuple[KvGroup, ...]
    hash_algorithm: str
    engine_name: str
    layout_version: str
    hash_bytes: int = 32
    hash_seed: str = ""
    tokenizer_fingerprint: str = ""
    kv_scales_fingerprint: str = ""
    cpu_isa_class: str = ""
    adapter_fingerprint: str = ""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    shard_count: int = 1
    checksum_algorithm: ChecksumAlgorithm = ChecksumAlgorithm.XXH3_64

    def __post_init__(self) -> None:
        if self.hash_bytes not in HASH_SIZES:
            raise InvalidArgument("hash_bytes", self.hash_bytes, "must be 16 or 32", "pad or hash again")
        if not self.kv_groups:
            raise InvalidArgument("kv_groups", "()", "needs 1 group or more", "describe the layers")
        if any(group.block_bytes < 1 for group in self.kv_groups):
            raise InvalidArgument(
                "kv_groups", self.kv_groups, "block_bytes must be 1 or more", "count the bytes"
            )

    def to_wire(self) -> types_pb2.NamespaceSpec:
        """The message that OpenNamespace carries."""
        groups = [
            types_pb2.KvGroup(
                kind=wire_enum(group.kind),
                block_bytes=group.block_bytes,
                layer_count=group.layer_count,
            )
            for group in self.kv_groups
        ]
        apart = {"kv_groups", "checksum_algorithm"}
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in apart}
        return types_pb2.NamespaceSpec(
            **plain,
            kv_groups=groups,
            checksum_algorithm=wire_enum(self.checksum_algorithm),
            encoding=types_pb2.BLOCK_ENCODING_RAW,
        )


def wire_enum(value: IntEnum) -> Any:
    """An enum of ours as a generated message takes it: the numbers agree, the types do not."""
    return int(value)


def isa_class() -> str:
    """The CPU's class where bytes depend on it, for example "x86_64:avx512_bf16"."""
    features: set[str] = set()
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                features = set(value.split())
                break
    strongest = next((feature for feature in ISA_FEATURES if feature in features), "base")
    return f"{platform.machine()}:{strongest}"
