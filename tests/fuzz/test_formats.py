"""What is read from disk under fire: any bytes are ours, or refused by the one kind of error that fits."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st
from prefixd_server.base.clock import ManualClock
from prefixd_server.base.errors import ConfigError
from prefixd_server.cache.epochs import FILE_NAME, Epochs
from prefixd_server.index.records import (
    RECORD_BYTES,
    NamespaceRecord,
    RecordError,
    checked,
    decode_namespace,
    intact,
    records_from,
    seal,
    unchecked,
)
from prefixd_server.media.nvme_format import (
    HEADER_BYTES,
    MARKER_BYTES_MAX,
    FormatError,
    Marker,
    SegmentHeader,
    VersionError,
    decode_header,
    decode_marker,
)

from tests.support.fuzzing import corpus, examples
from tests.support.hostile import mutated
from tests.support.specs import spec
from tests.support.stores import run_records

HEADER = SegmentHeader(bytes(range(16)), 7, 1 << 61, 256 << 20, 65_536)
MARKER = Marker(bytes(range(16)), ("/a", "/b"))
NAMESPACE = NamespaceRecord("tenant", spec().fingerprint(), 7, spec(), 1e9)
CONTENT: dict[str, Any] = json.loads(unchecked(NAMESPACE.key(), NAMESPACE.encode()))
DEEP = b"[" * (MARKER_BYTES_MAX - 1)

junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=8)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=4,
)


def altered(content: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """The object with a field changed, lost, or added."""

    @st.composite
    def alter(draw: st.DrawFn) -> dict[str, Any]:
        changed = json.loads(json.dumps(content))
        target = changed
        name = draw(st.sampled_from(sorted(target)))
        if isinstance(target[name], dict) and draw(st.booleans()):
            target = target[name]
            name = draw(st.sampled_from(sorted(target)))
        match draw(st.integers(0, 2)):
            case 0:
                del target[name]
            case 1:
                target[name] = draw(junk)
            case _:
                target[draw(st.text(max_size=6))] = draw(junk)
        return dict(changed)

    return alter()


@examples(200)
@given(
    st.one_of(st.binary(max_size=200), mutated(HEADER.encode()[:64])).map(
        lambda data: data.ljust(HEADER_BYTES, b"\0")
    )
)
def test_any_block_is_a_header_or_refused(block: bytes) -> None:
    with suppress(FormatError, VersionError):
        assert decode_header(block).encode() == block


@examples(200)
@given(
    st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)
)
def test_any_header_with_the_right_checksum_is_read_as_it_was_written(
    segment_id: int, slot_bytes: int, generation: int, segment_bytes: int
) -> None:
    header = SegmentHeader(b"u" * 16, segment_id, generation, segment_bytes, slot_bytes)
    assert decode_header(header.encode()) == header


@examples(300)
@given(
    st.one_of(
        st.binary(max_size=200), mutated(MARKER.encode()), junk.map(lambda value: json.dumps(value).encode())
    )
)
@example(DEEP)
@example(b"9" * 5000)
def test_any_file_is_a_marker_or_refused(content: bytes) -> None:
    with suppress(FormatError, VersionError):
        assert len(decode_marker(content).store_uuid) == 16


@examples(200)
@given(altered(json.loads(MARKER.encode())))
def test_a_marker_with_the_right_checksum_and_any_content_is_read_or_refused(content: dict[str, Any]) -> None:
    content.pop("check", None)
    check = f"{xxhash.xxh3_64_intdigest(json.dumps(content, sort_keys=True).encode()):016x}"
    with suppress(FormatError, VersionError):
        assert len(decode_marker(json.dumps(content | {"check": check}).encode()).store_uuid) == 16


@examples(200)
@given(st.binary(max_size=80), st.one_of(st.binary(max_size=200), mutated(NAMESPACE.encode())))
def test_any_value_is_a_namespace_record_or_refused(key: bytes, value: bytes) -> None:
    for name in (key, NAMESPACE.key()):
        with suppress(RecordError):
            assert decode_namespace(name, value) == NAMESPACE


@examples(300)
@given(st.one_of(altered(CONTENT).map(lambda value: json.dumps(value).encode()), st.binary(max_size=50)))
@example(DEEP)
@example(b"9" * 5000)
def test_a_value_with_the_right_checksum_and_any_content_is_a_record_or_refused(content: bytes) -> None:
    try:
        record = decode_namespace(NAMESPACE.key(), checked(NAMESPACE.key(), content))
    except RecordError:
        return
    assert record.key() == NAMESPACE.key()
    assert record.spec is None or record.spaces()
    assert NamespaceRecord.encode(record)


@examples(100)
@given(mutated(run_records(3).tobytes()))
def test_a_changed_row_is_noticed(rows: bytes) -> None:
    rows = rows[: 3 * RECORD_BYTES].ljust(3 * RECORD_BYTES, b"\0")
    same = [rows[at : at + RECORD_BYTES] in WHOLE for at in range(0, len(rows), RECORD_BYTES)]
    assert intact(rows, 3).tolist() == same


WHOLE = {row.tobytes() for row in run_records(3)}


@examples(100)
@given(st.binary(min_size=RECORD_BYTES, max_size=RECORD_BYTES))
def test_any_row_can_be_sealed(row: bytes) -> None:
    records = np.array(records_from(row))
    seal(records)
    assert intact(records.tobytes(), 1).all()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all of them."""
    return tmp_path_factory.mktemp("epochs")


@examples(150)
@given(
    st.one_of(
        st.binary(max_size=100),
        mutated(b'{"format_version": 1, "epochs": {"tenant/00": 7}}'),
        junk.map(lambda value: json.dumps({"format_version": 1, "epochs": value}).encode()),
    )
)
@example(DEEP)
@example(b"9" * 5000)
def test_any_file_of_epochs_is_read_or_refused(data_dir: Path, content: bytes) -> None:
    (data_dir / FILE_NAME).write_bytes(content)
    reason = "EPOCHS_UNREADABLE"
    try:
        assert Epochs(data_dir, ManualClock()).fresh("tenant", b"\0") >= 1
    except ConfigError as error:
        reason = error.reason
    assert reason == "EPOCHS_UNREADABLE"


@pytest.mark.parametrize("path", corpus("disk"), ids=lambda path: path.name)
def test_the_corpus_is_refused_as_what_it_is(path: Path) -> None:
    data = path.read_bytes()
    kind = path.name.partition("-")[0]
    if kind == "header":
        with pytest.raises(FormatError):
            decode_header(data.ljust(HEADER_BYTES, b"\0"))
    elif kind == "marker":
        with pytest.raises(FormatError):
            decode_marker(data)
    else:
        with pytest.raises(RecordError):
            decode_namespace(NAMESPACE.key(), checked(NAMESPACE.key(), data))
