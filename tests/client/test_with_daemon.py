"""The client against `prefixd serve` itself, killed, stopped and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from prefixd_client import AsyncClient, Client, DaemonRefused, KvGroup, RequestPhase, StopReason, UsageReport

from tests.support.clients import PATIENT, data_of, empty, is_ready, run_of, spec, stored, until
from tests.support.daemon import DaemonProcess
from tests.support.ports import free_port
from tests.support.repository import ROOT
from tests.support.wire import short_directory

BIG = 3 << 20
"""A block of more than one part and more than one message."""


@pytest.fixture(scope="module")
def real() -> Iterator[DaemonProcess]:
    room = ("--dram-size", "64MiB", "--set", "dram.segment=4MiB")
    with short_directory() as directory, DaemonProcess(directory / "p.sock", *room) as process:
        yield process


def loaded(namespace, hashes, nbytes=4096) -> list[bytes]:
    """What is hit of a run."""
    lease = namespace.acquire(hashes)
    if lease is None:
        return []
    with lease:
        targets = empty(lease.hit_count, nbytes)
        return [bytes(target) for target in targets[: lease.load(targets)]]


def test_another_client_loads_what_one_has_stored(real) -> None:
    run = run_of(20, "shared")
    with Client(real.socket, options=PATIENT) as one, Client(real.socket, options=PATIENT) as other:
        data = stored(one.namespace(spec()), run)
        assert loaded(other.namespace(spec()), run) == data
        assert loaded(other.namespace(spec("another model")), run) == []


def test_runs_continue_behind_their_parent(real) -> None:
    run = run_of(8, "continued")
    with Client(real.socket, options=PATIENT) as client:
        namespace = client.namespace(spec())
        data = stored(namespace, run[:3]) + stored(namespace, run[3:], parent_hash=run[2])
        assert loaded(namespace, run) == data
        with namespace.acquire(run, skip_blocks=3, request_id="r") as lease:
            assert (lease.hit_count, lease.block_count) == (8, 5)


def test_blocks_of_several_parts_and_messages_come_back(real) -> None:
    run, big = run_of(2, "big"), spec("big", kv_groups=(KvGroup(block_bytes=BIG, layer_count=2),))
    with Client(real.socket, options=PATIENT) as client:
        namespace = client.namespace(big)
        data = stored(namespace, run)
        assert loaded(namespace, run, BIG) == data
        assert namespace.get(run) == data
        other = run_of(2, "big put")
        assert namespace.put(zip(other, data, strict=True)).stored_count == 2
        assert loaded(namespace, other, BIG) == data


def test_the_portable_path_speaks_to_the_same_cache(real) -> None:
    run = run_of(4, "portable")
    with Client(real.socket, options=PATIENT) as client:
        namespace = client.namespace(spec())
        put = namespace.put(zip(run, data_of(run), strict=True))
        assert (put.stored_count, put.present_count, put.declined_count) == (4, 0, 0)
        assert namespace.put(zip(run, data_of(run), strict=True)).present_count == 4
        assert namespace.get([*run, *run_of(1, "unknown")]) == data_of(run)
        assert loaded(namespace, run) == data_of(run)


async def test_the_async_client_speaks_to_the_same_cache(real) -> None:
    run = run_of(4, "async")
    async with AsyncClient(real.socket, options=PATIENT) as client:
        namespace = await client.namespace(spec())
        put = await namespace.put(zip(run[:2], data_of(run[:2]), strict=True))
        assert put.stored_count == 2
        lease = await namespace.reserve(run[2:], parent_hash=run[1])
        assert (await lease.store(data_of(run[2:]))).visible == 2
        assert await namespace.get(run) == data_of(run)
        targets = empty(4)
        async with await namespace.acquire(run) as read:
            assert await read.load(targets) == 4
        assert [bytes(target) for target in targets] == data_of(run)


REDEEM = """
import sys
from prefixd_client import Client
from tests.support.clients import PATIENT, empty, spec
path, instance, token = sys.argv[1:]
with Client(path, instance, options=PATIENT) as client:
    namespace = client.namespace(spec(shard_count=2, tensor_parallel_size=2))
    with namespace.redeem(bytes.fromhex(token), 1) as lease:
        print(lease.load(empty(lease.block_count), shard=1))
"""


def test_a_worker_process_redeems_what_the_scheduler_has_acquired(real) -> None:
    run = run_of(5, "redeemed")
    with Client(real.socket, options=PATIENT) as scheduler:
        namespace = scheduler.namespace(spec(shard_count=2, tensor_parallel_size=2))
        for shard in (0, 1):
            namespace.reserve(run, shard=shard).store(data_of(run))
        token = namespace.acquire(run, shards=()).hand_over().hex()
        arguments = [str(real.socket), scheduler.instance_id, token]
        done = subprocess.run(
            [sys.executable, "-c", REDEEM, *arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            timeout=60,
            check=True,
        )
        assert done.stdout.split() == [b"5"]
        stranger = Client(real.socket, options=PATIENT)
        with stranger:
            two = spec(shard_count=2, tensor_parallel_size=2)
            assert stranger.namespace(two).redeem(bytes.fromhex(token), 0) is None


def test_usage_reports_are_taken(real) -> None:
    run = run_of(3, "used")
    with Client(real.socket, options=PATIENT) as client:
        namespace = client.namespace(spec())
        stored(namespace, run)
        namespace.report_usage(UsageReport(request_id="u", phase=RequestPhase.STARTED, block_hashes=run))
        namespace.report_usage(
            UsageReport(
                request_id="u",
                phase=RequestPhase.FINISHED,
                output_token_count=5,
                stop_reason=StopReason.END_TURN,
                decode_latency_s=0.01,
                prefill_time_s=0.5,
                attention_mass=[0.5, 0.25, 0.25],
            )
        )
        until(lambda: not len(client.control.outbox))


def test_the_callers_bugs_are_refused_with_reason_and_remedy(real) -> None:
    run = run_of(2, "twice")
    with Client(real.socket, options=PATIENT) as client:
        with pytest.raises(DaemonRefused) as caught:
            client.namespace(spec(model_id=""))
        assert caught.value.reason
        with pytest.raises(DaemonRefused, match="DUPLICATE_HASH"):
            client.namespace(spec()).reserve([run[0], run[0]])


def test_a_killed_daemon_is_a_miss_and_its_successor_is_used_with_no_call() -> None:
    run = run_of(4)
    with short_directory() as directory:
        path = directory / "p.sock"
        with DaemonProcess(path) as first, Client(path, options=PATIENT) as client:
            namespace = client.namespace(spec())
            data = stored(namespace, run)
            held, boot_id = namespace.acquire(run), client.status().boot_id
            first.kill()
            assert namespace.lookup(run).hit_count == 0
            assert namespace.acquire(run) is None
            with DaemonProcess(path):
                until(lambda: is_ready(client))
                assert client.status().boot_id != boot_id
                assert held.load(empty(4)) == 0
                assert namespace.lookup(run).hit_count == 0
                assert stored(namespace, run) == data
                assert loaded(namespace, run) == data


def test_a_stopped_daemon_costs_one_deadline_and_goes_on_where_it_was() -> None:
    run = run_of(4)
    with (
        short_directory() as directory,
        DaemonProcess(directory / "p.sock") as process,
        Client(process.socket, options=PATIENT) as client,
    ):
        namespace = client.namespace(spec())
        data = stored(namespace, run)
        held, boot_id = namespace.acquire(run), client.status().boot_id
        process.signal(signal.SIGSTOP)
        began = time.monotonic()
        assert namespace.lookup(run, timeout_s=0.05).hit_count == 0
        assert client.status().state == "away"
        assert all(namespace.acquire(run) is None for _ in range(100))
        assert time.monotonic() - began < PATIENT.lookup_timeout_s
        assert held.load(empty(4)) == 4
        process.signal(signal.SIGCONT)
        until(lambda: is_ready(client))
        assert client.status().boot_id == boot_id
        assert loaded(namespace, run) == data


def test_by_tcp_only_the_portable_path_works() -> None:
    run, port = run_of(3), free_port()
    with (
        short_directory() as directory,
        DaemonProcess(directory / "p.sock", "--listen", f"127.0.0.1:{port}"),
        Client(f"127.0.0.1:{port}", options=PATIENT) as client,
    ):
        namespace = client.namespace(spec())
        assert namespace.reserve(run) is None
        assert namespace.put(zip(run, data_of(run), strict=True)).stored_count == 3
        assert namespace.lookup(run).hit_count == 3
        assert namespace.acquire(run) is None
        assert namespace.get(run) == data_of(run)
