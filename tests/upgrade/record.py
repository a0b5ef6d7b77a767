"""Records what a release says: python -m tests.upgrade.record VERSION writes tests/upgrade/samples/VERSION.

Run once for each release, at its tag. wire.jsonl is a conversation that uses every RPC; store.tar.xz is a
data directory with blocks on NVMe, and store.json tells what is in it. Samples are never changed afterwards.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from prefixd.v1 import admin_service_pb2 as admin
from prefixd.v1 import cache_service_pb2 as cache
from prefixd.v1 import types_pb2
from prefixd_server.rpc.namespace_spec import spec_to_wire

from tests.support.daemon import running_daemon
from tests.support.node import chain
from tests.support.nvme_daemon import NvmeDaemon
from tests.support.specs import spec
from tests.support.wire import short_directory
from tests.support.wire_engine import Companion, checksum_of, put_messages
from tests.upgrade.conversation import Conversation, Turn, answer_of, save

SAMPLES = Path(__file__).with_name("samples")
BLOCK_BYTES = 4096
STORE_BLOCK_BYTES = 65_536
STORE_RUN_BLOCKS = 8
STORED_COUNT = 32
"""Blocks that NVMe has in the end, at the least."""


class Recorder:
    """A conversation whose turns are kept."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation
        self.turns: list[Turn] = []

    async def say(self, method: str, *requests: Message, answers: int = 1, kept: bool = False) -> Any:
        """Sends requests; the last answer."""
        sent = [request.SerializeToString(deterministic=True) for request in requests]
        got = await self._conversation.exchange(method, sent, answers, kept=kept)
        self.turns.append(Turn(method, sent, got, kept))
        return answer_of(method, got[-1]) if got else None


async def talk(say: Any, companion: Any) -> None:
    """Uses every RPC once or more; `companion` connects a session's companion socket."""
    hello = cache.SessionHello(
        instance_id="sample", engine_name="test", client_version="0.1.0", pid=1, readable_devices=["GPU-none"]
    )
    opened = (await say("OpenSession", cache.OpenSessionRequest(hello=hello), kept=True)).opened
    await companion(opened)
    session = opened.session_id
    asked = cache.OpenNamespaceRequest(spec=spec_to_wire(spec("sample", block_bytes=BLOCK_BYTES)))
    ref = (await say("OpenNamespace", asked)).namespace
    await say("WatchEvents", admin.WatchEventsRequest(), answers=0, kept=True)
    await write(say, session, ref)
    await read(say, session, ref)
    await portable(say, ref)
    await tell(say, session, ref)
    await operate(say, ref)
    step = admin.HandOverRequest(step=admin.HAND_OVER_STEP_ASKED, pid=1, server_version="0.1.0")
    await say("HandOver", step)


RUN, LATER, FRESH = chain("a", "b", "c", "d"), chain("e", "f"), chain("g")
BLOCKS = [bytes([number]) * BLOCK_BYTES for number in range(len(RUN))]


async def write(say: Any, session: bytes, ref: types_pb2.NamespaceRef) -> None:
    """Reserve, Commit, Abort. The slots are fresh memory: their blocks are zeros."""
    fields: dict[str, Any] = {"session_id": session, "namespace": ref, "ttl": Duration(seconds=20)}
    cost = Duration(nanos=5_000_000)
    leased = await say("Reserve", cache.ReserveRequest(block_hashes=RUN, recompute_cost=cost, **fields))
    sums = [checksum_of(bytes(BLOCK_BYTES))] * len(RUN)
    await say("Commit", cache.CommitRequest(session_id=session, token=leased.lease.token, checksums=sums))
    below = await say("Reserve", cache.ReserveRequest(block_hashes=LATER, parent_hash=RUN[-1], **fields))
    await say("Abort", cache.AbortRequest(session_id=session, token=below.lease.token))


async def read(say: Any, session: bytes, ref: types_pb2.NamespaceRef) -> None:
    """Lookup, Acquire, a renewal, Redeem, Release."""
    await say("Lookup", cache.LookupRequest(namespace=ref, block_hashes=[*RUN, *LATER]))
    request = cache.AcquireRequest(
        session_id=session,
        namespace=ref,
        block_hashes=[*RUN, *LATER],
        skip_block_count=1,
        redeem_shards=[0],
        ttl=Duration(seconds=20),
        request_id="request",
        max_wait=Duration(nanos=1_000_000),
    )
    token = (await say("Acquire", request)).lease.token
    await say("WatchEvents", answers=1)
    beat = cache.SessionHeartbeat(renew_tokens=[token], statistics=cache.ClientStatistics(read_block_count=3))
    await say("OpenSession", cache.OpenSessionRequest(heartbeat=beat), kept=True)
    await say("ListLeases", admin.ListLeasesRequest())
    await say("Redeem", cache.RedeemRequest(session_id=session, token=token, shard=0))
    release = cache.LeaseRelease(token=token, shards=[0], bad_blocks=[cache.BadBlock(block_index=3)])
    await say("Release", cache.ReleaseRequest(session_id=session, releases=[release]))


async def portable(say: Any, ref: types_pb2.NamespaceRef) -> None:
    """Put, Get."""
    run = chain("p", "q")
    await say("Put", *put_messages(ref, run, BLOCKS[:2]))
    await say("Get", cache.GetRequest(namespace=ref, block_hashes=run), answers=3)


async def tell(say: Any, session: bytes, ref: types_pb2.NamespaceRef) -> None:
    """Prefetch, CancelPrefetch, ReportUsage."""
    run = cache.PrefetchRun(namespace=ref, block_hashes=RUN, queue_position=1, deadline=Duration(seconds=5))
    asked = await say("Prefetch", cache.PrefetchRequest(session_id=session, runs=[run]))
    ids = [status.prefetch_id for status in asked.runs]
    await say("CancelPrefetch", cache.CancelPrefetchRequest(session_id=session, prefetch_ids=ids))
    report = cache.UsageReport(
        namespace=ref,
        request_id="request",
        phase=cache.REQUEST_PHASE_FINISHED,
        block_hashes=RUN,
        output_token_count=7,
        stop_reason=cache.STOP_REASON_LENGTH,
        decode_latency=Duration(nanos=9_000_000),
        prefill_time=Duration(nanos=30_000_000),
        prefill_token_count=32,
        attention_mass=[0.5, 0.25, 0.125, 0.125],
    )
    request = cache.ReportUsageRequest(session_id=session, reports=[report], quiet_period=Duration(nanos=1))
    await say("ReportUsage", request)


async def operate(say: Any, ref: types_pb2.NamespaceRef) -> None:
    """AdminService; what ends things comes last."""
    await say("GetStats", admin.GetStatsRequest())
    await say("ListNamespaces", admin.ListNamespacesRequest())
    await say("DescribeBlock", admin.DescribeBlockRequest(namespace=ref, block_hash=RUN[1]))
    await say("ExplainBlock", admin.ExplainBlockRequest(namespace=ref, block_hash=RUN[1]))
    await say("Pin", admin.PinRequest(namespace=ref, block_hashes=RUN))
    await say("Unpin", admin.UnpinRequest(namespace=ref, block_hashes=RUN))
    await say("Evict", admin.EvictRequest(namespace=ref, block_hashes=RUN, keep_block_count=2))
    await say("SetMode", admin.SetModeRequest(policy="lru", conservative="off"))
    await say("Check", admin.CheckRequest())
    await say("DropNamespace", admin.DropNamespaceRequest(namespace=ref))
    await say("Drain", admin.DrainRequest(timeout=Duration(nanos=1)))


async def record_wire(path: Path) -> None:
    """A conversation with this code's daemon."""
    with short_directory() as directory:
        async with (
            running_daemon(data_dir=str(directory)) as daemon,
            grpc.aio.insecure_channel(f"unix:{daemon.config.socket_path}") as channel,
        ):
            conversation = Conversation(channel)
            recorder = Recorder(conversation)
            connected: list[Companion] = []

            async def companion(opened: cache.SessionOpened) -> None:
                found = await asyncio.to_thread(Companion, opened.companion_path, opened.session_id)
                connected.append(found)

            await talk(recorder.say, companion)
            conversation.close()
            connected[0].close()
    save(recorder.turns, path)


def stored_blocks(number: int) -> list[bytes]:
    """The bytes of one of the store's runs: such as pack well."""
    first = number * STORE_RUN_BLOCKS
    return [bytes([(first + index) % 251]) * STORE_BLOCK_BYTES for index in range(STORE_RUN_BLOCKS)]


def stored_run(number: int) -> list[bytes]:
    """The hashes of one of the store's runs."""
    return chain(*(f"{number}/{index}" for index in range(STORE_RUN_BLOCKS)))


def record_store(directory: Path) -> None:
    """A data directory of a daemon that has ended."""
    with short_directory() as work, NvmeDaemon(work) as daemon:
        daemon.wait_until_recovered()
        ref = daemon.open_namespace("one")
        run_count = 0
        while (kept := daemon.nvme.resident_slot_count) < STORED_COUNT:
            daemon.put_blocks(ref, stored_run(run_count), stored_blocks(run_count))
            run_count += 1
        daemon.signal(15)
        assert daemon.wait() == 0
        with tarfile.open(directory / "store.tar.xz", "w:xz", preset=9) as archive:
            archive.add(work / "data", "data")
    told = {
        "fingerprint": ref.fingerprint.hex(),
        "epoch": ref.epoch,
        "run_count": run_count,
        "block_count": kept,
    }
    (directory / "store.json").write_text(json.dumps(told, indent=2) + "\n")


def main() -> None:
    """See the module."""
    directory = SAMPLES / sys.argv[1]
    directory.mkdir(parents=True)
    asyncio.run(record_wire(directory / "wire.jsonl"))
    record_store(directory)


if __name__ == "__main__":
    main()
