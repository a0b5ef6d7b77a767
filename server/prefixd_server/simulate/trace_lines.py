"""One line of a request log, read: the trace form and logs of prompts (traces.py tells both).

Not here: what becomes of the lines (traces.py).
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.types import StopReason

WINDOW_BYTES_MAX = 2**31
TOKENS_MAX = 2**31
"""Of one request, and of one block: sums over any log fit into 64 bits."""
_STOPS = {
    "": StopReason.UNKNOWN,
    "tool_use": StopReason.TOOL_USE,
    "tool_calls": StopReason.TOOL_USE,
    "end_turn": StopReason.END_TURN,
    "stop": StopReason.END_TURN,
    "max_tokens": StopReason.LENGTH,
    "length": StopReason.LENGTH,
}

Tokenizer = Callable[[str], list[int]]
"""Text to token ids."""


def records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, object) of each line that is not blank."""
    number = 0
    try:
        with path.open("rb") as file:
            packed = file.read(4) == b"\x28\xb5\x2f\xfd"
            file.seek(0)
            for line in _unpacked(file) if packed else file:
                number += 1
                if line.strip():
                    yield number, _record(path, number, line)
    except (OSError, zstandard.ZstdError) as error:
        raise ConfigError("TRACE_UNREADABLE", f"{path}:{number + 1}: {error}", file=path) from error


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError("TRACE_UNREADABLE", f"{path}:{number}: {error}", file=path) from error
    if not isinstance(record, dict):
        raise ConfigError("TRACE_UNREADABLE", f"{path}:{number}: a line is not an object", file=path)
    return record


def _unpacked(file: io.BufferedReader) -> io.BufferedReader:
    unpacker = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    reader = unpacker.stream_reader(file, read_across_frames=True)
    return io.BufferedReader(cast("io.RawIOBase", reader))


@dataclass(frozen=True, slots=True)
class Request:
    """One line, read."""

    time_s: float
    input_tokens: int
    output_tokens: int
    stop: StopReason
    ids: NDArray[np.int64]


class Reader(Protocol):
    """Makes requests of lines; a wrong field is a KeyError, TypeError or ValueError."""

    block_tokens: int

    def read(self, record: dict[str, Any], position: int) -> Request:
        """The request of a line, the `position`th of the file."""
        ...


class TraceReader:
    """Reads the trace form."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens

    def read(self, record: dict[str, Any], position: int) -> Request:
        """See Reader."""
        del position
        if tokens_of_block(record) != self.block_tokens:
            raise ValueError(f"block_tokens is {record['block_tokens']}, and was {self.block_tokens} before")
        ids = _ids(record["hash_ids"])
        if len(ids) and self.block_tokens == 0:
            raise ValueError("block_tokens is 0: hash_ids names blocks of at least one token")
        return Request(
            time_s=_finite(record["timestamp_ms"]) / 1e3,
            input_tokens=_count(record["input_length"]),
            output_tokens=_count(record["output_length"]),
            stop=_stop(record),
            ids=ids,
        )


class PromptReader:
    """Reads logs of prompts; equal beginnings, in whole blocks, become equal ids."""

    def __init__(self, tokenize: Tokenizer, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._tokenize = tokenize
        self._known: dict[tuple[int, tuple[int, ...]], int] = {}

    def read(self, record: dict[str, Any], position: int) -> Request:
        """See Reader. Without a time, requests come one a second."""
        tokens = self._tokenize(_text(record["prompt"]))
        run, above = [], -1
        for start in range(0, len(tokens) - self.block_tokens + 1, self.block_tokens):
            block = tuple(tokens[start : start + self.block_tokens])
            above = self._known.setdefault((above, block), len(self._known))
            run.append(above)
        output = record.get("output_length")
        seconds = record.get("timestamp")
        if seconds is None:
            seconds = record.get("timestamp_ms", 1e3 * position) / 1e3
        return Request(
            time_s=_finite(seconds),
            input_tokens=len(tokens),
            output_tokens=len(self._tokenize(_text(record.get("output", ""))))
            if output is None
            else _count(output),
            stop=_stop(record),
            ids=np.array(run, dtype=np.int64),
        )


def _ids(told: Any) -> NDArray[np.int64]:
    """Ids of a run; those of 64 bits without a sign become others, each its own."""
    ids = np.asarray(told)
    if len(ids) == 0 or (ids.ndim == 1 and ids.dtype.kind == "i"):
        return ids.astype(np.int64)
    if not all(type(one) is int and 0 <= one < 2**64 for one in told):
        raise ValueError("hash_ids is not a list of whole numbers of at most 64 bits")
    return np.array(told, dtype=np.uint64).view(np.int64)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or not 0 <= value <= TOKENS_MAX:
        raise ValueError(f"{value!r} is not a count of tokens from 0 to {TOKENS_MAX}")
    return value


def tokens_of_block(record: dict[str, Any]) -> int:
    """What a line of the trace form tells; 0 where there are no blocks."""
    told = record["block_tokens"]
    tokens = int(told)
    if tokens != float(told) or not 0 <= tokens <= TOKENS_MAX:
        raise ValueError(f"block_tokens is {told}: it is a whole number from 0 to {TOKENS_MAX}")
    return tokens


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value} is not a time")
    return number


def _stop(record: dict[str, Any]) -> StopReason:
    return _STOPS.get(record.get("stop") or "", StopReason.UNKNOWN)


def utf8(text: str) -> list[int]:
    """A tokenizer for want of one: each byte is a token."""
    return list(text.encode())
