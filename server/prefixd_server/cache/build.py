"""Builds the cache floor from a configuration: the object graph, and nothing else."""

from __future__ import annotations

import secrets

import numpy as np

from prefixd_server.base.clock import Clock
from prefixd_server.base.config import Config
from prefixd_server.base.types import Tier
from prefixd_server.cache.administration import Administration
from prefixd_server.cache.cache import Cache
from prefixd_server.cache.companions import Companions
from prefixd_server.cache.endings import Endings
from prefixd_server.cache.epochs import Epochs
from prefixd_server.cache.portable import Portable
from prefixd_server.cache.reading import Reading
from prefixd_server.cache.rebalancing import Rebalancing
from prefixd_server.cache.room import Room
from prefixd_server.cache.sessions import Sessions
from prefixd_server.cache.state import State
from prefixd_server.cache.usage import Usage
from prefixd_server.cache.verifying import Verifier
from prefixd_server.cache.writing import Writing
from prefixd_server.catalog.catalog import Catalog
from prefixd_server.catalog.slots import SlotTable
from prefixd_server.media.dram import DramMedium
from prefixd_server.media.movers import Movers
from prefixd_server.policy.lru import LruPolicy

BOOT_ID_BYTES = 16


def build_cache(config: Config, clock: Clock, movers: Movers, seed: int | None = None) -> Cache:
    """A cache that is ready to start().

    Args:
        movers: the threads that copy; tests give a hand-cranked twin.
        seed: of the policy's randomness; None for the system's. The key table
            is always seeded from the system: hostile tenants choose hashes.

    Raises:
        ConfigError: when the memory cannot be had, or the data directory is damaged.
    """
    dram = DramMedium.from_config(config)
    table = SlotTable(Tier.DRAM, config.segment_bytes, config.segment_count)
    state = State(
        catalog=Catalog({Tier.DRAM: table}, config.catalog.block_count_max, secrets.randbits(63)),
        policy=LruPolicy(),
        dram=dram,
        movers=movers,
        clock=clock,
        limits=config.leases,
        rng=np.random.default_rng(seed),
        drain_timeout_s=config.drain.timeout_s,
        boot_id=secrets.token_bytes(BOOT_ID_BYTES),
    )
    endings = Endings(state)
    epochs = Epochs(config.server.data_dir, clock)
    sessions = Sessions(config.leases.session_count_max, endings)
    quotas = {tenant.name: tenant.quota_bytes for tenant in config.all_tenants}
    room = Room(state, quotas)
    verifier = Verifier(state)
    reading = Reading(state, sessions, endings, verifier)
    writing = Writing(state, sessions, endings, room)
    return Cache(
        state=state,
        epochs=epochs,
        sessions=sessions,
        endings=endings,
        room=room,
        rebalancing=Rebalancing(state, sessions, room),
        companions=Companions(sessions, room, dram),
        reading=reading,
        writing=writing,
        portable=Portable(state, reading, writing, verifier),
        usage=Usage(state, sessions),
        administration=Administration(state, sessions, endings, room, epochs, clock.now()),
        namespace_count_max=config.catalog.namespace_count_max,
    )
