"""The HBM tier: its devices together, and which of them a session, a run or a slot belongs to.

A block has at most one copy in HBM, on one device, and is read there by the sessions that named it. What a
device does or suffers is its own (hbm_device.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.accounts import TierStats
from prefixd_server.base.types import DeviceSegment, Extent, Slots, Tier
from prefixd_server.cache.hbm_device import HbmDevice, HbmState
from prefixd_server.cache.sessions import Session
from prefixd_server.cache.state import State
from prefixd_server.media.hbm_devices import DeviceMovers

REDEEMER_COUNT_MAX = 65_536
"""Shards of instances whose redeemers are remembered."""


class HbmTier:
    """See the module. Owned by the event loop.

    Args:
        movers: of all devices.
    """

    def __init__(self, state: State, devices: Sequence[HbmDevice], movers: DeviceMovers) -> None:
        self._state = state
        self._table = state.catalog.slots[Tier.HBM]
        self.devices = tuple(devices)
        self._movers = movers
        self._redeemers: dict[tuple[str, str, int], tuple[int, ...]] = {}
        """By tenant, instance and shard: what its last redeemer named; the oldest first."""

    # -- who may read --------------------------------------------------------------------------

    def named(self, session: Session) -> tuple[int, ...]:
        """Devices that the session has named and that serve it, in the order of the configuration."""
        return tuple(device.number for device in self.devices if device.serves(session))

    def of_shard(self, session: Session, shard: int) -> tuple[int, ...]:
        """Of those, where the shard's blocks can be read by whoever of the instance redeems it.

        Where several are named, that is what the process named which redeemed the shard last.
        """
        named = self.named(session)
        if len(session.readable_devices) < 2:
            return named
        unknown = named if len(named) > 1 else ()  # one alone may be another shard's
        redeemer = self._redeemers.get((session.tenant, session.instance_id, shard), unknown)
        return tuple(device for device in named if device in redeemer)

    def redeemed(self, session: Session, shard: int) -> None:
        """The session, one of its instance's, has asked for the shard of a lease."""
        who = (session.tenant, session.instance_id, shard)
        self._redeemers.pop(who, None)
        self._redeemers[who] = self.named(session)
        if len(self._redeemers) > REDEEMER_COUNT_MAX:
            del self._redeemers[next(iter(self._redeemers))]

    def device_of_shard(self, session: Session, shard: int) -> HbmDevice | None:
        """Where the shard's blocks go for the session; None where there is no device, or no telling which."""
        devices = self.of_shard(session, shard)
        return self.devices[devices[0]] if len(devices) == 1 else None

    def device_segments(self, session: Session, extents: Iterable[Extent]) -> tuple[DeviceSegment, ...]:
        """How the session opens the segments that extents lie in; it may have them open from now on."""
        found: dict[int, DeviceSegment] = {}
        for extent in extents:
            if extent.tier is Tier.HBM and extent.segment_id not in found:
                device = next(d for d in self.devices if extent.segment_id in d.segment_ids)
                found[extent.segment_id] = device.opened_by(session, extent.segment_id)
        return tuple(found.values())

    def on(self, devices: Collection[int], slots: Slots) -> NDArray[np.bool_]:
        """Which slots lie on one of these devices; NO_SLOT does not."""
        return np.isin(self._table.devices_of(slots), list(devices))

    # -- life ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Takes the devices and their memory, then watches them; ends when cancelled or all are off."""
        await asyncio.gather(*(device.run() for device in self.devices))

    async def close(self) -> None:
        """Gives the memory back."""
        await self._movers.drain()
        self._movers.close()
        self._state.dram.unpin()
        for device in self.devices:
            device.close()

    @property
    def state(self) -> HbmState:
        """READY where one device is; STARTING where one may become so; else OFF."""
        states = {device.state for device in self.devices}
        return next(state for state in (HbmState.READY, HbmState.STARTING, HbmState.OFF) if state in states)

    @property
    def reason(self) -> str:
        """What is not as it should be; where there are several devices, of which."""
        if len(self.devices) == 1:
            return self.devices[0].reason
        told = [(device.medium.uuid, device.state, device.reason) for device in self.devices]
        return "; ".join(f"{uuid} is {state.value}: {reason}" for uuid, state, reason in told if reason)

    def stats(self, pools: list[int]) -> TierStats:
        """What the given pools hold here."""
        devices = tuple(device.stats(pools) for device in self.devices)
        return replace(
            self._table.stats(Tier.HBM, pools),
            prefaulted_bytes=sum(device.allocated_bytes for device in devices),
            page_kind="device",
            state=self.state.value,
            state_reason=self.reason,
            devices=devices,
        )
