"""The operator's verbs: each calls one method of AdminService and shows the answer."""

from __future__ import annotations

import json
import os
import pwd
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from prefixd.v1 import admin_service_pb2 as wire
from prefixd.v1 import admin_service_pb2_grpc, types_pb2

from prefixd_server.app import tables
from prefixd_server.app.exits import Exit
from prefixd_server.app.plain import plain
from prefixd_server.base.config import default_socket_path
from prefixd_server.base.errors import ConfigError
from prefixd_server.rpc import answers
from prefixd_server.rpc.audit import CALLER_KEY

CALL_TIMEOUT_S = 30.0
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_receive_message_length", -1))


def common_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that every verb has."""
    for option in (
        click.option(
            "--timeout", type=click.FloatRange(min=0.001), default=CALL_TIMEOUT_S, help="Seconds to wait."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print JSON: bytes in hex, times in seconds."),
        click.option(
            "--socket", type=click.Path(path_type=Path), envvar="PREFIXD_SOCKET", help="The tenant's socket."
        ),
    ):
        command = option(command)
    return command


namespace_option = click.option(
    "--namespace",
    "name",
    required=True,
    metavar="HEX[@EPOCH]",
    help="Fingerprint, or its start; see `namespaces`.",
)
_block_options = (
    click.argument("block_hash", metavar="HASH"),
    click.option("--group", type=click.IntRange(min=0), default=0, show_default=True, help="The KV group."),
    click.option("--shard", type=click.IntRange(min=0), default=0, show_default=True),
    namespace_option,
)
_hashes_argument = click.argument("hashes", nargs=-1, metavar="HASH...")


def block_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that name one block."""
    for option in _block_options:
        command = option(command)
    return command


class Operator:
    """One connection to one daemon."""

    def __init__(self, channel: grpc.Channel, timeout_s: float | None, as_json: bool) -> None:
        make: Any = admin_service_pb2_grpc.AdminServiceStub
        self._stub = make(channel)
        self._timeout_s = timeout_s
        self._as_json = as_json

    def call(self, method: str, request: Message, *, extra_s: float = 0.0) -> Any:
        """Calls one method. Raises grpc.RpcError."""
        timeout_s = None if self._timeout_s is None else self._timeout_s + extra_s
        return getattr(self._stub, method)(request, timeout=timeout_s, metadata=((CALLER_KEY, caller()),))

    def show(self, answer: Message, table: Callable[[Any], None]) -> None:
        """Prints an answer: JSON, or as its table."""
        if self._as_json:
            click.echo(json.dumps(plain(answer), indent=2))
        else:
            table(answer)

    def namespace(self, name: str) -> types_pb2.NamespaceRef:
        """The namespace named by the start of its fingerprint, at the epoch given or the current one."""
        start, _, epoch = name.lower().partition("@")
        found = [
            item.namespace
            for item in self.call("ListNamespaces", wire.ListNamespacesRequest()).namespaces
            if item.namespace.fingerprint.hex().startswith(start)
        ]
        if len(found) != 1:
            raise click.UsageError(
                f"--namespace {name} names {len(found)} namespaces; see `prefixd namespaces`"
            )
        return types_pb2.NamespaceRef(
            fingerprint=found[0].fingerprint, epoch=int(epoch) if epoch.isdecimal() else found[0].epoch
        )


@contextmanager
def connected(socket: Path | None, timeout: float | None, as_json: bool) -> Iterator[Operator]:
    """Connects, and turns what goes wrong into a message and an exit status."""
    try:
        path = (socket or default_socket_path()).absolute()
    except ConfigError as error:
        raise click.UsageError(error.message) from error
    with grpc.insecure_channel(f"unix:{path}", options=_OPTIONS) as channel:
        try:
            yield Operator(channel, timeout, as_json)
        except grpc.RpcError as error:
            sys.exit(_explain(error, path))


def caller() -> str:
    """Who runs the command, for the daemon's audit log; "sudo" names who stands behind root."""
    uid = os.getuid()
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = "?"
    behind = os.environ.get("SUDO_USER", "")
    text = f"user={user} uid={uid} pid={os.getpid()}" + (f" sudo={behind}" if behind else "")
    # Metadata carries printable ASCII.
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)


def _explain(error: Any, path: Path) -> Exit:
    """Prints why a call failed; the exit status."""
    status = rpc_status.from_call(error)
    if status is None:
        click.echo(f"prefixd: no answer from {path}: {error.details()} ({error.code().name})", err=True)
        click.echo(
            "Is the daemon running? Start it with `prefixd serve`, or name its socket with --socket.",
            err=True,
        )
        return Exit.UNREACHABLE
    info = error_details_pb2.ErrorInfo()
    reason = next((info.reason for detail in status.details if detail.Unpack(info)), error.code().name)
    click.echo(f"prefixd: {status.message} [{reason}]", err=True)
    return Exit.FAILED


def hash_bytes(hashes: tuple[str, ...]) -> list[bytes]:
    """Hex arguments; a single "-" reads them from standard input."""
    words = sys.stdin.read().split() if hashes == ("-",) else hashes
    try:
        return [bytes.fromhex(word) for word in words]
    except ValueError as error:
        raise click.UsageError(f"a prefix hash must be hex: {error}") from error


def show_block(
    method: str,
    request_type: type[Message],
    table: Callable[[Any], None],
    *,
    socket: Path | None,
    as_json: bool,
    timeout: float,
    name: str,
    shard: int,
    group: int,
    block_hash: str,
) -> None:
    """Shows what a method says about one block; exits with FAILED where it is not known."""
    (key,) = hash_bytes((block_hash,))
    with connected(socket, timeout, as_json) as operator:
        request = request_type(
            namespace=operator.namespace(name), shard=shard, kv_group=group, block_hash=key
        )
        answer = operator.call(method, request)
        operator.show(answer, table)
    sys.exit(Exit.OK if answer.found else Exit.FAILED)


@click.command()
@common_options
def stats(socket: Path | None, as_json: bool, timeout: float) -> None:
    """Show counters, tiers and memory."""
    with connected(socket, timeout, as_json) as operator:
        operator.show(operator.call("GetStats", wire.GetStatsRequest()), tables.stats)


@click.command()
@common_options
def leases(socket: Path | None, as_json: bool, timeout: float) -> None:
    """Show who holds what since when."""
    with connected(socket, timeout, as_json) as operator:
        operator.show(operator.call("ListLeases", wire.ListLeasesRequest()), tables.leases)


@click.command()
@common_options
def namespaces(socket: Path | None, as_json: bool, timeout: float) -> None:
    """Show the tenant's namespaces."""
    with connected(socket, timeout, as_json) as operator:
        operator.show(operator.call("ListNamespaces", wire.ListNamespacesRequest()), tables.namespaces)


@click.command()
@common_options
@block_options
def describe(**options: Any) -> None:
    """Show everything known about one block, with its story."""
    show_block("DescribeBlock", wire.DescribeBlockRequest, tables.block, **options)


@click.command()
@common_options
@block_options
def explain(**options: Any) -> None:
    """Show what a block is worth, where it would be placed, and why."""
    show_block("ExplainBlock", wire.ExplainBlockRequest, tables.explanation, **options)


@click.command()
@common_options
@namespace_option
@click.option(
    "--keep", type=click.IntRange(min=0), default=0, show_default=True, help="Blocks to keep at the start."
)
@_hashes_argument
def evict(
    socket: Path | None, as_json: bool, timeout: float, name: str, keep: int, hashes: tuple[str, ...]
) -> None:
    """Evict a run and what hangs below it; without hashes, everything in the namespace."""
    keys = hash_bytes(hashes)
    with connected(socket, timeout, as_json) as operator:
        request = wire.EvictRequest(
            namespace=operator.namespace(name), block_hashes=keys, keep_block_count=keep
        )
        operator.show(operator.call("Evict", request), tables.fields)


@click.command()
@common_options
@namespace_option
@_hashes_argument
def pin(socket: Path | None, as_json: bool, timeout: float, name: str, hashes: tuple[str, ...]) -> None:
    """Keep a run from eviction until unpin or a restart."""
    keys = hash_bytes(hashes)
    with connected(socket, timeout, as_json) as operator:
        request = wire.PinRequest(namespace=operator.namespace(name), block_hashes=keys)
        operator.show(operator.call("Pin", request), tables.fields)


@click.command()
@common_options
@namespace_option
@_hashes_argument
def unpin(socket: Path | None, as_json: bool, timeout: float, name: str, hashes: tuple[str, ...]) -> None:
    """Undo pin."""
    keys = hash_bytes(hashes)
    with connected(socket, timeout, as_json) as operator:
        request = wire.UnpinRequest(namespace=operator.namespace(name), block_hashes=keys)
        operator.show(operator.call("Unpin", request), tables.fields)


@click.command("drop-namespace")
@common_options
@namespace_option
def drop_namespace(socket: Path | None, as_json: bool, timeout: float, name: str) -> None:
    """Forget a namespace at once and raise its epoch."""
    with connected(socket, timeout, as_json) as operator:
        request = wire.DropNamespaceRequest(namespace=operator.namespace(name))
        operator.show(operator.call("DropNamespace", request), tables.fields)


@click.command()
@common_options
@click.option(
    "--offline",
    "directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Verify every byte of a store instead, whose daemon is stopped.",
)
@click.option("--repair", is_flag=True, help="With --offline: forget what is damaged; good blocks stay.")
def check(socket: Path | None, as_json: bool, timeout: float, directory: Path | None, repair: bool) -> None:
    """Verify every cross-link and identity of the catalog; fails when something is wrong."""
    if directory is not None:
        from prefixd_server.app import offline  # noqa: PLC0415 - other verbs need not wait for its imports

        sys.exit(offline.check(directory, repair=repair, as_json=as_json))
    if repair:
        raise click.UsageError("--repair needs --offline DIR: a daemon forgets what is damaged by itself")
    with connected(socket, timeout, as_json) as operator:
        answer = operator.call("Check", wire.CheckRequest())
        operator.show(answer, tables.check)
    sys.exit(Exit.FAILED if answer.problems else Exit.OK)


@click.command()
@common_options
@click.option("--wait", type=click.FloatRange(min=0), help="Longest wait for leases to end, in seconds.")
def drain(socket: Path | None, as_json: bool, timeout: float, wait: float | None) -> None:
    """Stop admitting and wait for leases to end; fails when some are left."""
    with connected(socket, timeout, as_json) as operator:
        request = wire.DrainRequest(timeout=None if wait is None else answers.duration(wait))
        answer = operator.call("Drain", request, extra_s=wait or 0.0)
        operator.show(answer, tables.fields)
    sys.exit(Exit.FAILED if answer.remaining_lease_count else Exit.OK)


VERBS = (stats, leases, namespaces, describe, explain, evict, pin, unpin, drop_namespace, check, drain)
