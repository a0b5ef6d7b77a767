"""What the storage promises beside its answers: it never raises, never gives foreign bytes, holds nothing."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from prefixd.v1 import types_pb2

from tests.support.daemon_command import DaemonCommand
from tests.support.memory_scribble import scribble_all_memory

torch = pytest.importorskip("torch")

from prefixd_client.connectors.sglang import weight_updates  # noqa: E402 - needs SGLang

from tests.support.sglang_contract import (  # noqa: E402 - needs SGLang
    TOKENS,
    Controller,
    behind,
    host_pool,
    keys,
    latent_pool,
    scrambled,
)

StorageOf = Callable[..., Any]


@pytest.fixture
def pool() -> Any:
    """A host pool with noise in it."""
    return host_pool("page_first")


def wait_until(is_so: Callable[[], bool]) -> None:
    """Returns when the daemon has come so far: releases are sent in the background."""
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # polls another process: there is nothing to wait on


def over(storage: Any, pool: Any) -> Controller:
    """SGLang's controller, by the zero-copy calls."""
    return Controller(storage, pool, zero_copy=True)


def misses(storage: Any, pool: Any) -> list[Any]:
    """What every call answers for a prompt of two blocks."""
    run, indices = keys(2), pool.alloc(2 * TOKENS)
    flat = [pool.get_dummy_flat_data_page() for _ in run]
    return [
        storage.batch_exists(run, behind()),
        storage.batch_get_v1(run, indices, behind()),
        storage.batch_set_v1(run, indices, behind()),
        storage.exists(run[0]),
        storage.get(run[0], flat[0]),
        storage.batch_get(run, flat),
        storage.set(run[0], flat[0]),
        storage.batch_set(run, flat),
    ]


NOTHING = [0, [False, False], [False, False], False, None, [None, None], False, False]


def test_without_a_daemon_every_call_is_a_miss(own_daemon, storage_of: StorageOf, pool) -> None:
    own_daemon.kill()
    assert misses(storage_of(own_daemon, pool), pool) == NOTHING


def test_a_daemon_that_dies_or_hangs_is_a_miss(
    own_daemon: DaemonCommand, storage_of: StorageOf, pool
) -> None:
    storage = storage_of(own_daemon, pool, extra={"lookup_timeout_s": 0.5})
    run, indices = keys(2), pool.alloc(2 * TOKENS)
    assert storage.batch_set_v1(run, indices, behind()) == [True, True]
    own_daemon.signal(signal.SIGSTOP)
    assert misses(storage, pool) == NOTHING
    own_daemon.kill()
    assert misses(storage, pool) == NOTHING


def test_a_damaged_block_is_a_miss_and_the_daemon_hears_of_it(
    own_daemon: DaemonCommand, storage_of: StorageOf, pool
) -> None:
    controller = over(storage_of(own_daemon, pool), pool)
    run, indices = keys(4), controller.room(4)
    assert controller.save(run, indices)
    assert own_daemon.process is not None
    scribble_all_memory(own_daemon.process.pid)
    assert controller.load(run, controller.room(4)) == 0
    wait_until(lambda: own_daemon.stats().bad_block_count == 1)
    assert controller.hits(run) == 0, "what hangs below a bad block is forgotten with it"
    assert own_daemon.problems() == []


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("a key that is no digest", lambda storage, pool: storage.batch_exists(["x"], behind())),
        ("a short digest", lambda storage, pool: storage.batch_exists(["ab" * 16], behind())),
        ("an ancestor that is no digest", lambda storage, pool: storage.batch_exists(keys(1), behind("y"))),
    ],
)
def test_calls_that_make_no_sense_count_nothing(daemon, storage_of: StorageOf, pool, name, call) -> None:
    assert call(storage_of(daemon, pool), pool) == 0


def test_memory_of_another_size_is_not_touched(daemon, storage_of: StorageOf, pool) -> None:
    storage = storage_of(daemon, pool)
    run, indices = keys(2), pool.alloc(2 * TOKENS)
    assert storage.batch_set_v1(run, indices[:TOKENS], behind()) == [False, False]
    assert storage.batch_set_v1(run, indices, behind()) == [True, True]
    small = torch.zeros(7)
    assert storage.get(run[0], small) is None
    assert small.tolist() == [0.0] * 7
    assert storage.batch_get_v1(run, indices[:-1], behind()) == [False, False]
    assert storage.batch_get_v1([], indices[:0], behind()) == []


def test_blocks_whose_ancestors_were_not_told_are_not_kept(
    daemon, storage_of: StorageOf, pool, caplog
) -> None:
    storage = storage_of(daemon, pool)
    run, indices = keys(2), pool.alloc(2 * TOKENS)
    assert storage.batch_set_v1(run, indices) == [False, False]
    assert "hicache_storage_pass_prefix_keys" in caplog.text
    assert storage.batch_exists(run, behind()) == 0


def test_a_block_below_one_that_is_not_kept_is_not_kept(daemon, storage_of: StorageOf, pool) -> None:
    storage = storage_of(daemon, pool)
    run, indices = keys(3), pool.alloc(TOKENS)
    assert storage.batch_set_v1(run[2:], indices, behind(*run[:2])) == [False]
    assert storage.batch_exists(run[2:], behind(*run[:2])) == 0


def test_many_threads_call_at_once(daemon, storage_of: StorageOf) -> None:
    pool = host_pool("page_first_direct")
    controller = over(storage_of(daemon, pool), pool)
    runs = [keys(4, seed) for seed in range(4)]
    rooms = [(controller.room(4), controller.room(4)) for _ in runs]
    wrong: list[int] = []

    def live(index: int) -> None:
        run, (source, target) = runs[index], rooms[index]
        for _ in range(5):
            ok = controller.save(run, source) and controller.hits(run) == 4
            if not ok or controller.load(run, target) != 4:
                wrong.append(index)

    threads = [threading.Thread(target=live, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [controller.bytes_at(target) for _, target in rooms] == [
        controller.bytes_at(source) for source, _ in rooms
    ]


def test_each_rank_has_its_own_bytes_and_a_hit_is_what_all_ranks_have(daemon, storage_of: StorageOf) -> None:
    pools = [scrambled(host_pool("page_first"), seed) for seed in range(2)]
    ranks = [over(storage_of(daemon, pool, tp_rank=rank, tp_size=2), pool) for rank, pool in enumerate(pools)]
    run, rooms = keys(3), [rank.room(3) for rank in ranks]
    assert ranks[0].save(run, rooms[0])
    assert [rank.hits(run) for rank in ranks] == [0, 0]
    assert ranks[1].save(run[:2], rooms[1][: 2 * TOKENS])
    assert [rank.hits(run) for rank in ranks] == [2, 2]
    expected = [rank.bytes_at(room)[:2] for rank, room in zip(ranks, rooms, strict=True)]
    assert expected[0] != expected[1]
    for rank, room, bytes_ in zip(ranks, rooms, expected, strict=True):
        scrambled(rank.pool, seed=9)
        assert rank.load(run, room) == 2
        assert rank.bytes_at(room)[:2] == bytes_


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_latent_vectors_are_one_shard_for_all_ranks(daemon, storage_of: StorageOf, layout) -> None:
    pools = [latent_pool(layout), scrambled(latent_pool(layout), seed=1)]
    writer, reader = (
        over(storage_of(daemon, pool, tp_rank=rank, tp_size=2, is_mla_model=True), pool)
        for rank, pool in enumerate(pools)
    )
    run, source, target = keys(3), writer.room(3), reader.room(3)
    assert writer.save(run, source)
    assert reader.load(run, target) == 3
    assert reader.bytes_at(target) == writer.bytes_at(source)


OTHERS = {
    "type": lambda: (host_pool("page_first", torch.float16), {}),
    "layout": lambda: (host_pool("page_first_direct"), {}),
    "model": lambda: (host_pool("page_first"), {"model_name": "other"}),
    "weights": lambda: (host_pool("page_first"), {"extra": {"weights_revision": "other"}}),
    "ranks": lambda: (host_pool("page_first"), {"tp_size": 2}),
    "stage": lambda: (host_pool("page_first"), {"pp_rank": 1, "pp_size": 2}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_engine_never_hits(daemon, storage_of: StorageOf, pool, what) -> None:
    run = keys(2)
    controller = over(storage_of(daemon, pool), pool)
    assert controller.save(run, controller.room(2))
    other_pool, changes = OTHERS[what]()
    other = over(storage_of(daemon, other_pool, **changes), other_pool)
    assert other.hits(run) == 0
    assert other.load(run, other.room(2)) == 0
    assert controller.hits(run) == 2


def test_an_update_of_weights_in_place_ends_the_sharing(daemon, storage_of: StorageOf, pool, caplog) -> None:
    updater = type("Updater", (), dict.fromkeys(weight_updates.STEPS, lambda _: "updated"))
    weight_updates.watch_class(updater)
    controller = over(storage_of(daemon, pool), pool)
    run, indices = keys(2), controller.room(2)
    assert controller.save(run, indices)
    assert updater().begin_weight_update() == "updated"
    assert misses(controller.storage, pool) == NOTHING
    assert "updated in place" in caplog.text
    fresh = over(storage_of(daemon, pool), pool)
    assert fresh.hits(run) == 2, "attached again, with a revision that the operator vouches for"


def test_metrics_tell_what_was_moved(daemon, storage_of: StorageOf, pool) -> None:
    controller = over(storage_of(daemon, pool), pool)
    run = keys(3)
    controller.save(run, controller.room(3))
    controller.load(run, controller.room(3))
    metrics = controller.storage.get_stats()
    assert (metrics.backup_pgs, metrics.prefetch_pgs) == ([3], [3])
    assert all(rate > 0 for rate in (*metrics.backup_bandwidth, *metrics.prefetch_bandwidth))
    assert controller.storage.get_stats().backup_pgs == []
    silent = storage_of(daemon, pool, enable_storage_metrics=False)
    assert silent.get_stats() is None


def test_an_engine_cannot_clear_what_others_share(daemon, storage_of: StorageOf, pool) -> None:
    controller = over(storage_of(daemon, pool), pool)
    run = keys(2)
    controller.save(run, controller.room(2))
    assert controller.storage.clear() is False
    assert controller.hits(run) == 2


def test_nothing_is_held_when_the_calls_are_over(
    own_daemon: DaemonCommand, storage_of: StorageOf, pool
) -> None:
    controller = over(storage_of(own_daemon, pool), pool)
    run = keys(3)
    controller.save(run, controller.room(3))
    assert controller.load(run, controller.room(3)) == 3
    controller.storage.close()
    assert own_daemon.leases() == []
    assert own_daemon.tier(types_pb2.TIER_DRAM).resident_slot_count == 3
