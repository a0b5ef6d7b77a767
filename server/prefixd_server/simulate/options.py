"""Parsing of the command's list and size options, and the words in which they are refused."""

from __future__ import annotations

from pathlib import Path

import click

from prefixd_server.base.sizes import parse_size
from prefixd_server.simulate.policies import NAMES

FRACTIONS_DEFAULT = "0.005,0.01,0.02,0.05,0.1,0.2,0.5"


def policy_list(_ctx: click.Context, _param: click.Parameter, value: str) -> list[str]:
    """Names of policies, separated by commas."""
    names = [name.strip() for name in value.split(",") if name.strip()]
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise click.BadParameter(
            f"unknown policy {', '.join(unknown) or '(none)'}; there are {', '.join(NAMES)}"
        )
    return list(dict.fromkeys(names))


def fraction_list(_ctx: click.Context, _param: click.Parameter, value: str) -> list[float]:
    """Shares of the footprint, separated by commas."""
    try:
        fractions = [float(part) for part in value.split(",") if part.strip()]
    except ValueError as error:
        raise click.BadParameter(f"{value!r} is not a list of numbers such as 0.01,0.05") from error
    if not fractions or not all(0 < share <= 1 for share in fractions):
        raise click.BadParameter("a share of the footprint is above 0 and at most 1")
    return sorted(set(fractions))


def size_list(_ctx: click.Context, _param: click.Parameter, value: str | None) -> list[int]:
    """Sizes such as 64GiB, separated by commas; none where nothing is given."""
    if value is None:
        return []
    try:
        return [parse_size(part) for part in value.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{value!r} {error}") from error


def output_path(_ctx: click.Context, _param: click.Parameter, value: Path | None) -> Path | None:
    """A file that can be written when all is done."""
    if value is not None and not value.parent.is_dir():
        raise click.BadParameter(f"{value}: there is no directory {value.parent}")
    return value
