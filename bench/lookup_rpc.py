"""Lookup over the wire against an echo: what the daemon adds to gRPC's own cost.

    python -m bench.lookup_rpc [--rounds N] [--json OUT]

The echo is a bare grpc.aio server on uvloop whose handler parses and serialises
the very same messages. Both are processes of their own; calls alternate; the
ratio of the medians is judged. Limits: 1.5 for 512 hashes, 3 for 8,192.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop
import xxhash
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prefixd.v1 import cache_service_pb2 as wire
from prefixd.v1 import cache_service_pb2_grpc, types_pb2

LIMITS = {512: 1.5, 8192: 3.0}
BLOCK_BYTES = 4096
READY_TIMEOUT_S = 30.0
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1))


async def serve_echo(path: str) -> None:
    """Answers every Lookup with one hit of its length."""

    class Echo(cache_service_pb2_grpc.CacheServiceServicer):
        """Parses, counts, serialises."""

        async def Lookup(self, request: wire.LookupRequest, _: object) -> wire.LookupResponse:  # noqa: N802 - the wire's name
            """See CacheService."""
            hit = types_pb2.TierHit(tier=types_pb2.TIER_DRAM, block_count=len(request.block_hashes))
            return wire.LookupResponse(hits=[hit])

    server = grpc.aio.server()
    register: Any = cache_service_pb2_grpc.add_CacheServiceServicer_to_server
    register(Echo(), server)
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    await server.wait_for_termination()


@contextmanager
def process(*arguments: str) -> Iterator[None]:
    """A process, killed at the end."""
    running = subprocess.Popen(arguments)
    try:
        yield
    finally:
        running.kill()
        running.wait()


def connected(path: Path) -> grpc.Channel:
    """A channel to a server that is coming up."""
    channel = grpc.insecure_channel(f"unix:{path}", options=_OPTIONS)
    grpc.channel_ready_future(channel).result(timeout=READY_TIMEOUT_S)
    return channel


def wait_until_serving(channel: grpc.Channel) -> None:
    """Until health says SERVING."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    health: Any = health_pb2_grpc.HealthStub(channel)
    while (
        health.Check(health_pb2.HealthCheckRequest(), timeout=5).status
        != health_pb2.HealthCheckResponse.SERVING
    ):
        if time.monotonic() > deadline:
            raise TimeoutError("the daemon is not serving")
        time.sleep(0.01)


def chain(count: int) -> list[bytes]:
    """Chained hashes."""
    hashes = [hashlib.sha256(b"root").digest()]
    while len(hashes) < count:
        hashes.append(hashlib.sha256(hashes[-1]).digest())
    return hashes


def fill(stub: Any, hashes: list[bytes]) -> types_pb2.NamespaceRef:
    """Stores a block for every hash; the namespace."""
    spec = types_pb2.NamespaceSpec(
        model_id="bench",
        weights_fingerprint="revision:bench",
        model_config_fingerprint="bench",
        kv_dtype="uint8",
        kv_layout="bench",
        attention_backend="none",
        block_tokens=16,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        shard_count=1,
        hash_algorithm="sha256",
        hash_bytes=32,
        engine_name="bench",
        layout_version="1",
        checksum_algorithm=types_pb2.CHECKSUM_ALGORITHM_XXH3_64,
        encoding=types_pb2.BLOCK_ENCODING_RAW,
        kv_groups=[
            types_pb2.KvGroup(
                kind=types_pb2.KV_GROUP_KIND_FULL_ATTENTION, block_bytes=BLOCK_BYTES, layer_count=1
            )
        ],
    )
    ref: types_pb2.NamespaceRef = stub.OpenNamespace(wire.OpenNamespaceRequest(spec=spec)).namespace
    data = bytes(BLOCK_BYTES)
    checksum = xxhash.xxh3_64_intdigest(data)

    def messages() -> Iterator[wire.PutRequest]:
        yield wire.PutRequest(header=wire.PutHeader(namespace=ref))
        for key in hashes:
            yield wire.PutRequest(block=wire.PutBlock(block_hash=key, checksum=checksum, data=data))

    stored = stub.Put(messages()).stored_count
    if stored != len(hashes):
        raise RuntimeError(f"stored {stored} of {len(hashes)} blocks")
    return ref


def alternate(rounds: int, *calls: Callable[[], Any]) -> list[list[float]]:
    """Seconds of each call, in turns; the first tenth warms up and is dropped."""
    seconds: list[list[float]] = [[] for _ in calls]
    for round_index in range(rounds + rounds // 10):
        for kept, call in zip(seconds, calls, strict=True):
            began = time.perf_counter()
            call()
            if round_index >= rounds // 10:
                kept.append(time.perf_counter() - began)
    return seconds


def measure(rounds: int, daemon: grpc.Channel, echo: grpc.Channel) -> list[dict[str, float]]:
    """One row per length of run."""
    make: Any = cache_service_pb2_grpc.CacheServiceStub
    daemon_stub, echo_stub = make(daemon), make(echo)
    hashes = chain(max(LIMITS))
    ref = fill(daemon_stub, hashes)
    rows = []
    for count, limit in LIMITS.items():
        request = wire.LookupRequest(namespace=ref, block_hashes=hashes[:count])
        answer = daemon_stub.Lookup(request)
        if [hit.block_count for hit in answer.hits] != [count]:
            raise RuntimeError(f"not every block hits: {answer}")
        ours, theirs = alternate(
            rounds,
            lambda request=request: daemon_stub.Lookup(request),
            lambda request=request: echo_stub.Lookup(request),
        )
        lookup, floor = statistics.median(ours), statistics.median(theirs)
        rows.append(
            {
                "hash_count": count,
                "lookup_us": lookup * 1e6,
                "echo_us": floor * 1e6,
                "ratio": lookup / floor,
                "limit": limit,
            }
        )
    return rows


def main() -> None:
    """Measures, prints, fails when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--echo", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.echo:
        uvloop.run(serve_echo(arguments.echo))
        return
    prefixd = str(Path(sys.executable).with_name("prefixd"))
    with tempfile.TemporaryDirectory(prefix="pfx") as directory:
        socket, echo_socket = Path(directory, "p.sock"), Path(directory, "echo.sock")
        flags = ("--dram-size", "128MiB", "--log-level", "warning")
        with (
            process(prefixd, "serve", "--socket", str(socket), *flags),
            process(sys.executable, "-m", "bench.lookup_rpc", "--echo", str(echo_socket)),
            connected(socket) as daemon,
            connected(echo_socket) as echo,
        ):
            wait_until_serving(daemon)
            rows = measure(arguments.rounds, daemon, echo)
    for row in rows:
        verdict = "ok" if row["ratio"] <= row["limit"] else "MISSED"
        print(
            f"lookup of {row['hash_count']:>5} hashes: {row['lookup_us']:7.0f} us, "
            f"echo {row['echo_us']:7.0f} us, ratio {row['ratio']:.2f} (limit {row['limit']}) {verdict}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2))
    sys.exit(any(row["ratio"] > row["limit"] for row in rows))


if __name__ == "__main__":
    main()
