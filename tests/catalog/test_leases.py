"""Who holds what until when."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.errors import NotFound
from prefixd_server.base.types import Tier
from prefixd_server.catalog.leases import LeasedPiece, LeaseTable, ReadLease, ShardHold, WriteLease
from prefixd_server.catalog.namespaces import Namespaces

from tests.support.specs import spec


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint32)


@pytest.fixture
def table() -> LeaseTable:
    return LeaseTable()


def read_lease(token: bytes, expires_at: float = 10.0, instance_id: str = "one") -> ReadLease:
    namespace = Namespaces().open("red", spec(), 1, 0.0, 10)
    piece = LeasedPiece(0, Tier.DRAM, 0, slots(1, 2, 3))
    return ReadLease(token, "red", instance_id, 7, namespace, 0.0, expires_at, {0: ShardHold(b"s", (piece,))})


def write_lease(token: bytes, expires_at: float = 10.0) -> WriteLease:
    namespace = Namespaces().open("red", spec(), 1, 0.0, 10)
    return WriteLease(token, "red", "one", b"s", 7, namespace, 0, 0, Tier.DRAM, slots(4, 5), 0.0, expires_at)


def test_a_lease_is_found_only_by_its_own_instance_and_tenant(table: LeaseTable) -> None:
    lease = read_lease(b"token")
    table.add(lease)
    assert table.read(b"token", "red", "one") is lease
    for tenant, instance in (("blue", "one"), ("red", "two")):
        with pytest.raises(NotFound) as refused:
            table.read(b"token", tenant, instance)
        assert refused.value.reason == "LEASE_UNKNOWN"


def test_an_unknown_token_and_a_foreign_one_get_the_same_answer(table: LeaseTable) -> None:
    table.add(read_lease(b"token"))
    with pytest.raises(NotFound) as foreign:
        table.read(b"token", "blue", "one")
    table.end(table.reads[b"token"])
    with pytest.raises(NotFound) as unknown:
        table.read(b"token", "blue", "one")
    assert str(foreign.value) == str(unknown.value)


def test_a_renewed_lease_does_not_expire_at_its_first_time(table: LeaseTable) -> None:
    lease = read_lease(b"token", expires_at=10.0)
    table.add(lease)
    table.renew(lease, 20.0)
    assert list(table.expired(10.0)) == []
    assert list(table.expired(20.0)) == [lease]


def test_a_lease_is_never_shortened_by_renewal(table: LeaseTable) -> None:
    lease = read_lease(b"token", expires_at=10.0)
    table.add(lease)
    table.renew(lease, 5.0)
    assert lease.expires_at == 10.0


def test_a_quarantined_lease_neither_expires_again_nor_counts_as_live(table: LeaseTable) -> None:
    lease = write_lease(b"w")
    table.add(lease)
    assert table.live_count("red") == 1
    lease.quarantined = True
    assert list(table.expired(100.0)) == []
    assert table.live_count("red") == 0
    assert table.held_by(b"w", "red", "one") is None


def test_a_write_lease_belongs_to_one_process(table: LeaseTable) -> None:
    lease = write_lease(b"w")
    table.add(lease)
    assert table.write(b"w", "red", "one", 7) is lease
    with pytest.raises(NotFound):
        table.write(b"w", "red", "one", 8)


def test_open_slots_shrink_as_blocks_are_committed() -> None:
    lease = write_lease(b"w")
    lease.committed_count = 1
    assert lease.open_slots.tolist() == [5]
