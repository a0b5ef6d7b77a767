"""rpc/checks.py, rpc/requests.py, rpc/namespace_spec.py: what a request must be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_server.base.errors import InvalidRequest, PrefixdError, Unsupported
from prefixd_server.base.types import HASH_COUNT_MAX, RequestPhase
from prefixd_server.cache.turns import at_once
from prefixd_server.rpc import checks, requests
from prefixd_server.rpc.namespace_spec import spec_from_wire, spec_to_wire

from tests.support.specs import spec

releases, reports = at_once(requests.releases), at_once(requests.reports)


def reason_of(call: Any, *args: Any, **kwargs: Any) -> str:
    """The reason with which a call is refused."""
    with pytest.raises(PrefixdError) as caught:
        call(*args, **kwargs)
    assert caught.value.message
    return caught.value.reason


def lookup(hashes: list[bytes]) -> wire.LookupRequest:
    """A request that carries a run."""
    ref = types_pb2.NamespaceRef(fingerprint=b"f" * 32, epoch=1)
    return wire.LookupRequest(namespace=ref, block_hashes=hashes)


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=20))
def test_a_run_of_whole_hashes_is_packed_in_order(hashes: list[bytes]) -> None:
    assert checks.run(lookup(hashes), 32).tobytes() == b"".join(hashes)


def test_short_hashes_are_padded_and_stay_distinct() -> None:
    run = checks.run(lookup([b"\1" * 16, b"\2" * 16]), 16)
    assert run.shape == (2, 4)
    assert not run[:, 2:].any()


@pytest.mark.parametrize(
    ("hashes", "reason"),
    [
        ([], "EMPTY_RUN"),
        ([b"x" * 31], "HASH_LENGTH_MISMATCH"),
        ([b"x" * 32, b"x" * 31, b"x" * 33], "HASH_LENGTH_MISMATCH"),
        ([b"x" * 32] * (HASH_COUNT_MAX + 1), "TOO_MANY_HASHES"),
    ],
)
def test_a_malformed_run_is_refused(hashes: list[bytes], reason: str) -> None:
    assert reason_of(checks.run, lookup(hashes), 32) == reason


def test_the_refusal_of_a_hash_names_its_place() -> None:
    with pytest.raises(InvalidRequest, match=r"block_hashes\[1\] has 3 bytes.*have 32"):
        checks.run(lookup([b"x" * 32, b"abc"]), 32)


def test_an_empty_run_passes_where_it_means_everything() -> None:
    assert checks.run(lookup([]), 32, allow_empty=True).shape == (0, 4)


@pytest.mark.parametrize(
    ("seconds", "nanos"), [(-1, 0), (0, 0), (0, -5), (checks.DURATION_S_MAX + 1, 0), (1, 10**9)]
)
def test_spans_are_positive_and_in_range(seconds: int, nanos: int) -> None:
    request = wire.AcquireRequest(ttl=Duration(seconds=seconds, nanos=nanos))
    assert reason_of(checks.span_s, request, "ttl") == "FIELD_INVALID"


def test_an_absent_span_is_none() -> None:
    assert checks.span_s(wire.AcquireRequest(), "ttl") is None
    assert checks.span_s(wire.AcquireRequest(ttl=Duration(nanos=5 * 10**8)), "ttl") == 0.5


def test_a_spec_survives_the_wire_and_keeps_its_fingerprint() -> None:
    original = spec(shard_count=2, hash_bytes=16, kv_scales_fingerprint="s", model_id="Mödell")
    again = spec_from_wire(spec_to_wire(original))
    assert again == original
    assert again.fingerprint() == original.fingerprint()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_id": ""}, "spec.model_id"),
        ({"model_id": "x" * 1025}, "spec.model_id"),
        ({"model_id": "a\0b"}, "spec.model_id"),
        ({"weights_fingerprint": "abc"}, "spec.weights_fingerprint"),
        ({"weights_fingerprint": "sha256:"}, "spec.weights_fingerprint"),
        ({"block_tokens": 0}, "spec.block_tokens"),
        ({"block_tokens": 65_537}, "spec.block_tokens"),
        ({"kv_groups": []}, "spec.kv_groups count"),
        ({"shard_count": 0}, "spec.shard_count"),
        ({"tensor_parallel_size": 1025}, "spec.tensor_parallel_size"),
        ({"hash_bytes": 20}, "spec.hash_bytes"),
        ({"checksum_algorithm": 0}, "spec.checksum_algorithm"),
        ({"encoding": 0}, "spec.encoding"),
        ({"kv_groups": [types_pb2.KvGroup(block_bytes=1, layer_count=1)]}, "spec.kv_groups[0].kind"),
        (
            {"kv_groups": [types_pb2.KvGroup(kind="KV_GROUP_KIND_FULL_ATTENTION", layer_count=1)]},
            "spec.kv_groups[0].block_bytes",
        ),
        (
            {"kv_groups": [types_pb2.KvGroup(kind="KV_GROUP_KIND_FULL_ATTENTION", block_bytes=1)]},
            "spec.kv_groups[0].layer_count",
        ),
    ],
)
def test_each_wrong_field_of_a_spec_is_named(change: dict[str, Any], field: str) -> None:
    message = spec_to_wire(spec())
    for name, value in change.items():
        message.ClearField(name)
        if name == "kv_groups":
            message.kv_groups.extend(value)
        else:
            setattr(message, name, value)
    with pytest.raises(InvalidRequest) as caught:
        spec_from_wire(message)
    assert (caught.value.reason, caught.value.metadata["field"]) == ("FIELD_INVALID", field)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"checksum_algorithm": 9}, "UNSUPPORTED_CHECKSUM"),
        ({"encoding": 9}, "UNSUPPORTED_ENCODING"),
        ({"kind": types_pb2.KV_GROUP_KIND_SLIDING_WINDOW}, "UNSUPPORTED_KV_GROUP"),
        ({"kind": types_pb2.KV_GROUP_KIND_RECURRENT}, "UNSUPPORTED_KV_GROUP"),
    ],
)
def test_what_is_known_but_not_served_says_so(change: dict[str, int], reason: str) -> None:
    message = spec_to_wire(spec())
    for name, value in change.items():
        setattr(message.kv_groups[0] if name == "kind" else message, name, value)
    with pytest.raises(Unsupported) as caught:
        spec_from_wire(message)
    assert caught.value.reason == reason


def test_shards_and_groups_are_checked_against_the_namespace() -> None:
    two = spec(shard_count=2)
    assert requests.redeem_shards([0, 1], two) == (0, 1)
    assert reason_of(requests.redeem_shards, [0, 2], two) == "SHARD_OUT_OF_RANGE"
    assert reason_of(requests.redeem_shards, [0] * 5000, two) == "FIELD_INVALID"
    assert reason_of(requests.kv_group, 1, two) == "KV_GROUP_OUT_OF_RANGE"
    assert reason_of(requests.skip_count, 3, 3) == "FIELD_INVALID"


def test_a_session_begins_with_hello_and_goes_on_with_heartbeats() -> None:
    hello = wire.OpenSessionRequest(hello=wire.SessionHello(instance_id="i", pid=7))
    beat = wire.OpenSessionRequest(heartbeat=wire.SessionHeartbeat(renew_tokens=[b"t" * 16]))
    assert requests.hello(hello).pid == 7
    assert requests.heartbeat(beat) == [b"t" * 16]
    assert reason_of(requests.hello, beat) == "HELLO_MISSING"
    assert reason_of(requests.heartbeat, hello) == "HEARTBEAT_EXPECTED"
    nameless = wire.OpenSessionRequest(hello=wire.SessionHello())
    assert reason_of(requests.hello, nameless) == "FIELD_INVALID"
    short = wire.OpenSessionRequest(heartbeat=wire.SessionHeartbeat(renew_tokens=[b"t"]))
    assert reason_of(requests.heartbeat, short) == "FIELD_INVALID"


def test_commit_needs_a_checksum_per_block() -> None:
    assert requests.checksums([1, 2**64 - 1]).dtype == np.uint64
    assert reason_of(requests.checksums, []) == "CHECKSUM_MISSING"


def test_bad_blocks_are_bounded_over_the_whole_release() -> None:
    half = [wire.BadBlock()] * (HASH_COUNT_MAX // 2 + 1)
    entries = [wire.LeaseRelease(token=b"t" * 16, bad_blocks=half)] * 2
    assert len(releases(entries[:1])) == 1
    assert reason_of(releases, entries) == "FIELD_INVALID"
    assert reason_of(releases, []) == "FIELD_INVALID"


def report(**fields: Any) -> wire.UsageReport:
    """A usage report that is right unless told otherwise."""
    values: dict[str, Any] = {
        "namespace": types_pb2.NamespaceRef(fingerprint=b"f" * 32, epoch=1),
        "request_id": "r",
        "phase": wire.REQUEST_PHASE_FINISHED,
    }
    return wire.UsageReport(**(values | fields))


def test_a_report_is_taken_over_field_by_field() -> None:
    sent = report(
        block_hashes=[b"h" * 32, b"i" * 32],
        attention_mass=[0.25, 0.5],
        decode_latency=Duration(nanos=10**7),
        stop_reason=wire.STOP_REASON_TOOL_USE,
        output_token_count=9,
    )
    (taken,) = reports([sent], lambda _: spec())
    assert taken.phase is RequestPhase.FINISHED
    assert taken.hashes is not None
    assert taken.hashes.shape == (2, 4)
    assert taken.attention_mass is not None
    assert taken.attention_mass.tolist() == [0.25, 0.5]
    assert (taken.decode_latency_s, taken.output_token_count, taken.stop_reason.name) == (0.01, 9, "TOOL_USE")


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": 0},
        {"request_id": ""},
        {"request_id": "r" * 129},
        {"block_hashes": [b"h" * 32], "attention_mass": [0.1, 0.2]},
        {"block_hashes": [b"h" * 32], "attention_mass": [1.5]},
        {"block_hashes": [b"h" * 32], "attention_mass": [float("nan")]},
        {"block_hashes": [b"h" * 32], "attention_mass": [-0.1]},
        {"decode_latency": Duration(seconds=-1)},
    ],
)
def test_a_report_with_a_wrong_field_is_refused(fields: dict[str, Any]) -> None:
    assert reason_of(reports, [report(**fields)], lambda _: spec()) == "FIELD_INVALID"


def test_reports_are_bounded_in_number_and_in_hashes() -> None:
    assert reason_of(reports, [], lambda _: spec()) == "FIELD_INVALID"
    assert reason_of(reports, [report()] * 1025, lambda _: spec()) == "FIELD_INVALID"
    long = report(block_hashes=[b"h" * 32] * (HASH_COUNT_MAX // 2 + 1))
    assert reason_of(reports, [long, long], lambda _: spec()) == "TOO_MANY_HASHES"
