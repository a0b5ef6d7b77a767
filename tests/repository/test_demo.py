"""The demo fails when it should."""

from __future__ import annotations

import pytest

from bench.demo.__main__ import Row
from bench.demo.prompts import Prompt


@pytest.mark.parametrize(
    ("shares", "hit_tokens", "identical", "failure"),
    [
        (True, 3456, True, ""),
        (False, 0, True, ""),
        (True, 3456, False, "logits differ"),
        (False, 0, False, "logits differ"),
        (True, 0, True, "nothing was found"),
    ],
)
def test_a_row_fails_when_a_logit_differs_or_a_shared_prompt_missed(
    shares, hit_tokens, identical, failure
) -> None:
    row = Row(Prompt("a prompt", 0, [1, 2, 3], shares), hit_tokens, 1.0, 0.1, identical)
    assert bool(row.failure) == bool(failure)
    assert failure in row.failure
