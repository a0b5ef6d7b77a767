"""Takeover on one node: a new daemon asks the old one for it, step by step, over the admin socket.

    new: ASKED       its memory is allocated, so that a lack of it costs nothing
    old: RELEASED    NVMe is closed and all locks are let go; DRAM serves on
    new: READY       the locks are taken, NVMe is open and read in
    old: YIELDED     nothing new is admitted, TCP addresses are free
    new: SERVING     the sockets are renamed into place; the old one drains and ends

The locks alone say whose the node is, and no step gets round them: each daemon
takes them as at any start. So a death at any step leaves it to the other one. A
successor that finds its predecessor gone starts as always; a predecessor that
loses its successor starts again, unless somebody else has the locks by then.
What the steps do is daemon.py's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from grpc_status import rpc_status
from prefixd.v1 import admin_service_pb2 as wire
from prefixd.v1 import admin_service_pb2_grpc

import prefixd_server
from prefixd_server.base.errors import InvalidRequest, PrefixdError, StateConflict, Unavailable
from prefixd_server.base.failpoints import failpoint
from prefixd_server.base.logs import logger
from prefixd_server.rpc import checks, requests
from prefixd_server.rpc.audit import CALLER_KEY

STEP_TIMEOUT_S = 120.0
"""For one step of the other daemon: a million blocks are read in within seconds, a drain may precede."""

Steps: TypeAlias = AsyncIterator[wire.HandOverRequest]

_EOF: Any = cast(Any, grpc.aio).EOF
"""Its stubs lack it."""
_log = logger("prefixd.takeover")


class TakeoverRefused(PrefixdError):
    """The old daemon does not hand over; this one does not start."""


class HandingOver:
    """The old daemon's half.

    Args:
        let_go: closes NVMe and lets go of the locks. Raises Unavailable, with the locks held, when it cannot.
        make_way: stops admitting, and closes what the new daemon must bind.
    """

    def __init__(
        self, let_go: Callable[[], Awaitable[None]], make_way: Callable[[], Awaitable[None]]
    ) -> None:
        self._let_go = let_go
        self._make_way = make_way
        self._begun = False
        self._over = asyncio.Event()
        self.succeeded = False
        """Once it is over: whether another daemon serves."""

    @property
    def is_over(self) -> bool:
        """Whether the node was let go of, and this daemon is to end or to start again."""
        return self._over.is_set()

    async def wait(self) -> None:
        """Returns when it is over."""
        await self._over.wait()

    async def serve(self, steps: Steps) -> AsyncIterator[wire.HandOverResponse]:
        """Answers the new daemon's steps. Raises base.errors."""
        asked = await _next(steps, wire.HAND_OVER_STEP_ASKED)
        if self._begun:
            raise StateConflict(
                "TAKEOVER_UNDER_WAY", "another daemon is taking over already; let it end first"
            )
        _log.info("handing over", pid=asked.pid, version=asked.server_version)
        failpoint("takeover.asked")
        self._begun = True
        try:
            # Whoever asked may be gone: what is half closed is closed all the same.
            await _to_its_end(self._let_go())
        except Unavailable:
            self._begun = False
            raise
        except asyncio.CancelledError:
            self._over.set()
            raise
        try:
            failpoint("takeover.released")
            yield wire.HandOverResponse(step=wire.HAND_OVER_STEP_RELEASED)
            await _next(steps, wire.HAND_OVER_STEP_READY)
            await self._make_way()
            failpoint("takeover.yielded")
            yield wire.HandOverResponse(step=wire.HAND_OVER_STEP_YIELDED)
            await _next(steps, wire.HAND_OVER_STEP_SERVING)
            self.succeeded = True
            failpoint("takeover.served")
        finally:
            self._over.set()


async def _next(steps: Steps, wanted: wire.HandOverStep) -> wire.HandOverRequest:
    """The new daemon's next step. Raises InvalidRequest, Unavailable."""
    try:
        async with asyncio.timeout(STEP_TIMEOUT_S):
            message = await anext(steps, None)
    except TimeoutError as error:
        raise Unavailable("TAKEOVER_TIMEOUT", f"no next step within {STEP_TIMEOUT_S:g} s") from error
    if message is not None:
        checks.utf8("server_version", message.server_version, requests.NAME_BYTES_MAX)
    if message is None or message.step != wanted:
        name = wire.HandOverStep.Name(wanted)
        raise InvalidRequest("STEP_EXPECTED", f"step must be {name} now", field="step")
    return message


async def _to_its_end(work: Awaitable[None]) -> None:
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


class Predecessor:
    """The new daemon's half: asked(), ready(), serving(), close(), in this order."""

    def __init__(self, socket: Path) -> None:
        stub: Any = admin_service_pb2_grpc.AdminServiceStub
        # As its own user's tool: no proxy between two processes of one node.
        self._channel = grpc.aio.insecure_channel(
            f"unix:{socket.absolute()}", options=[("grpc.enable_http_proxy", 0)]
        )
        self._call: Any = stub(self._channel).HandOver(
            metadata=((CALLER_KEY, f"takeover pid={os.getpid()}"),)
        )

    async def asked(self) -> bool:
        """Asks for the node; whether anybody was there, and has let go of it. Raises TakeoverRefused."""
        try:
            return await self._say(wire.HAND_OVER_STEP_ASKED)
        except grpc.aio.AioRpcError as error:
            if _is_gone(error):
                return False
            status = _status_of(error)
            detail = status.message if status is not None else error.details()
            raise TakeoverRefused(
                "TAKEOVER_REFUSED",
                f"the running daemon does not hand over: {detail}; stop it, then start this one",
                code=error.code().name,
            ) from error

    async def ready(self) -> None:
        """Tells that the locks are held; on return the old daemon admits nothing new, or is gone."""
        await self._go_on(wire.HAND_OVER_STEP_READY)

    async def serving(self) -> None:
        """Tells that the sockets are in place; on return the old daemon knows, or is gone."""
        await self._go_on(wire.HAND_OVER_STEP_SERVING)

    async def close(self) -> None:
        """Hangs up; before serving() this tells the old daemon that it has the node again."""
        await self._channel.close(None)

    async def _go_on(self, step: wire.HandOverStep) -> None:
        """Whether the old daemon lives makes no difference any more: the locks are ours."""
        try:
            await self._say(step)
        except grpc.aio.AioRpcError as error:
            _log.warning("the old daemon is gone", step=wire.HandOverStep.Name(step), error=error.details())

    async def _say(self, step: wire.HandOverStep) -> bool:
        """Whether an answer came, and not the end of the call."""
        request = wire.HandOverRequest(step=step, pid=os.getpid(), server_version=prefixd_server.__version__)
        # A call that has ended tells why when it is read.
        with contextlib.suppress(asyncio.InvalidStateError):
            await self._call.write(request)
        try:
            async with asyncio.timeout(STEP_TIMEOUT_S):
                answer = await self._call.read()
        except TimeoutError as error:
            raise TakeoverRefused(
                "TAKEOVER_REFUSED",
                f"no answer from the running daemon within {STEP_TIMEOUT_S:g} s; end it, then start this one",
            ) from error
        return answer is not _EOF


def _is_gone(error: grpc.aio.AioRpcError) -> bool:
    """Whether nobody is at the socket: gRPC says so itself, without a status of ours."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and _status_of(error) is None


def _status_of(error: Any) -> Any:
    """Our own status, if it is one of ours that has answered."""
    return rpc_status.from_call(error)
