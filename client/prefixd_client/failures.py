"""The one place where a failed call is judged: what it means, and what follows from it. Pure.

DEADLINE_EXCEEDED, UNAVAILABLE        the daemon is away: open the breaker
SESSION_UNKNOWN, COMPANION_MISSING    the session has ended: open it anew
NAMESPACE_UNKNOWN, _EPOCH_STALE       open the namespace anew
INVALID_ARGUMENT, UNIMPLEMENTED       with our ErrorInfo: the caller's bug, raised
everything else                       a miss
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from .errors import DaemonRefused

DOMAIN = "prefixd"
STATUS_METADATA_KEY = "grpc-status-details-bin"
SESSION_ENDED = frozenset({"SESSION_UNKNOWN", "COMPANION_MISSING"})
NAMESPACE_ENDED = frozenset({"NAMESPACE_UNKNOWN", "NAMESPACE_EPOCH_STALE"})
LEASE_RACES = frozenset({"LEASE_UNKNOWN", "LEASE_EXPIRED"})


class Verdict(Enum):
    """What a failure means; every one of them is a miss for the caller except REFUSED."""

    MISS = auto()
    AWAY = auto()
    SESSION_ENDED = auto()
    NAMESPACE_ENDED = auto()
    REFUSED = auto()


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed call taken apart; reason is empty when whoever answered is not prefixd."""

    method: str
    code: grpc.StatusCode
    message: str
    reason: str = ""
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """By the table in the module's docstring."""
        if self.code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
            return Verdict.AWAY
        if self.reason in SESSION_ENDED:
            return Verdict.SESSION_ENDED
        if self.reason in NAMESPACE_ENDED:
            return Verdict.NAMESPACE_ENDED
        is_refusal = self.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
        if is_refusal and self.reason and self.reason not in LEASE_RACES:
            return Verdict.REFUSED
        return Verdict.MISS

    @property
    def is_timeout(self) -> bool:
        """Whether the deadline ended the call."""
        return self.code is grpc.StatusCode.DEADLINE_EXCEEDED

    def as_error(self) -> DaemonRefused:
        """The exception for a refusal."""
        return DaemonRefused(self.reason, self.message, self.code.name, self.metadata)

    def __str__(self) -> str:
        return f"{self.method}: {self.code.name} {self.reason} {self.message}"[:300]


def failure_of(error: Any, method: str) -> Failure:
    """Takes the RpcError of a call of this method, of either stack, apart."""
    code = error.code() or grpc.StatusCode.UNKNOWN
    message = error.details() or ""
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_METADATA_KEY:
            info = _error_info(value)
            if info is not None:
                return Failure(method, code, message, info.reason, dict(info.metadata))
    return Failure(method, code, message)


def _error_info(details: bytes) -> error_details_pb2.ErrorInfo | None:
    """The ErrorInfo of our domain in a packed google.rpc.Status; None when there is none."""
    try:
        status = status_pb2.Status.FromString(details)
        for packed in status.details:
            info = error_details_pb2.ErrorInfo()
            if packed.Unpack(info) and info.domain == DOMAIN:
                return info
    except DecodeError:
        return None
    return None
