"""Headers and markers: whatever is damaged is not taken for ours."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixd_server.media import nvme_format
from prefixd_server.media.nvme_format import (
    HEADER_BYTES,
    FormatError,
    Marker,
    SegmentHeader,
    VersionError,
    decode_header,
    decode_marker,
    segment_name,
    segment_of_name,
    segments_within,
)

HEADER = SegmentHeader(bytes(range(16)), 7, 1 << 61, 256 << 20, 65_536)
MARKER = Marker(bytes(range(16)), ("/a", "/b"))


def test_a_header_comes_back_as_it_was_written() -> None:
    assert decode_header(HEADER.encode()) == HEADER
    assert len(HEADER.encode()) == HEADER_BYTES


@given(st.integers(0, 8 * HEADER_BYTES - 1))
def test_any_flipped_bit_of_a_header_is_detected(bit: int) -> None:
    block = bytearray(HEADER.encode())
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        decode_header(bytes(block))


@given(st.integers(0, 8 * len(MARKER.encode()) - 9))
def test_any_flipped_bit_of_a_marker_is_detected(bit: int) -> None:
    content = bytearray(MARKER.encode())
    content[bit // 8] ^= 1 << bit % 8
    with pytest.raises(FormatError):
        decode_marker(bytes(content))


@pytest.mark.parametrize("content", [b"", b"\0" * HEADER_BYTES, b"x" * HEADER_BYTES])
def test_what_is_not_a_header_is_not_taken_for_one(content: bytes) -> None:
    with pytest.raises(FormatError):
        decode_header(content)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"null", b"\xff\xfe", b'{"check": 1}'])
def test_what_is_not_a_marker_is_not_taken_for_one(content: bytes) -> None:
    with pytest.raises(FormatError):
        decode_marker(content)


@pytest.mark.parametrize("version", [0, 2])
def test_another_format_version_is_told_apart_from_damage(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(nvme_format, "FORMAT_VERSION", version)
        header, marker = HEADER.encode(), MARKER.encode()
    with pytest.raises(VersionError) as raised:
        decode_header(header)
    assert raised.value.version == version
    with pytest.raises(VersionError):
        decode_marker(marker)


def test_the_marker_is_readable_by_people() -> None:
    shown = json.loads(MARKER.encode())
    assert shown["kind"] == "prefixd nvme directory"
    assert shown["directories"] == ["/a", "/b"]


def test_a_raised_header_is_of_the_next_generation() -> None:
    raised = HEADER.raised(4096)
    assert (raised.generation, raised.slot_bytes) == (HEADER.generation + 1, 4096)


@given(st.integers(0, 999_999))
def test_file_names_and_segments_stand_for_each_other(segment: int) -> None:
    assert segment_of_name(segment_name(segment)) == segment


@pytest.mark.parametrize(
    "name", ["segment-1.kv", "segment-000001.kv~", "xsegment-000001.kv", "segment-00000a.kv"]
)
def test_other_names_stand_for_no_segment(name: str) -> None:
    assert segment_of_name(name) is None


def test_segments_headers_and_index_together_stay_under_the_cap() -> None:
    count = segments_within(cap_bytes=10 << 30, segment_bytes=256 << 20, index_bytes=100 << 20)
    assert count * ((256 << 20) + HEADER_BYTES) + (100 << 20) <= 10 << 30
    assert (count + 1) * ((256 << 20) + HEADER_BYTES) + (100 << 20) > 10 << 30
    assert segments_within(1 << 20, 256 << 20, 2 << 20) == 0
