"""`prefixd check --offline DIR` and `prefixd inspect DIR`: a store without its daemon.

The commands print; what they find is told in fsck.py and inventory.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from prefixd_server.app.exits import Exit
from prefixd_server.app.fsck import LEFTOVERS, Check, Verdict
from prefixd_server.app.inventory import Inventory, take_inventory
from prefixd_server.app.offline_store import OfflineStore
from prefixd_server.base.clock import SystemClock
from prefixd_server.base.errors import ConfigError
from prefixd_server.base.sizes import human_size

_COLUMNS = ("tenant", "namespace", "model", "blocks", "bytes", "last use", "< 1 h", "< 1 d", "older")


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def inspect(directory: Path, as_json: bool) -> None:
    """Show what is in a store whose daemon is stopped, by namespace and age."""
    sys.exit(_explained(lambda: _inspect(directory, as_json=as_json)))


def check(directory: Path, *, repair: bool, as_json: bool) -> Exit:
    """Checks a store, repairs when told, prints. FAILED while damage is left."""
    return _explained(lambda: _check(directory, repair=repair, as_json=as_json))


def _check(directory: Path, *, repair: bool, as_json: bool) -> Exit:
    with OfflineStore(directory) as store:
        verdict = Check(store).run()
        forgotten = 0
        if repair and verdict.doomed is not None:
            forgotten = store.forget(verdict.doomed)
    if as_json:
        click.echo(json.dumps(_check_facts(verdict, forgotten, repaired=repair), indent=1))
    else:
        _print_check(verdict, forgotten, repaired=repair)
    return Exit.OK if repair or not verdict.problem_count else Exit.FAILED


def _inspect(directory: Path, *, as_json: bool) -> Exit:
    with OfflineStore(directory) as store:
        inventory = take_inventory(store, SystemClock().wall())
    if as_json:
        click.echo(json.dumps(inventory.facts(), indent=1))
    else:
        _print_inventory(inventory)
    return Exit.OK


def _explained(act: Callable[[], Exit]) -> Exit:
    """What a command ends with; says why a store cannot be looked at."""
    try:
        return act()
    except ConfigError as error:
        click.echo(f"prefixd: {error.message}", err=True)
        return Exit.ALREADY_RUNNING if error.reason == "ALREADY_RUNNING" else Exit.USAGE
    except OSError as error:
        click.echo(f"prefixd: {error}", err=True)
        return Exit.FAILED


def _check_facts(verdict: Verdict, forgotten: int, *, repaired: bool) -> dict[str, object]:
    return {
        "records": verdict.record_count,
        "good": verdict.good_count,
        "read_bytes": verdict.read_bytes,
        "problems": verdict.problem_count,
        "findings": {finding.name: count for finding, count in verdict.findings.items()},
        "corrupt_records": verdict.corrupt_record_count,
        "index_damage": verdict.index_damage,
        "missing_directories": verdict.missing_directories,
        "damaged_segments": verdict.damaged_segments,
        "repaired": repaired,
        "forgotten": forgotten,
    }


def _print_check(verdict: Verdict, forgotten: int, *, repaired: bool) -> None:
    lines = [
        f"{verdict.good_count:,} of {verdict.record_count:,} blocks are good; "
        f"{human_size(verdict.read_bytes)} read"
    ]
    for finding, count in verdict.findings.items():
        left_over = " (left over; the daemon deletes such by itself)" if finding in LEFTOVERS else ""
        lines.append(f"{count:,} blocks: {finding.value}{left_over}")
    if verdict.corrupt_record_count:
        lines.append(f"{verdict.corrupt_record_count:,} index records do not match their checksum")
    if verdict.index_damage:
        lines.append(f"index: {verdict.index_damage}")
    lines += [f"directory {name} is missing" for name in verdict.missing_directories]
    lines += [f"segment {number}: header or length is wrong" for number in verdict.damaged_segments]
    if repaired:
        lines.append(f"repaired: {forgotten:,} records forgotten; a start makes damaged segments anew")
    elif verdict.problem_count:
        lines.append(f"{verdict.problem_count:,} problems; --repair forgets what is damaged")
    else:
        lines.append("no damage")
    for line in lines:
        click.echo(line)


def _print_inventory(inventory: Inventory) -> None:
    click.echo(
        f"store {inventory.store_uuid} in {', '.join(inventory.directories)}: "
        f"{inventory.segment_count:,} segments of {human_size(inventory.segment_bytes)}, "
        f"index {human_size(inventory.index_bytes)}, "
        f"{inventory.dead_record_count:,} records that a start would delete"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        table.add_column(column, no_wrap=True)
    for line in inventory.lines:
        table.add_row(
            line.tenant,
            f"{line.fingerprint[:12]}@{line.epoch}",
            line.model_id,
            f"{line.block_count:,}",
            human_size(line.block_bytes),
            f"{line.idle_s / 3600:,.1f} h ago" if line.block_count else "-",
            *(human_size(size) for size in line.bytes_by_age),
        )
    Console(highlight=False, soft_wrap=True).print(table)
