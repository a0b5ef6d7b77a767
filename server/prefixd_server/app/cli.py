"""The `prefixd` command: serve, config, and the operator's verbs.

Parses arguments and prints; what the verbs do is told in daemon.py and
operate.py.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import click

import prefixd_server
from prefixd_server.app import operate
from prefixd_server.app.exits import Exit
from prefixd_server.base.config import Config
from prefixd_server.base.config_sample import sample_toml, shown_toml
from prefixd_server.base.config_sources import load_config
from prefixd_server.base.errors import PrefixdError
from prefixd_server.base.logs import configure_logging, logger

_ELSEWHERE: dict[str, tuple[str, str]] = {
    "completion": ("prefixd_server.app.completion", "completion"),
    "inspect": ("prefixd_server.app.offline", "inspect"),
    "mode": ("prefixd_server.app.mode", "mode"),
    "record": ("prefixd_server.app.record", "record"),
    "simulate": ("prefixd_server.simulate.command", "simulate"),
}
"""Commands whose imports are heavy: name -> (module, attribute), loaded when asked for."""


SOMEBODY_ELSES = frozenset({"ALREADY_RUNNING", "TAKEOVER_REFUSED"})
"""Why a daemon does not start where another one runs."""


class LazyGroup(click.Group):
    """A group that imports the commands of other rooms only when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """See click."""
        return sorted({*super().list_commands(ctx), *_ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See click."""
        if cmd_name not in _ELSEWHERE:
            return super().get_command(ctx, cmd_name)
        module, attribute = _ELSEWHERE[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(prefixd_server.__version__, prog_name="prefixd")
def main() -> None:
    """The prefix KV cache of every inference engine on a node."""


def _config_options(command: Callable[..., None]) -> Callable[..., None]:
    """Flags that change the configuration; they override PREFIXD_* variables, those override the file."""
    for option in (
        click.option(
            "--set",
            "settings",
            multiple=True,
            metavar="KEY=VALUE",
            help="Any other key: leases.ttl_max_s=60.",
        ),
        click.option("--log-level", help="debug, info, warning or error."),
        click.option("--log-format", help="json or console."),
        click.option(
            "--tenant", "tenants", multiple=True, metavar="NAME=...,SOCKET=...", help="A further tenant."
        ),
        click.option("--metrics", metavar="HOST:PORT", help="Prometheus endpoint."),
        click.option("--data-dir", help="Directory for what outlives the daemon."),
        click.option("--dram-size", metavar="SIZE", help="Host memory for blocks, for example 64GiB."),
        click.option("--listen", metavar="HOST:PORT", help="TCP address, loopback only."),
        click.option("--socket", metavar="PATH", help="Unix socket of the first tenant."),
        click.option(
            "--config", "file", type=click.Path(path_type=Path), envvar="PREFIXD_CONFIG", help="TOML file."
        ),
    ):
        command = option(command)
    return command


def _loaded(
    file: Path | None,
    tenants: tuple[str, ...],
    settings: tuple[str, ...],
    flags: dict[str, str | None],
    as_json: bool = False,
) -> Config:
    """The configuration from all its sources. Exits with USAGE when it is wrong, and says why."""
    given = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise click.UsageError(f"--set {setting}: must be KEY=VALUE, for example leases.ttl_max_s=60")
        given[key.strip()] = value.strip()
    named = {"log_format": "log.format", "log_level": "log.level", "dram_size": "dram.size"}
    given |= {named.get(name, name): value for name, value in flags.items() if value is not None}
    try:
        return load_config(file=file, environment=os.environ, flags=given, tenants=tenants)
    except PrefixdError as error:
        if as_json:
            click.echo(
                json.dumps(
                    {"fine": False, "reason": error.reason, "message": error.message, **error.metadata}
                )
            )
        else:
            click.echo(f"prefixd: {error.message}", err=True)
        sys.exit(Exit.USAGE)


@main.command()
@click.option(
    "--takeover",
    is_flag=True,
    help="Have a daemon that runs already hand the node over; see docs/upgrade.md.",
)
@_config_options
def serve(
    takeover: bool,
    file: Path | None,
    tenants: tuple[str, ...],
    settings: tuple[str, ...],
    **flags: str | None,
) -> None:
    """Run the daemon until SIGTERM, which drains it; a second signal ends it at once."""
    config = _loaded(file, tenants, settings, flags)
    configure_logging(config.log)
    from prefixd_server.app.process import run  # noqa: PLC0415 - other verbs need not wait for its imports

    try:
        status = run(config, takeover=takeover)
    except PrefixdError as error:
        logger("prefixd.daemon").error(
            "cannot start", reason=error.reason, detail=error.message, **error.metadata
        )
        sys.exit(Exit.ALREADY_RUNNING if error.reason in SOMEBODY_ELSES else Exit.USAGE)
    sys.exit(status)


@main.group()
def config() -> None:
    """Look at the configuration."""


@config.command()
def sample() -> None:
    """Print a sample file: every key, its default, the reason for it."""
    click.echo(sample_toml(), nl=False)


_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@config.command()
@_config_options
@_json_option
def show(
    file: Path | None,
    tenants: tuple[str, ...],
    settings: tuple[str, ...],
    as_json: bool,
    **flags: str | None,
) -> None:
    """Print the configuration in force, all sources applied."""
    text = shown_toml(_loaded(file, tenants, settings, flags))
    click.echo(json.dumps(tomllib.loads(text), indent=2) + "\n" if as_json else text, nl=False)


@config.command("check")
@_config_options
@_json_option
def check_config(
    file: Path | None,
    tenants: tuple[str, ...],
    settings: tuple[str, ...],
    as_json: bool,
    **flags: str | None,
) -> None:
    """Check the configuration; exits with 2 and says what is wrong."""
    loaded = _loaded(file, tenants, settings, flags, as_json)
    names = [tenant.name for tenant in loaded.all_tenants]
    if as_json:
        click.echo(json.dumps({"fine": True, "segment_count": loaded.segment_count, "tenants": names}))
    else:
        click.echo(f"fine: {loaded.segment_count} segments, tenants {', '.join(names)}")


for _verb in operate.VERBS:
    main.add_command(_verb)
