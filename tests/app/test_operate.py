"""app/operate.py and app/tables.py: every verb against a real daemon."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from prefixd_server.app.exits import Exit

from tests.support.daemon import running_daemon
from tests.support.node import chain
from tests.support.operator import prefixd_json, run_prefixd
from tests.support.wire_engine import put_messages, wire_engine

HASHES = chain("a", "b", "c")
HEX = [key.hex() for key in HASHES]


class Operator:
    """The command, pointed at a daemon that keeps a run of three blocks and a lease on it."""

    def __init__(self, socket: str, fingerprint: str) -> None:
        self.socket = socket
        self.fingerprint = fingerprint

    async def run(self, *arguments: str, text: str | None = None) -> Result:
        """One call, beside the loop that serves it."""
        return await run_prefixd(Path(self.socket), *arguments, text=text)

    async def json(self, *arguments: str) -> Any:
        """The answer of a call that must succeed."""
        return await prefixd_json(Path(self.socket), *arguments)


@pytest.fixture
async def operator() -> AsyncIterator[Operator]:
    """See Operator."""
    async with running_daemon() as daemon, wire_engine(daemon.config.socket_path) as engine:
        ref = await engine.open_namespace(block_bytes=4096)
        await engine.put(*put_messages(ref, HASHES, [bytes(4096)] * 3))
        await engine.acquire(ref, HASHES)
        yield Operator(str(daemon.config.socket_path), ref.fingerprint.hex())


async def test_stats_balance_as_json_and_read_as_a_table(operator: Operator) -> None:
    stats = await operator.json("stats")
    hits = sum(hit["block_count"] for hit in stats["hits"])
    assert stats["asked_block_count"] == hits + stats["pending_block_count"] + stats["miss_block_count"] == 3
    (tier,) = stats["tiers"]
    assert tier["resident_slot_count"] == 3
    table = (await operator.run("stats")).output
    assert "3 = 3 hits" in table
    assert "DRAM" in table


async def test_stats_of_every_tier_read_as_json_and_as_a_table(tmp_path: Path) -> None:
    settings = {"data_dir": str(tmp_path), "nvme__size": "32MiB", "nvme__segment": "2MiB"}
    async with running_daemon(**settings) as daemon:
        socket = daemon.config.socket_path
        tiers = (await prefixd_json(socket, "stats"))["tiers"]
        assert {tier["tier"] for tier in tiers} == {"DRAM", "NVME"}
        text = (await run_prefixd(socket, "stats")).output
        assert "NVME" in text
        assert "demand under way" in text


async def test_a_tenant_without_rights_is_told_the_mode_and_not_what_moves(tmp_path: Path) -> None:
    settings = {"data_dir": str(tmp_path), "nvme__size": "32MiB", "nvme__segment": "2MiB"}
    async with running_daemon("batch", **settings) as daemon:
        daemon.cache.set_conservative("on")
        first, batch = [tenant.socket for tenant in daemon.config.all_tenants]
        assert first is not None
        assert batch is not None
        told = (await prefixd_json(batch, "stats"))["traffic"]
        assert (told["conservative"], told["links"], told["conservative_entered_count"]) == (True, [], 0)
        (link,) = (await prefixd_json(first, "stats"))["traffic"]["links"]
        assert link["demand_bytes"] == 0
        refused = await run_prefixd(batch, "mode", "--conservative", "off")
        assert "[ADMIN_REQUIRED]" in refused.output


async def test_leases_tell_who_holds_what(operator: Operator) -> None:
    (lease,) = (await operator.json("leases"))["leases"]
    assert (lease["instance_id"], lease["kind"], lease["slot_count"]) == ("engine", "READ", 3)
    assert "engine" in (await operator.run("leases")).output


async def test_namespaces_are_listed_with_their_bytes(operator: Operator) -> None:
    (namespace,) = (await operator.json("namespaces"))["namespaces"]
    assert namespace["namespace"]["fingerprint"] == operator.fingerprint
    assert (namespace["block_count"], namespace["resident_bytes"]) == (3, 3 * 4096)
    assert operator.fingerprint[:12] in (await operator.run("namespaces")).output


async def test_describe_tells_a_blocks_story(operator: Operator) -> None:
    named = ("describe", "--namespace", operator.fingerprint[:8])
    block = await operator.json(*named, HEX[1])
    assert block["parent_hash"] == HEX[0]
    assert block["copies"][0]["lease_count"] == 1
    text = (await operator.run(*named, HEX[1])).output
    assert "committed" in text
    unknown = await operator.run(*named, "00" * 32)
    assert (unknown.exit_code, unknown.output) == (Exit.FAILED, "not kept\n")


async def test_pins_hold_and_evict_takes_the_rest(operator: Operator) -> None:
    named = ("--namespace", operator.fingerprint)
    assert (await operator.json("pin", *named, HEX[0]))["pinned_block_count"] == 1
    assert (await operator.json("evict", *named))["held_block_count"] == 3
    assert (await operator.json("unpin", *named, HEX[0]))["unpinned_block_count"] == 1
    text = await operator.run("evict", *named, "--keep", "1", "-", text="\n".join(HEX))
    assert "held_block_count     2" in text.output


async def test_drop_namespace_raises_the_epoch(operator: Operator) -> None:
    dropped = await operator.json("drop-namespace", "--namespace", operator.fingerprint)
    assert dropped["dropped_block_count"] == 3
    assert (await operator.json("namespaces"))["namespaces"] == []


async def test_check_says_that_everything_balances(operator: Operator) -> None:
    assert (await operator.json("check"))["problems"] == []
    assert "everything balances" in (await operator.run("check")).output


async def test_drain_fails_while_a_lease_is_held(operator: Operator) -> None:
    result = await operator.run("drain", "--wait", "0.01", "--json")
    assert result.exit_code == Exit.FAILED
    assert json.loads(result.output)["remaining_lease_count"] == 1


async def test_an_ambiguous_or_unknown_namespace_is_a_usage_error(operator: Operator) -> None:
    result = await operator.run("evict", "--namespace", "zz")
    assert result.exit_code == Exit.USAGE
    assert "prefixd namespaces" in result.output


async def test_a_refusal_is_told_with_its_reason(operator: Operator) -> None:
    result = await operator.run("describe", "--namespace", f"{operator.fingerprint}@1", HEX[0])
    assert result.exit_code == Exit.FAILED
    assert "[NAMESPACE_EPOCH_STALE]" in result.output


async def test_mode_shows_and_switches_the_policy(operator: Operator) -> None:
    assert (await operator.json("mode"))["policy"] == "importance"
    assert (await operator.json("mode", "--policy", "lru"))["policy"] == "lru"
    assert "lru" in (await operator.run("mode")).output
    switched = await operator.json("mode", "--conservative", "on")
    assert (switched["conservative"], switched["conservative_on"]) == ("on", True)
    assert (await operator.json("stats"))["traffic"]["conservative"] is True
    assert (await operator.json("mode", "--conservative", "auto"))["conservative_on"] is False
    unknown = await operator.run("mode", "--conservative", "maybe")
    assert "[CONSERVATIVE_UNKNOWN]" in unknown.output
    refused = await operator.run("mode", "--policy", "fifo")
    assert refused.exit_code == Exit.FAILED
    assert "fifo" in refused.output
