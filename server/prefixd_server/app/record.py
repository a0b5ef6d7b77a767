"""`prefixd record`: writes the requests of a live daemon as a trace that `prefixd simulate` replays.

Hashes become numbers in the order in which they are met, so the file holds
when requests came, how long they were and what they share, and neither tokens nor
hashes. A request is written when its reply ends, or at the end of the recording
with a reply of no tokens; readers sort by time.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import click
import grpc
import zstandard
from prefixd.v1 import admin_service_pb2 as wire
from prefixd.v1 import cache_service_pb2

from prefixd_server.app.operate import Operator, common_options, connected

OPEN_REQUEST_COUNT_MAX = 65_536
"""Requests whose replies are awaited; beyond it the oldest are written as they are."""
_STOPS = {
    cache_service_pb2.STOP_REASON_END_TURN: "end_turn",
    cache_service_pb2.STOP_REASON_TOOL_USE: "tool_use",
    cache_service_pb2.STOP_REASON_LENGTH: "max_tokens",
}


@dataclass(slots=True)
class Recorded:
    """What a recording came to."""

    request_count: int = 0
    skipped_count: int = 0
    lost_count: int = 0


class Recorder:
    """Turns events into lines of a trace.

    A trace has one block size: requests of namespaces with another one than the first are
    skipped, and counted.
    """

    def __init__(self, out: TextIO) -> None:
        self.recorded = Recorded()
        self._out = out
        self._numbers: dict[bytes, int] = {}
        self._block_tokens = 0
        self._began_at_ms: float | None = None
        self._open: dict[tuple[str, str], dict[str, Any]] = {}

    def take(self, event: wire.WatchEventsResponse) -> None:
        """One event, in the order in which they come."""
        kind = event.WhichOneof("event")
        if kind == "request_began":
            self._begin(event.request_began, event.at.ToNanoseconds() / 1e6)
        elif kind == "request_ended":
            ended = event.request_ended
            line = self._open.pop((ended.instance_id, ended.request_id), None)
            if line is not None:
                stop = _STOPS.get(ended.stop_reason, "")
                self._write(line | {"output_length": ended.output_token_count, "stop": stop})
        elif kind == "events_lost":
            self.recorded.lost_count += event.events_lost.count

    def finish(self) -> None:
        """Writes the requests whose replies have not ended."""
        for line in self._open.values():
            self._write(line)
        self._open.clear()

    def _begin(self, began: wire.RequestBegan, at_ms: float) -> None:
        if self._began_at_ms is None:
            self._began_at_ms, self._block_tokens = at_ms, began.block_tokens
        if began.block_tokens != self._block_tokens:
            self.recorded.skipped_count += 1
            return
        name = began.namespace.fingerprint + began.namespace.epoch.to_bytes(8, "big")
        numbers = self._numbers
        line = {
            "timestamp_ms": round(at_ms - self._began_at_ms, 3),
            "input_length": len(began.block_hashes) * began.block_tokens,
            "output_length": 0,
            "block_tokens": began.block_tokens,
            "hash_ids": [numbers.setdefault(name + key, len(numbers)) for key in began.block_hashes],
            "stop": "",
        }
        if not began.request_id:
            self._write(line)
            return
        self._open[began.instance_id, began.request_id] = line
        if len(self._open) > OPEN_REQUEST_COUNT_MAX:
            self._write(self._open.pop(next(iter(self._open))))

    def _write(self, line: dict[str, Any]) -> None:
        self._out.write(json.dumps(line, separators=(",", ":")) + "\n")
        self.recorded.request_count += 1


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    """The file to write, compressed where its name ends in .zst."""
    with path.open("wb") as file:
        if path.suffix != ".zst":
            with io.TextIOWrapper(file, encoding="utf-8") as plain:
                yield plain
            return
        with (
            zstandard.ZstdCompressor().stream_writer(file) as packer,
            io.TextIOWrapper(packer, encoding="utf-8") as packed,
        ):
            yield packed


def _recorded(operator: Operator, recorder: Recorder, *, endless: bool) -> Recorded:
    """Records until the time is over or Ctrl-C. Raises grpc.RpcError."""
    try:
        for event in operator.call("WatchEvents", wire.WatchEventsRequest()):
            recorder.take(event)
    except KeyboardInterrupt:
        pass
    except grpc.RpcError as error:
        if endless or error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
    finally:
        recorder.finish()
    return recorder.recorded


@click.command()
@common_options
@click.option(
    "--for", "seconds", type=click.FloatRange(min=0.1), help="Seconds to record; until Ctrl-C without."
)
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False, writable=True))
def record(socket: Path | None, as_json: bool, timeout: float, seconds: float | None, out: Path) -> None:
    """Write the tenant's requests as a trace for `prefixd simulate`: hashes and sizes, no tokens."""
    del timeout  # a recording lasts as long as it is asked to
    with connected(socket, seconds, as_json) as operator:
        # Whoever does not answer shall not cost a trace that is there already.
        operator.call("GetStats", wire.GetStatsRequest())
        with opened(out) as file:
            done = _recorded(operator, Recorder(file), endless=seconds is None)
    summary = {"requests": done.request_count, "skipped": done.skipped_count, "lost_events": done.lost_count}
    click.echo(
        json.dumps(summary)
        if as_json
        else f"{done.request_count:,} requests written to {out}; {done.skipped_count:,} of another "
        f"block size skipped, {done.lost_count:,} events lost"
    )
