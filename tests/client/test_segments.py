"""SegmentMap against a real companion socket and real memory."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import pytest_asyncio
from prefixd_client import segments
from prefixd_client.segments import CompanionLost, CompanionRefused, SegmentMap, SegmentUnknown
from prefixd_server.media.dram import DramMedium
from prefixd_server.rpc.companion import Companion

from tests.support.companions import FakeCache, until

MIB = 1 << 20
SESSION = bytes(range(16))
T = TypeVar("T")


@pytest.fixture
def cache() -> Iterator[FakeCache]:
    dram = DramMedium(2 * MIB, 4)
    assert dram.wait_prefaulted(10)
    yield FakeCache(dram, {SESSION: "a"}, {1: "a", 2: "a", 3: "b", 4: "a"})
    dram.close()


@pytest_asyncio.fixture
async def companion(cache: FakeCache, tmp_path: Path) -> AsyncIterator[Companion]:
    server = Companion(tmp_path / "s.fd", "a", cache, 0o660, "")
    await server.open()
    yield server
    await server.close()


@pytest_asyncio.fixture
async def client(companion: Companion, tmp_path: Path) -> AsyncIterator[SegmentMap]:
    made = await off_loop(SegmentMap, str(tmp_path / "s.fd"), SESSION)
    yield made
    await off_loop(made.close)


async def off_loop(function: Callable[..., T], *arguments: object) -> T:
    """The daemon serves on this loop, so the client calls from a thread."""
    return await asyncio.to_thread(function, *arguments)


def mapping_count() -> int:
    """Segments mapped in this process, by the daemon and by the client."""
    return sum("prefixd-segment" in line for line in Path("/proc/self/maps").read_text().splitlines())


async def test_both_sides_see_the_same_bytes(client: SegmentMap, cache: FakeCache) -> None:
    view = await off_loop(client.view, 2, 4096, 5)
    view[:] = b"block"
    assert bytes(cache.dram.view(1, 4096, 5)) == b"block"
    cache.dram.view(1, 4096, 5)[:] = b"other"
    assert bytes(view) == b"other"


async def test_a_segment_is_mapped_once_and_keeps_its_address(client: SegmentMap) -> None:
    before = mapping_count()
    first = await off_loop(client.segment, 1)
    many = await off_loop(client.segments, [1, 2, 1])
    assert many[1] is first
    assert client.segment(1) is first
    assert mapping_count() == before + 2
    assert set(many) == {1, 2}


async def test_more_segments_than_one_request_carries_come_in_turn(
    client: SegmentMap, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_COUNT_MAX", 2)
    assert set(await off_loop(client.segments, [1, 2, 4])) == {1, 2, 4}


async def test_anothers_segment_is_unknown_and_the_connection_goes_on(client: SegmentMap) -> None:
    with pytest.raises(SegmentUnknown) as unknown:
        await off_loop(client.segment, 3)
    assert unknown.value.segment_id == 3
    with pytest.raises(SegmentUnknown):
        await off_loop(client.segments, [1, 3])
    assert (await off_loop(client.segment, 1)).length_bytes == 2 * MIB


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (2 * MIB, 1), (0, 2 * MIB + 1)])
async def test_a_view_beyond_the_segment_is_refused(client: SegmentMap, offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="not within"):
        await off_loop(client.view, 1, offset, length)


async def test_prefetching_maps_in_the_background(client: SegmentMap) -> None:
    before = mapping_count()
    client.prefetch([1, 2, 3])
    await until(lambda: mapping_count() == before + 2)
    assert client.segment(2).segment_id == 2


async def test_prefaulting_works_on_kernels_without_populate(
    client: SegmentMap, cache: FakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = await off_loop(client.segment, 1)
    segment.view(0, 4)[:] = b"keep"
    monkeypatch.setattr(segments, "_MADV_POPULATE_WRITE", 9999)
    segment.prefault(0)
    assert bytes(cache.dram.view(0, 0, 4)) == b"keep"


async def test_a_retired_segment_is_unmapped_when_its_last_user_has_let_go(client: SegmentMap) -> None:
    before = mapping_count()
    view = await off_loop(client.view, 1, 0, 4)
    segment = client.segment(1)
    client.retire([1, 77])
    assert mapping_count() == before + 1
    view[:] = b"mine"
    del view
    assert mapping_count() == before + 1
    await until(lambda: not client._work)
    del segment
    await until(lambda: mapping_count() == before)


async def test_a_segment_asked_for_after_it_was_retired_is_mapped_anew(
    client: SegmentMap, cache: FakeCache
) -> None:
    (await off_loop(client.view, 1, 0, 4))[:] = b"mine"
    client.retire([1])
    cache.dram.renew(0)
    cache.owners[5] = cache.owners.pop(1)
    with pytest.raises(SegmentUnknown):
        await off_loop(client.segment, 1)


async def test_a_fork_does_not_inherit_the_mappings(client: SegmentMap) -> None:
    segment = await off_loop(client.segment, 1)
    flags = smaps_flags(segment.address)
    assert "dc" in flags  # "do not copy area on fork"


def smaps_flags(address: int) -> list[str]:
    """VmFlags of the mapping that begins at an address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith(f"{address:x}-"):
            found = True
        elif found and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("no such mapping")


async def test_the_daemons_end_is_noticed_and_told_once(
    companion: Companion, cache: FakeCache, tmp_path: Path
) -> None:
    told: list[bool] = []
    client = await off_loop(
        lambda: SegmentMap(str(tmp_path / "s.fd"), SESSION, on_lost=lambda: told.append(True))
    )
    kept = await off_loop(client.segment, 1)
    await companion.close()
    await until(lambda: told == [True])
    assert client.is_lost
    assert client.segment(1) is kept
    with pytest.raises(CompanionLost):
        await off_loop(client.segment, 2)
    await off_loop(client.close)
    assert told == [True]


async def test_a_client_may_close_from_the_callback(companion: Companion, tmp_path: Path) -> None:
    closed = threading.Event()
    made: list[SegmentMap] = []

    def on_lost() -> None:
        made[0].close()
        closed.set()

    made.append(await off_loop(lambda: SegmentMap(str(tmp_path / "s.fd"), SESSION, on_lost=on_lost)))
    await companion.close()
    assert await off_loop(closed.wait, 10)


async def test_a_late_answer_is_told_and_the_connection_stands_until_the_map_is_closed(
    companion: Companion, cache: FakeCache, tmp_path: Path
) -> None:
    told = threading.Event()
    client = await off_loop(
        lambda: SegmentMap(str(tmp_path / "s.fd"), SESSION, timeout_s=0.02, on_lost=told.set)
    )
    kept = await off_loop(client.segment, 1)
    with pytest.raises(CompanionLost, match="timed out"):
        client.segment(2)  # on the loop that would serve it
    assert await off_loop(told.wait, 10)
    assert client.is_lost
    with pytest.raises(CompanionLost, match="gone"):
        client.segment(2)
    assert client.segment(1) is kept
    assert cache.names(SESSION) == ["attach"]
    await off_loop(client.close)
    await until(lambda: cache.names(SESSION) == ["attach", "lost"])


async def test_closing_is_told_to_the_daemon_and_leaves_nothing(
    companion: Companion, cache: FakeCache, tmp_path: Path
) -> None:
    before = (mapping_count(), len(list(Path("/proc/self/fd").iterdir())))
    client = await off_loop(SegmentMap, str(tmp_path / "s.fd"), SESSION)
    await off_loop(client.segments, [1, 2])
    await off_loop(client.close)
    client.close()
    client.prefetch([1])
    with pytest.raises(CompanionLost):
        client.segment(1)
    await until(lambda: cache.names(SESSION) == ["attach", "lost"])
    await until(lambda: companion.connection_count == 0)
    assert (mapping_count(), len(list(Path("/proc/self/fd").iterdir()))) == before
    assert not any(thread.name == "prefixd-segments" for thread in threading.enumerate())


async def test_a_session_that_is_not_known_is_refused_with_the_reason(
    companion: Companion, tmp_path: Path
) -> None:
    with pytest.raises(CompanionRefused) as refused:
        await off_loop(SegmentMap, str(tmp_path / "s.fd"), bytes(16))
    assert refused.value.reason == "SESSION_UNKNOWN"


def test_nobody_listening_is_lost(tmp_path: Path) -> None:
    with pytest.raises(CompanionLost, match="no answer"):
        SegmentMap(str(tmp_path / "nobody.fd"), SESSION)


def test_a_socket_left_by_a_dead_daemon_is_lost(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(tmp_path / "s"))
    with pytest.raises(CompanionLost, match="refused"):
        SegmentMap(str(tmp_path / "s"), SESSION)


async def test_a_path_longer_than_an_address_can_be_reached(cache: FakeCache, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    companion = Companion(deep / "s.fd", "a", cache, 0o660, "")
    await companion.open()
    client = await off_loop(SegmentMap, str(deep / "s.fd"), SESSION)
    assert (await off_loop(client.segment, 1)).segment_id == 1
    await off_loop(client.close)
    await companion.close()


def daemon_that(path: Path, *packets: bytes) -> threading.Thread:
    """A daemon that takes one connection, says these things, and then hangs until the peer goes."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        listener.close()
        with connection:
            for packet in packets:
                connection.recv(4096)
                connection.send(packet)
            while connection.recv(4096):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_a_daemon_that_hangs_is_lost_when_the_time_is_over(tmp_path: Path) -> None:
    thread = daemon_that(tmp_path / "s", b'{"ok":true}')
    client = SegmentMap(str(tmp_path / "s"), SESSION, timeout_s=0.02)
    with pytest.raises(CompanionLost, match="timed out"):
        client.segment(1)
    assert client.is_lost
    client.close()
    thread.join(10)


def test_closing_wakes_who_waits_for_a_daemon_that_hangs(tmp_path: Path) -> None:
    thread = daemon_that(tmp_path / "s", b'{"ok":true}')
    client = SegmentMap(str(tmp_path / "s"), SESSION, timeout_s=60)
    failed: list[BaseException] = []

    def ask() -> None:
        try:
            client.segment(1)
        except CompanionLost as error:
            failed.append(error)

    waiter = threading.Thread(target=ask)
    waiter.start()
    client.close()
    waiter.join(10)
    assert len(failed) == 1
    thread.join(10)


@pytest.mark.parametrize(
    "answer",
    [
        b"garbage",
        b"[]",
        b'{"segment":2,"length_bytes":5}',
        b'{"segment":1,"length_bytes":5}',
        b'{"segment":1}',
    ],
)
def test_a_daemon_that_talks_nonsense_is_lost(tmp_path: Path, answer: bytes) -> None:
    thread = daemon_that(tmp_path / "s", b'{"ok":true}', answer)
    client = SegmentMap(str(tmp_path / "s"), SESSION)
    with pytest.raises(CompanionLost):
        client.segment(1)
    client.close()
    thread.join(10)


async def test_sixteen_threads_share_one_map(client: SegmentMap) -> None:
    barrier = threading.Barrier(16)

    def fetch(number: int) -> int:
        barrier.wait()
        return client.segments([1, 2, 4])[(1, 2, 4)[number % 3]].address

    with_threads = await asyncio.gather(*(run_in_thread(fetch, number) for number in range(16)))
    assert len(set(with_threads)) == 3


async def run_in_thread(function: Callable[[int], int], number: int) -> int:
    """A thread of its own: the loop's pool may be smaller than the barrier."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[int] = loop.create_future()
    threading.Thread(
        target=lambda: loop.call_soon_threadsafe(done.set_result, function(number)), daemon=True
    ).start()
    return await done
