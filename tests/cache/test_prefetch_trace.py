"""Prefetch over the conversation trace: the next requests wait in the queue one window ahead."""

from __future__ import annotations

from pathlib import Path

from prefixd_server.simulate.traces import read_trace

from tests.support.queued_trace import QueuedTrace

TRACE = Path(__file__).parents[1] / "data/traces/mooncake_conversation_512.jsonl.zst"
REQUESTS = 350
AHEAD_S = 5.0


def test_what_nvme_has_is_in_dram_when_it_is_asked_for_and_little_is_brought_in_vain(tmp_path: Path) -> None:
    replay = QueuedTrace(read_trace(TRACE).part(0, REQUESTS), tmp_path, 1, 32, AHEAD_S)
    outcome = replay.run()
    replay.close()
    assert outcome.brought_in_time_blocks > 200
    assert outcome.in_time >= 0.8
    assert outcome.useless < 0.1
