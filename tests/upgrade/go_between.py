"""Stands between a client and a daemon and makes one of them look like another release.

It passes bytes on, both ways, whatever the method; `answers` changes each answer on its way.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from tests.upgrade.conversation import answer_of

UNKNOWN_FIELD = b"\x82\x7d\x05later"
"""Field 2,000 with five bytes: what a later release may have added to any message."""


def with_unknown_fields(message: Message) -> Message:
    """The message, and each in it, with a field that nobody knows."""
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for element in value if field.is_repeated else [value]:
            with_unknown_fields(element)
    message.MergeFromString(UNKNOWN_FIELD)
    return message


def without(message: Message, names: frozenset[str]) -> Message:
    """The message, and each in it, without the fields of these names ("Message.field")."""
    for field, value in message.ListFields():
        if f"{message.DESCRIPTOR.name}.{field.name}" in names:
            message.ClearField(field.name)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for element in value if field.is_repeated else [value]:
                without(element, names)
    return message


class _Passing(grpc.GenericRpcHandler):
    """Every method, as a stream of bytes each way: on the wire a single message is a stream of one."""

    def __init__(self, channel: grpc.aio.Channel, answers: Callable[[Message], Message]) -> None:
        self._channel = channel
        self._answers = answers

    def service(self, handler_call_details: Any) -> Any:
        """See grpc."""
        path = handler_call_details.method

        async def pass_on(requests: AsyncIterator[bytes], call: Any) -> AsyncIterator[bytes]:
            stream: Any = self._channel.stream_stream(path)(requests)
            try:
                async for data in stream:
                    answer = self._answers(answer_of(path.rpartition("/")[2], data))
                    yield answer.SerializeToString()
            except grpc.aio.AioRpcError as error:
                await call.abort(error.code(), error.details() or "", tuple(error.trailing_metadata() or ()))
            finally:
                stream.cancel()

        make: Any = grpc.stream_stream_rpc_method_handler
        return make(pass_on)


@asynccontextmanager
async def go_between(
    daemon: Path, socket: Path, answers: Callable[[Message], Message]
) -> AsyncIterator[None]:
    """A server on `socket` that passes everything on to the daemon's."""
    async with grpc.aio.insecure_channel(f"unix:{daemon}") as channel:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_Passing(channel, answers),))
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        try:
            yield
        finally:
            await server.stop(0)
