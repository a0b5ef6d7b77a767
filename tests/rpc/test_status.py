"""rpc/status.py."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2
from prefixd_server.base import errors
from prefixd_server.rpc.status import CODES, METADATA_VALUE_LENGTH_MAX, code_of, internal_error, status_of

EVERY_CLASS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.PrefixdError)
]


@pytest.mark.parametrize("kind", EVERY_CLASS)
def test_every_error_class_stands_in_the_table(kind: type[errors.PrefixdError]) -> None:
    assert kind in CODES
    assert code_of(kind("REASON", "message")) is CODES[kind]
    assert CODES[kind] is not grpc.StatusCode.OK


def test_a_status_carries_one_error_info_with_its_facts() -> None:
    status = status_of(errors.InvalidRequest("TOO_MANY", "too many; send fewer", field="runs", value=5))
    (packed,) = status.details
    info = error_details_pb2.ErrorInfo()
    assert packed.Unpack(info)
    assert (info.domain, info.reason, dict(info.metadata)) == (
        "prefixd",
        "TOO_MANY",
        {"field": "runs", "value": "5"},
    )
    assert status.message == "too many; send fewer"


def test_retry_info_is_there_where_a_retry_helps() -> None:
    full = status_of(errors.LimitReached("FULL", "full", retry_after_s=0.25))
    retry = error_details_pb2.RetryInfo()
    assert full.details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 250
    assert len(status_of(errors.MessageTooLarge("LARGE", "large")).details) == 1


def test_a_subclass_takes_the_code_of_its_nearest_class() -> None:
    class Special(errors.NotFound):
        """Not in the table itself."""

    assert code_of(Special("R", "m")) is grpc.StatusCode.NOT_FOUND


def test_long_facts_are_cut_so_that_the_status_fits_into_headers() -> None:
    status = status_of(errors.InvalidRequest("R", "m", value="x" * 100_000))
    info = error_details_pb2.ErrorInfo()
    status.details[0].Unpack(info)
    assert len(info.metadata["value"]) == METADATA_VALUE_LENGTH_MAX


def test_an_internal_error_tells_an_id_and_nothing_of_the_cause() -> None:
    error = internal_error()
    assert error.metadata["error_id"] in error.message
    assert code_of(error) is grpc.StatusCode.INTERNAL
