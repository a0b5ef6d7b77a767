"""What a request may say about GPUs."""

from __future__ import annotations

import pytest
from prefixd.v1 import cache_service_pb2 as wire
from prefixd_server.base.errors import InvalidRequest
from prefixd_server.base.types import Tier
from prefixd_server.rpc import requests


def hello(*devices: str) -> requests.Hello:
    body = wire.SessionHello(instance_id="one", readable_devices=devices)
    return requests.hello(wire.OpenSessionRequest(hello=body))


def test_a_session_names_its_devices() -> None:
    assert hello().readable_devices == frozenset()
    assert hello("GPU-1", "GPU-2", "GPU-1").readable_devices == {"GPU-1", "GPU-2"}


@pytest.mark.parametrize("devices", [["GPU"] * 65, ["x" * 129]])
def test_too_many_devices_and_long_names_are_refused(devices: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        hello(*devices)
    assert "readable_devices" in str(caught.value.metadata.get("field"))


@pytest.mark.parametrize(("value", "tier"), [(0, Tier.DRAM), (Tier.DRAM, Tier.DRAM), (Tier.HBM, Tier.HBM)])
def test_a_reserve_may_ask_for_hbm(value: int, tier: Tier) -> None:
    assert requests.wanted_tier(value) is tier


@pytest.mark.parametrize("value", [Tier.NVME, 9])
def test_no_other_tier_can_be_asked_for(value: int) -> None:
    with pytest.raises(InvalidRequest, match="wanted_tier"):
        requests.wanted_tier(value)
