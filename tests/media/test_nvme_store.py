"""Opening directories: ours is adopted, what is missing is made, the rest is refused or left alone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from prefixd_server.base.errors import ConfigError
from prefixd_server.base.files import RealFiles
from prefixd_server.media import nvme_format
from prefixd_server.media.nvme import NvmeMedium
from prefixd_server.media.nvme_format import (
    HEADER_BYTES,
    MARKER_NAME,
    SegmentHeader,
    decode_marker,
    file_bytes,
    segment_name,
)
from structlog.testing import capture_logs

from tests.support.faulty_files import DISK_FULL, FaultyFiles
from tests.support.stores import SEGMENT_BYTES, SLOT_BYTES, small_store


def everything(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_space_is_taken_when_the_store_is_made(tmp_path: Path) -> None:
    medium = small_store(tmp_path, 3)
    assert medium.present() == [0, 1, 2]
    sizes = [(tmp_path / segment_name(number)).stat() for number in range(3)]
    assert [size.st_size for size in sizes] == 3 * [file_bytes(SEGMENT_BYTES)]
    assert all(size.st_blocks * 512 >= SEGMENT_BYTES for size in sizes)
    assert medium.preallocated_bytes == 3 * (SEGMENT_BYTES + HEADER_BYTES)
    medium.close()


def test_segments_are_spread_over_the_directories(tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    medium = NvmeMedium(directories, 4, SEGMENT_BYTES)
    assert [len(list(directory.glob("*.kv"))) for directory in directories] == [2, 2]
    for directory in directories:
        marker = decode_marker((directory / MARKER_NAME).read_bytes())
        assert marker.store_uuid == medium.store_uuid
        assert marker.directories == tuple(map(str, directories))
    medium.close()


def test_a_directory_may_be_added_later(tmp_path: Path) -> None:
    first = small_store(tmp_path / "a", 2)
    first.close()
    second = NvmeMedium([tmp_path / "a", tmp_path / "b"], 4, SEGMENT_BYTES)
    assert second.store_uuid == first.store_uuid
    assert (second.report.kept, second.report.made) == ([0, 1], [2, 3])
    assert (tmp_path / "b" / segment_name(2)).exists()
    second.close()


@pytest.mark.parametrize("name", ["photo.jpg", segment_name(0), "index"])
def test_a_directory_without_our_marker_is_refused_and_not_touched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(ConfigError, match="empty directory") as raised:
        small_store(tmp_path)
    assert raised.value.reason == "NVME_DIRECTORY_FOREIGN"
    assert everything(tmp_path) == {name: b"precious"}


def test_what_a_file_system_or_a_lock_leaves_behind_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "LOCK").write_text("12\n")
    small_store(tmp_path).close()
    assert (tmp_path / "LOCK").read_text() == "12\n"


def test_directories_of_two_stores_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        small_store(tmp_path / name).close()
    before = everything(tmp_path / "a"), everything(tmp_path / "b")
    with pytest.raises(ConfigError, match="different stores") as raised:
        NvmeMedium([tmp_path / "a", tmp_path / "b"], 2, SEGMENT_BYTES)
    assert raised.value.reason == "NVME_STORES_MIXED"
    assert (everything(tmp_path / "a"), everything(tmp_path / "b")) == before


def test_a_damaged_marker_is_refused_with_the_remedy(tmp_path: Path) -> None:
    small_store(tmp_path).close()
    (tmp_path / MARKER_NAME).write_bytes(b"{}")
    with pytest.raises(ConfigError, match="restore the marker") as raised:
        small_store(tmp_path)
    assert raised.value.reason == "NVME_MARKER_DAMAGED"


@pytest.mark.parametrize("version", [0, 2])
@pytest.mark.parametrize("where", ["marker", "segment"])
def test_a_format_that_is_too_new_or_too_old_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, where: str
) -> None:
    medium = small_store(tmp_path)
    medium.close()
    with monkeypatch.context() as patched:
        patched.setattr(nvme_format, "FORMAT_VERSION", version)
        if where == "marker":
            content = nvme_format.Marker(medium.store_uuid, (str(tmp_path),)).encode()
            (tmp_path / MARKER_NAME).write_bytes(content)
        else:
            header = SegmentHeader(medium.store_uuid, 0, 1, SEGMENT_BYTES, 0)
            with (tmp_path / segment_name(0)).open("r+b") as file:
                file.write(header.encode())
    before = everything(tmp_path)
    opened = descriptors()
    with pytest.raises(ConfigError, match=f"version {version}.*run the release that wrote it") as raised:
        small_store(tmp_path)
    assert raised.value.reason == "NVME_FORMAT_VERSION"
    assert everything(tmp_path) == before
    assert descriptors() == opened


def test_another_stores_segment_is_refused_and_not_touched(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        small_store(tmp_path / name).close()
    shutil.copy(tmp_path / "theirs" / segment_name(1), tmp_path / "ours" / segment_name(1))
    before = everything(tmp_path / "ours")
    with pytest.raises(ConfigError, match="belongs to store") as raised:
        small_store(tmp_path / "ours")
    assert raised.value.reason == "NVME_SEGMENT_FOREIGN"
    assert everything(tmp_path / "ours") == before


def test_only_orphans_that_are_ours_by_name_and_uuid_are_removed(tmp_path: Path) -> None:
    small_store(tmp_path, 3).close()
    stranger = tmp_path / segment_name(9)
    stranger.write_bytes(b"named like ours")
    other = tmp_path / "segment-000002.kv.bak"
    shutil.copy(tmp_path / segment_name(2), other)
    medium = small_store(tmp_path, 2)
    assert medium.report.orphans_removed == 1
    assert not (tmp_path / segment_name(2)).exists()
    assert stranger.read_bytes() == b"named like ours"
    assert medium.report.left_alone == [stranger]
    assert other.exists()
    medium.close()


def test_segments_of_another_size_are_made_anew(tmp_path: Path) -> None:
    first = small_store(tmp_path, 2)
    generation = first.generation(0)
    first.close()
    second = NvmeMedium([tmp_path], 2, 2 * SEGMENT_BYTES)
    assert (second.report.orphans_removed, second.report.made) == (2, [0, 1])
    assert second.generation(0) != generation
    second.close()


@pytest.mark.parametrize("harm", ["truncated", "zeroed header", "flipped header", "empty", "renamed"])
def test_a_damaged_segment_is_forgotten_by_a_new_generation(tmp_path: Path, harm: str) -> None:
    first = small_store(tmp_path, 2)
    first.raise_generation(0, SLOT_BYTES)
    generation = first.generation(0)
    first.close()
    path = tmp_path / segment_name(0)
    content = path.read_bytes()
    path.write_bytes(
        {
            "truncated": content[: SEGMENT_BYTES // 2],
            "zeroed header": bytes(HEADER_BYTES) + content[HEADER_BYTES:],
            "flipped header": bytes([content[0] ^ 1]) + content[1:],
            "empty": b"",
            "renamed": (tmp_path / segment_name(1)).read_bytes(),
        }[harm]
    )
    second = small_store(tmp_path, 2)
    assert (second.report.damaged, second.report.kept) == ([0], [1])
    assert second.generation(0) not in {generation, generation + 1}
    assert second.slot_bytes(0) == 0
    assert path.stat().st_size == file_bytes(SEGMENT_BYTES)
    second.close()
    third = small_store(tmp_path, 2)
    assert third.report.kept == [0, 1]
    third.close()


def test_a_deleted_segment_is_made_anew_and_never_continues_the_lost_one(tmp_path: Path) -> None:
    first = small_store(tmp_path, 2)
    lost = first.generation(1)
    first.close()
    (tmp_path / segment_name(1)).unlink()
    second = small_store(tmp_path, 2)
    assert (second.report.made, second.report.kept) == ([1], [0])
    assert second.generation(1) not in {lost, lost + 1}
    second.close()


def test_a_full_disk_gives_fewer_segments(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.fail("allocate", DISK_FULL, after=2, times=9)
    medium = small_store(tmp_path, 4, files)
    assert (medium.present(), medium.report.absent) == ([0, 1], [2, 3])
    assert int(medium.generations[3]) == 0
    assert not (tmp_path / segment_name(2)).exists()
    medium.close()


def test_a_segment_that_cannot_be_read_is_left_out_and_left_alone(tmp_path: Path) -> None:
    small_store(tmp_path, 3).close()
    files = FaultyFiles()
    files.spoil(segment_name(1), 0, HEADER_BYTES)
    medium = small_store(tmp_path, 3, files)
    assert (medium.report.kept, medium.report.absent) == ([0, 2], [1])
    assert medium.present() == [0, 2]
    medium.close()
    whole = small_store(tmp_path, 3)
    assert whole.report.kept == [0, 1, 2]
    whole.close()


def test_a_disk_without_room_for_any_segment_is_refused(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.fail("allocate", DISK_FULL, times=9)
    with pytest.raises(ConfigError, match="free space") as raised:
        small_store(tmp_path, 2, files)
    assert raised.value.reason == "NVME_NO_SPACE"


def test_a_failure_while_opening_leaves_no_descriptor_open(tmp_path: Path) -> None:
    small_store(tmp_path, 3).close()
    before = descriptors()
    files = FaultyFiles()
    files.fail("read_at", errno.ENXIO, after=3)
    with pytest.raises(OSError, match="No such device"):
        small_store(tmp_path, 3, files)
    assert descriptors() == before


def test_a_file_system_without_direct_io_is_used_with_a_warning(tmp_path: Path) -> None:
    class NoDirect(RealFiles):
        def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
            if flags & os.O_DIRECT:
                raise OSError(22, "Invalid argument", str(path))
            return super().open(path, flags, mode)

    with capture_logs() as lines:
        medium = small_store(tmp_path, 2, NoDirect())
    assert not medium.report.direct
    assert "no direct I/O" in lines[0]["event"]
    medium.close()


def test_the_marker_is_durable_before_the_first_segment(tmp_path: Path) -> None:
    files = FaultyFiles()
    small_store(tmp_path, 1, files).close()
    names = [call for call in files.calls if call[0] != "read_at"]
    assert names[:5] == [
        ("open", MARKER_NAME + ".tmp"),
        ("write_at", MARKER_NAME + ".tmp"),
        ("sync_data", MARKER_NAME + ".tmp"),
        ("rename", MARKER_NAME),
        ("sync_directory", tmp_path.name),
    ]
    assert names[5:] == [
        ("open", segment_name(0)),
        ("allocate", segment_name(0)),
        ("write_at", segment_name(0)),
        ("sync_data", segment_name(0)),
        ("sync_directory", tmp_path.name),
    ]


def test_sizes_that_make_no_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 segments"):
        small_store(tmp_path, 0)
    with pytest.raises(ValueError, match="1000 bytes"):
        NvmeMedium([tmp_path], 1, 1000)
