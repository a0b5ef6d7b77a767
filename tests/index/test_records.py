"""The codec: what was written comes back, and whatever was changed is noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixd_server.base.types import KvGroup, KvGroupKind
from prefixd_server.index.records import (
    KEY_BYTES,
    KIND_BLOCK,
    RECORD_BYTES,
    NamespaceRecord,
    RecordError,
    block_keys,
    checked,
    decode_namespace,
    distinct_spaces,
    intact,
    keys_of,
    new_records,
    records_from,
    seal,
    space_identity,
    unchecked,
)

from tests.support.specs import spec
from tests.support.stores import FINGERPRINT, SPACE, UUID, hashes, run_records

words = st.integers(0, 2**64 - 1)


@given(
    st.lists(
        st.tuples(
            st.tuples(words, words, words, words),
            st.integers(0, 2**32 - 1),
            words,
            words,
            st.floats(0, 4e9),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_records_come_back_as_they_were_written(
    blocks: list[tuple[tuple[int, ...], int, int, int, float]],
) -> None:
    records = new_records(SPACE, np.array([hash_ for hash_, *_ in blocks], dtype=np.uint64), UUID)
    for place, (_, slot, generation, checksum, last_use) in enumerate(blocks):
        records[place]["slot"] = slot
        records[place]["generation"] = generation
        records[place]["checksum"] = checksum
        records[place]["last_use"] = last_use
    seal(records)
    rows = records.tobytes()
    assert intact(rows, len(blocks)).all()
    again = records_from(rows)
    assert (again == records).all()
    assert [tuple(row) for row in again["hash"].tolist()] == [hash_ for hash_, *_ in blocks]


@given(st.integers(0, 8 * RECORD_BYTES - 1))
def test_any_flipped_bit_of_a_record_is_detected(bit: int) -> None:
    rows = bytearray(run_records(3).tobytes())
    rows[RECORD_BYTES + bit // 8] ^= 1 << bit % 8
    assert intact(bytes(rows), 3).tolist() == [True, False, True]


def test_a_value_under_another_key_is_detected() -> None:
    first, second = (bytes(run_records(1, seed).tobytes()) for seed in (1, 2))
    assert not intact(first[:KEY_BYTES] + second[KEY_BYTES:], 1).any()


def test_keys_are_the_first_bytes_of_records() -> None:
    records = run_records(5)
    packed = b"".join(
        records.tobytes()[at : at + KEY_BYTES] for at in range(0, 5 * RECORD_BYTES, RECORD_BYTES)
    )
    assert keys_of(records).tobytes() == packed
    assert block_keys(SPACE, hashes(5)).tobytes() == packed
    assert packed[0] == KIND_BLOCK


def test_no_two_spaces_share_an_identity() -> None:
    spaces = {
        space_identity(tenant, fingerprint, epoch, shard, group)
        for tenant in ("red", "re", "d", "")
        for fingerprint in (FINGERPRINT, b"g" * 32)
        for epoch in (1, 2)
        for shard in (0, 1)
        for group in (0, 1)
    }
    assert len(spaces) == 4 * 2 * 2 * 2 * 2


def test_spaces_of_a_batch_are_told_apart() -> None:
    other = space_identity("blue", FINGERPRINT, 1, 0, 0)
    batch = np.concatenate([run_records(3), run_records(2, space=other)])
    found = [(space, rows.start, rows.stop) for space, rows in distinct_spaces(batch)]
    assert found == [(SPACE, 0, 3), (other, 3, 5)]
    assert list(distinct_spaces(batch[:0])) == []


def namespace(**changes: object) -> NamespaceRecord:
    groups = (KvGroup(KvGroupKind.FULL_ATTENTION, 65_536, 2), KvGroup(KvGroupKind.FULL_ATTENTION, 4096, 1))
    wanted = spec(shard_count=2, kv_groups=groups)
    record = NamespaceRecord("rød", wanted.fingerprint(), 3, wanted, 1_700_000_000.5)
    return replace(record, **changes)


def test_a_namespace_comes_back_as_it_was_written() -> None:
    for record in (namespace(), namespace(spec=None)):
        assert decode_namespace(record.key(), record.encode()) == record


def test_a_namespaces_key_does_not_depend_on_its_epoch() -> None:
    assert namespace(epoch=4).key() == namespace().key()
    assert namespace(tenant="blue").key() != namespace().key()
    assert namespace(fingerprint=FINGERPRINT).key() != namespace().key()


def test_a_namespace_names_every_space_it_can_have_and_a_dropped_one_none() -> None:
    record = namespace()
    assert sorted(record.spaces().values()) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert space_identity("rød", record.fingerprint, 3, 1, 0) in record.spaces()
    assert not set(namespace(epoch=4).spaces()) & set(record.spaces())
    assert namespace(spec=None).spaces() == {}


@given(st.data())
def test_any_flipped_bit_of_a_namespace_record_is_detected(data: st.DataObject) -> None:
    record = namespace()
    value = bytearray(record.encode())
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    value[bit // 8] ^= 1 << bit % 8
    with pytest.raises(RecordError):
        decode_namespace(record.key(), bytes(value))


def test_a_namespace_under_anothers_key_is_detected() -> None:
    record, other = namespace(), namespace(tenant="blue")
    with pytest.raises(RecordError):
        decode_namespace(other.key(), record.encode())
    with pytest.raises(RecordError, match="another's key"):
        decode_namespace(other.key(), checked(other.key(), unchecked(record.key(), record.encode())))


@pytest.mark.parametrize("value", [b"", b"short"])
def test_a_value_too_short_to_be_checked_is_refused(value: bytes) -> None:
    with pytest.raises(RecordError, match="bytes"):
        unchecked(b"k", value)
