"""The one table from errors to gRPC codes, and the google.rpc.Status that carries them.

Every error leaves as one Status with one ErrorInfo (domain "prefixd", stable
reason, facts as metadata) and a RetryInfo where a retry helps. docs/errors.md
lists the reasons.
"""

from __future__ import annotations

import secrets

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from prefixd_server.base.errors import (
    ConfigError,
    DataCorrupt,
    DeadlinePassed,
    Forbidden,
    InvalidRequest,
    LimitReached,
    MessageTooLarge,
    NotFound,
    PrefixdError,
    StateConflict,
    Unauthenticated,
    Unavailable,
    Unsupported,
)

DOMAIN = "prefixd"
STATUS_METADATA_KEY = "grpc-status-details-bin"
METADATA_VALUE_LENGTH_MAX = 256
"""Facts are cut to this many characters: a status travels in headers of 8 KiB."""
MESSAGE_LENGTH_MAX = 1024
"""So is the message, which may quote what the caller sent."""

CODES: dict[type[PrefixdError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    StateConflict: grpc.StatusCode.FAILED_PRECONDITION,
    Unsupported: grpc.StatusCode.UNIMPLEMENTED,
    Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    MessageTooLarge: grpc.StatusCode.RESOURCE_EXHAUSTED,
    LimitReached: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Unavailable: grpc.StatusCode.UNAVAILABLE,
    DeadlinePassed: grpc.StatusCode.DEADLINE_EXCEEDED,
    DataCorrupt: grpc.StatusCode.DATA_LOSS,
    ConfigError: grpc.StatusCode.INTERNAL,
    PrefixdError: grpc.StatusCode.INTERNAL,
}


def code_of(error: PrefixdError) -> grpc.StatusCode:
    """The gRPC code of an error, by the nearest class in the table."""
    return next(CODES[kind] for kind in type(error).__mro__ if kind in CODES)


def status_of(error: PrefixdError) -> status_pb2.Status:
    """The error as it goes over the wire."""
    details: list[Message] = [
        error_details_pb2.ErrorInfo(
            reason=error.reason,
            domain=DOMAIN,
            metadata={name: value[:METADATA_VALUE_LENGTH_MAX] for name, value in error.metadata.items()},
        )
    ]
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        details.append(retry)
    status = status_pb2.Status(code=code_of(error).value[0], message=message_of(error))
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def message_of(error: PrefixdError) -> str:
    """What people are told, cut to what headers carry."""
    text = error.message
    return text if len(text) <= MESSAGE_LENGTH_MAX else text[: MESSAGE_LENGTH_MAX - 3] + "..."


def trailing_metadata(error: PrefixdError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata that carries the whole status."""
    return ((STATUS_METADATA_KEY, status_of(error).SerializeToString()),)


def internal_error() -> PrefixdError:
    """What a caller is told about an unexpected exception: an id that the log has too, nothing else."""
    error_id = secrets.token_hex(4)
    return PrefixdError(
        "INTERNAL",
        f"the daemon has made a mistake (error id {error_id}), told in its log; treat it as a miss",
        error_id=error_id,
    )
