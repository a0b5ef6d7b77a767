"""The error tree. Outcomes (hit, pending, miss, declined) are values, never errors.

    PrefixdError                    reason, message, remedy; metadata for ErrorInfo
    |- InvalidRequest               the request is wrong in itself       INVALID_ARGUMENT
    |- NotFound                     no such thing for this tenant        NOT_FOUND
    |- StateConflict                right thing, wrong moment            FAILED_PRECONDITION
    |- Unsupported                  understood, and not served           UNIMPLEMENTED
    |- Forbidden                    not on this socket                   PERMISSION_DENIED
    |- Unauthenticated              nobody known calls                  UNAUTHENTICATED
    |- DeadlinePassed               the caller has given up already     DEADLINE_EXCEEDED
    |- MessageTooLarge              one message over the limit         RESOURCE_EXHAUSTED
    |- LimitReached                 full is an answer; retry_after_s     RESOURCE_EXHAUSTED
    |- Unavailable                  starting or draining; retry_after_s  UNAVAILABLE
    |- DataCorrupt                  the sender's bytes do not match      DATA_LOSS
    `- ConfigError                  the configuration is wrong           exit code 2

The codes on the right stand in rpc/status.py, the one table.
"""

from __future__ import annotations

from typing import ClassVar


class PrefixdError(Exception):
    """A fault with a stable reason.

    Args:
        reason: UPPER_SNAKE, stable; scripts may match it.
        message: names the field, the value, the limit and the remedy.
        retry_after_s: when a retry may help; None when it does not.
        metadata: further facts, as strings (field, value, limit, ...).
    """

    default_retry_after_s: ClassVar[float | None] = None

    def __init__(
        self, reason: str, message: str, *, retry_after_s: float | None = None, **metadata: object
    ) -> None:
        super().__init__(reason, message)  # What it is made from again in another process.
        self.reason = reason
        self.message = message
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s
        self.metadata = {name: str(value) for name, value in metadata.items()}

    def __str__(self) -> str:
        return self.message


class InvalidRequest(PrefixdError):
    """The request is wrong in itself; repeating it cannot help."""


class NotFound(PrefixdError):
    """No such namespace, session or lease, as far as this tenant can know."""


class StateConflict(PrefixdError):
    """The thing exists, but the request came at the wrong moment."""


class Unsupported(PrefixdError):
    """Understood, and not served."""


class Forbidden(PrefixdError):
    """Not allowed on this socket."""


class Unauthenticated(PrefixdError):
    """Over TCP: the caller does not show who it is, or is nobody we know."""


class DeadlinePassed(PrefixdError):
    """The caller's deadline had passed before the call began; nothing was done."""


class MessageTooLarge(PrefixdError):
    """One message over the limit; no retry helps, sending less does."""


class LimitReached(PrefixdError):
    """A bound is reached; retry later."""

    default_retry_after_s = 0.1


class Unavailable(PrefixdError):
    """Starting or draining; retry later."""

    default_retry_after_s = 1.0


class DataCorrupt(PrefixdError):
    """Bytes do not match their checksum."""


class ConfigError(PrefixdError):
    """The configuration is wrong; the daemon does not start."""
