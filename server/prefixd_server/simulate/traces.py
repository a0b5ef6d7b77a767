"""Request logs: what is replayed. Readers for the trace form and for plain logs of prompts.

Trace form: JSON lines, plain or zstd, one request a line: timestamp_ms,
input_length, output_length, block_tokens, hash_ids (id k names the whole prefix
up to and including block k), and where known session, type and stop.

Prompt log: JSON lines with `prompt` (text), and where known timestamp (seconds)
or timestamp_ms, output_length or `output` (text), session, stop.

Not here: replaying (replay.py), statistics of a trace (shape.py).
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import zstandard
from numpy.typing import NDArray

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.types import HASH_WORDS, Hashes, StopReason

WINDOW_BYTES_MAX = 2**31
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


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, as columns.

    arrival_s: seconds from the first on; input_tokens, output_tokens: per request;
    ids: block ids of all requests, one after the other, dense from 0;
    starts: shape (requests + 1,), where each request's ids begin.
    """

    name: str
    block_tokens: int
    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    stops: tuple[StopReason, ...]
    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    block_count: int

    @property
    def request_count(self) -> int:
        """Requests."""
        return len(self.arrival_s)

    @property
    def reference_count(self) -> int:
        """Blocks asked for, repetitions counted."""
        return len(self.ids)

    def run(self, request: int) -> NDArray[np.int32]:
        """Block ids of a request, from its first block on."""
        return self.ids[self.starts[request] : self.starts[request + 1]]

    def hashes(self) -> Hashes:
        """A prefix hash for each block id, shape (block_count, 4): what an engine would send."""
        numbers = np.arange(1, self.block_count * HASH_WORDS + 1, dtype=np.uint64)
        return _mix(numbers).reshape(self.block_count, HASH_WORDS)

    def part(self, first: int, last: int) -> Trace:
        """The requests [first, last) as a trace of their own."""
        ids = self.ids[self.starts[first] : self.starts[last]]
        known, dense = np.unique(ids, return_inverse=True)
        return Trace(
            name=self.name,
            block_tokens=self.block_tokens,
            arrival_s=self.arrival_s[first:last] - self.arrival_s[first],
            input_tokens=self.input_tokens[first:last],
            output_tokens=self.output_tokens[first:last],
            stops=self.stops[first:last],
            ids=dense.astype(np.int32),
            starts=self.starts[first : last + 1] - self.starts[first],
            block_count=len(known),
        )


def read_trace(path: Path, tokenizer: Tokenizer | None = None, block_tokens: int = 512) -> Trace:
    """Reads either form; what the first line holds decides.

    Args:
        tokenizer: for prompt logs; UTF-8 bytes count as tokens without one.
        block_tokens: for prompt logs; a trace says its own.

    Raises:
        ConfigError: TRACE_UNREADABLE, TRACE_EMPTY, TRACE_WITHOUT_HASHES; names the file and the remedy.
    """
    records = list(_records(path))
    if not records:
        raise ConfigError("TRACE_EMPTY", f"{path} holds no requests", file=path)
    try:
        if "prompt" in records[0]:
            return _from_prompts(path, records, tokenizer or _utf8, block_tokens)
        return _from_trace(path, records)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            "TRACE_UNREADABLE", f"{path}: a field is missing or wrong: {error!r}", file=path
        ) from error


def _records(path: Path) -> Iterator[dict[str, Any]]:
    number = 0
    try:
        with path.open("rb") as file:
            packed = file.read(4) == b"\x28\xb5\x2f\xfd"
            file.seek(0)
            lines = io.TextIOWrapper(_unpacked(file) if packed else file, encoding="utf-8")
            for line in lines:
                number += 1
                if not line.strip():
                    continue
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ConfigError(
                        "TRACE_UNREADABLE", f"{path}:{number}: a line is not an object", file=path
                    )
                yield record
    except (OSError, ValueError, zstandard.ZstdError) as error:
        raise ConfigError("TRACE_UNREADABLE", f"{path}:{number + 1}: {error}", file=path) from error


def _unpacked(file: io.BufferedReader) -> io.BufferedReader:
    unpacker = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    return io.BufferedReader(cast("io.RawIOBase", unpacker.stream_reader(file)))


def _from_trace(path: Path, records: list[dict[str, Any]]) -> Trace:
    if not any(record["hash_ids"] for record in records):
        raise ConfigError(
            "TRACE_WITHOUT_HASHES", f"{path} has no block hashes: reuse cannot be judged from it", file=path
        )
    records.sort(key=lambda record: record["timestamp_ms"])
    ids = [np.asarray(record["hash_ids"], dtype=np.int64) for record in records]
    times = np.array([record["timestamp_ms"] for record in records], dtype=np.float64) / 1e3
    return _build(path, int(records[0]["block_tokens"]), times, records, ids)


def _from_prompts(path: Path, records: list[dict[str, Any]], tokenize: Tokenizer, block_tokens: int) -> Trace:
    times = []
    for position, record in enumerate(records):
        seconds = record.get("timestamp")
        times.append(record.get("timestamp_ms", 1e3 * position) / 1e3 if seconds is None else float(seconds))
    order = sorted(range(len(records)), key=times.__getitem__)
    known: dict[tuple[int, tuple[int, ...]], int] = {}
    ids, shaped = [], []
    for position in order:
        record = records[position]
        tokens = tokenize(record["prompt"])
        run, above = [], -1
        for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
            above = known.setdefault((above, tuple(tokens[start : start + block_tokens])), len(known))
            run.append(above)
        ids.append(np.array(run, dtype=np.int64))
        output = record.get("output_length")
        if output is None:
            output = len(tokenize(record.get("output", "")))
        shaped.append(record | {"input_length": len(tokens), "output_length": output})
    return _build(path, block_tokens, np.array(times, dtype=np.float64)[order], shaped, ids)


def _build(
    path: Path,
    block_tokens: int,
    times: NDArray[np.float64],
    records: list[dict[str, Any]],
    ids: list[NDArray[np.int64]],
) -> Trace:
    lengths = np.array([len(run) for run in ids], dtype=np.int64)
    known, dense = np.unique(np.concatenate(ids), return_inverse=True)
    stops = tuple(_STOPS.get(record.get("stop") or "", StopReason.UNKNOWN) for record in records)
    return Trace(
        name=path.name.removesuffix(".zst").removesuffix(".jsonl"),
        block_tokens=block_tokens,
        arrival_s=times - times[0],
        input_tokens=np.array([record["input_length"] for record in records], dtype=np.int64),
        output_tokens=np.array([record["output_length"] for record in records], dtype=np.int64),
        stops=stops,
        ids=dense.astype(np.int32),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        block_count=len(known),
    )


def load_tokenizer(path: Path) -> Tokenizer:
    """A tokenizer from its `tokenizer.json`; needs the package tokenizers.

    Raises:
        ConfigError: TOKENIZER_UNREADABLE; names the file and the remedy.
    """
    try:
        tokenizers = importlib.import_module("tokenizers")
        loaded = tokenizers.Tokenizer.from_file(str(path))
    except ImportError as error:
        raise ConfigError(
            "TOKENIZER_UNREADABLE", f"{path} needs the package tokenizers: pip install tokenizers", file=path
        ) from error
    except Exception as error:  # what the package raises is its base class only
        raise ConfigError("TOKENIZER_UNREADABLE", f"{path}: {error}", file=path) from error

    def encode(text: str) -> list[int]:
        ids: list[int] = loaded.encode(text, add_special_tokens=False).ids
        return ids

    return encode


def _utf8(text: str) -> list[int]:
    return list(text.encode())


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64: well spread 64-bit words, the same in every run."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
