"""app/record.py: a live daemon's requests become a trace that the simulator replays."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from prefixd.v1 import admin_service_pb2 as wire
from prefixd.v1 import cache_service_pb2
from prefixd_server.app.cli import main
from prefixd_server.app.exits import Exit
from prefixd_server.app.record import Recorder, opened
from prefixd_server.base.types import StopReason
from prefixd_server.policy.lru import LruPolicy
from prefixd_server.simulate.replay import Replay
from prefixd_server.simulate.traces import read_trace

from tests.support.daemon import running_daemon
from tests.support.node import chain
from tests.support.wire_engine import WireEngine, put_messages, wire_engine

RUNS = [chain("a", "b", "c"), chain("a", "b"), chain("a", "b", "c"), chain("x")]


def event(seconds: float, **fields: Any) -> wire.WatchEventsResponse:
    answer = wire.WatchEventsResponse(**fields)
    answer.at.FromNanoseconds(round(seconds * 1e9))
    return answer


def began(name: str, hashes: list[bytes], block_tokens: int = 16) -> wire.RequestBegan:
    return wire.RequestBegan(request_id=name, block_hashes=hashes, block_tokens=block_tokens)


async def finishes(engine: WireEngine, ref: Any, name: str, tokens: int) -> None:
    report = cache_service_pb2.UsageReport(
        namespace=ref,
        request_id=name,
        phase=cache_service_pb2.REQUEST_PHASE_FINISHED,
        output_token_count=tokens,
        stop_reason=cache_service_pb2.STOP_REASON_TOOL_USE,
    )
    await engine.call("ReportUsage", session_id=engine.session_id, reports=[report])


async def test_a_live_run_is_recorded_and_simulated(tmp_path: Path) -> None:
    out = tmp_path / "live.jsonl.zst"
    async with running_daemon() as daemon, wire_engine(daemon.config.socket_path) as engine:
        ref = await engine.open_namespace(block_bytes=4096)
        arguments = ["record", "--for", "600", "--json", "--socket", str(daemon.config.socket_path), str(out)]
        recording = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, main, arguments))
        async with asyncio.timeout(20):
            while not daemon.cache.watchers.watched(daemon.config.server.tenant):
                await asyncio.sleep(0.005)
        hits = []
        for number, run in enumerate(RUNS):
            answer = await engine.acquire(ref, run, request_id=f"r{number}")
            hits.append(sum(hit.block_count for hit in answer.hits))
            await engine.put(*put_messages(ref, run, [bytes(4096)] * len(run)))
            if number < 3:
                await finishes(engine, ref, f"r{number}", 10 * (number + 1))
    result = await recording
    # The daemon's end ends the recording; what was heard until then is written.
    assert "no answer" in result.output
    trace = read_trace(out)
    assert trace.request_count == 4
    assert [len(trace.run(request)) for request in range(4)] == [3, 2, 3, 1]
    assert trace.output_tokens.tolist() == [10, 20, 30, 0]
    assert trace.stops[:3] == (StopReason.TOOL_USE,) * 3
    assert hits == [0, 2, 3, 0]
    assert Replay(trace, LruPolicy(), 100, seed=1).run().tolist() == hits
    text = out.read_bytes()
    assert RUNS[0][0] not in text


def test_a_trace_that_is_there_stays_when_no_daemon_answers(tmp_path: Path) -> None:
    out = tmp_path / "precious.jsonl"
    out.write_text("recorded for a week\n")
    done = CliRunner().invoke(main, ["record", "--socket", str(tmp_path / "no.sock"), str(out)])
    assert done.exit_code == Exit.UNREACHABLE
    assert out.read_text() == "recorded for a week\n"


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.zst"])
def test_a_trace_is_written_as_its_name_says(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    with opened(path) as file:
        recorder = Recorder(file)
        recorder.take(event(1.0, request_began=began("r", RUNS[0])))
        recorder.finish()
    assert read_trace(path).reference_count == 3


def test_other_block_sizes_are_skipped_and_lost_events_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with opened(path) as file:
        recorder = Recorder(file)
        recorder.take(event(5.0, request_began=began("", RUNS[0])))
        recorder.take(event(5.5, request_began=began("r2", RUNS[1], block_tokens=64)))
        recorder.take(event(6.0, events_lost=wire.EventsLost(count=9)))
        recorder.take(event(7.0, request_began=began("r3", RUNS[1])))
        recorder.take(event(8.0, request_ended=wire.RequestEnded(request_id="r3", output_token_count=4)))
        recorder.finish()
    assert (recorder.recorded.skipped_count, recorder.recorded.lost_count) == (1, 9)
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["timestamp_ms"], second["timestamp_ms"]) == (0.0, 2000.0)
    assert first["hash_ids"] == [0, 1, 2]
    assert second["hash_ids"] == [0, 1]
    assert (second["input_length"], second["output_length"]) == (32, 4)
