"""The audit log: one line per call of AdminService, with who, what and how it ended.

Who: the tenant, which the kernel vouches for by the socket's mode and group, or
on TCP the caller's certificate or token; and what the caller says of itself,
which nobody vouches for. What: the request's fields, hashes and tokens
shortened, since a log must not let its reader use another's blocks. Calls that
only look are logged at debug level.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from prefixd_server.base.errors import PrefixdError
from prefixd_server.base.logs import logger

CALLER_KEY = "prefixd-operator"
"""Metadata in which a caller may say who it is; the command line sends user, uid and pid."""
CALLER_CHARACTERS_MAX = 128
SHOWN_BYTES = 6
LOOKING = ("Get", "List", "Describe", "Explain", "Check")
"""Beginnings of the names of calls that change nothing."""


class Audit:
    """The log of one tenant's socket."""

    def __init__(self, tenant: str) -> None:
        self._log = logger("prefixd.audit").bind(tenant=tenant)

    async def noted(self, method: str, request: Any, call: Any, work: Awaitable[Any]) -> Any:
        """Awaits the call's work, logs it, and gives what it gives or raises what it raises."""
        began = time.perf_counter()
        outcome, result = "CANCELLED", None
        try:
            result = await work
        except PrefixdError as error:
            outcome = error.reason
            raise
        except Exception:
            outcome = "INTERNAL"
            raise
        else:
            outcome = "OK"
            return result
        finally:
            told = {} if result is None else {"result": summary(result)}
            self._say(method, request, call, outcome, took_s=round(time.perf_counter() - began, 6), **told)

    def opened(self, method: str, request: Any, call: Any) -> None:
        """Logs the beginning of a stream; there is no request yet where requests come one by one."""
        self._say(method, request, call, "OPENED")

    def refused(self, method: str, refusal: PrefixdError, call: Any) -> None:
        """Logs a caller that nobody knows, with the address that the call came from."""
        self._log.warning("admin call", method=method, outcome=refusal.reason, peer=call.peer())

    def _say(self, method: str, request: Any, call: Any, outcome: str, **facts: object) -> None:
        say = self._log.debug if method.startswith(LOOKING) else self._log.info
        what = summary(request) if isinstance(request, Message) else "malformed" if request else {}
        say("admin call", method=method, outcome=outcome, caller=_caller(call), request=what, **facts)


def summary(message: Message) -> dict[str, object]:
    """The fields that are set: short values as they are, bytes by their start, lists by their length."""
    return {
        field.name: len(value) if field.is_repeated else _short(value)
        for field, value in message.ListFields()
    }


def _short(value: object) -> object:
    if isinstance(value, Duration):
        return value.seconds + value.nanos / 1e9
    if isinstance(value, Message):
        return summary(value)
    return value[:SHOWN_BYTES].hex() if isinstance(value, bytes) else value


def _caller(call: Any) -> str:
    """What the caller says of itself, made harmless for a log."""
    said = next((value for key, value in call.invocation_metadata() or () if key == CALLER_KEY), "")
    text = said if isinstance(said, str) else ""
    return "".join(letter for letter in text[:CALLER_CHARACTERS_MAX] if letter.isprintable())
