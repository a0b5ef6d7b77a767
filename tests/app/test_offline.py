"""`prefixd check --offline` and `prefixd inspect`: what they find, forget, and leave alone."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from prefixd_server.app.cli import main
from prefixd_server.app.exits import Exit
from prefixd_server.index.records import (
    KIND_BLOCK,
    KIND_NAMESPACE,
    NamespaceRecord,
    Records,
    new_records,
    seal,
    space_identity,
)
from prefixd_server.index.store import Change, Store
from prefixd_server.media.nvme_format import HEADER_BYTES, MARKER_NAME, segment_name

from tests.support.daemon import PREFIXD
from tests.support.specs import spec
from tests.support.stores import SLOT_BYTES, blocks, hashes, small_store

SPEC = spec(block_bytes=SLOT_BYTES)
NAMESPACE = NamespaceRecord("red", SPEC.fingerprint(), 1, SPEC, 1_700_000_000.0)
SPACE = space_identity("red", SPEC.fingerprint(), 1, 0, 0)
COUNT = 10


@dataclass
class Made:
    """A store of one run of COUNT blocks in segment 0, closed."""

    directory: Path
    uuid: bytes
    records: Records

    def index(self) -> Store:
        return Store(self.directory / "index", self.uuid)

    def change(self, changes: list[Change]) -> None:
        store = self.index()
        store.write(changes)
        store.close()

    def change_record(self, place: int, **values: Any) -> None:
        """Rewrites one record; it matches its checksum again."""
        for name, value in values.items():
            self.records[place][name] = value
        seal(self.records)
        self.change([changes(self.records)[place]])

    def flip(self, segment: int, offset: int) -> None:
        with (self.directory / segment_name(segment)).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))

    def left(self) -> list[int]:
        """Depths of the blocks that the index still has."""
        store = self.index()
        keys = {key for key, _ in store.pairs(KIND_BLOCK)}
        store.close()
        return [place for place, (key, _) in enumerate(changes(self.records)) if key in keys]


def changes(records: Records) -> list[tuple[bytes, bytes]]:
    rows = [row.tobytes() for row in records]
    return [(row[:65], row[65:]) for row in rows]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    medium = small_store(tmp_path / "store", 2)
    medium.raise_generation(0, SLOT_BYTES)
    extent, sums = blocks(COUNT)
    medium.write(0, 0, extent)
    medium.flush([0])
    run = hashes(COUNT)
    records = new_records(SPACE, run, medium.store_uuid)
    records["block_bytes"] = SLOT_BYTES
    records["generation"] = medium.generation(0)
    records["slot"] = records["depth"] = np.arange(COUNT)
    records["checksum"] = sums
    records["parent"][1:] = run[:-1]
    records["last_use"] = 1_700_000_000.0
    seal(records)
    medium.close()
    made = Made(tmp_path / "store", medium.store_uuid, records)
    made.change([(NAMESPACE.key(), NAMESPACE.encode()), *changes(records)])
    return made


def check_offline(directory: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["check", "--offline", str(directory), *options])


def inspect(directory: Path, *options: str) -> Result:
    return CliRunner().invoke(main, ["inspect", str(directory), *options])


def check(made: Made, *options: str) -> tuple[int, dict[str, Any]]:
    result = check_offline(made.directory, "--json", *options)
    return result.exit_code, json.loads(result.stdout)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.startswith("LOG")
    }


def test_a_whole_store_is_found_good_and_is_not_changed(made: Made) -> None:
    before = contents(made.directory)
    status, found = check(made)
    assert (status, found["good"], found["problems"], found["findings"]) == (Exit.OK, COUNT, 0, {})
    assert found["read_bytes"] == COUNT * SLOT_BYTES
    assert "no damage" in check_offline(made.directory).stdout
    assert contents(made.directory) == before


def test_one_flipped_bit_is_found_and_costs_the_block_and_what_hangs_below_it(made: Made) -> None:
    made.flip(0, HEADER_BYTES + 6 * SLOT_BYTES + 77)
    status, found = check(made)
    assert (status, found["good"]) == (Exit.FAILED, 6)
    assert found["findings"] == {"BYTES_WRONG": 1, "ORPHANED": 3}
    assert "--repair" in check_offline(made.directory).stdout
    status, found = check(made, "--repair")
    assert (status, found["forgotten"]) == (Exit.OK, 4)
    assert made.left() == list(range(6))
    assert check(made)[1]["problems"] == 0


def _cut(made: Made) -> None:
    with (made.directory / segment_name(0)).open("r+b") as file:
        file.truncate(HEADER_BYTES + 3 * SLOT_BYTES)


def _zero_header(made: Made) -> None:
    with (made.directory / segment_name(0)).open("r+b") as file:
        file.write(bytes(HEADER_BYTES))


def _zero_bytes(made: Made) -> None:
    with (made.directory / segment_name(0)).open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(bytes(COUNT * SLOT_BYTES))


def _delete(made: Made) -> None:
    (made.directory / segment_name(0)).unlink()


def _reuse(made: Made) -> None:
    medium = small_store(made.directory, 2)
    medium.raise_generation(0, SLOT_BYTES)
    medium.close()


def _drop_namespace(made: Made) -> None:
    dropped = NamespaceRecord("red", SPEC.fingerprint(), 2, None, 0.0)
    made.change([(dropped.key(), dropped.encode())])


@pytest.mark.parametrize(
    ("harm", "finding", "status"),
    [
        (_cut, "SEGMENT_DAMAGED", Exit.FAILED),
        (_zero_header, "SEGMENT_DAMAGED", Exit.FAILED),
        (_zero_bytes, "BYTES_WRONG", Exit.FAILED),
        (_delete, "SEGMENT_MISSING", Exit.FAILED),
        (_reuse, "STALE_GENERATION", Exit.OK),
        (_drop_namespace, "NAMESPACE_GONE", Exit.OK),
        (lambda made: made.change_record(0, store_uuid=1), "FOREIGN_STORE", Exit.FAILED),
        (lambda made: made.change_record(0, slot=16), "OUT_OF_PLACE", Exit.FAILED),
        (lambda made: made.change_record(0, block_bytes=SLOT_BYTES + 1), "OUT_OF_PLACE", Exit.FAILED),
        (lambda made: made.change_record(0, slot=3), "SLOT_SHARED", Exit.FAILED),
        (lambda made: made.change([(changes(made.records)[0][0], None)]), "ORPHANED", Exit.OK),
    ],
)
def test_every_harm_has_its_name_and_can_be_forgotten(
    made: Made, harm: Callable[[Made], None], finding: str, status: Exit
) -> None:
    harm(made)
    exit_code, found = check(made)
    assert exit_code == status
    assert finding in found["findings"]
    assert found["good"] + sum(found["findings"].values()) == found["records"]
    assert found["good"] == 0
    assert check(made, "--repair")[0] == Exit.OK
    assert made.left() == []
    assert check(made)[1]["records"] == 0


def test_records_that_do_not_match_their_checksum_are_counted_and_forgotten(made: Made) -> None:
    key, value = changes(made.records)[9]
    made.change([(key, value[:-1] + b"x"), (bytes([KIND_NAMESPACE]) + b"odd", b"bad value")])
    status, found = check(made)
    assert (status, found["corrupt_records"], found["good"]) == (Exit.FAILED, 2, 9)
    assert check(made, "--repair")[0] == Exit.OK
    assert made.left() == list(range(9))
    assert check(made)[1]["corrupt_records"] == 0


def test_an_index_that_cannot_be_opened_is_left_alone_until_repair(made: Made) -> None:
    next((made.directory / "index").glob("MANIFEST-*")).write_bytes(b"garbage")
    before = contents(made.directory)
    status, found = check(made)
    assert status == Exit.FAILED
    assert "MANIFEST" in found["index_damage"]
    assert contents(made.directory) == before
    assert check(made, "--repair")[0] == Exit.OK
    assert (made.directory / "index.damaged").exists()
    assert check(made)[1]["problems"] == 0


def test_a_store_in_use_is_not_looked_at(made: Made) -> None:
    medium = small_store(made.directory, 2)
    result = check_offline(made.directory)
    assert result.exit_code == Exit.ALREADY_RUNNING
    assert "in use" in result.stderr
    medium.close()


def test_what_is_not_a_store_is_refused(tmp_path: Path) -> None:
    for command in (check_offline, inspect):
        result = command(tmp_path)
        assert result.exit_code == Exit.USAGE
        assert MARKER_NAME in result.stderr


def test_a_store_is_shown_by_namespace_and_age(made: Made) -> None:
    before = contents(made.directory)
    shown = json.loads(inspect(made.directory, "--json").stdout)
    (line,) = shown["lines"]
    assert (line["tenant"], line["model_id"], line["epoch"]) == ("red", "model", 1)
    assert (line["block_count"], line["block_bytes"]) == (COUNT, COUNT * SLOT_BYTES)
    assert line["bytes_by_age"] == [0, 0, COUNT * SLOT_BYTES]
    assert (shown["segment_count"], shown["dead_record_count"]) == (2, 0)
    assert shown["index_bytes"] > 0
    text = inspect(made.directory).stdout
    assert "red" in text
    assert NAMESPACE.fingerprint.hex()[:12] in text
    assert contents(made.directory) == before


def test_dropped_namespaces_and_reused_segments_are_shown_as_dead(made: Made) -> None:
    _reuse(made)
    shown = json.loads(inspect(made.directory, "--json").stdout)
    assert shown["dead_record_count"] == COUNT
    assert shown["lines"][0]["block_count"] == 0
    _drop_namespace(made)
    assert json.loads(inspect(made.directory, "--json").stdout)["lines"] == []


def test_the_command_itself_answers_with_its_exit_status(made: Made) -> None:
    def run(*words: object) -> subprocess.CompletedProcess[str]:
        command = [PREFIXD, *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    made.flip(0, HEADER_BYTES + 77)
    found = run("check", "--offline", made.directory, "--json")
    assert (found.returncode, json.loads(found.stdout)["findings"]["BYTES_WRONG"]) == (Exit.FAILED, 1)
    assert run("check", "--offline", made.directory, "--repair").returncode == Exit.OK
    assert "no damage" in run("check", "--offline", made.directory).stdout
    assert json.loads(run("inspect", made.directory, "--json").stdout)["segment_count"] == 2
    assert run("inspect", made.directory / "index").returncode == Exit.USAGE


def test_repair_without_a_store_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["check", "--repair"])
    assert result.exit_code == Exit.USAGE
    assert "--offline" in result.stderr
