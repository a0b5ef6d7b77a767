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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.errors import ConfigError
from prefixd_server.base.types import HASH_WORDS, Hashes, StopReason
from prefixd_server.simulate.trace_lines import (
    PromptReader,
    Reader,
    Request,
    Tokenizer,
    TraceReader,
    records,
    tokens_of_block,
    utf8,
)


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
    reader: Reader | None = None
    requests: list[Request] = []
    lines: list[int] = []
    for line, record in records(path):
        try:
            if reader is None:
                if "prompt" in record:
                    reader = PromptReader(tokenizer or utf8, block_tokens)
                else:
                    reader = TraceReader(tokens_of_block(record))
            requests.append(reader.read(record, len(requests)))
            lines.append(line)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                "TRACE_UNREADABLE", f"{path}:{line}: a field is missing or wrong: {error!r}", file=path
            ) from error
    if reader is None:
        raise ConfigError("TRACE_EMPTY", f"{path} holds no requests", file=path)
    if not any(len(request.ids) for request in requests):
        raise ConfigError(
            "TRACE_WITHOUT_HASHES",
            f"{path} has no block hashes: reuse cannot be judged from it"
            if isinstance(reader, TraceReader)
            else f"{path}: no prompt fills a block of {block_tokens} tokens: lower --block-tokens",
            file=path,
        )
    return _build(path, reader.block_tokens, requests, lines)


def name_of(path: Path) -> str:
    """What a trace is called, after its file."""
    return path.name.removesuffix(".zst").removesuffix(".jsonl")


def _build(path: Path, block_tokens: int, requests: list[Request], lines: list[int]) -> Trace:
    order = sorted(range(len(requests)), key=lambda at: requests[at].time_s)
    requests, lines = [requests[at] for at in order], [lines[at] for at in order]
    times = np.array([request.time_s for request in requests], dtype=np.float64)
    lengths = np.array([len(request.ids) for request in requests], dtype=np.int64)
    known, dense = np.unique(np.concatenate([request.ids for request in requests]), return_inverse=True)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    _check_parents(path, known, dense, starts, lines)
    return Trace(
        name=name_of(path),
        block_tokens=block_tokens,
        arrival_s=times - times[0],
        input_tokens=np.array([request.input_tokens for request in requests], dtype=np.int64),
        output_tokens=np.array([request.output_tokens for request in requests], dtype=np.int64),
        stops=tuple(request.stop for request in requests),
        ids=dense.astype(np.int32),
        starts=starts,
        block_count=len(known),
    )


def _check_parents(
    path: Path,
    known: NDArray[np.int64],
    ids: NDArray[np.intp],
    starts: NDArray[np.int64],
    lines: list[int],
) -> None:
    """An id stands for its whole prefix, so whatever comes before it is always the same."""
    above = np.concatenate([[-1], ids])[: len(ids)]
    above[starts[:-1][np.diff(starts) > 0]] = -1
    parent = np.full(len(known), -1, dtype=np.intp)
    parent[ids] = above
    wrong = np.flatnonzero(parent[ids] != above)
    if len(wrong):
        line = lines[int(np.searchsorted(starts, wrong[0], side="right")) - 1]
        raise ConfigError(
            "TRACE_UNREADABLE",
            f"{path}:{line}: id {known[ids[wrong[0]]]} follows different blocks; an id names a whole prefix",
            file=path,
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


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64: well spread 64-bit words, the same in every run."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
