"""What is remembered of which block comes before which."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from prefixd_client.connectors.sglang import chains
from prefixd_client.connectors.sglang.chains import Chains, hash_of
from prefixd_client.errors import InvalidArgument

RUN = [bytes([number]) * 32 for number in range(8)]


def test_a_run_is_known_from_its_root_once_it_was_told_in_parts() -> None:
    known = Chains()
    known.told([], RUN[:3])
    known.told(RUN[:3], RUN[3:6])
    assert known.before(RUN[5]) == RUN[:5]
    assert (known.parent(RUN[0]), known.parent(RUN[3])) == (b"", RUN[2])


def test_what_was_not_told_is_not_guessed() -> None:
    known = Chains()
    known.told(None, RUN[2:4])
    assert known.parent(RUN[2]) is None
    assert known.before(RUN[3]) == [RUN[2]]
    assert known.parent(RUN[7]) is None


def test_the_blocks_told_longest_ago_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(chains, "REMEMBERED_BLOCK_COUNT_MAX", 3)
    known = Chains()
    known.told([], RUN[:3])
    known.told([], RUN[:1])
    known.told(RUN[:3], RUN[3:4])
    assert [known.parent(block) is not None for block in RUN[:4]] == [True, False, True, True]


@pytest.mark.parametrize("key", ["", "zz" * 32, "ab" * 31, "ab" * 33])
def test_a_key_that_is_no_digest_is_refused(key: str) -> None:
    with pytest.raises(InvalidArgument, match="64 hexadecimal digits"):
        hash_of(key)
