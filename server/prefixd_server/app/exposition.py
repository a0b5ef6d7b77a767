"""The Prometheus endpoint: GET /metrics, on the event loop, rendered in a thread.

Only what a scraper needs of HTTP/1.1: one request a connection, no body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.logs import logger

REQUEST_TIMEOUT_S = 5.0
REQUEST_BYTES_MAX = 8192
CONNECTION_COUNT_MAX = 16

Render = Callable[[], Awaitable[bytes]]


class Exposition:
    """Serves what `render` gives."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._server: asyncio.Server | None = None
        self._connection_count = 0

    async def open(self, address: str) -> int:
        """Listens on HOST:PORT and returns the port. Raises ConfigError."""
        host, _, port = address.rpartition(":")
        try:
            self._server = await asyncio.start_server(
                self._serve, host.strip("[]"), int(port), limit=REQUEST_BYTES_MAX
            )
        except OSError as error:
            raise ConfigError(
                "CANNOT_LISTEN",
                f"metrics = {address}: cannot listen there ({error.strerror}); free it or choose another",
                key="metrics",
                value=address,
            ) from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connection_count += 1
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                writer.write(await self._answer(reader))
                await writer.drain()
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            logger("prefixd.metrics").debug("scrape failed", error=repr(error))
        finally:
            self._connection_count -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if self._connection_count > CONNECTION_COUNT_MAX:
            return _response("503 Service Unavailable", b"too many scrapers\n")
        if method not in {b"GET", b"HEAD"}:
            return _response("405 Method Not Allowed", b"only GET\n")
        if path != b"/metrics":
            return _response("404 Not Found", b"see /metrics\n")
        body = await self._render()
        answer = _response("200 OK", body, CONTENT_TYPE_LATEST)
        return answer if method == b"GET" else answer.removesuffix(body)


def _response(status: str, body: bytes, content_type: str = "text/plain; charset=utf-8") -> bytes:
    lines = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        "Connection: close",
        "\r\n",
    )
    return "\r\n".join(lines).encode() + body
