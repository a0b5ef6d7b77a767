"""The daemon's life: locks, object graph, sockets, drain, end. Signals are process.py's.

Each thing that is opened is closed in the opposite order, whether the start
went well or not. What the parts do is theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import prefixd_server
from prefixd_server.app.exposition import Exposition
from prefixd_server.app.lock import Lock, data_dir_lock, remove_sockets, socket_lock
from prefixd_server.base.clock import Clock, SystemClock
from prefixd_server.base.config import Config, TenantConfig, config_error
from prefixd_server.base.logs import logger
from prefixd_server.base.metrics import Metrics
from prefixd_server.base.types import Tier
from prefixd_server.cache.build import build_cache
from prefixd_server.cache.cache import Cache
from prefixd_server.media.movers import Movers
from prefixd_server.rpc.callers import Callers
from prefixd_server.rpc.companion import Companion
from prefixd_server.rpc.probes import ProbeServer
from prefixd_server.rpc.seat import Seat, companion_path
from prefixd_server.rpc.server import WireServer
from prefixd_server.rpc.tls import server_credentials

STOP_GRACE_S = 0.25
"""For answers that are on their way when the sockets close; leases have ended by then."""
TIER_LOOK_INTERVAL_S = 0.1
"""How late health may tell that a tier is away or back."""
LAG_INTERVAL_S = 0.1
"""How often the loop's lag is measured."""


class Daemon:
    """One daemon, on the running loop: start() ... stop().

    Args:
        config: checked.
        clock: leases and policy follow it; tests give a manual one.
    """

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self.config = config
        self.ports: dict[str, int] = {}
        self._clock = clock or SystemClock()
        self._open = contextlib.AsyncExitStack()
        self._servers: list[WireServer] = []
        self._probes: list[ProbeServer] = []
        self._cache: Cache | None = None
        self._grace_s = STOP_GRACE_S
        self._log = logger("prefixd.daemon")

    @property
    def cache(self) -> Cache:
        """The cache floor; there from start() on."""
        assert self._cache is not None, "the daemon was not started"
        return self._cache

    @property
    def metrics(self) -> Metrics:
        """What all floors observe; there from start() on."""
        return self.cache.state.metrics

    async def start(self) -> None:
        """Serves when it returns. Raises ConfigError or AlreadyRunning, with nothing left open."""
        try:
            self._take_locks()
            config = self.config
            movers = Movers(config.movers.thread_count, config.movers.queue_limit)
            self._cache = build_cache(config, self._clock, movers)
            self._open.push_async_callback(self._cache.stop)
            self._cache.start()
            self._open.push_async_callback(self._stop_servers)
            for tenant in config.all_tenants:
                await self._open_tenant(tenant)
            await self._open_addresses()
        except BaseException:
            await self._open.aclose()
            raise
        self._watch_lag()
        self._watch_tiers()
        await self._set_serving(True)
        self._log.info(
            "serving",
            version=prefixd_server.__version__,
            boot=self.cache.boot_id.hex(),
            pid=os.getpid(),
            sockets=[str(tenant.socket) for tenant in config.all_tenants],
            dram_bytes=config.dram.size_bytes,
            **{f"{name}_port": port for name, port in self.ports.items()},
        )

    async def drain(self, timeout_s: float | None = None) -> int:
        """Stops admitting; returns how many leases are held when all are gone or the time is over."""
        timeout = self.config.drain.timeout_s if timeout_s is None else timeout_s
        self._log.info("draining", timeout_s=timeout)
        await self._set_serving(False)
        self.cache.drain_begin(timeout)
        remaining = await self.cache.drained(timeout)
        self._log.info("drained", remaining_leases=remaining)
        return remaining

    def hurry(self) -> None:
        """From now on stop() waits for nobody."""
        self._grace_s = 0.0

    async def stop(self) -> None:
        """Closes everything, in the opposite order of start()."""
        await self._set_serving(False)
        await self._open.aclose()
        self._log.info("stopped")

    def status(self) -> str:
        """One line for the service manager. Raises what ended a background task, if one has ended."""
        self.cache.raise_if_broken()
        stats = self.cache.stats(None)
        tiers = ", ".join(
            f"{tier.tier.name} {tier.state}" + (f" ({tier.state_reason})" if tier.state_reason else "")
            for tier in stats.tiers
        )
        what = "draining" if stats.draining else "serving"
        return f"{what}: {tiers}; {stats.session_count} sessions, {stats.lease_count} leases"

    # -- start, step by step -------------------------------------------------------------------

    def _take_locks(self) -> None:
        data_dir = self.config.server.data_dir
        if data_dir is not None:
            _make_directory(data_dir, 0o700, "data_dir")
            self._lock(data_dir_lock(data_dir))
        for tenant in self.config.all_tenants:
            socket = _socket_of(tenant)
            _make_directory(socket.parent, 0o755, "socket")
            self._lock(socket_lock(socket))
            remove_sockets(socket)
            self._open.callback(remove_sockets, socket)

    def _lock(self, lock: Lock) -> None:
        lock.acquire()
        self._open.callback(lock.release)

    async def _open_tenant(self, tenant: TenantConfig) -> None:
        socket = _socket_of(tenant)
        companion = Companion(
            companion_path(socket), tenant.name, self.cache.companions, tenant.mode, tenant.group
        )
        self._open.push_async_callback(companion.close)
        await companion.open()
        server = self._server((Seat(tenant.name, tenant.admin, str(companion_path(socket).absolute())),))
        await server.open_unix(socket, tenant.mode, tenant.group)

    async def _open_addresses(self) -> None:
        addresses = self.config.server
        if addresses.listen:
            tenants = self.config.all_tenants
            seats = tuple(Seat(tenant.name, admin=False, companion_path="") for tenant in tenants)
            server = self._server(seats, Callers(tenants))
            credentials = server_credentials(self.config.tls)
            self.ports["listen"] = await server.open_tcp(addresses.listen, credentials)
        if addresses.probes:
            probes = ProbeServer()
            self._open.push_async_callback(probes.stop)
            self.ports["probes"] = await probes.open(addresses.probes)
            self._probes.append(probes)
        if addresses.metrics:
            exposition = Exposition(self._render_metrics)
            self.ports["metrics"] = await exposition.open(addresses.metrics)
            self._open.push_async_callback(exposition.close)

    def _server(self, seats: tuple[Seat, ...], callers: Callers | None = None) -> WireServer:
        server = WireServer(self.cache, seats, self.config.leases, self.drain, self.metrics, callers)
        self._servers.append(server)
        return server

    async def _stop_servers(self) -> None:
        await asyncio.gather(*(server.stop(self._grace_s) for server in self._servers))

    async def _set_serving(self, serving: bool) -> None:
        for server in self._servers:
            await server.set_serving(serving)
        for probes in self._probes:
            await probes.set_serving(serving)

    def _watch_tiers(self) -> None:
        task = asyncio.get_running_loop().create_task(self._tell_tiers())
        self._open.callback(task.cancel)

    async def _tell_tiers(self) -> None:
        """Has health answer for each tier, whenever one comes or goes."""
        told: dict[Tier, bool] = {}
        while True:
            for tier in self.cache.stats(None).tiers:
                if told.get(tier.tier) is not tier.is_ready:
                    told[tier.tier] = tier.is_ready
                    for server in self._servers:
                        await server.set_tier_serving(tier.tier, tier.is_ready)
            await asyncio.sleep(TIER_LOOK_INTERVAL_S)

    # -- metrics -------------------------------------------------------------------------------

    async def _render_metrics(self) -> bytes:
        node = self.cache.stats(None)
        tenants = {tenant.name: self.cache.stats(tenant.name) for tenant in self.config.all_tenants}
        return await asyncio.to_thread(self.metrics.render, node, tenants)

    def _watch_lag(self) -> None:
        task = asyncio.get_running_loop().create_task(self._measure_lag())
        self._open.callback(task.cancel)

    async def _measure_lag(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.metrics.loop_lag.observe(max(0.0, loop.time() - due))


def _socket_of(tenant: TenantConfig) -> Path:
    assert tenant.socket is not None, "checked configurations name every socket"
    return tenant.socket


def _make_directory(path: Path, mode: int, key: str) -> None:
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise config_error(
            "configuration", key, path, f"cannot make the directory: {error.strerror}"
        ) from error
