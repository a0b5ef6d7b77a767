"""gRPC channels as this library wants them: one per session, no proxies, bounded messages."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio

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


def open_channel(target: str, options: ClientOptions) -> grpc.Channel:
    """A sync channel; it connects with its first call."""
    if options.tls is None or target.startswith("unix:"):
        return grpc.insecure_channel(target, options=_channel_options(options))
    return grpc.secure_channel(target, options.tls.credentials(), options=_channel_options(options))


def open_async_channel(target: str, options: ClientOptions) -> grpc.aio.Channel:
    """The same for the running event loop."""
    if options.tls is None or target.startswith("unix:"):
        return grpc.aio.insecure_channel(target, options=_channel_options(options))
    return grpc.aio.secure_channel(target, options.tls.credentials(), options=_channel_options(options))


def _channel_options(options: ClientOptions) -> list[tuple[str, int]]:
    """A private subchannel pool: a new channel tries the daemon anew, and waits out no old one's backoff."""
    return [
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_receive_message_length", options.message_bytes_max),
        ("grpc.max_send_message_length", options.message_bytes_max),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 50),
        # Also how long one attempt to connect may take: TLS shakes hands over a network.
        ("grpc.min_reconnect_backoff_ms", 50 if options.tls is None else 2_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]
