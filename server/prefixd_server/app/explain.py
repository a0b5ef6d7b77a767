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
@block_options
def explain(**options: Any) -> None:
    """Show what a block is worth, where it would be placed, and why."""
    show_block("ExplainBlock", wire.ExplainBlockRequest, tables.explanation, **options)
