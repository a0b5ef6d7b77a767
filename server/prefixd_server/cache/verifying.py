"""Has a mover verify the copy in one slot against the catalog's checksum."""

from __future__ import annotations

import numpy as np

from prefixd_server.base.types import NO_ROW, NamespaceSpec, Tier
from prefixd_server.cache.state import State
from prefixd_server.media.movers import VerifyJob


class Verifier:
    """See the module."""

    def __init__(self, state: State) -> None:
        self._state = state

    async def is_good(self, spec: NamespaceSpec, kv_group: int, tier: Tier, slot: int) -> bool:
        """Whether the slot's bytes match their checksum. The caller holds a lease on the slot.

        A slot whose block was forgotten meanwhile has nothing to be compared
        with, and counts as good; so does one that its medium cannot read.
        """
        table = self._state.catalog.slots[tier]
        row = int(table.row[slot])
        if row == NO_ROW:
            return True
        extent = table.extents(np.array([slot], dtype=np.uint32), None)[0]
        job = VerifyJob(
            source=self._state.media[tier],
            segment_index=table.segment_of(slot),
            offset_bytes=extent.offset_bytes,
            stride_bytes=extent.stride_bytes,
            block_bytes=spec.kv_groups[kv_group].block_bytes,
            checksums=self._state.catalog.columns.checksum[row : row + 1].copy(),
            algorithm=spec.checksum_algorithm,
        )
        try:
            result = await self._state.movers_of(tier).run(job)
        except OSError:
            # A medium that cannot be read is given up as a whole; that says nothing of this copy.
            return True
        return not bool(result.bad[0])
