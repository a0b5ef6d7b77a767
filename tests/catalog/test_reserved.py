"""Reserved arrays: full length from the start, paid for where touched, never moved."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from prefixd_server.catalog.reserved import reserve


def resident_bytes() -> int:
    """Memory of this process that is present."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_an_array_is_paid_for_only_where_it_is_touched() -> None:
    before = resident_bytes()
    column = reserve(np.uint64, 1 << 30)
    assert column.nbytes == 8 << 30
    column[:1000] = 7
    column[1 << 29] = 7
    assert resident_bytes() - before < 4 << 20


def test_a_shape_of_several_dimensions_is_zeroed_and_writable() -> None:
    keys = reserve(np.uint64, (1000, 4))
    assert keys.shape == (1000, 4)
    assert not keys.any()
    keys[999] = (1, 2, 3, 4)
    assert keys[999].tolist() == [1, 2, 3, 4]


def test_a_view_sees_what_is_written_later() -> None:
    column = reserve(np.int32, 1 << 20, huge_pages=True)
    scalars = column.data
    column[1 << 19] = 5
    assert scalars[1 << 19] == 5
