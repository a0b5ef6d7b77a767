"""base/sizes.py."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixd_server.base.sizes import format_size, human_size, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 << 20),
        ("64 GiB", 64 << 30),
        ("1.5g", 3 << 29),
        ("10GB", 10**10),
        ("4096", 4096),
        ("2Gi", 2 << 30),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1.5", "5 parsecs", "1e3", "0.3KiB"])
def test_what_is_no_whole_number_of_bytes_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_size(text)


@given(st.integers(0, 1 << 60))
def test_a_formatted_size_reads_back_exactly(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


def test_tables_show_three_digits() -> None:
    assert [human_size(n) for n in (0, 1536, 5 << 30)] == ["0 B", "1.5 KiB", "5 GiB"]
    assert [human_size(n << 20) for n in (999, 1000, 1023)] == ["999 MiB", "1000 MiB", "1023 MiB"]
    assert human_size(2000 << 40) == "2000 TiB"
