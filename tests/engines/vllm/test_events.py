"""KV events: a router learns what the cache keeps, and what was lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prefixd_client.connectors.vllm.events import KvEvents
from prefixd_client.connectors.vllm.jobs import SaveJob
from vllm.distributed.kv_events import BlockRemoved, BlockStored

TOKENS = 16
HASHES = [bytes([index]) * 32 for index in range(6)]


def job(first: int, last: int, job_id: int = 1) -> SaveJob:
    """A save of blocks first to last - 1."""
    parent = HASHES[first - 1] if first else b""
    return SaveJob(job_id, "r", None, parent, tuple(HASHES[first:last]), tuple(range(first, last)), None)


def request(**fields: Any) -> Any:
    """What is read of vLLM's request."""
    return SimpleNamespace(all_token_ids=list(range(6 * TOKENS + 5)), lora_request=None, **fields)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> KvEvents:
    """Somebody listens, and wants whole hashes."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    return KvEvents(TOKENS, enabled=True)


def test_kept_blocks_are_told_with_their_tokens_and_parent(events) -> None:
    events.planned(job(2, 5), request(), 2)
    assert events.take() == []
    events.saved(1, 2)
    (stored,) = events.take()
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == HASHES[2:4]
    assert stored.parent_block_hash == HASHES[1]
    assert stored.token_ids == list(range(2 * TOKENS, 4 * TOKENS))
    assert (stored.block_size, stored.medium) == (TOKENS, "CPU")
    assert events.take() == []


def test_a_save_that_was_not_kept_is_not_told(events) -> None:
    events.planned(job(0, 3), request(), 0)
    events.saved(1, 0)
    events.saved(7, 3)
    assert events.take() == []


def test_a_run_at_its_root_has_no_parent_and_an_adapter_is_named(events) -> None:
    lora = SimpleNamespace(lora_int_id=4, lora_name="four")
    asked = request()
    asked.lora_request = lora
    events.planned(job(0, 1), asked, 0)
    events.saved(1, 1)
    (stored,) = events.take()
    assert (stored.parent_block_hash, stored.lora_id, stored.lora_name) == (None, 4, "four")


def test_lost_blocks_are_told(events) -> None:
    events.lost(HASHES[3:5])
    events.lost(())
    (removed,) = events.take()
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium) == (HASHES[3:5], "CPU")


def test_nothing_is_kept_where_nobody_listens() -> None:
    events = KvEvents(TOKENS, enabled=False)
    events.planned(job(0, 3), request(), 0)
    events.saved(1, 3)
    events.lost(HASHES[:1])
    assert events.take() == []


def test_hashes_are_told_as_vllm_tells_its_own(monkeypatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    events = KvEvents(TOKENS, enabled=True)
    events.lost(HASHES[1:2])
    (removed,) = events.take()
    assert removed.block_hashes == [int.from_bytes(HASHES[1][-8:], "big")]
