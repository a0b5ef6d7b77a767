"""A probe tells whether a disk works again, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from prefixd_server.media.nvme_probe import PROBE_NAME, probe

from tests.support.faulty_files import DISK_BROKEN, DISK_FULL, FaultyFiles
from tests.support.stores import small_store


def test_a_disk_that_works_passes(tmp_path: Path) -> None:
    probe(FaultyFiles(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["open", "allocate", "write_at", "sync_data", "read_at"])
@pytest.mark.parametrize("number", [DISK_BROKEN, DISK_FULL])
def test_a_disk_that_fails_at_any_step_fails_the_probe(tmp_path: Path, call: str, number: int) -> None:
    files = FaultyFiles(always={call: number})
    with pytest.raises(OSError, match=r"\[Errno") as raised:
        probe(files, tmp_path)
    assert raised.value.errno == number
    assert list(tmp_path.iterdir()) == []


def test_what_an_interrupted_probe_left_is_used_and_removed(tmp_path: Path) -> None:
    (tmp_path / PROBE_NAME).write_bytes(b"left")
    probe(FaultyFiles(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_medium_probes_each_of_its_directories(tmp_path: Path) -> None:
    files = FaultyFiles()
    medium = small_store(tmp_path, files=files)
    files.calls.clear()
    medium.probe()
    assert [name for call, name in files.calls if call == "sync_data"] == [PROBE_NAME]
    medium.close()


def test_a_directory_that_is_no_longer_the_store_s_fails_the_probe_and_is_left_alone(tmp_path: Path) -> None:
    medium = small_store(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    with pytest.raises(FileNotFoundError, match="store"):
        medium.probe()
    # A mount point whose drive is gone.
    (tmp_path / "store").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no PREFIXD-NVME there.*store"):
        medium.probe()
    assert list((tmp_path / "store").iterdir()) == []
    medium.close()
