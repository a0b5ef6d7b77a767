"""The story of blocks."""

from __future__ import annotations

import numpy as np
from prefixd_server.catalog.journal import Journal, Verb


def key(word: int) -> np.ndarray:
    return np.array([[word, 0, 0, 0]], dtype=np.uint64)


def words(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


def test_a_story_is_told_in_order_and_of_its_block_only() -> None:
    journal = Journal(16)
    journal.tell(1.0, Verb.RESERVED, 5, words(1, 2, 3))
    journal.tell(2.0, Verb.COMMITTED, 5, words(2))
    journal.tell(3.0, Verb.RESERVED, 6, words(2))
    assert journal.story(5, key(2), 4.0) == ("3.000 s ago: reserved", "2.000 s ago: committed")


def test_the_ring_forgets_the_oldest_and_keeps_its_order_over_the_edge() -> None:
    journal = Journal(4)
    for moment, verb in enumerate(
        [Verb.RESERVED, Verb.COMMITTED, Verb.VISIBLE, Verb.USED, Verb.PINNED, Verb.MOVED]
    ):
        journal.tell(float(moment), verb, 1, words(9))
    told = [line.split(": ")[1] for line in journal.story(1, key(9), 6.0)]
    assert told == ["visible", "used", "pinned", "moved"]


def test_a_run_longer_than_the_ring_keeps_its_end() -> None:
    journal = Journal(4)
    journal.tell(0.0, Verb.RESERVED, 1, words(*range(10)))
    assert journal.story(1, key(0), 0.0) == ()
    assert journal.story(1, key(9), 0.0) == ("0.000 s ago: reserved",)
