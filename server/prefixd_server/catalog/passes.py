"""How a check goes over the catalog without holding the loop: in steps.

A check is an iterator of steps; each looks at a bounded part and yields what is
wrong with it, in words. What lies between two yields is read at one instant, and
between two yields anything may change: a step takes nothing over from the one
before it but what it has copied. So every finding is of a state that was; and what
is there from the first step to the last is looked at, whatever comes and goes
meanwhile. Run to its end at once (everything()), a check is of one instant.

Two forms do for every law. One that ties a thing to a few others is verified in
place, a stretch at a time. One that ties many together (the order of a list, how
often each is named) is verified on a copy of its columns, taken in one step into
memory that was touched before; totals are counted in one step by numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

T = TypeVar("T")
Problems: TypeAlias = list[str]
Steps: TypeAlias = Iterator[Problems]
StepsTo: TypeAlias = Generator[Problems, None, T]
"""Steps that lead to a result."""

STRETCH = 2048
"""Rows, slots or nodes of a step: half a millisecond."""
TOUCHED_BYTES = 1 << 20
"""New memory made ready in a step."""


def everything(steps: Iterable[Problems]) -> Problems:
    """All steps at once; what is wrong, each once."""
    return list(dict.fromkeys(problem for problems in steps for problem in problems))


def stretches(count: int, length: int | None = None) -> Iterator[tuple[int, int]]:
    """[first, end) of each stretch of `count` things, each of `length` or STRETCH."""
    length = length or STRETCH
    return ((first, min(first + length, count)) for first in range(0, count, length))


def filled(count: int, dtype: DTypeLike, value: int = 0) -> StepsTo[NDArray[Any]]:
    """A new array, its memory touched piece by piece."""
    array = np.empty(count, dtype=dtype)
    yield from touched(array, value)
    return array


def touched(array: NDArray[Any], value: int = 0) -> Steps:
    """Fills a new array piece by piece."""
    for first, end in stretches(len(array), TOUCHED_BYTES // array.itemsize):
        array[first:end] = value
        yield []


def copied(columns: Sequence[NDArray[Any]], count: Callable[[], int]) -> StepsTo[list[NDArray[Any]]]:
    """Copies of the first count() of each column, all of the instant at which this returns."""
    while True:
        room = count() + STRETCH
        copies = [np.empty(room, dtype=column.dtype) for column in columns]
        for copy in copies:
            yield from touched(copy)
        if (found := count()) <= room:
            for copy, column in zip(copies, columns, strict=True):
                copy[:found] = column[:found]
            return [copy[:found] for copy in copies]


def gathered(parts: Callable[[], list[NDArray[Any]]]) -> StepsTo[NDArray[Any]]:
    """The parts put end to end, of the instant at which this returns; they may change their lengths."""
    while True:
        now = parts()
        copy = yield from filled(sum(map(len, now)) + STRETCH, now[0].dtype)
        now = parts()
        if (found := sum(map(len, now))) <= len(copy):
            return np.concatenate(now, out=copy[:found])


def marked(members: NDArray[np.int32], count: int) -> StepsTo[NDArray[np.bool_]]:
    """Of `count` things, which are among the members."""
    marks: NDArray[np.bool_] = yield from filled(count, np.bool_)
    for first, end in stretches(len(members)):
        marks[members[first:end]] = True
        yield []
    return marks


def named(wrong: bool | np.bool_ | NDArray[np.bool_], problem: str) -> Problems:
    """The problem, where anything is wrong."""
    return [problem] if np.any(wrong) else []
