"""A tier that is away is named by health, in the statistics and in the metrics, and the daemon goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prefixd.v1 import admin_service_pb2, admin_service_pb2_grpc, types_pb2
from prefixd_server.app.daemon import Daemon
from prefixd_server.base.clock import ManualClock

from tests.support.daemon import running_daemon

NVME = "prefixd.tier.nvme"
DRAM = "prefixd.tier.dram"
States = health_pb2.HealthCheckResponse.ServingStatus
SETTINGS = {"nvme__size": "32MiB", "nvme__segment": "2MiB", "nvme__retry_pause_s": "0.2"}


@asynccontextmanager
async def daemon_with_nvme(data_dir: str) -> AsyncIterator[tuple[Daemon, grpc.aio.Channel, ManualClock]]:
    clock = ManualClock()
    async with running_daemon(clock=clock, data_dir=data_dir, **SETTINGS) as daemon:
        socket = daemon.config.socket_path
        async with grpc.aio.insecure_channel(f"unix:{socket}") as channel:
            await until_health(channel, NVME, lambda state: state == States.Value("SERVING"))
            yield daemon, channel, clock


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
    return int(answer.status)


async def until_health(channel: grpc.aio.Channel, service: str, holds: Callable[[int], bool]) -> None:
    """Watches health until it is as wanted."""
    stub = health_pb2_grpc.HealthStub(channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=30)
    async for answer in watch:
        if holds(int(answer.status)):
            watch.cancel()
            return


async def nvme_stats(channel: grpc.aio.Channel) -> admin_service_pb2.TierStats:
    stub = admin_service_pb2_grpc.AdminServiceStub(channel)
    answer = await stub.GetStats(admin_service_pb2.GetStatsRequest(), timeout=10)
    return next(tier for tier in answer.tiers if tier.tier == types_pb2.TIER_NVME)


async def test_an_index_that_died_is_told_everywhere_and_comes_back(tmp_path: Path) -> None:
    async with daemon_with_nvme(str(tmp_path)) as (daemon, channel, clock):
        assert daemon.cache.storage is not None
        pid = daemon.cache.storage.nvme.index.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until_health(channel, NVME, lambda state: state == States.Value("NOT_SERVING"))
        assert await health(channel, "") == States.Value("SERVING")
        assert await health(channel, DRAM) == States.Value("SERVING")
        stats = await nvme_stats(channel)
        assert (stats.state, "index" in stats.state_reason) == ("paused", True)
        assert stats.fault_counts["index_fault"] == 1
        assert 'prefixd_tier_faults_total{kind="index_fault",tier="nvme"} 1.0' in await scrape(daemon)
        clock.advance(1.0)
        await until_health(channel, NVME, lambda state: state == States.Value("SERVING"))
        stats = await nvme_stats(channel)
        assert (stats.state, stats.state_reason) == ("ready", "")


async def scrape(daemon: Daemon) -> str:
    node = daemon.cache.stats(None)
    return (await asyncio.to_thread(daemon.metrics.render, node, {})).decode()
