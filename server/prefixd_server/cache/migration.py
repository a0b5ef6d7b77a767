"""Whether background copies may go on, and what has moved: the governors, the pace, conservative mode.

One for the node. Not here: what is copied (scheduler.py, prefetching.py) and who
waits for a turn (governor.py).
"""

from __future__ import annotations

import structlog

from prefixd_server.base.config import MigrationConfig
from prefixd_server.base.traffic import Traffic, TransferCount
from prefixd_server.base.types import Tier
from prefixd_server.base.work import Reason
from prefixd_server.cache.conservative import ConservativeMode, Setting
from prefixd_server.cache.governor import Governor, loop_time
from prefixd_server.cache.pace import Pace
from prefixd_server.cache.state import State
from prefixd_server.cache.watching import ConservativeModeChanged, Watchers

DRAM_NVME = frozenset({Tier.DRAM, Tier.NVME})
HBM_DRAM = frozenset({Tier.HBM, Tier.DRAM})
DRAM_HELD = "DRAM that may not be given up"

log = structlog.get_logger(__name__)


class Migration:
    """See the module. Owned by the event loop; times are the loop's."""

    def __init__(self, state: State, config: MigrationConfig, watchers: Watchers) -> None:
        self._state = state
        self._watchers = watchers
        self.config = config
        self.pace = Pace(config.decode_p99_target_s)
        self.governors = {
            link: Governor(name, config.background_share, self.pace)
            for link, name in ((HBM_DRAM, "HBM-DRAM"), (DRAM_NVME, "DRAM-NVMe"))
            if link <= state.catalog.slots.keys()
        }
        self.mode = ConservativeMode(Setting(config.conservative), 0.0)
        self._told_on = self.mode.mode.on
        self.background_may_begin = True
        """As observed last."""
        self.counts = {reason: TransferCount() for reason in Reason}

    def observe(self) -> bool:
        """Measures the pressures; whether background copies may begin now."""
        now = loop_time()
        pressures = {
            f"demand on the {governor.name} link": governor.demand_share()
            for governor in self.governors.values()
        }
        pressures[DRAM_HELD] = self._dram_held_share()
        mode = self.mode.observe(pressures, now)
        self._changed()
        self.background_may_begin = not mode.on and self.pace.factor(now) > 0
        return self.background_may_begin

    def set_conservative(self, setting: Setting) -> None:
        """The operator's word."""
        self.mode.set(setting, loop_time())
        self._changed()

    def decoded(self, latency_s: float) -> None:
        """An engine reports the decode latency of a reply, seconds per token."""
        self.pace.observe(latency_s, loop_time())

    def keep_quiet(self, instance_id: str, span_s: float) -> None:
        """An engine wants no background copies for a time; 0 ends its earlier wish."""
        self.pace.keep_quiet(instance_id, span_s, loop_time())

    def count(self, reason: Reason, block_count: int, size_bytes: int) -> None:
        """A transfer was published."""
        self.counts[reason].block_count += block_count
        self.counts[reason].bytes += size_bytes

    def hurry(self) -> None:
        """The daemon ends: nothing waits for its turn any more."""
        for governor in self.governors.values():
            governor.hurry()

    def traffic(self) -> Traffic:
        """For people; prefetches are added by who knows them."""
        now = loop_time()
        mode = self.mode
        return Traffic(
            links=tuple(governor.stats() for governor in self.governors.values()),
            transfers=self.counts,
            conservative=mode.mode.on,
            conservative_setting=mode.setting.value,
            conservative_reason=mode.mode.reason,
            conservative_entered_count=mode.entered_count,
            quiet_s=self.pace.quiet_for(now),
            decode_p99_s=self.pace.decode_p99_s(now),
        )

    def _changed(self) -> None:
        """In the mode, what waits is given up, and with it the slots that it holds: demand needs the room."""
        mode = self.mode.mode
        for governor in self.governors.values():
            governor.keep_for_demand(mode.on)
        if mode.on is not self._told_on:
            self._told_on = mode.on
            log.warning("conservative mode " + ("begins" if mode.on else "ends"), reason=mode.reason)
            at = self._state.clock.wall()
            self._watchers.tell_all(ConservativeModeChanged(at, mode.on, mode.reason))

    def _dram_held_share(self) -> float:
        """Part of DRAM's slots that are being written, leased or quarantined, 0 to 1."""
        table = self._state.catalog.slots[Tier.DRAM]
        counts = table.counts()
        held = counts.reserved + counts.quarantined + table.leased_count
        return held / counts.total if counts.total else 0.0
