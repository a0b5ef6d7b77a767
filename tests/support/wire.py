"""What tests of the wire share: errors as values, short directories for sockets."""

from __future__ import annotations

import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2


@dataclass(frozen=True)
class Refusal:
    """An error as a client sees it; reason is empty when it carries no ErrorInfo."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]
    retry_after_s: float | None


def refusal_of(error: Any) -> Refusal:
    """Takes an RpcError apart; at most one ErrorInfo, from the domain prefixd."""
    details = dict(iter(error.trailing_metadata() or ())).get("grpc-status-details-bin")
    status = status_pb2.Status.FromString(details) if details else status_pb2.Status()
    infos, retry_after_s = [], None
    for packed in status.details:
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if packed.Unpack(info):
            assert info.domain == "prefixd"
            infos.append(info)
        if packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    assert len(infos) <= 1
    return Refusal(
        error.code(),
        error.details() or "",
        infos[0].reason if infos else "",
        dict(infos[0].metadata) if infos else {},
        retry_after_s,
    )


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name: unix paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="pfx") as directory:
        yield Path(directory)


def raw_call(path: Path, method: str, timeout_header: str, message: bytes = b"") -> bytes:
    """One gRPC call by hand over HTTP/2, for headers that no library sends; what comes back within 2 s."""
    headers = b"".join(
        _literal(name, value)
        for name, value in (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("grpc-timeout", timeout_header),
        )
    )
    body = b"\0" + struct.pack(">I", len(message)) + message
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(2.0)
        connection.connect(str(path))
        connection.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _frame(4, 0, 0, b"")
            + _frame(1, 4, 1, headers)
            + _frame(0, 1, 1, body)
        )
        received = b""
        # The stream's end: a frame of stream 1 that is HEADERS with END_STREAM, or RST_STREAM.
        while b"\x01\x05\0\0\0\x01" not in received and b"\x03\0\0\0\0\x01" not in received:
            received += connection.recv(65_536)
    return received


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _literal(name: str, value: str) -> bytes:
    """An HPACK header that is never indexed and not compressed."""
    return b"\x10" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
