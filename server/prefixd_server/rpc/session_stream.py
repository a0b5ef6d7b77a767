"""One OpenSession stream: hello, then heartbeats in and notices out, until it ends.

The session lives as long as this stream; what its end means for leases is the
cache floor's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from prefixd.v1 import cache_service_pb2 as wire

import prefixd_server
from prefixd_server.base.config import LeaseConfig
from prefixd_server.base.errors import InvalidRequest
from prefixd_server.base.logs import logger
from prefixd_server.base.types import HASH_COUNT_MAX
from prefixd_server.cache.cache import Cache
from prefixd_server.cache.sessions import DrainingNotice, FarewellNotice, SegmentsRetiredNotice, Session
from prefixd_server.rpc import answers, requests
from prefixd_server.rpc.seat import Seat

HELLO_TIMEOUT_S = 10.0
"""A stream that says nothing must not stay."""
CAPABILITIES = ("put_get", "bad_block_reports", "usage_reports")


class SessionStream:
    """Serves one stream."""

    def __init__(self, cache: Cache, seat: Seat, limits: LeaseConfig) -> None:
        self._cache = cache
        self._limits = limits
        self._seat = seat
        self._log = logger("prefixd.session").bind(tenant=seat.tenant)

    async def serve(
        self, messages: AsyncIterator[wire.OpenSessionRequest]
    ) -> AsyncIterator[wire.OpenSessionResponse]:
        """Answers until the client ends the stream. Raises base.errors."""
        session = await self._open(messages)
        log = self._log.bind(session=session.session_id[:4].hex(), instance=session.instance_id)
        log.info("session opened", engine=session.engine_name, client_version=session.client_version)
        try:
            yield self._opened(session)
            async for answer in self._converse(session, messages):
                yield answer
        finally:
            self._cache.sessions.transport_lost(session.session_id)
            log.info("session ended")

    async def _open(self, messages: AsyncIterator[wire.OpenSessionRequest]) -> Session:
        try:
            first = await asyncio.wait_for(anext(messages, None), HELLO_TIMEOUT_S)
        except TimeoutError:
            first = None
        if first is None:
            raise InvalidRequest(
                "HELLO_MISSING", f"no hello within {HELLO_TIMEOUT_S:g} s; send it first", field="hello"
            )
        hello = requests.hello(first)
        return self._cache.sessions.open(
            self._seat.tenant,
            hello.instance_id,
            hello.engine_name,
            hello.client_version,
            hello.pid,
            self._seat.local,
            hello.readable_devices,
        )

    def _opened(self, session: Session) -> wire.OpenSessionResponse:
        limits = self._limits
        return wire.OpenSessionResponse(
            opened=wire.SessionOpened(
                session_id=session.session_id,
                boot_id=self._cache.boot_id,
                server_version=prefixd_server.__version__,
                companion_path=self._seat.companion_path,
                heartbeat_interval=answers.duration(limits.heartbeat_interval_s),
                lease_ttl_max=answers.duration(limits.ttl_max_s),
                hash_count_max=HASH_COUNT_MAX,
                capabilities=CAPABILITIES,
            )
        )

    async def _converse(
        self, session: Session, messages: AsyncIterator[wire.OpenSessionRequest]
    ) -> AsyncIterator[wire.OpenSessionResponse]:
        """Waits for the client and for notices at once; never loses either when both come."""
        heard = asyncio.ensure_future(anext(messages, None))
        noticed = asyncio.ensure_future(session.outbox.get())
        try:
            while True:
                await asyncio.wait({heard, noticed}, return_when=asyncio.FIRST_COMPLETED)
                if noticed.done():
                    notice = noticed.result()
                    if isinstance(notice, FarewellNotice):
                        return
                    yield _notice(notice)
                    noticed = asyncio.ensure_future(session.outbox.get())
                if heard.done():
                    message = heard.result()
                    if message is None:
                        return
                    yield self._heartbeat(session, message)
                    heard = asyncio.ensure_future(anext(messages, None))
        finally:
            heard.cancel()
            noticed.cancel()

    def _heartbeat(self, session: Session, message: wire.OpenSessionRequest) -> wire.OpenSessionResponse:
        lost, expires_after_s = self._cache.sessions.heartbeat(
            session.session_id, requests.heartbeat(message)
        )
        return wire.OpenSessionResponse(
            heartbeat=wire.HeartbeatAnswer(lost_tokens=lost, expires_after=answers.duration(expires_after_s))
        )


def _notice(notice: SegmentsRetiredNotice | DrainingNotice) -> wire.OpenSessionResponse:
    if isinstance(notice, DrainingNotice):
        return wire.OpenSessionResponse(
            draining=wire.Draining(gone_after=answers.duration(notice.gone_after_s))
        )
    return wire.OpenSessionResponse(segments_retired=wire.SegmentsRetired(segment_ids=notice.segment_ids))
