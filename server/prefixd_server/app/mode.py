"""`prefixd mode`: how the daemon decides, shown and switched while it runs."""

from __future__ import annotations

from pathlib import Path

import click
from prefixd.v1 import admin_service_pb2 as wire

from prefixd_server.app import tables
from prefixd_server.app.operate import common_options, connected


@click.command()
@common_options
@click.option("--policy", default="", help='The policy that chooses from now on: "importance" or "lru".')
@click.option(
    "--conservative", default="", help='Only demand and needed evictions go on: "auto", "on" or "off".'
)
def mode(socket: Path | None, as_json: bool, timeout: float, policy: str, conservative: str) -> None:
    """Show how the daemon decides; with options, switch it until the next start."""
    with connected(socket, timeout, as_json) as operator:
        request = wire.SetModeRequest(policy=policy, conservative=conservative)
        operator.show(operator.call("SetMode", request), tables.fields)
