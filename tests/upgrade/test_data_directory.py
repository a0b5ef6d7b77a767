"""A data directory of every release opens; one of a format that is not read is refused, with what to do."""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
from prefixd.v1 import types_pb2
from prefixd_server.app.exits import Exit
from prefixd_server.index.records import KIND_STORE, checked
from prefixd_server.index.store import Store
from prefixd_server.media.nvme_format import MARKER_NAME, decode_marker

from tests.support.daemon import PREFIXD
from tests.support.nvme_daemon import NvmeDaemon, assert_balanced, wait_for
from tests.support.wire import short_directory
from tests.upgrade.record import SAMPLES, stored_blocks, stored_run

RELEASES = sorted(path.parent.name for path in SAMPLES.glob("*/store.json"))
NEWEST = RELEASES[-1]


@pytest.fixture
def directory() -> Iterator[Path]:
    """For the socket, the log and the data."""
    with short_directory() as path:
        yield path


def unpack(release: str, directory: Path) -> dict[str, Any]:
    """Puts the release's data directory there; what is known of it."""
    with tarfile.open(SAMPLES / release / "store.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    told: dict[str, Any] = json.loads((SAMPLES / release / "store.json").read_text())
    return told


@pytest.mark.parametrize("release", RELEASES)
def test_a_store_of_a_release_opens_with_every_block_right(directory: Path, release: str) -> None:
    told = unpack(release, directory)
    with NvmeDaemon(directory) as daemon:
        daemon.wait_until_recovered()
        assert daemon.nvme.resident_slot_count == told["block_count"]
        ref = types_pb2.NamespaceRef(fingerprint=bytes.fromhex(told["fingerprint"]), epoch=told["epoch"])
        served = 0
        for number in range(told["run_count"]):
            found = daemon.get(ref, stored_run(number))
            assert found == stored_blocks(number)[: len(found)]
            served += len(found)
        assert served == told["block_count"]
        assert_balanced(daemon)


def newer_marker(data: Path) -> None:
    """The store's marker, of format 2."""
    marker = data / "nvme" / MARKER_NAME
    content = json.loads(marker.read_text())
    del content["check"]
    content["format_version"] = 2
    check = xxhash.xxh3_64_intdigest(json.dumps(content, sort_keys=True).encode())
    marker.write_text(json.dumps(content | {"check": f"{check:016x}"}) + "\n")


def newer_segment(data: Path) -> None:
    """The header of one segment, of format 2."""
    path = next((data / "nvme").glob("segment-*.kv"))
    with path.open("r+b") as file:
        head = bytearray(file.read(56))
        head[8:12] = (2).to_bytes(4, "little")
        file.seek(0)
        file.write(head + xxhash.xxh3_64_intdigest(bytes(head)).to_bytes(8, "little"))


def newer_epochs(data: Path) -> None:
    """The durable epochs, of format 2."""
    (data / "epochs.json").write_text(json.dumps({"format_version": 2, "epochs": {}}))


@pytest.mark.parametrize("change", [newer_marker, newer_segment, newer_epochs])
def test_a_format_that_is_not_read_is_refused_with_the_remedy_and_left_alone(
    directory: Path, change: Any
) -> None:
    unpack(NEWEST, directory)
    change(directory / "data")
    before = contents(directory / "data")
    refused = subprocess.run(
        [PREFIXD, "serve", "--socket", directory / "p.sock", "--data-dir", directory / "data", *FLAGS],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert refused.returncode == Exit.USAGE
    assert "version 2" in refused.stderr
    assert "run the release that wrote it" in refused.stderr
    assert contents(directory / "data") == before


FLAGS = (
    "--dram-size=4MiB",
    "--set=dram.segment=2MiB",
    "--set=nvme.size=32MiB",
    "--set=nvme.segment=2MiB",
)


def contents(data: Path) -> dict[Path, int]:
    """Every file with a digest of its bytes, but for the lock, and the marker, which says where it lies."""
    return {
        path: xxhash.xxh3_64_intdigest(path.read_bytes())
        for path in data.rglob("*")
        if path.is_file() and path.name not in {"LOCK", MARKER_NAME}
    }


def test_an_index_of_another_format_is_refused_and_memory_serves(directory: Path) -> None:
    unpack(NEWEST, directory)
    nvme = directory / "data" / "nvme"
    uuid = decode_marker((nvme / MARKER_NAME).read_bytes()).store_uuid
    key = bytes([KIND_STORE])
    store = Store(nvme / "index", uuid)
    content = json.dumps({"format_version": 2, "store_uuid": uuid.hex()}).encode()
    store.write([(key, checked(key, content))])
    store.close()
    with NvmeDaemon(directory) as daemon:
        wait_for(lambda: daemon.nvme.state == "refused", "the refusal")
        assert "run the release that wrote it" in daemon.nvme.state_reason
        assert daemon.problems() == []
        assert daemon.is_serving()
