"""Admission: whether new blocks are worth more than what would have to go for them.

Admission and eviction are one comparison of importance. The new block gets the
benefit of the doubt: what it is worth is still an average over all ways its reply can
end, while the resident's worth is known better.
"""

from __future__ import annotations

BENEFIT_OF_DOUBT = 1.2
"""A resident must be worth this many times the new block to keep its place."""


def ceiling_for(importance_new: float) -> float:
    """Residents below this importance give way to a new block of that importance."""
    return BENEFIT_OF_DOUBT * importance_new
