"""What a reader can read: tiers, and of HBM the devices whose memory it can open."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import Rows, Slots, Tier
from prefixd_server.catalog.catalog import Catalog


@dataclass(frozen=True, slots=True)
class Reach:
    """tiers, fastest first; devices of HBM by number, None for every one."""

    tiers: tuple[Tier, ...]
    devices: tuple[int, ...] | None = None

    def tier_of(self, catalog: Catalog, rows: Rows) -> NDArray[np.uint8]:
        """The fastest tier in reach that has each row whole; 0 when none has."""
        tier_of = np.zeros(len(rows), dtype=np.uint8)
        for tier in self.tiers:
            if tier not in catalog.slots:
                continue
            resident = catalog.resident(tier, rows)
            if tier is Tier.HBM and resident.any():
                resident &= self._on_devices(catalog, catalog.columns.slot[tier].take(rows))
            if resident.all():
                # What a faster tier has stays; mostly there is none, and slower ones need no look.
                tier_of[tier_of == 0] = tier
                return tier_of
            tier_of[resident & (tier_of == 0)] = tier
        return tier_of

    def includes(self, catalog: Catalog, tier: Tier, slots: Slots) -> bool:
        """Whether all of these slots can be read."""
        return tier in self.tiers and (tier is not Tier.HBM or bool(self._on_devices(catalog, slots).all()))

    def _on_devices(self, catalog: Catalog, slots: Slots) -> NDArray[np.bool_]:
        table = catalog.slots[Tier.HBM]
        if self.devices is None or len(self.devices) == table.device_count:
            return np.ones(len(slots), dtype=np.bool_)
        return np.isin(table.devices_of(slots), self.devices)


ReachOf: TypeAlias = Callable[[int], Reach]
"""By shard: each may be read by another process, on another device."""
_HOST = Reach((Tier.DRAM,), ())
_ALL = Reach((Tier.HBM, Tier.DRAM, Tier.NVME))


def every_engines(_shard: int) -> Reach:
    """Of every engine of the node."""
    return _HOST


def all_stored(_shard: int) -> Reach:
    """Of the node itself."""
    return _ALL


def on_devices(devices: tuple[int, ...]) -> Reach:
    """Of one that can open the memory of these devices, if any."""
    return Reach((Tier.HBM, Tier.DRAM), devices) if devices else _HOST
