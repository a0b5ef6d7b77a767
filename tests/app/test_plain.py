"""app/plain.py."""

from __future__ import annotations

import json

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from prefixd.v1 import admin_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_server.app.plain import plain


def test_bytes_are_hex_spans_are_seconds_enums_are_short_and_numbers_stay_numbers() -> None:
    lease = wire.LeaseInfo(
        kind=wire.LEASE_KIND_WRITE,
        namespace=types_pb2.NamespaceRef(fingerprint=b"\x01\xff", epoch=2**63),
        open_shards=[0, 3],
        taken_at=Timestamp(seconds=1_700_000_000),
        expires_after=Duration(seconds=1, nanos=500_000_000),
    )
    values = plain(lease)
    assert values["kind"] == "WRITE"
    assert values["namespace"] == {"fingerprint": "01ff", "epoch": 2**63}
    assert values["open_shards"] == [0, 3]
    assert values["taken_at"] == "2023-11-14T22:13:20Z"
    assert values["expires_after"] == 1.5
    assert json.loads(json.dumps(values)) == values


def test_every_field_is_there_also_when_unset() -> None:
    values = plain(wire.GetStatsResponse(tiers=[wire.TierStats(tier=types_pb2.TIER_DRAM)]))
    assert list(values) == [field.name for field in wire.GetStatsResponse.DESCRIPTOR.fields]
    assert values["uptime"] is None
    assert values["tiers"][0]["tier"] == "DRAM"


def test_an_enum_value_of_a_newer_version_is_shown_as_its_number() -> None:
    assert plain(wire.TierStats(tier=77))["tier"] == "77"  # type: ignore[arg-type]  # from a newer daemon


def test_maps_are_dicts() -> None:
    tier = wire.TierStats(fault_counts={"slow": 2, "io_error": 1})
    assert plain(tier)["fault_counts"] == {"io_error": 1, "slow": 2}
