"""`prefixd explain`: a block's worth and standing, from a real daemon."""

from __future__ import annotations

from prefixd_server.app.exits import Exit

from tests.app.test_operate import HEX, Operator, operator

__all__ = ["operator"]


async def test_a_block_is_explained_with_its_signals_and_its_standing(operator: Operator) -> None:
    answer = await operator.json("explain", "--namespace", operator.fingerprint[:10], HEX[2])
    assert answer["policy"] == "importance"
    signals = {signal["name"]: signal["value"] for signal in answer["signals"]}
    assert signals["gap"] == "0 to 8 s"
    assert signals["reused"] == "yes"
    (placement,) = answer["placements"]
    assert (placement["present"], placement["evictable"]) == (True, False)
    assert "leases hold it" in placement["verdict"]
    table = (await operator.run("explain", "--namespace", operator.fingerprint, HEX[2])).output
    assert "leases hold it" in table
    assert "reuses per second" in table


async def test_a_block_that_is_not_kept_is_not_explained(operator: Operator) -> None:
    result = await operator.run("explain", "--namespace", operator.fingerprint, "00" * 32)
    assert result.exit_code == Exit.FAILED
    assert "not kept" in result.output
