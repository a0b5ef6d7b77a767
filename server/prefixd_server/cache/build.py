"""Builds the cache floor from a configuration: the object graph, and nothing else."""

from __future__ import annotations

import errno
import secrets
from dataclasses import dataclass

import numpy as np
import structlog

from prefixd_server.base.clock import Clock
from prefixd_server.base.config import Config
from prefixd_server.base.files import Files, RealFiles
from prefixd_server.base.sizes import format_size
from prefixd_server.base.types import Tier
from prefixd_server.cache.administration import Administration
from prefixd_server.cache.bad_copies import BadCopies
from prefixd_server.cache.cache import Cache
from prefixd_server.cache.companions import Companions
from prefixd_server.cache.copying import Copier
from prefixd_server.cache.costs import Costs
from prefixd_server.cache.endings import Endings
from prefixd_server.cache.epochs import Epochs
from prefixd_server.cache.hbm_device import HbmDevice
from prefixd_server.cache.hbm_placement import HbmPlacement
from prefixd_server.cache.hbm_tier import HbmTier
from prefixd_server.cache.hbm_transfers import HbmTransfers
from prefixd_server.cache.migration import Migration
from prefixd_server.cache.next_to_go import NextToGo
from prefixd_server.cache.nvme_health import NvmeHealth
from prefixd_server.cache.nvme_tier import NvmeTier
from prefixd_server.cache.portable import Portable
from prefixd_server.cache.prefetching import Prefetching
from prefixd_server.cache.quotas import Quotas
from prefixd_server.cache.readiness import Readiness
from prefixd_server.cache.reading import Reading
from prefixd_server.cache.rebalancing import Rebalancing
from prefixd_server.cache.releasing import Releasing
from prefixd_server.cache.room import Room
from prefixd_server.cache.scheduler import Scheduler
from prefixd_server.cache.sessions import Sessions
from prefixd_server.cache.state import State
from prefixd_server.cache.storage import Storage
from prefixd_server.cache.transfers import Transfers
from prefixd_server.cache.usage import Usage
from prefixd_server.cache.verifying import Verifier
from prefixd_server.cache.watching import Watchers
from prefixd_server.cache.workload import Workload
from prefixd_server.cache.write_budget import WriteBudget
from prefixd_server.cache.writing import Writing
from prefixd_server.catalog.catalog import Catalog
from prefixd_server.catalog.slots import SlotTable
from prefixd_server.index.line import open_line
from prefixd_server.index.process import Index, IndexOptions, OpenProcess
from prefixd_server.media.dram import DramMedium
from prefixd_server.media.hbm import HbmMedium
from prefixd_server.media.hbm_devices import DeviceMovers, HbmDevices
from prefixd_server.media.movers import Movers
from prefixd_server.media.nvme import NvmeMedium
from prefixd_server.media.nvme_format import file_bytes
from prefixd_server.policy.importance import ImportancePolicy
from prefixd_server.policy.lru import LruPolicy
from prefixd_server.policy.policy import DaemonPolicy
from prefixd_server.policy.weighed import WeighedImportance

log = structlog.get_logger(__name__)

DISK_FAILURES = frozenset({errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.EUCLEAN})
"""What a drive that has failed answers; memory is served without it. Other errors are the configuration's."""
BOOT_ID_BYTES = 16
HBM_MOVER_COUNT = 2
"""One in each direction keeps the link busy; they wait, and copy nothing themselves."""
INDEX_SHARE = 1 / 32
INDEX_BYTES_MIN = 16 << 20
"""Disk space kept for the index, the sum of both, of the NVMe tier's size: the cap holds with it."""
INDEX_LOG_BYTES = 10 << 20
"""Of that, for its logs and for tables on their way to disk."""
RECORD_DISK_BYTES = 512
"""Most disk space of one record: twice its size and more, for a table is there until its successor is."""
BUDGET_NAME = "WRITTEN"
"""Beside the index: what was written in the last day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSeams:
    """What tests put in the place of the NVMe tier's outside."""

    files: Files | None = None
    movers: Movers | None = None
    index_options: IndexOptions | None = None
    open_index: OpenProcess = open_line


def build_cache(
    config: Config,
    clock: Clock,
    movers: Movers,
    seed: int | None = None,
    disk: DiskSeams | None = None,
    dram: DramMedium | None = None,
) -> Cache:
    """A cache that is ready to start().

    Args:
        movers: the threads that copy in memory; tests give a hand-cranked twin.
        seed: of the policy's randomness; None for the system's, as the key table's always is.
        disk, dram: seams of tests; memory that is allocated already, and the cache's from here on.

    Raises:
        ConfigError: when the memory cannot be had, or the data directory is damaged.
    """
    disk = disk or DiskSeams()
    media = _Media(config, clock, disk.files, dram)
    dram, medium, devices = media.dram, media.nvme, media.hbm
    state = _state(config, clock, movers, seed, dram, medium, media.tables)
    endings = Endings(state)
    epochs = Epochs(config.server.data_dir, clock)
    sessions = Sessions(state.quotas, endings)
    room = Room(state)
    watchers = Watchers()
    workload = Workload(state, watchers)
    verifier = Verifier(state)
    bad_copies = BadCopies(state, sessions, endings)
    migration = Migration(state, config.migration, watchers)
    copier = Copier(state, bad_copies, migration.governors)
    hbm = None
    if devices is not None:
        hbm = _hbm_placement(config, state, sessions, endings, room, devices, copier, migration)
    nvme = transfers = storage = None
    if medium is not None:
        room.next_to_go = NextToGo(state)
        nvme = _nvme_tier(config, state, room, medium, disk)
        transfers = Transfers(state, room, nvme, copier, migration)
    prefetching = Prefetching(state, sessions, transfers, config.migration)
    if nvme is not None and transfers is not None and room.next_to_go is not None:
        scheduler = Scheduler(state, nvme, transfers, migration, prefetching, room.next_to_go)
        storage = Storage(state, nvme, transfers, epochs, scheduler)
    reading = Reading(state, sessions, transfers, workload, prefetching, hbm)
    hbm_tier = None if hbm is None else hbm.tier
    writing = Writing(state, sessions, endings, room, workload, hbm_tier)
    return Cache(
        state=state,
        epochs=epochs,
        sessions=sessions,
        endings=endings,
        room=room,
        rebalancing=Rebalancing(state, sessions, room),
        companions=Companions(sessions, room, dram),
        reading=reading,
        releasing=Releasing(state, sessions, endings, verifier, bad_copies),
        writing=writing,
        portable=Portable(state, reading, writing, verifier, bad_copies, workload),
        usage=Usage(state, sessions, workload, migration, prefetching),
        administration=Administration(
            state, sessions, endings, room, epochs, nvme, clock.now(), hbm_tier, media.nvme_failure
        ),
        storage=storage,
        hbm=hbm,
        migration=migration,
        prefetching=prefetching,
        readiness=Readiness(state, migration, reading),
        watchers=watchers,
    )


class _Media:
    """The tiers' media, as far as there are any, and their slot tables.

    nvme_failure: why the NVMe tier is not there although it should be; empty otherwise.
    """

    def __init__(self, config: Config, clock: Clock, files: Files | None, dram: DramMedium | None) -> None:
        self.dram = dram or DramMedium.from_config(config)
        self.tables = {Tier.DRAM: SlotTable(Tier.DRAM, config.segment_bytes, config.segment_count)}
        self.nvme_failure = ""
        self.nvme: NvmeMedium | None = None
        try:
            self.nvme = _open_nvme(config, clock, files)
        except OSError as failure:
            if failure.errno not in DISK_FAILURES:
                raise config.error("nvme.directories", failure.filename, f"{failure.strerror}") from failure
            self.nvme_failure = f"the disk failed at the start: {failure}"
            log.warning("NVMe tier failed: serving without it", reason=str(failure))
        if self.nvme is not None:
            self.tables[Tier.NVME] = SlotTable(Tier.NVME, self.nvme.segment_bytes, self.nvme.segment_count)
        self.hbm = _hbm_devices(config)
        if self.hbm is not None:
            self.tables[Tier.HBM] = SlotTable(
                Tier.HBM, self.hbm.segment_bytes, self.hbm.segment_count, len(self.hbm.media)
            )


def _state(
    config: Config,
    clock: Clock,
    movers: Movers,
    seed: int | None,
    dram: DramMedium,
    nvme: NvmeMedium | None,
    tables: dict[Tier, SlotTable],
) -> State:
    """What the rooms share."""
    durable = frozenset({Tier.NVME}) & tables.keys()
    catalog = Catalog(tables, config.catalog.block_count_max, secrets.randbits(63), durable)
    costs = Costs(catalog, config.policy.recompute_cost)
    importance = WeighedImportance(costs.weight) if config.policy.recompute_cost else ImportancePolicy()
    policies: dict[str, DaemonPolicy] = {policy.name: policy for policy in (importance, LruPolicy())}
    return State(
        metered=[importance],
        catalog=catalog,
        policy=policies[config.policy.name],
        policies=policies,
        learner=importance,
        costs=costs,
        dram=dram,
        media={Tier.DRAM: dram} if nvme is None else {Tier.DRAM: dram, Tier.NVME: nvme},
        movers=movers,
        clock=clock,
        limits=config.leases,
        rng=np.random.default_rng(seed),
        drain_timeout_s=config.drain.timeout_s,
        boot_id=secrets.token_bytes(BOOT_ID_BYTES),
        quotas=Quotas.of(config),
    )


def _nvme_tier(config: Config, state: State, room: Room, medium: NvmeMedium, seams: DiskSeams) -> NvmeTier:
    """The tier over its files, with movers of its own."""
    state.disk = seams.movers or Movers(config.nvme.thread_count, config.movers.queue_limit)
    health = NvmeHealth(state.clock, medium, state.disk, config.nvme.latency_max_s, config.nvme.retry_pause_s)
    index = Index(
        medium.index_directory,
        medium.store_uuid,
        seams.index_options,
        health.index_changed,
        seams.open_index,
    )
    files = seams.files or RealFiles()
    path = medium.index_directory.with_name(BUDGET_NAME)
    budget = WriteBudget(config.nvme.write_budget_bytes, state.clock, files, path, state.disk)
    block_count_max = (_index_bytes(config.nvme.size_bytes) - INDEX_LOG_BYTES) // RECORD_DISK_BYTES
    return NvmeTier(state, room, medium, index, budget, health, block_count_max)


def _hbm_devices(config: Config) -> HbmDevices | None:
    """The HBM tier's memory, nothing of it taken yet; None when the tier is off."""
    count, hbm = config.hbm_segment_count, config.hbm
    if not count:
        return None
    return HbmDevices(
        [HbmMedium(uuid, hbm.segment_bytes, count, hbm.copy_timeout_s) for uuid in config.hbm_devices]
    )


def _hbm_placement(
    config: Config,
    state: State,
    sessions: Sessions,
    endings: Endings,
    room: Room,
    devices: HbmDevices,
    copier: Copier,
    migration: Migration,
) -> HbmPlacement:
    """The tier over its memory, with movers of its own for each device."""
    movers = [Movers(HBM_MOVER_COUNT, config.movers.queue_limit) for _ in devices.media]
    state.device = together = DeviceMovers(devices, movers)
    state.media[Tier.HBM] = devices
    made = [
        HbmDevice(state, sessions, endings, room, devices, number, own) for number, own in enumerate(movers)
    ]
    tier = HbmTier(state, made, together)
    return HbmPlacement(state, tier, HbmTransfers(state, room, tier, copier, migration), migration)


def _open_nvme(config: Config, clock: Clock, files: Files | None) -> NvmeMedium | None:
    """The NVMe tier's files, within its size; None when the tier is off."""
    directories = config.nvme_directories
    if not directories:
        return None
    size, segment = config.nvme.size_bytes, config.nvme.segment_bytes
    count = (size - _index_bytes(size)) // file_bytes(segment)
    if count < 1:
        raise config.error("nvme.size", format_size(size), "leaves no room for one segment beside the index")
    for directory in directories:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return NvmeMedium(directories, count, segment, files, clock)


def _index_bytes(size_bytes: int) -> int:
    """Disk space kept for the index of a tier of this size."""
    return INDEX_BYTES_MIN + int(size_bytes * INDEX_SHARE)
