"""gRPC channels as this library wants them: one per session, no proxies, bounded messages."""

from __future__ import annotations

from pathlib import Path

import grpc

from .errors import InvalidArgument
from .options import ClientOptions

_REMEDY = 'give the socket\'s path, "unix:PATH" or "HOST:PORT"'


def target_of(address: str | Path) -> str:
    """gRPC's name for an address: a socket's path (with a slash, or "unix:...") or "host:port".

    Raises InvalidArgument for anything else.
    """
    text = str(address)
    if text.startswith("unix:"):
        return text
    if isinstance(address, Path) or "/" in text:
        return f"unix:{Path(text).absolute()}"
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal()):
        raise InvalidArgument("address", text, "is neither a path nor HOST:PORT", _REMEDY)
    return text


def channel_options(options: ClientOptions) -> list[tuple[str, int]]:
    """For sync and async channels.

    A private subchannel pool: a new channel must try the daemon anew, not wait out the backoff of an old one.
    """
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", options.message_bytes_max),
        ("grpc.max_send_message_length", options.message_bytes_max),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]


def open_channel(target: str, options: ClientOptions) -> grpc.Channel:
    """A sync channel; it connects with its first call."""
    return grpc.insecure_channel(target, options=channel_options(options))
