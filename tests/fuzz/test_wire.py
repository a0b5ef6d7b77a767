"""The wire under fire: whatever a tenant sends, the daemon lives, its books balance, nothing leaks, and every
refusal has a code and a reason."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from hypothesis import given

from tests.fuzz.besieged import SILENT, Besieged, besieged
from tests.support.fuzzing import corpus, examples
from tests.support.hostile import hostile_calls
from tests.support.request_fields import METHODS
from tests.support.wire import Refusal

CODES = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
}


@pytest.fixture(scope="module")
def town() -> Iterator[Besieged]:
    """One daemon for all of it."""
    with besieged() as made:
        yield made


def is_sound(method: str, refusal: Refusal | None) -> bool:
    """Whether the daemon may end a call so: not by an internal error, and not without a reason."""
    if refusal is None:
        return True
    if refusal.code is grpc.StatusCode.DEADLINE_EXCEEDED and method in SILENT:
        return True
    return refusal.code in CODES and refusal.reason.isupper() and bool(refusal.message)


@pytest.mark.parametrize("method", METHODS)
def test_every_call_is_answered_or_refused_with_its_reason(town: Besieged, method: str) -> None:
    @examples(12)
    @given(hostile_calls(method))
    def attack(messages: list[bytes]) -> None:
        refusal = town.attack(method, messages)
        assert is_sound(method, refusal), f"{method} of {[data[:200] for data in messages]}: {refusal}"

    attack()
    town.bystander_is_well()


@pytest.mark.parametrize("method", METHODS)
def test_the_corpus_is_answered_or_refused_with_its_reason(town: Besieged, method: str) -> None:
    for path in corpus("wire"):
        if path.name.startswith(f"{method}-") or path.name.startswith("any-"):
            refusal = town.attack(method, [path.read_bytes()])
            assert is_sound(method, refusal), f"{method} of {path.name}: {refusal}"
