"""Every stream socket under fire: bytes that are no HTTP, or half of it. The daemon lives, and lets go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixd_server.app.daemon import Daemon

from tests.support.daemon import running_daemon
from tests.support.fuzzing import Growth, examples
from tests.support.hostile import mutated
from tests.support.wire_engine import wire_engine

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
SCRAPE = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
DOORS = ["socket", "listen", "probes", "metrics"]
PATIENCE_S = 0.2
"""Until a caller that makes noise hangs up: nobody owes it an answer."""
ANSWER_TIMEOUT_S = 20.0
"""Until one that asks rightly gives up, however busy the machine is."""

frames = st.builds(
    lambda kind, flags, stream, body: len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream + body,
    st.integers(0, 255),
    st.integers(0, 255),
    st.binary(min_size=4, max_size=4),
    st.binary(max_size=60),
)
noise = st.one_of(
    st.binary(max_size=200),
    mutated(PREFACE),
    mutated(SCRAPE),
    st.lists(frames, max_size=6).map(lambda some: PREFACE + b"".join(some)),
    st.sampled_from(
        [
            SCRAPE,
            b"GET " + b"/" * 9000,
            b"\r\n" * 5000,
            b"\x16\x03\x01\x02\x00\x01",
            b"POST /metrics HTTP/1.1\r\n\r\n",
        ]
    ),
)


class House:
    """A daemon with every door open."""

    def __init__(self, runner: asyncio.Runner, daemon: Daemon) -> None:
        self._runner = runner
        self._daemon = daemon

    def shout(self, door: str, data: bytes) -> None:
        """Noise, until the daemon, or else the caller, hangs up."""
        with suppress(TimeoutError):
            self._runner.run(self._say(door, data, PATIENCE_S))

    def ask(self, door: str, data: bytes) -> bytes:
        """What comes back until the daemon hangs up. Raises TimeoutError."""
        return self._runner.run(self._say(door, data, ANSWER_TIMEOUT_S))

    async def _say(self, door: str, data: bytes, patience_s: float) -> bytes:
        if door == "socket":
            reader, writer = await asyncio.open_unix_connection(self._daemon.config.socket_path)
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._daemon.ports[door])
        heard = b""
        try:
            async with asyncio.timeout(patience_s):
                with suppress(OSError):
                    writer.write(data)
                    writer.write_eof()
                    while more := await reader.read(65_536):
                        heard += more
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        return heard

    def is_well(self) -> None:
        """Each door serves who knows how to ask."""

        async def ask() -> None:
            async with wire_engine(self._daemon.config.socket_path) as engine:
                assert (await engine.call("Check")).problems == []
            async with wire_engine(f"127.0.0.1:{self._daemon.ports['listen']}", None) as engine:
                await engine.call("ListLeases")

        self._runner.run(ask())
        assert b"200 OK" in self.ask("metrics", SCRAPE)


@asynccontextmanager
async def opened() -> AsyncIterator[Daemon]:
    """The daemon."""
    address = "127.0.0.1:0"
    async with running_daemon(listen=address, probes=address, metrics=address) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    """See House; nothing has grown at the end."""
    with asyncio.Runner() as runner:
        context = opened()
        made = House(runner, runner.run(context.__aenter__()))
        try:
            made.is_well()
            growth = Growth()
            yield made
            made.is_well()
            growth.check()
        finally:
            runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("door", DOORS)
def test_noise_ends_with_its_connection(house: House, door: str) -> None:
    @examples(60)
    @given(noise)
    def shout(data: bytes) -> None:
        house.shout(door, data)

    shout()
    house.is_well()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (SCRAPE, b"200 OK"),
        (SCRAPE.replace(b"GET", b"PUT"), b"405 Method Not Allowed"),
        (SCRAPE.replace(b"/metrics", b"/../etc/passwd"), b"404 Not Found"),
        (b"\r\n\r\n", b"405 Method Not Allowed"),
        (b"GET " + b"/" * 9000, b""),
        (b"GET /metrics HTTP/1.1\r\n", b""),
    ],
)
def test_a_scraper_is_answered_or_hung_up_on(house: House, request_bytes: bytes, status: bytes) -> None:
    heard = house.ask("metrics", request_bytes)
    assert heard.startswith(b"HTTP/1.1 " + status) if status else heard == b""
