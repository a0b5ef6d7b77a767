"""`prefixd explain`: why a block is where it is."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from prefixd.v1 import admin_service_pb2 as wire

from prefixd_server.app import tables
from prefixd_server.app.exits import Exit
from prefixd_server.app.operate import common_options, connected, hash_bytes, namespace_option


@click.command()
@common_options
@namespace_option
@click.option("--shard", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--group", type=click.IntRange(min=0), default=0, show_default=True, help="The KV group.")
@click.argument("block_hash", metavar="HASH")
def explain(
    socket: Path | None, as_json: bool, timeout: float, name: str, shard: int, group: int, block_hash: str
) -> None:
    """Show what a block is worth, where it would be placed, and why."""
    (key,) = hash_bytes((block_hash,))
    with connected(socket, timeout, as_json) as operator:
        request = wire.ExplainBlockRequest(
            namespace=operator.namespace(name), shard=shard, kv_group=group, block_hash=key
        )
        answer = operator.call("ExplainBlock", request)
        operator.show(answer, tables.explanation)
    sys.exit(Exit.OK if answer.found else Exit.FAILED)
