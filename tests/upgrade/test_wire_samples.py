"""Today's daemon answers recorded releases, and clients and daemons a minor version apart get on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
from google.protobuf.message import Message
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_client import Client, ClientOptions
from prefixd_client.namespace import KvGroup, NamespaceSpec

from tests.support.daemon import running_daemon
from tests.support.engine_churn import block_data, read_run, run_hashes
from tests.support.engine_process import PATIENT
from tests.support.wire import short_directory
from tests.support.wire_engine import Companion
from tests.upgrade.conversation import METHODS, Conversation, Turn, leaves, load, request_of
from tests.upgrade.go_between import go_between, with_unknown_fields, without
from tests.upgrade.record import SAMPLES

RELEASES = sorted(path.parent.name for path in SAMPLES.glob("*/wire.jsonl"))
BESIDE_THE_POINT = frozenset({".seconds", ".nanos"})
"""Times may be naught."""
OPTIONAL = frozenset(
    {
        "SessionHello.engine_name",
        "SessionHello.client_version",
        "SessionHello.pid",
        "SessionHello.readable_devices",
        "SessionHeartbeat.statistics",
        "AcquireRequest.skip_block_count",
        "AcquireRequest.ttl",
        "AcquireRequest.request_id",
        "AcquireRequest.max_wait",
        "ReserveRequest.ttl",
        "ReserveRequest.recompute_cost",
        "LeaseRelease.shards",
        "LeaseRelease.bad_blocks",
        "PrefetchRun.queue_position",
        "PrefetchRun.deadline",
        "UsageReport.block_hashes",
        "UsageReport.output_token_count",
        "UsageReport.stop_reason",
        "UsageReport.decode_latency",
        "UsageReport.prefill_time",
        "UsageReport.prefill_token_count",
        "UsageReport.attention_mass",
        "ReportUsageRequest.quiet_period",
        "EvictRequest.keep_block_count",
        "SetModeRequest.policy",
        "SetModeRequest.conservative",
        "DrainRequest.timeout",
        "HandOverRequest.pid",
        "HandOverRequest.server_version",
    }
)
"""Fields of requests that a client need not send."""
DISPENSABLE = frozenset(
    {
        "SessionOpened.capabilities",
        "SessionOpened.server_version",
        "LookupResponse.readiness",
        "AcquireResponse.ready_after",
        "AcquireResponse.device_segments",
        "RedeemResponse.device_segments",
        "ReserveResponse.device_segments",
        "ReserveResponse.retry_after",
        "PrefetchStatus.ready_after",
    }
)
"""Fields of answers that a client does without."""


async def replayed(turns: list[Turn]) -> list[list[Message]]:
    """Today's answers to recorded requests."""
    with short_directory() as directory:
        async with (
            running_daemon(data_dir=str(directory)) as daemon,
            grpc.aio.insecure_channel(f"unix:{daemon.config.socket_path}") as channel,
        ):
            conversation = Conversation(channel)
            first, *others = turns
            answers = [await answered(conversation, first)]
            (opened,) = answers[0]
            assert isinstance(opened, wire.OpenSessionResponse)
            path, session = opened.opened.companion_path, opened.opened.session_id
            with contextlib.closing(await asyncio.to_thread(Companion, path, session)):
                answers += [await answered(conversation, turn) for turn in others]
                conversation.close()
    return answers


async def answered(conversation: Conversation, turn: Turn) -> list[Message]:
    """Today's answers to one turn."""
    return replace(turn, answers=await conversation.replay(turn)).parsed_answers()


def told(messages: list[Message]) -> set[str]:
    """The fields that are set."""
    paths = {f"{number}{path}" for number, message in enumerate(messages) for path, _ in leaves(message)}
    return {path for path in paths if not path.endswith(tuple(BESIDE_THE_POINT))}


def changed(turns: list[Turn], change: Callable[[Message], Message]) -> list[Turn]:
    """The conversation as another release's client would have led it."""
    return [
        replace(
            turn,
            requests=[change(request_of(turn.method, data)).SerializeToString() for data in turn.requests],
        )
        for turn in turns
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_a_sample_uses_every_rpc_of_its_time(release: str) -> None:
    used = {turn.method for turn in load(SAMPLES / release / "wire.jsonl")}
    assert used <= METHODS.keys()
    if release == RELEASES[-1]:
        assert used == METHODS.keys()


@pytest.mark.parametrize("release", RELEASES)
async def test_recorded_requests_are_answered_with_all_that_was_recorded(release: str) -> None:
    turns = load(SAMPLES / release / "wire.jsonl")
    for turn, answers in zip(turns, await replayed(turns), strict=True):
        lacking = told(turn.parsed_answers()) - told(answers)
        assert not lacking, f"{turn.method} no longer tells {lacking}"


@pytest.mark.parametrize("release", RELEASES)
async def test_a_newer_clients_fields_are_ignored(release: str) -> None:
    turns = load(SAMPLES / release / "wire.jsonl")
    newer = changed(turns, with_unknown_fields)
    assert all(b"later" in data for turn in newer for data in turn.requests)
    for turn, answers in zip(newer, await replayed(newer), strict=True):
        assert told(turn.parsed_answers()) <= told(answers), turn.method


@pytest.mark.parametrize("release", RELEASES)
async def test_an_older_client_need_not_send_what_came_later(release: str) -> None:
    turns = load(SAMPLES / release / "wire.jsonl")
    older = changed(turns, lambda request: without(request, OPTIONAL))
    assert sum(len(data) for turn in older for data in turn.requests) < sum(
        len(data) for turn in turns for data in turn.requests
    )
    answers = await replayed(older)
    assert [len(turn.answers) for turn in turns] == [len(got) for got in answers]


@pytest.mark.parametrize(
    "answers",
    [with_unknown_fields, lambda answer: without(answer, DISPENSABLE)],
    ids=["newer", "older"],
)
async def test_the_client_works_with_a_daemon_of_another_release(
    answers: Callable[[Message], Message], tmp_path: Path
) -> None:
    spec = NamespaceSpec(
        model_id="model",
        weights_fingerprint="revision:1",
        model_config_fingerprint="00",
        kv_dtype="float32",
        kv_layout="test",
        attention_backend="sdpa",
        block_tokens=16,
        kv_groups=(KvGroup(block_bytes=4096, layer_count=2),),
        hash_algorithm="sha256",
        engine_name="test",
        layout_version="1",
    )

    def work(socket: Path) -> dict[str, int]:
        hashes = run_hashes("run", 4)
        with Client(socket, engine_name="test", options=ClientOptions(**PATIENT)) as client:
            namespace = client.namespace(spec)
            lease = namespace.reserve(hashes)
            assert lease is not None
            assert lease.store([block_data(key, 0, 4096) for key in hashes]).visible == 4
            assert namespace.lookup(hashes).hit_count == 4
            namespace.prefetch(hashes)
            assert client.status().state == "ready"
            return read_run(namespace, hashes)

    with short_directory() as directory:
        async with (
            running_daemon() as daemon,
            go_between(daemon.config.socket_path, directory / "b.sock", answers),
        ):
            seen = await asyncio.to_thread(work, directory / "b.sock")
    assert seen == {"hit": 4, "good": 4, "true": 4}
