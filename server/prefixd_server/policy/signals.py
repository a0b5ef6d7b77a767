"""The signals that tell runs apart: small codes, packed into two bytes of a prefix-tree node.

history byte: gap_code x 2 + reused; kept in the node column `gap_class`.
reply byte: reply_code x 4 + hint; kept in the node column `output_class`.

A class is the two together. Edges are powers of about two and are not tuned to
a workload (POLICY.md D2). Learning from classes is hazard.py's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from prefixd_server.base.types import StopReason

GAP_EDGES_S = (8.0, 16.0, 32.0, 64.0, 160.0, 400.0, 1200.0)
"""Edges of the time since the conversation's previous request."""
NO_GAP = 0
"""Gap code of a conversation without a previous request; what a new node has before it is classified."""
REPLY_EDGES_TOKENS = (16, 128, 400, 800)
"""Edges of the length of the reply."""
RUNNING = 0
"""Reply byte while the reply is not finished: neither its length nor its end is known."""

HISTORY_COUNT = 2 * (len(GAP_EDGES_S) + 2)
HINT_COUNT = 4
REPLY_COUNT = HINT_COUNT * (len(REPLY_EDGES_TOKENS) + 2)
CLASS_COUNT = HISTORY_COUNT * REPLY_COUNT

_HINTS = {StopReason.UNKNOWN: 0, StopReason.TOOL_USE: 1, StopReason.END_TURN: 2}
_HINT_NAMES = ("not told", "tool use", "end of turn", "cut off")

AGE_BUCKET_COUNT = 56
_LINEAR_BUCKET_COUNT = 5
_LINEAR_WIDTH_S = 5.0
_GROWTH = 1.2


def _age_edges() -> NDArray[np.float64]:
    linear = _LINEAR_WIDTH_S * np.arange(_LINEAR_BUCKET_COUNT + 1)
    beyond = linear[-1] * _GROWTH ** np.arange(1, AGE_BUCKET_COUNT - _LINEAR_BUCKET_COUNT + 1)
    edges: NDArray[np.float64] = np.ceil(np.concatenate([linear, beyond]))
    return edges


AGE_EDGES_S = _age_edges()
"""Shape (AGE_BUCKET_COUNT + 1,), whole seconds: 5 s wide up to 25 s, then growing by a fifth to 3 days."""
AGE_WIDTHS_S = np.diff(AGE_EDGES_S)
AGE_MIDDLES_S = AGE_EDGES_S[:-1] + AGE_WIDTHS_S / 2
_BUCKET_OF_SECOND = np.repeat(np.arange(AGE_BUCKET_COUNT, dtype=np.intp), AGE_WIDTHS_S.astype(np.intp))
"""Bucket of each whole second: a look-up is several times as fast as a search."""
_SECOND_MAX = len(_BUCKET_OF_SECOND) - 1
_BUCKET_OF_SECOND_LIST: list[int] = _BUCKET_OF_SECOND.tolist()


def age_buckets(ages_s: NDArray[np.float64]) -> NDArray[np.intp]:
    """Bucket of each age in seconds; ages beyond the last edge share the last bucket."""
    return _BUCKET_OF_SECOND.take(ages_s.astype(np.intp), mode="clip")


def age_bucket(age_s: float) -> int:
    """Bucket of one age."""
    return _BUCKET_OF_SECOND_LIST[min(max(int(age_s), 0), _SECOND_MAX)]


def gap_code(gap_s: float | None) -> int:
    """Code of the time since the conversation's previous request; None for a first request."""
    return NO_GAP if gap_s is None else 1 + bisect_right(GAP_EDGES_S, gap_s)


def history_byte(gap: int, *, reused: bool) -> int:
    """Packs a gap code and whether the blocks have been used again."""
    return 2 * gap + reused


def gap_of(history: int) -> int:
    """The gap code in a history byte."""
    return history // 2


def reply_byte(output_token_count: int, stop: StopReason) -> int:
    """Packs what is known of a finished reply."""
    length = 1 + bisect_right(REPLY_EDGES_TOKENS, output_token_count)
    return HINT_COUNT * length + _HINTS.get(stop, HINT_COUNT - 1)


class Signal(Enum):
    """What can be ignored, to see what it is worth."""

    GAP = "gap"
    REUSED = "reused"
    LIFE = "running or finished"
    REPLY_LENGTH = "reply length"
    STOP = "stop reason"


def classes_without(ignored: Collection[Signal]) -> NDArray[np.intp]:
    """For each class the one that stands for it when some signals are ignored, shape (CLASS_COUNT,)."""
    history, reply = np.divmod(np.arange(CLASS_COUNT, dtype=np.intp), REPLY_COUNT)
    gap, reused = np.divmod(history, 2)
    length, hint = np.divmod(reply, HINT_COUNT)
    if Signal.GAP in ignored:
        gap[:] = NO_GAP
    if Signal.REUSED in ignored:
        reused[:] = 0
    if Signal.REPLY_LENGTH in ignored:
        length = length.clip(max=1)
    if Signal.LIFE in ignored:
        length[:] = hint[:] = RUNNING
    if Signal.STOP in ignored:
        hint[:] = 0
    stand_in: NDArray[np.intp] = (2 * gap + reused) * REPLY_COUNT + HINT_COUNT * length + hint
    return stand_in


def describe(history: int, reply: int) -> dict[str, str]:
    """The signals of a class in words, for explanations."""
    gap, reused = divmod(history, 2)
    length, hint = divmod(reply, HINT_COUNT)
    return {
        "gap": "first request" if gap == NO_GAP else _span(gap - 1, GAP_EDGES_S, "s"),
        "reused": "yes" if reused else "no",
        "reply": "running" if reply == RUNNING else _span(length - 1, REPLY_EDGES_TOKENS, "tokens"),
        "stop": _HINT_NAMES[hint],
    }


def _span(bucket: int, edges: tuple[float, ...], unit: str) -> str:
    if bucket == len(edges):
        return f"{edges[-1]:g} {unit} or more"
    return f"{edges[bucket - 1] if bucket else 0:g} to {edges[bucket]:g} {unit}"
