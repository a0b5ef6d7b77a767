"""What a test sees of the tiers of a daemon that is a process of its own."""

from __future__ import annotations

from typing import TypeVar

from prefixd.v1 import admin_service_pb2 as admin
from prefixd.v1 import types_pb2

from tests.gpu.device_process import TIER_BYTES
from tests.support.engine_process import EngineProcess, Observer

BLOCK = 65_536
ALLOCATION_TIMEOUT_S = 30.0
"""Longer than the daemon's longest pause between attempts."""
Process = TypeVar("Process", bound=EngineProcess)


def tier_of(observer: Observer, tier: types_pb2.Tier) -> admin.TierStats:
    """The daemon's statistics of one tier."""
    (found,) = [stats for stats in observer.stats().tiers if stats.tier == tier]
    return found


def hbm(observer: Observer) -> admin.TierStats:
    """The daemon's statistics of HBM."""
    return tier_of(observer, types_pb2.TIER_HBM)


def wait_for_all_memory(observer: Observer, size_bytes: int = TIER_BYTES) -> None:
    """Returns when the whole tier is allocated."""
    observer.wait(
        lambda: hbm(observer),
        lambda tier: tier.prefaulted_bytes == size_bytes,
        "the whole tier is there",
        ALLOCATION_TIMEOUT_S,
    )


def opened(engine: Process) -> Process:
    """The engine, with the namespace "n" of blocks of BLOCK bytes open."""
    engine.ask("open", name="n", block_bytes=BLOCK)
    return engine
