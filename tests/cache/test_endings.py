"""Law 5: a slot is reused only when nobody can still write to it."""

from __future__ import annotations

import pytest
from prefixd_server.base.errors import NotFound, StateConflict
from prefixd_server.base.types import DeclineReason, LeaseRelease
from prefixd_server.cache.administration import RELEASES_IN_A_STEP
from prefixd_server.cache.cache import EXPIRY_COUNT_MAX

from tests.cache.conftest import MakeEngine
from tests.support.engine import slot_counts
from tests.support.node import Node, chain
from tests.support.specs import spec


def quarantined(node: Node) -> int:
    return slot_counts(node)[3]


def test_an_expired_write_lease_quarantines_its_slots_until_the_process_is_dead(
    engine: MakeEngine, node: Node
) -> None:
    writer = engine()
    reserved = writer.reserve(chain(*"abc"))
    node.clock.advance(11.0)
    node.cache.step()
    assert quarantined(node) == 3
    with pytest.raises(StateConflict) as late:
        writer.commit(reserved, chain(*"abc"))
    assert late.value.reason == "LEASE_EXPIRED"
    assert quarantined(node) == 3
    writer.dies()
    assert slot_counts(node)[1:] == (0, 0, 0)


def test_a_lost_connection_quarantines_and_a_known_death_frees(engine: MakeEngine, node: Node) -> None:
    writer = engine()
    writer.reserve(chain(*"abc"))
    writer.loses_its_connection()
    assert quarantined(node) == 3
    writer.dies()
    assert quarantined(node) == 0


def test_death_known_first_frees_at_once(engine: MakeEngine, node: Node) -> None:
    writer = engine()
    writer.reserve(chain(*"abc"))
    writer.dies()
    assert slot_counts(node)[1:] == (0, 0, 0)


def test_abort_after_expiry_is_the_writers_word_that_it_has_stopped(engine: MakeEngine, node: Node) -> None:
    writer = engine()
    reserved = writer.reserve(chain(*"ab"))
    node.clock.advance(11.0)
    node.cache.step()
    assert reserved.lease is not None
    assert node.cache.abort("red", writer.session.session_id, reserved.lease.token) == 2
    assert quarantined(node) == 0
    assert node.cache.abort("red", writer.session.session_id, reserved.lease.token) == 0


def test_a_quarantined_slot_is_not_given_to_anybody(engine: MakeEngine, node: Node) -> None:
    writer, other = engine(), engine(instance="two")
    lost = writer.reserve(chain(*"ab"))
    node.clock.advance(11.0)
    node.cache.step()
    places = {
        (e.segment_id, e.offset_bytes + i * e.stride_bytes)
        for e in lost.extents
        for i in range(e.block_count)
    }
    for number in range(200):
        hashes = chain("other", number)
        fresh = other.reserve(hashes)
        given = {
            (e.segment_id, e.offset_bytes + i * e.stride_bytes)
            for e in fresh.extents
            for i in range(e.block_count)
        }
        assert not given & places
        if fresh.lease is not None:
            other.commit(fresh, hashes[len(hashes) - len(given) :])


def test_quarantine_is_bounded_and_past_the_bound_reserve_is_declined(engine: MakeEngine, node: Node) -> None:
    writer = engine()
    numbers = iter(range(1000))
    while quarantined(node) * 65_536 <= 0.25 * (8 << 20):
        assert writer.reserve(chain("x", next(numbers))).lease is not None
        node.clock.advance(11.0)
        node.cache.step()
    answer = writer.reserve(chain("y"))
    assert answer.decline_reason is DeclineReason.QUARANTINE_FULL
    assert engine(tenant="blue").reserve(chain("y")).lease is not None
    writer.dies()
    assert engine().reserve(chain("y")).lease is not None


def test_an_expired_read_lease_frees_its_slots_at_once(engine: MakeEngine, node: Node) -> None:
    reader = engine()
    hashes = reader.put(*"abc")
    answer = reader.acquire(hashes)
    assert answer.lease is not None
    node.clock.advance(11.0)
    node.cache.step()
    assert node.cache.list_leases("red") == []
    with pytest.raises(NotFound):
        node.cache.redeem("red", reader.session.session_id, answer.lease.token, 0)


def test_a_leased_block_is_not_evicted(engine: MakeEngine, node: Node) -> None:
    reader, writer = engine(), engine(instance="two")
    hashes = reader.put(*"abc")
    reader.acquire(hashes)
    for number in range(300):
        writer.put("filler", number)
    assert writer.hits(hashes) == 3
    node.cache.stats(None)
    assert node.cache.stats("red").counters.evicted > 0


def test_heartbeats_keep_a_lease_and_name_the_lost_ones(engine: MakeEngine, node: Node) -> None:
    reader = engine()
    answer = reader.acquire(reader.put(*"abc"))
    assert answer.lease is not None
    for _ in range(5):
        node.clock.advance(8.0)
        node.cache.step()
        lost, _ = node.cache.sessions.heartbeat(reader.session.session_id, [answer.lease.token, b"x" * 16])
        assert lost == [b"x" * 16]
    assert len(node.cache.list_leases("red")) == 1


def test_a_worker_keeps_its_shard_when_the_scheduler_dies(engine: MakeEngine, node: Node) -> None:
    what = spec("sharded", shard_count=2)
    scheduler, worker = engine(what=what), engine(what=what, shard=1)
    scheduler.put(*"ab")
    worker.put(*"ab")
    answer = scheduler.acquire(chain(*"ab"))
    assert answer.lease is not None
    node.cache.redeem("red", worker.session.session_id, answer.lease.token, 1)
    scheduler.dies()
    (lease,) = node.cache.list_leases("red")
    assert lease.open_shards == (1,)
    assert node.cache.redeem("red", worker.session.session_id, answer.lease.token, 1)
    released, _ = node.run(
        node.cache.release("red", worker.session.session_id, [LeaseRelease(answer.lease.token, (1,))])
    )
    assert released == 1
    assert node.cache.list_leases("red") == []


def test_all_leases_of_an_instance_end_with_its_last_session(engine: MakeEngine, node: Node) -> None:
    scheduler, worker = engine(), engine()
    hashes = scheduler.put(*"ab")
    scheduler.acquire(hashes)
    scheduler.loses_its_connection()
    worker.acquire(hashes)
    worker.loses_its_connection()
    assert node.cache.list_leases("red") == []


def test_another_instances_token_is_as_good_as_none(engine: MakeEngine, node: Node) -> None:
    reader, thief = engine(), engine(instance="two")
    answer = reader.acquire(reader.put(*"ab"))
    assert answer.lease is not None
    with pytest.raises(NotFound):
        node.cache.redeem("red", thief.session.session_id, answer.lease.token, 0)
    released, _ = node.run(
        node.cache.release("red", thief.session.session_id, [LeaseRelease(answer.lease.token)])
    )
    assert released == 0
    assert len(node.cache.list_leases("red")) == 1


def test_many_leases_that_expire_together_end_some_at_a_time(engine: MakeEngine, node: Node) -> None:
    reader = engine()
    hashes = reader.put(*"ab")
    for _ in range(EXPIRY_COUNT_MAX + 5):
        assert reader.acquire(hashes).lease is not None
    node.clock.advance(10.0)
    assert node.cache.step()
    assert node.cache.state.leases.live_count() == 5
    assert not node.cache.step()
    assert node.cache.state.leases.live_count() == 0


def test_a_dropped_namespace_ends_its_leases_some_at_a_time(engine: MakeEngine, node: Node) -> None:
    reader, other = engine(), engine(tenant="blue")
    hashes, theirs = reader.put(*"ab"), other.put(*"ab")
    for _ in range(2 * RELEASES_IN_A_STEP):
        assert reader.acquire(hashes).lease is not None
    assert other.acquire(theirs).lease is not None
    dropping = node.loop.create_task(node.cache.drop_namespace("red", reader.ref))
    seen = set()
    while not dropping.done():
        node.loop.call_soon(node.loop.stop)
        node.loop.run_forever()
        seen.add(node.cache.state.leases.live_count("red"))
        assert node.cache.check() == []
    assert {2 * RELEASES_IN_A_STEP, RELEASES_IN_A_STEP, 0} <= seen
    assert node.cache.state.leases.live_count("blue") == 1
