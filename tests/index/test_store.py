"""The database: durable writes, lost tails, damage, foreign databases."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from prefixd_server.index import store as store_module
from prefixd_server.index.records import KIND_BLOCK, KIND_NAMESPACE, KIND_STORE, checked
from prefixd_server.index.store import Change, Pair, Store, StoreFault, StoreRefused
from prefixd_server.index.wal import live_log_number

from tests.support.faulty_files import DISK_BROKEN, FaultyFiles
from tests.support.stores import UUID


def block(number: int) -> Pair:
    return bytes([KIND_BLOCK]) + b"%08d" % number, b"value %d " % number + bytes(64)


def read(store: Store, kind: int = KIND_BLOCK) -> list[Pair]:
    return list(store.pairs(kind))


def log_of(directory: Path) -> Path:
    return directory / f"{live_log_number(directory):06d}.log"


def filled(directory: Path, count: int, *, tables: bool = False) -> list[Pair]:
    """A closed database of `count` blocks, in table files or in the log."""
    written = [block(number) for number in range(count)]
    store = Store(directory, UUID)
    for start in range(0, count, 256):
        store.write(written[start : start + 256])
    store.close()
    if tables:
        # Opening writes what the log holds into a table.
        Store(directory, UUID).close()
    return written


def test_what_was_written_is_there_after_reopening(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    written = filled(directory, 600)
    store = Store(directory, UUID)
    assert read(store) == written
    assert store.reset_reason == ""
    store.close()


def test_changes_apply_in_their_order(tmp_path: Path) -> None:
    store = Store(tmp_path / "index", UUID)
    (key, value), (other, _) = block(1), block(2)
    store.write([(key, b"old"), (key, None), (key, value), (other, value), (other, None)])
    assert read(store) == [(key, value)]
    assert store.get(other) is None
    store.close()


def test_kinds_are_iterated_apart(tmp_path: Path) -> None:
    store = Store(tmp_path / "index", UUID)
    name = bytes([KIND_NAMESPACE]) + b"x"
    store.write([block(1), (name, b"v")])
    assert read(store) == [block(1)]
    assert read(store, KIND_NAMESPACE) == [(name, b"v")]
    assert len(read(store, KIND_STORE)) == 1
    store.close()


def test_every_write_is_followed_by_a_sync_of_the_log_it_went_to(tmp_path: Path) -> None:
    directory, files = tmp_path / "index", FaultyFiles()
    store = Store(directory, UUID, files)
    # 20 MB pass the write buffer, so the log changes on the way.
    logs = set()
    for number in range(40):
        files.calls.clear()
        store.write([(block(number)[0], os.urandom(500_000))])
        live = log_of(directory).name
        if live not in logs and number:
            assert files.calls == [("open", live), ("sync_directory", "index"), ("sync_data", live)]
        else:
            assert files.calls[-1] == ("sync_data", live)
        logs.add(live)
    assert len(logs) > 1
    store.close()


def test_a_write_that_cannot_be_synced_is_a_fault(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = Store(tmp_path / "index", UUID, files)
    files.fail("sync_data", DISK_BROKEN)
    with pytest.raises(StoreFault, match="Input/output"):
        store.write([block(1)])
    store.close()


@pytest.mark.parametrize("harm", ["cut", "zeroed", "flipped"])
def test_a_lost_tail_of_the_log_costs_the_last_records_and_no_others(tmp_path: Path, harm: str) -> None:
    directory = tmp_path / "index"
    store = Store(directory, UUID)
    changes: list[Change] = [block(number) for number in range(100)]
    for change in changes:
        store.write([change])
    store.write([(changes[3][0], None)])
    store.close()
    log = log_of(directory)
    content = log.read_bytes()
    log.write_bytes(
        {
            "cut": content[:-5],
            "zeroed": content[:-40] + bytes(40),
            "flipped": content[:-3] + bytes([content[-3] ^ 4]) + content[-2:],
        }[harm]
    )
    store = Store(directory, UUID)
    found = read(store)
    assert found == changes[: len(found)]
    assert len(found) >= 99
    assert changes[3] in found
    store.close()


def test_a_table_that_is_damaged_inside_costs_what_lies_there(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    written = filled(directory, 20_000, tables=True)
    table = max(directory.glob("*.sst"), key=lambda path: path.stat().st_size)
    content = bytearray(table.read_bytes())
    content[len(content) // 3] ^= 1
    table.write_bytes(content)
    store = Store(directory, UUID)
    assert store.reset_reason == ""
    found = read(store)
    assert store.damaged
    assert set(found) < set(written)
    assert len(found) > 0.95 * len(written)
    kept = store.rebuild((KIND_NAMESPACE, KIND_BLOCK))
    assert kept == len(found) + 1
    assert not store.damaged
    assert read(store) == sorted(found)
    assert not store.damaged
    store.write([block(20_001)])
    store.close()
    store = Store(directory, UUID)
    assert read(store) == [*sorted(found), block(20_001)]
    store.close()
    assert (tmp_path / "index.damaged").exists()


def _garble(directory: Path) -> None:
    next(directory.glob("MANIFEST-*")).write_bytes(b"garbage")


def _lose_current(directory: Path) -> None:
    (directory / "CURRENT").unlink()


def _lose_table(directory: Path) -> None:
    next(directory.glob("*.sst")).unlink()


@pytest.mark.parametrize("harm", [_garble, _lose_current, _lose_table])
def test_a_database_that_cannot_be_opened_is_set_aside(tmp_path: Path, harm: Callable[[Path], None]) -> None:
    directory = tmp_path / "index"
    filled(directory, 300, tables=True)
    harm(directory)
    store = Store(directory, UUID)
    assert store.reset_reason
    assert read(store) == []
    store.write([block(1)])
    store.close()
    assert list((tmp_path / "index.damaged").iterdir())
    store = Store(directory, UUID)
    assert (store.reset_reason, read(store)) == ("", [block(1)])
    store.close()


def test_a_rebuild_that_was_cut_short_before_the_swap_is_undone(tmp_path: Path) -> None:
    directory = tmp_path / "index"
    written = filled(directory, 10)
    filled(tmp_path / "index.new", 3)
    store = Store(directory, UUID)
    assert read(store) == written
    assert not (tmp_path / "index.new").exists()
    store.close()


def test_a_rebuild_that_was_cut_short_within_the_swap_is_ended(tmp_path: Path) -> None:
    written = filled(tmp_path / "index.new", 3)
    store = Store(tmp_path / "index", UUID)
    assert read(store) == written
    store.close()


def test_another_stores_index_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "index", 3)
    with pytest.raises(StoreRefused, match="belongs to store"):
        Store(tmp_path / "index", b"another store...")


@pytest.mark.parametrize("version", [0, 2])
def test_a_format_that_is_too_new_or_too_old_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(store_module, "FORMAT_VERSION", version)
        patched.setattr(store_module, "FORMAT_VERSION_MIN", version)
        Store(tmp_path / "index", UUID).close()
    with pytest.raises(StoreRefused, match=f"version {version}.*run the release that wrote it"):
        Store(tmp_path / "index", UUID)


def test_a_database_whose_claim_is_damaged_is_set_aside(tmp_path: Path) -> None:
    store = Store(tmp_path / "index", UUID)
    key = bytes([KIND_STORE])
    value = bytearray(checked(key, json.dumps({"format_version": 1, "store_uuid": UUID.hex()}).encode()))
    value[9] ^= 1
    store.write([(key, bytes(value)), block(1)])
    store.close()
    store = Store(tmp_path / "index", UUID)
    assert "does not match its checksum" in store.reset_reason
    assert read(store) == []
    store.close()


def test_old_reports_do_not_pile_up(tmp_path: Path) -> None:
    for _ in range(4):
        Store(tmp_path / "index", UUID).close()
    assert len(list((tmp_path / "index").glob("LOG.old.*"))) <= 1


def test_the_bytes_on_disk_are_counted(tmp_path: Path) -> None:
    store = Store(tmp_path / "index", UUID)
    before = store.disk_bytes()
    store.write([(block(1)[0], os.urandom(1 << 20))])
    assert store.disk_bytes() - before >= 1 << 20
    store.close()
