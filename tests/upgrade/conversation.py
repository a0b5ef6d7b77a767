"""Talks to a daemon in bytes: the wire as it was recorded, not as today's classes would write it.

A turn is what goes out and what comes back on one method. Names that a daemon gives away (sessions, tokens)
differ from one boot to the next: where a recorded answer and today's differ in such a field, the recorded
name is replaced by today's in all that is sent afterwards.
"""

from __future__ import annotations

import base64
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from prefixd.v1 import admin_service_pb2, cache_service_pb2

SERVICES = (
    cache_service_pb2.DESCRIPTOR.services_by_name["CacheService"],
    admin_service_pb2.DESCRIPTOR.services_by_name["AdminService"],
)
METHODS: dict[str, MethodDescriptor] = {
    method.name: method for service in SERVICES for method in service.methods
}
CALL_TIMEOUT_S = 20.0
NAME_BYTES = 16
"""Sessions, tokens, prefetches and boots are so long."""


@dataclass(frozen=True)
class Turn:
    """Serialized messages. `kept`: a stream that stays open; a later turn of its method goes on with it."""

    method: str
    requests: list[bytes]
    answers: list[bytes]
    kept: bool = False

    def parsed_requests(self) -> list[Message]:
        """By today's classes."""
        return [request_of(self.method, data) for data in self.requests]

    def parsed_answers(self) -> list[Message]:
        """By today's classes."""
        return [answer_of(self.method, data) for data in self.answers]


def request_of(method: str, data: bytes) -> Message:
    """A request, by today's class."""
    message: Message = GetMessageClass(METHODS[method].input_type).FromString(data)
    return message


def answer_of(method: str, data: bytes) -> Message:
    """An answer, by today's class."""
    message: Message = GetMessageClass(METHODS[method].output_type).FromString(data)
    return message


def save(turns: Sequence[Turn], path: Path) -> None:
    """One turn a line."""
    lines = []
    for turn in turns:
        plain = asdict(turn)
        for name in ("requests", "answers"):
            plain[name] = [base64.b64encode(data).decode() for data in plain[name]]
        lines.append(json.dumps(plain) + "\n")
    path.write_text("".join(lines))


def load(path: Path) -> list[Turn]:
    """What save() wrote."""
    turns = []
    for line in path.read_text().splitlines():
        plain = json.loads(line)
        for name in ("requests", "answers"):
            plain[name] = [base64.b64decode(data) for data in plain[name]]
        turns.append(Turn(**plain))
    return turns


class Conversation:
    """One channel, and the streams that are kept open on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._streams: dict[str, Any] = {}
        self._names: dict[bytes, bytes] = {}

    async def replay(self, turn: Turn) -> list[bytes]:
        """Sends a recorded turn, by today's names; today's answers, as many as were recorded."""
        requests = [self._renamed(data) for data in turn.requests]
        answers = await self.exchange(turn.method, requests, len(turn.answers), kept=turn.kept)
        for then, now in zip(turn.parsed_answers(), answers, strict=False):
            self._learn(then, answer_of(turn.method, now))
        return answers

    async def exchange(
        self, method: str, requests: Sequence[bytes], answer_count: int, *, kept: bool = False
    ) -> list[bytes]:
        """Sends messages and reads so many answers; a stream that is not kept is cancelled then."""
        stream = self._streams.pop(method, None) or self._begin(method, requests)
        if METHODS[method].client_streaming:
            for data in requests:
                await stream.write(data)
            if not METHODS[method].server_streaming:
                await stream.done_writing()
        if not METHODS[method].server_streaming:
            return [await stream]
        answers = [await stream.read() for _ in range(answer_count)]
        if kept:
            self._streams[method] = stream
        else:
            stream.cancel()
        return answers

    def close(self) -> None:
        """Cancels what is open."""
        for stream in self._streams.values():
            stream.cancel()

    def _begin(self, method: str, requests: Sequence[bytes]) -> Any:
        known = METHODS[method]
        way = (
            "stream" if known.client_streaming else "unary",
            "stream" if known.server_streaming else "unary",
        )
        call = getattr(self._channel, "_".join(way))(f"/{known.containing_service.full_name}/{method}")
        return (
            call()
            if known.client_streaming
            else call(requests[0], timeout=None if way[1] == "stream" else CALL_TIMEOUT_S)
        )

    def _renamed(self, data: bytes) -> bytes:
        for then, now in self._names.items():
            data = data.replace(then, now)
        return data

    def _learn(self, then: Message, now: Message) -> None:
        found = dict(names_in(now))
        for path, name in names_in(then):
            if path in found and found[path] != name:
                self._names[name] = found[path]


def names_in(message: Message, path: str = "") -> Iterator[tuple[str, bytes]]:
    """(path, name) of every name that a daemon has given away in an answer."""
    for where, value in leaves(message, path):
        if isinstance(value, bytes) and len(value) == NAME_BYTES:
            yield where, value


def leaves(message: Message, path: str = "") -> Iterator[tuple[str, object]]:
    """(path, value) of every field that is set; elements of lists and maps by their number."""
    for field, value in message.ListFields():
        where = f"{path}.{field.name}"
        if field.is_repeated and field.message_type is not None and field.message_type.GetOptions().map_entry:
            yield where, dict(value)
            continue
        values = value if field.is_repeated else [value]
        for number, element in zip(itertools.count(), values):
            place = f"{where}[{number}]" if field.is_repeated else where
            if isinstance(element, Message):
                yield from leaves(element, place)
            else:
                yield place, element
