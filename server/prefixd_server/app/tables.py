"""Answers of AdminService as tables for people, on standard output."""

from __future__ import annotations

from datetime import datetime

from google.protobuf.message import Message
from prefixd.v1 import admin_service_pb2 as wire
from rich.console import Console
from rich.table import Table

from prefixd_server.app.plain import plain
from prefixd_server.base.sizes import human_size

FINGERPRINT_DIGITS = 12
WIDTH_MIN = 160


def fields(message: Message) -> None:
    """One line per field."""
    _key_values({name: str(value) for name, value in plain(message).items()})


def stats(answer: wire.GetStatsResponse) -> None:
    """Counters, then tiers."""
    asked = answer.asked_block_count
    hits = sum(hit.block_count for hit in answer.hits)
    _key_values(
        {
            "version": f"{answer.server_version}, boot {answer.boot_id.hex()[:8]}",
            "uptime": f"{answer.uptime.seconds:,} s" + (", DRAINING" if answer.draining else ""),
            "blocks": f"{answer.block_count:,} known, {human_size(answer.metadata_bytes)} of metadata",
            "asked": f"{asked:,} = {hits:,} hits + {answer.pending_block_count:,} pending + "
            f"{answer.miss_block_count:,} misses" + (f" ({hits / asked:.1%} hit)" if asked else ""),
            "stored": f"{answer.committed_block_count:,} committed, "
            f"{answer.declined_block_count:,} declined, "
            f"{answer.evicted_block_count:,} evicted, {answer.bad_block_count:,} bad",
            "holders": f"{answer.session_count:,} sessions, {answer.lease_count:,} leases",
        }
    )
    table = _table(
        *("tier", "state", "capacity", "assigned", "pre-faulted"),
        *("slots", "free", "reserved", "resident", "quarantined"),
    )
    for tier in answer.tiers:
        counts = (
            tier.slot_count,
            tier.free_slot_count,
            tier.reserved_slot_count,
            tier.resident_slot_count,
            tier.quarantined_slot_count,
        )
        sizes = (tier.capacity_bytes, tier.assigned_bytes, tier.prefaulted_bytes)
        table.add_row(
            *(plain(tier)["tier"], tier.state),
            *map(human_size, sizes),
            *(f"{count:,}" for count in counts),
        )
    _console().print(table)
    for tier in answer.tiers:
        _devices(tier)
        name = plain(tier)["tier"]
        if tier.state_reason:
            _console().print(f"{name} is {tier.state}: {tier.state_reason}", markup=False)
        faults = [f"{count:,} {kind}" for kind, count in sorted(tier.fault_counts.items()) if count]
        if faults:
            _console().print(f"{name} faults: {', '.join(faults)}", markup=False)
    _traffic(answer.traffic)


def _devices(tier: wire.TierStats) -> None:
    """Where a tier lies on several devices, one row each."""
    if len(tier.devices) < 2:
        return
    table = _table(
        *("device", "state", "capacity", "allocated"), *("free", "reserved", "resident", "quarantined")
    )
    for device in tier.devices:
        counts = (
            device.free_slot_count,
            device.reserved_slot_count,
            device.resident_slot_count,
            device.quarantined_slot_count,
        )
        table.add_row(
            *(device.uuid, device.state),
            *map(human_size, (device.capacity_bytes, device.allocated_bytes)),
            *(f"{count:,}" for count in counts),
        )
    _console().print(table)


def _traffic(traffic: wire.Traffic) -> None:
    """What moves between the tiers, and how it is governed."""
    table = _table("link", "demand", "prefetch", "demotion", "background may take", "demand under way")
    for link in traffic.links:
        sizes = (link.demand_bytes, link.prefetch_bytes, link.demotion_bytes)
        table.add_row(
            link.name, *map(human_size, sizes), f"{link.background_share:.0%}", f"{link.demand_share:.0%}"
        )
    if traffic.links:
        _console().print(table)
    moved = [f"{total.block_count:,} {total.reason}" for total in traffic.transfers if total.block_count]
    if moved:
        _console().print(f"transferred blocks: {', '.join(moved)}", markup=False)
    if traffic.conservative:
        why = traffic.conservative_reason
        _console().print(f"conservative mode is on: {why}; background copies rest", markup=False)


def leases(answer: wire.ListLeasesResponse) -> None:
    """One row per lease."""
    table = _table(
        "token", "kind", "instance", "pid", "namespace", "slots", "shards", "held for", "ends in", "state"
    )
    now = datetime.now().timestamp()
    for lease in answer.leases:
        table.add_row(
            lease.token_prefix,
            plain(lease)["kind"],
            lease.instance_id,
            str(lease.pid or "-"),
            lease.namespace.fingerprint.hex()[:FINGERPRINT_DIGITS],
            f"{lease.slot_count:,}",
            ",".join(map(str, lease.open_shards)),
            f"{max(0.0, now - lease.taken_at.seconds):.0f} s",
            f"{lease.expires_after.seconds + lease.expires_after.nanos / 1e9:.1f} s",
            "quarantined" if lease.quarantined else "live",
        )
    _console().print(table)


def namespaces(answer: wire.ListNamespacesResponse) -> None:
    """One row per namespace."""
    table = _table(
        "fingerprint", "epoch", "model", "engine", "shards", "tokens a block", "blocks", "bytes", "opened"
    )
    for item in answer.namespaces:
        table.add_row(
            item.namespace.fingerprint.hex()[:FINGERPRINT_DIGITS],
            str(item.namespace.epoch),
            item.spec.model_id,
            item.spec.engine_name,
            str(item.spec.shard_count),
            str(item.spec.block_tokens),
            f"{item.block_count:,}",
            human_size(item.resident_bytes),
            item.opened_at.ToDatetime().isoformat(timespec="seconds"),
        )
    _console().print(table)


def block(answer: wire.DescribeBlockResponse) -> None:
    """One block: fields, copies, story."""
    if not answer.found:
        _console().print("not kept")
        return
    values = plain(answer)
    copies, story = values.pop("copies"), values.pop("story")
    values["checksum"] = f"{answer.checksum:016x}"
    values["idle"] = f"{values['idle']:.1f} s"
    _key_values({name: str(value) for name, value in values.items()})
    for copy in copies:
        _console().print(
            f"copy in {copy['tier']}: segment {copy['segment_id']} at {copy['offset_bytes']:,}, "
            f"{copy['state']}, {copy['lease_count']} leases"
        )
    for line in story:
        _console().print(f"  {line}", markup=False)


def explanation(answer: wire.ExplainBlockResponse) -> None:
    """Signals and worth of one block, then its standing in each tier."""
    if not answer.found:
        _console().print("not kept")
        return
    signals = {signal.name: signal.value for signal in answer.signals}
    _key_values({"policy": answer.policy, "score": f"{answer.score:.4g}"} | signals)
    table = _table("tier", "copy", "rank", "what would happen")
    for item in plain(answer)["placements"]:
        copy = "yes" if item["present"] else "no"
        table.add_row(item["tier"], copy, f"{item['rank']:.0%}", item["verdict"])
    _console().print(table)


def check(answer: wire.CheckResponse) -> None:
    """What is wrong, if anything."""
    for problem in answer.problems:
        _console().print(problem, markup=False)
    verdict = f"{len(answer.problems)} problems" if answer.problems else "everything balances"
    elapsed_ms = answer.elapsed.seconds * 1e3 + answer.elapsed.nanos / 1e6
    _console().print(f"{verdict}; {answer.block_count:,} blocks looked at in {elapsed_ms:.1f} ms")


def _console() -> Console:
    """Wide enough that nothing is cut; a narrower terminal wraps lines itself."""
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, WIDTH_MIN)
    return console


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _key_values(values: dict[str, str]) -> None:
    width = max(map(len, values))
    for name, value in values.items():
        _console().print(f"{name:<{width}}  {value}", markup=False)
