"""A store under fire: whatever its files say, a node starts or tells why not, and serves no wrong byte."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixd_server.base.config import NvmeConfig
from prefixd_server.base.errors import ConfigError
from prefixd_server.cache.epochs import FILE_NAME
from prefixd_server.index.records import (
    CHECK_BYTES,
    KEY_BYTES,
    KIND_BLOCK,
    KIND_NAMESPACE,
    KIND_STORE,
    RECORD,
    Records,
    checked,
    records_from,
    seal,
)
from prefixd_server.index.store import Store
from prefixd_server.media.nvme_format import (
    HEADER_BYTES,
    INDEX_NAME,
    MARKER_NAME,
    FormatError,
    decode_header,
    decode_marker,
)

from tests.support.engine import Engine
from tests.support.fuzzing import examples
from tests.support.node import MIB, Node, start_node
from tests.support.nvme_node import cold, fill, make_engine, read, storage_of, until

NVME = NvmeConfig(size_bytes=32 * MIB, segment_bytes=2 * MIB, retry_pause_s=0.05)
DRAM_BYTES = 4 * MIB
FIELDS = [name for name in RECORD.names or () if name not in {"kind", "check"}]
EDGES = [0, 1, 2, 3, 7, 31, 32, 255, 2**16, 2**32 - 1]
REASONS = {
    "NVME_MARKER_DAMAGED",
    "NVME_FORMAT_VERSION",
    "NVME_SEGMENT_FOREIGN",
    "NVME_STORES_MIXED",
    "NVME_DIRECTORY_FOREIGN",
    "EPOCHS_UNREADABLE",
    "INDEX_REFUSED",
}


@dataclass(frozen=True)
class Kept:
    """What a node that has lived left behind, and the runs that NVMe has whole."""

    data_dir: Path
    runs: list[list[bytes]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    """See Kept."""
    data_dir = tmp_path_factory.mktemp("kept")
    node = started(data_dir)
    engine = make_engine(node)
    runs = cold(engine, fill(engine, 30))
    node.close()
    assert len(runs) > 10
    return Kept(data_dir, runs)


def started(data_dir: Path) -> Node:
    """The node, when it has recovered what it can or has refused the store."""
    node = start_node(DRAM_BYTES, nvme=NVME, data_dir=data_dir, tenants=("red",))
    health = storage_of(node).nvme.health
    node.run(until(lambda: health.writable or health.state.value == "refused"))
    return node


# -- harm --------------------------------------------------------------------------------------

Harm = Callable[[Path], None]


@st.composite
def changed_records(draw: st.DrawFn) -> Harm:
    """Records whose checks are right and whose fields are not, under the keys that they name."""
    seed = draw(st.integers(0, 2**32 - 1))
    share = draw(st.sampled_from([0.02, 0.2, 1.0]))
    sealed = draw(st.integers(0, 3)) > 0

    def harm(data_dir: Path) -> None:
        rng = np.random.default_rng(seed)
        with opened(data_dir) as store:
            pairs = list(store.pairs(KIND_BLOCK))
            chosen = [pair for pair in pairs if rng.random() < share]
            records: Any = np.array(records_from(b"".join(key + value for key, value in chosen)))
            for row in records:
                spoil(row, records, rng)
            if sealed:
                seal(records)
            packed = [row.tobytes() for row in records]
            store.write([(row[:KEY_BYTES], row[KEY_BYTES:]) for row in packed])

    return harm


def spoil(row: Any, records: Records, rng: np.random.Generator) -> None:
    """Gives a record another field: an edge, noise, or another record's."""
    field = FIELDS[rng.integers(len(FIELDS))]
    kind = row[field].dtype
    match rng.integers(3):
        case 0:
            row[field] = records[rng.integers(len(records))][field]
        case 1:
            value = EDGES[rng.integers(len(EDGES))]
            row[field] = value if kind.kind == "f" else value & (2 ** (8 * kind.itemsize) - 1)
        case _:
            size = row[field].nbytes
            row[field] = np.frombuffer(rng.bytes(size), kind).reshape(row[field].shape)


@st.composite
def changed_values(draw: st.DrawFn) -> Harm:
    """A namespace's record, or the store's, with other contents; its check is right or not."""
    kind = draw(st.sampled_from([KIND_NAMESPACE, KIND_STORE]))
    content = draw(st.sampled_from([b"null", b"{}", b"[" * 5000, b"\xff", b"", b'{"spec": {}}', b"9" * 5000]))
    right = draw(st.booleans())

    def harm(data_dir: Path) -> None:
        with opened(data_dir) as store:
            for key, value in list(store.pairs(kind)):
                store.write(
                    [(key, checked(key, content) if right else value[:-CHECK_BYTES] + bytes(CHECK_BYTES))]
                )

    return harm


@st.composite
def changed_files(draw: st.DrawFn) -> Harm:
    """Segment headers, markers and the file of epochs with other bytes, or cut."""
    name = draw(st.sampled_from(["segment-000000.kv", "segment-000001.kv", MARKER_NAME, FILE_NAME]))
    offset, data = draw(st.integers(0, 80)), draw(st.binary(min_size=1, max_size=30))
    cut = draw(st.integers(0, 3)) == 0

    def harm(data_dir: Path) -> None:
        path = data_dir / name if name == FILE_NAME else data_dir / "nvme" / name
        with path.open("r+b" if path.exists() else "w+b") as file:
            if cut:
                file.truncate(offset)
            else:
                file.seek(offset)
                file.write(data)

    return harm


@st.composite
def changed_header(draw: st.DrawFn) -> Harm:
    """A header whose check is right and whose fields are not."""
    field = draw(st.sampled_from(["segment_id", "generation", "segment_bytes", "slot_bytes"]))
    value = draw(st.sampled_from([0, 1, 4095, 4096, 65_536, 65_537, 2**31, 2**32 - 1]))

    def harm(data_dir: Path) -> None:
        path = data_dir / "nvme" / "segment-000000.kv"
        # Another harm may have left none.
        with path.open("r+b") as file, suppress(FormatError):
            header = decode_header(file.read(HEADER_BYTES))
            file.seek(0)
            file.write(replace(header, **{field: value}).encode())

    return harm


@contextmanager
def opened(data_dir: Path) -> Iterator[Store]:
    """The store's index, with no daemon beside it."""
    directory = data_dir / "nvme"
    marker = decode_marker((directory / MARKER_NAME).read_bytes())
    store = Store(directory / INDEX_NAME, marker.store_uuid)
    yield store
    store.close()


# -- what must hold ----------------------------------------------------------------------------


def check_node(node: Node, runs: list[list[bytes]]) -> None:
    """Books balance before and after every run was read; read() compares each byte served."""
    assert node.cache.check() == []
    engine: Engine = make_engine(node)
    for hashes in runs:
        assert read(engine, hashes) <= len(hashes)
    fill(engine, 3, name="fresh")
    assert node.cache.check() == []


def survives(kept: Kept, directory: Path, harms: list[Harm]) -> None:
    """Copies the store, harms the copy, starts a node on it."""
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(kept.data_dir, directory)
    for harm in harms:
        harm(directory)
    try:
        node = started(directory)
    except ConfigError as error:
        reason = error.reason
    else:
        check_node(node, kept.runs)
        node.close()
        return
    assert reason in REASONS


@examples(8)
@given(st.lists(st.one_of(changed_records(), changed_records(), changed_values()), min_size=1, max_size=2))
def test_any_index_is_recovered_or_refused(kept: Kept, tmp_path_factory: Any, harms: list[Harm]) -> None:
    survives(kept, tmp_path_factory.getbasetemp() / "harmed-index", harms)


@examples(6)
@given(st.lists(st.one_of(changed_files(), changed_header()), min_size=1, max_size=2))
def test_any_files_are_recovered_or_refused(kept: Kept, tmp_path_factory: Any, harms: list[Harm]) -> None:
    survives(kept, tmp_path_factory.getbasetemp() / "harmed-files", harms)
