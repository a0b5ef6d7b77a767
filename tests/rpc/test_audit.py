"""rpc/audit.py: who called what, and how it ended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prefixd.v1 import admin_service_pb2 as wire
from prefixd.v1 import types_pb2
from prefixd_server.rpc.audit import CALLER_CHARACTERS_MAX, Audit, summary
from structlog.testing import capture_logs

from tests.support.daemon import DaemonProcess
from tests.support.node import chain
from tests.support.operator import prefixd_json, run_prefixd
from tests.support.wire import short_directory
from tests.support.wire_engine import put_messages, wire_engine

HASHES = chain("a", "b", "c")


class Call:
    """A gRPC call that carries metadata."""

    def __init__(self, *metadata: tuple[str, Any]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, Any], ...]:
        """See grpc.aio."""
        return self._metadata


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short directory."""
    with short_directory() as path:
        yield path


def entries(daemon: DaemonProcess) -> list[dict[str, Any]]:
    """The audit log."""
    lines = [json.loads(line) for line in daemon.log.splitlines()]
    return [line for line in lines if line.get("logger") == "prefixd.audit"]


async def test_a_change_is_logged_with_who_what_and_result_and_no_whole_hash(directory: Path) -> None:
    path = directory / "p.sock"
    with DaemonProcess(path) as daemon:
        async with wire_engine(path) as engine:
            ref = await engine.open_namespace(block_bytes=4096)
            await engine.put(*put_messages(ref, HASHES, [bytes(4096)] * 3))
        name = ref.fingerprint.hex()
        await run_prefixd(path, "evict", "--namespace", name, "--keep", "1", *(key.hex() for key in HASHES))
        await run_prefixd(path, "evict", "--namespace", f"{name}@7")
        await prefixd_json(path, "stats")
        done, refused = entries(daemon)
        assert HASHES[0].hex() not in daemon.log
    assert (done["event"], done["method"], done["tenant"], done["outcome"]) == (
        *("admin call", "Evict", "default", "OK"),
    )
    assert f"uid={os.getuid()} pid=" in done["caller"]
    assert done["request"] == {
        "namespace": {"fingerprint": name[:12], "epoch": ref.epoch},
        "block_hashes": 3,
        "keep_block_count": 1,
    }
    assert done["result"] == {"evicted_block_count": 2}
    assert (refused["method"], refused["outcome"]) == ("Evict", "NAMESPACE_EPOCH_STALE")


async def test_calls_that_only_look_are_logged_for_those_who_ask(directory: Path) -> None:
    path = directory / "p.sock"
    with DaemonProcess(path, "--log-level", "debug") as daemon:
        await prefixd_json(path, "stats")
        assert [(entry["method"], entry["level"]) for entry in entries(daemon)] == [("GetStats", "debug")]


async def test_what_fails_inside_and_what_is_cancelled_is_logged_too() -> None:
    async def broken() -> None:
        raise ZeroDivisionError

    with capture_logs() as lines, pytest.raises(ZeroDivisionError):
        await Audit("t").noted("Drain", wire.DrainRequest(), Call(), broken())
    assert [line["outcome"] for line in lines] == ["INTERNAL"]


def test_what_a_caller_says_cannot_forge_a_line() -> None:
    said = "root\n\x1b[2J" + "x" * 1000
    with capture_logs() as lines:
        Audit("t").opened("WatchEvents", wire.WatchEventsRequest(), Call(("prefixd-operator", said)))
    (line,) = lines
    assert line["caller"].startswith("root[2Jxxx")
    assert len(line["caller"]) < CALLER_CHARACTERS_MAX


def test_a_summary_shortens_bytes_and_counts_lists() -> None:
    request = wire.PinRequest(
        namespace=types_pb2.NamespaceRef(fingerprint=bytes(range(32)), epoch=3), block_hashes=HASHES
    )
    assert summary(request) == {
        "namespace": {"fingerprint": "000102030405", "epoch": 3},
        "block_hashes": 3,
    }
    assert summary(wire.DrainRequest(timeout={"seconds": 1, "nanos": 500_000_000})) == {"timeout": 1.5}
