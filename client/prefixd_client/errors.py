"""The errors that the client raises. A cache that is away, slow or full is a miss, never an error.

    PrefixdClientError
    |- CallerError               the caller's program is wrong; fix the call
    |  |- InvalidArgument        field, value, limit and remedy are named
    |  |- ClientClosed           close() came before this call
    |  `- ForkedError            this process is a fork of the one that opened the client
    `- DaemonRefused             the daemon understood, and refuses: reason, code, metadata

Nothing else leaves this library on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping


class PrefixdClientError(Exception):
    """Root of the tree."""


class CallerError(PrefixdClientError):
    """The caller's program is wrong; repeating the call cannot help."""


class InvalidArgument(CallerError, ValueError):
    """An argument is wrong in itself.

    Args:
        field: the argument's name.
        value: what was given; cut to 80 characters in the message.
        limit: what is allowed.
        remedy: what to do.
    """

    def __init__(self, field: str, value: object, limit: str, remedy: str) -> None:
        super().__init__(f"{field} = {str(value)[:80]}: {limit}; {remedy}")
        self.field = field
        self.value = value
        self.limit = limit
        self.remedy = remedy


class ClientClosed(CallerError):
    """The client was closed before this call."""

    def __init__(self) -> None:
        super().__init__("this client is closed; make a new one with Client(address)")


class ForkedError(CallerError):
    """The client was opened before os.fork(); its threads, channel and mappings stayed in the parent."""

    def __init__(self) -> None:
        super().__init__(
            "this client was opened before os.fork() and does not work in the child; "
            "open a Client in the child after the fork, with the same instance_id to share leases"
        )


class DaemonRefused(PrefixdClientError):
    """The daemon understood the call and refuses it.

    Args:
        reason: UPPER_SNAKE and stable, from the answer's ErrorInfo.
        message: the daemon's own words, with the remedy.
        code: name of the gRPC code, for example "INVALID_ARGUMENT".
        metadata: further facts from the answer's ErrorInfo.
    """

    def __init__(self, reason: str, message: str, code: str, metadata: Mapping[str, str]) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.code = code
        self.metadata = dict(metadata)
