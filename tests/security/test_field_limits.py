"""Every string, bytes and repeated field of every request has a limit, and it is kept."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import Message
from prefixd.v1.types_pb2 import NamespaceSpec

from tests.support.daemon import running_daemon
from tests.support.request_fields import METHODS, Known, bounded_fields, resized, sound
from tests.support.wire import refusal_of
from tests.support.wire_engine import WireEngine, wire_engine


@dataclass(frozen=True)
class Limit:
    """The largest size that is taken, and the reason that one more is refused for."""

    largest: int
    reason: str = "FIELD_INVALID"


TEXT, NAME = Limit(1024), Limit(128)
HASHES, ID = Limit(16_384, "TOO_MANY_HASHES"), Limit(16)
FINGERPRINT, HASH = Limit(32), Limit(32, "HASH_LENGTH_MISMATCH")
RUN = {"namespace.fingerprint": FINGERPRINT, "block_hashes": HASHES, "block_hashes[]": HASH}
SESSION, TOKEN = {"session_id": ID}, {"token": ID}
ONE = {"namespace.fingerprint": FINGERPRINT, "block_hash": HASH}
SPEC_TEXTS = set(bounded_fields(NamespaceSpec.DESCRIPTOR)) - {"kv_groups"}

LIMITS: dict[str, dict[str, Limit]] = {
    "OpenNamespace": {f"spec.{name}": TEXT for name in SPEC_TEXTS} | {"spec.kv_groups": Limit(16)},
    "OpenSession": {
        "hello.instance_id": NAME,
        "hello.engine_name": NAME,
        "hello.client_version": NAME,
        "hello.readable_devices": Limit(64),
        "hello.readable_devices[]": NAME,
        "heartbeat.renew_tokens": Limit(4096),
        "heartbeat.renew_tokens[]": ID,
    },
    "Lookup": RUN,
    "Acquire": SESSION | RUN | TOKEN | {"redeem_shards": Limit(1), "request_id": NAME},
    "Redeem": SESSION | TOKEN,
    "Release": SESSION
    | {
        "releases": Limit(4096),
        "releases.token": ID,
        "releases.shards": Limit(16_384),
        "releases.bad_blocks": Limit(16_384),
    },
    "Reserve": SESSION | RUN | TOKEN | {"parent_hash": HASH},
    "Commit": SESSION | TOKEN | {"checksums": Limit(16_384)},
    "Abort": SESSION | TOKEN,
    "Put": {
        "header.namespace.fingerprint": FINGERPRINT,
        "header.parent_hash": HASH,
        "block.block_hash": HASH,
        "block.data": Limit(4096, "DATA_TOO_LONG"),
        "data": Limit(96, "DATA_TOO_LONG"),
    },
    "Get": RUN,
    "Prefetch": SESSION | {"runs": Limit(64)} | {f"runs.{name}": limit for name, limit in RUN.items()},
    "CancelPrefetch": SESSION | {"prefetch_ids": Limit(4096), "prefetch_ids[]": ID},
    "ReportUsage": SESSION
    | {"reports": Limit(1024), "reports.request_id": NAME, "reports.attention_mass": Limit(3)}
    | {f"reports.{name}": limit for name, limit in RUN.items()},
    "DropNamespace": {"namespace.fingerprint": FINGERPRINT},
    "DescribeBlock": ONE,
    "ExplainBlock": ONE,
    "Evict": RUN,
    "Pin": RUN,
    "Unpin": RUN,
    "SetMode": {"policy": NAME, "conservative": NAME},
    "HandOver": {"server_version": NAME},
}


@pytest.mark.parametrize("method", METHODS)
def test_every_field_has_a_limit_in_the_table(method: str) -> None:
    assert set(bounded_fields(METHODS[method].input_type)) == set(LIMITS.get(method, {}))


async def reason_of(engine: WireEngine, method: str, messages: list[Message]) -> tuple[str, str]:
    """(reason, the field that it names) of a call's refusal; ("", "") when it goes well."""
    stub: Any = getattr(engine.cache, method, None) or getattr(engine.admin, method)
    try:
        if METHODS[method].client_streaming:
            call = stub(iter(messages), timeout=20)
        else:
            call = stub(messages[0], timeout=20)
        if METHODS[method].server_streaming:
            for _ in messages:
                await call.read()
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        refusal = refusal_of(error)
        return refusal.reason or f"{refusal.code}: {refusal.message}", refusal.metadata.get("field", "")
    return "", ""


def names(told: str, path: str) -> bool:
    """Whether a refusal's field is this one: "spec.kv_groups count", "block_hashes[3]", "runs.token" ..."""
    return (
        re.split(r"[\[ ]", told, maxsplit=1)[0].rpartition(".")[2]
        == path.removesuffix("[]").rpartition(".")[2]
    )


async def test_a_field_at_its_limit_is_taken_and_one_beyond_is_refused_by_name() -> None:
    wrong = []
    async with running_daemon() as daemon, wire_engine(daemon.config.socket_path) as engine:
        for method, limits in LIMITS.items():
            ref = await engine.open_namespace(block_bytes=4096)
            known = Known(ref, engine.session_id, b"t" * 16)
            whole = sound(method, known)
            for path, limit in limits.items():
                at = await reason_of(engine, method, resized(whole, path, limit.largest))
                over = await reason_of(engine, method, resized(whole, path, limit.largest + 1))
                if at[0] == limit.reason and names(at[1], path):
                    wrong.append(f"{method}.{path} is refused at its limit: {at}")
                if over[0] != limit.reason or not names(over[1], path):
                    wrong.append(f"{method}.{path} beyond its limit: {over}")
        assert daemon.cache.check() == []
    assert wrong == []
