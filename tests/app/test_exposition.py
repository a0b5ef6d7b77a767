"""app/exposition.py and base/metrics.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from prefixd_server.app.exposition import Exposition
from prefixd_server.base.accounts import Counters, Stats, TierStats
from prefixd_server.base.errors import ConfigError
from prefixd_server.base.metrics import Metrics
from prefixd_server.base.types import Tier
from prometheus_client.parser import text_string_to_metric_families

DRAM = TierStats(Tier.DRAM, 100, 80, 60, 5, 20, 10, 1, 2, 3, 4)
COUNTERS = Counters(asked=6, pending=1, missed=2, committed=9)
COUNTERS.hits[Tier.DRAM] = 3
STATS = Stats((DRAM,), COUNTERS, 7, 8, 1234, 99, True, 12.5)


async def rendered() -> bytes:
    """A scrape of fixed statistics."""
    return Metrics().render(STATS, {"default": STATS})


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """A served endpoint."""
    exposition = Exposition(rendered)
    yield await exposition.open("127.0.0.1:0")
    await exposition.close()


async def ask(port: int, request: bytes) -> bytes:
    """Everything that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer


async def test_a_scrape_parses_and_tells_the_statistics(port: int) -> None:
    head, _, body = (await ask(port, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }
    assert samples["prefixd_tier_slots", (("state", "quarantined"), ("tier", "dram"))] == 4
    assert samples["prefixd_tier_assigned_bytes", (("tier", "dram"),)] == 80
    assert samples["prefixd_block_hits_total", (("tenant", "default"), ("tier", "dram"))] == 3
    assert samples["prefixd_blocks_asked_total", (("tenant", "default"),)] == 6
    assert samples["prefixd_draining", ()] == 1
    assert all(name.startswith("prefixd_") for name, _ in samples)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01 garbage\r\n\r\n", b"405"),
        (b"HEAD /metrics?x=1 HTTP/1.1\r\n\r\n", b"200"),
    ],
)
async def test_other_requests_get_a_plain_answer(port: int, request_bytes: bytes, status: bytes) -> None:
    answer = await ask(port, request_bytes)
    assert answer.split()[1] == status


async def test_an_endless_request_is_cut_off_and_the_next_one_is_served(port: int) -> None:
    assert await ask(port, b"x" * 100_000) == b""
    assert (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_an_address_in_use_is_a_configuration_error(port: int) -> None:
    with pytest.raises(ConfigError, match="free it or choose another"):
        await Exposition(rendered).open(f"127.0.0.1:{port}")
