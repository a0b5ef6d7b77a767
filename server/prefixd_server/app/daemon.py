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
from prefixd_server.app.lock import AlreadyRunning, Lock, data_dir_lock, remove_sockets, socket_lock
from prefixd_server.app.takeover import HandingOver, Predecessor
from prefixd_server.base.clock import Clock, SystemClock
from prefixd_server.base.config import Config, TenantConfig, config_error
from prefixd_server.base.failpoints import failpoint
from prefixd_server.base.logs import logger
from prefixd_server.base.metrics import Metrics
from prefixd_server.base.types import Tier
from prefixd_server.cache.build import build_cache
from prefixd_server.cache.cache import Cache
from prefixd_server.media.dram import DramMedium
from prefixd_server.media.movers import Movers
from prefixd_server.rpc.admin_service import Ends
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
FAREWELL_INTERVAL_S = 0.02
HOLDER_GOES_WITHIN_S, LOCK_INTERVAL_S = 5.0, 0.02
"""In a takeover: how long to wait for the locks of one that is dead or ends, and how often to look."""
READ_IN_TIMEOUT_S = 60.0
"""Then engines are served without what NVMe holds, until it is read in."""
LAG_INTERVAL_S = 0.1
"""How often the loop's lag is measured."""


class Daemon:
    """One daemon, on the running loop: start() ... stop().

    Args:
        config: checked.
        clock: leases and policy follow it; tests give a manual one.
        takeover: whether start() asks a daemon that runs already to hand the node over (takeover.py).
    """

    def __init__(self, config: Config, clock: Clock | None = None, *, takeover: bool = False) -> None:
        self.config = config
        self.handing_over = HandingOver(self._let_go, self._make_way)
        self._takeover = takeover
        self._locks: list[Lock] = []
        self._addresses = contextlib.AsyncExitStack()
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
        """Serves when it returns. Raises PrefixdError, with nothing left open."""
        try:
            config = self.config
            dram, predecessor = await self._ask_predecessor() if self._takeover else (None, None)
            await self._take_locks(replacing=predecessor is not None)
            movers = Movers(config.movers.thread_count, config.movers.queue_limit)
            self._cache = build_cache(config, self._clock, movers, dram=dram)
            self._open.push_async_callback(self._cache.stop)
            self._cache.start()
            self._open.push_async_callback(self._stop_servers)
            if predecessor is not None:
                await self._read_in()
                failpoint("takeover.opened")
                await predecessor.ready()
                failpoint("takeover.ready")
            for tenant in config.all_tenants:
                await self._open_tenant(tenant)
            self._open.push_async_callback(self._addresses.aclose)
            await self._open_addresses()
        except BaseException:
            await self._open.aclose()
            raise
        self._watch_lag()
        self._watch_tiers()
        await self._set_serving(True)
        if predecessor is not None:
            failpoint("takeover.published")
            await predecessor.serving()
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

    async def leave(self) -> None:
        """After a takeover: ends each session when its leases are gone; its engine goes to the new daemon.

        What is left when the drain's time is over goes with stop().
        """
        if not self.cache.state.draining:
            # Somebody else has the node, whom the successor never told us of.
            self.cache.drain_begin()
        loop, timeout_s = asyncio.get_running_loop(), self.config.drain.timeout_s
        gone_at = loop.time() + timeout_s
        while self.cache.farewell() and loop.time() < gone_at:
            await asyncio.sleep(FAREWELL_INTERVAL_S)
        # Answers in pieces, which no session stands for, come to their end.
        self._grace_s = max(STOP_GRACE_S, gone_at - loop.time())
        self._log.info("left", remaining_leases=self.cache.state.leases.live_count())

    async def must_begin_anew(self) -> bool:
        """Whether a takeover has failed and nobody else has the node: what was let go of is to be opened.

        The locks are free on return; taking them is the new beginning's.
        """
        if not self.handing_over.is_over or self.handing_over.succeeded:
            return False
        try:
            for lock in self._locks:
                await _acquire(lock, HOLDER_GOES_WITHIN_S)
        except AlreadyRunning as owner:
            self._log.info("another daemon has the node", detail=owner.message)
            return False
        finally:
            for lock in self._locks:
                lock.release()
        return True

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

    async def _ask_predecessor(self) -> tuple[DramMedium, Predecessor | None]:
        """Our memory, and the daemon that has let go for us, if one runs. Raises PrefixdError."""
        # First, so that a lack of memory is found while the old daemon still has everything.
        dram = DramMedium.from_config(self.config)
        release_memory = self._open.enter_context(contextlib.ExitStack())
        release_memory.callback(dram.close)
        failpoint("takeover.memory")
        admin = next(tenant for tenant in self.config.all_tenants if tenant.admin)
        predecessor = Predecessor(_socket_of(admin))
        # Closed after all else: the old daemon, told so, finds the locks free.
        self._open.push_async_callback(predecessor.close)
        found = await predecessor.asked()
        release_memory.pop_all()
        failpoint("takeover.given")
        return dram, predecessor if found else None

    async def _read_in(self) -> None:
        """Waits until NVMe has been read in, as the old daemon serves from memory meanwhile."""
        loop = asyncio.get_running_loop()
        until = loop.time() + READ_IN_TIMEOUT_S
        while any(tier.state == "recovering" for tier in self.cache.stats(None).tiers):
            if loop.time() > until:
                self._log.warning("NVMe is still being read in", waited_s=READ_IN_TIMEOUT_S)
                return
            await asyncio.sleep(TIER_LOOK_INTERVAL_S)

    async def _take_locks(self, *, replacing: bool) -> None:
        data_dir = self.config.server.data_dir
        if data_dir is not None:
            _make_directory(data_dir, 0o700, "data_dir")
            await self._lock(data_dir_lock(data_dir))
        for tenant in self.config.all_tenants:
            socket = _socket_of(tenant)
            _make_directory(socket.parent, 0o755, "socket")
            lock = await self._lock(socket_lock(socket))
            remove_sockets(socket, published=not replacing)
            self._open.callback(self._remove_own, lock, socket)

    async def _lock(self, lock: Lock) -> Lock:
        # Of a daemon that dies while it hands over, the kernel closes the socket before the lock.
        await _acquire(lock, HOLDER_GOES_WITHIN_S if self._takeover else 0.0)
        self._locks.append(lock)
        self._open.callback(lock.release)
        return lock

    @staticmethod
    def _remove_own(lock: Lock, socket: Path) -> None:
        """Removes the sockets, unless they are another daemon's by now."""
        if lock.is_held:
            remove_sockets(socket)

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
            self._addresses.push_async_callback(self._stop_server, server)
            credentials = server_credentials(self.config.tls)
            self.ports["listen"] = await server.open_tcp(addresses.listen, credentials)
        if addresses.probes:
            probes = ProbeServer()
            self._addresses.push_async_callback(probes.stop)
            self.ports["probes"] = await probes.open(addresses.probes)
            self._probes.append(probes)
        if addresses.metrics:
            exposition = Exposition(self._render_metrics)
            self.ports["metrics"] = await exposition.open(addresses.metrics)
            self._addresses.push_async_callback(exposition.close)

    # -- end by takeover, step by step ---------------------------------------------------------

    async def _let_go(self) -> None:
        await self.cache.hand_over()
        failpoint("takeover.nvme-closed")
        for lock in self._locks:
            lock.release()

    async def _make_way(self) -> None:
        self.cache.drain_begin()
        await self._addresses.aclose()

    def _server(self, seats: tuple[Seat, ...], callers: Callers | None = None) -> WireServer:
        ends = Ends(self.drain, self.handing_over.serve)
        server = WireServer(self.cache, seats, self.config.leases, ends, self.metrics, callers)
        self._servers.append(server)
        return server

    async def _stop_server(self, server: WireServer) -> None:
        await server.stop(self._grace_s)

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


async def _acquire(lock: Lock, patience_s: float) -> None:
    """Takes a lock, waiting so long for its holder to go. Raises AlreadyRunning."""
    until = asyncio.get_running_loop().time() + patience_s
    while True:
        try:
            return lock.acquire()
        except AlreadyRunning:
            if asyncio.get_running_loop().time() >= until:
                raise
            await asyncio.sleep(LOCK_INTERVAL_S)


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
