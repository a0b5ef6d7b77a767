"""The policy in the node: one use per request, what replies teach, admission, switching."""

from __future__ import annotations

import numpy as np
import pytest
from prefixd_server.base.types import RequestPhase, ReserveOutcome, StopReason, UsageReport
from prefixd_server.policy.importance import ImportancePolicy
from prefixd_server.policy.signals import NO_GAP, gap_code, history_byte, reply_byte

from tests.cache.conftest import MakeEngine
from tests.support.engine import Engine, slot_counts
from tests.support.node import Node, chain, packed

FIRST = history_byte(NO_GAP, reused=False)


def node_of(node: Node, engine: Engine, key: bytes) -> int:
    catalog = node.cache.state.catalog
    namespace = catalog.namespaces.get("red", engine.ref)
    row = int(catalog.find(catalog.namespaces.space(namespace, 0, 0), packed([key]))[0])
    assert row >= 0, "the block is not kept"
    return int(catalog.columns.node[row])


def signals(node: Node, engine: Engine, key: bytes) -> tuple[int, int, int, int]:
    """(history byte, reply byte, reused, uses) of the block's node."""
    nodes, at = node.cache.state.catalog.tree.nodes, node_of(node, engine, key)
    history, reply = int(nodes.gap_class[at]), int(nodes.output_class[at])
    return history, reply, int(nodes.reused[at]), int(nodes.use_count[at])


def asks(node: Node, engine: Engine, hashes: list[bytes], request_id: str) -> int:
    """Acquires and releases; blocks hit."""
    ids = ("red", engine.session.session_id, engine.ref, packed(hashes), 0, (), None)
    return node.cache.acquire(*ids, request_id=request_id).run.hit_count


def finishes(
    node: Node, engine: Engine, request_id: str, tokens: int = 50, stop: StopReason = StopReason.TOOL_USE
) -> None:
    report = UsageReport(
        engine.ref, request_id, RequestPhase.FINISHED, output_token_count=tokens, stop_reason=stop
    )
    node.cache.report_usage("red", engine.session.session_id, [report])


def test_importance_chooses_unless_told_otherwise(node: Node) -> None:
    assert isinstance(node.cache.state.policy, ImportancePolicy)
    assert set(node.cache.state.policies) == {"importance", "lru"}


def test_a_request_and_its_reply_classify_what_it_used_and_what_it_stored(
    node: Node, engine: MakeEngine
) -> None:
    one = engine()
    hashes = chain(*"abcd")
    assert asks(node, one, hashes, "r1") == 0
    node.clock.advance(2.0)
    one.put(*"abcd")
    assert signals(node, one, hashes[-1]) == (FIRST, 0, 0, 1)
    node.clock.advance(5.0)
    finishes(node, one, "r1", 50)
    assert signals(node, one, hashes[-1])[1] == reply_byte(50, StopReason.TOOL_USE)
    node.clock.advance(20.0)
    assert asks(node, one, hashes, "r2") == 4
    again = history_byte(gap_code(27.0), reused=True)
    assert signals(node, one, hashes[-1]) == (again, 0, 1, 2)


def test_a_reply_says_nothing_of_blocks_that_another_request_has_used_since(
    node: Node, engine: MakeEngine
) -> None:
    one = engine()
    hashes = one.put(*"ab")
    asks(node, one, hashes, "r1")
    node.clock.advance(1.0)
    asks(node, one, hashes, "r2")
    finishes(node, one, "r1")
    assert signals(node, one, hashes[-1])[1] == 0
    finishes(node, one, "r2", 500, StopReason.END_TURN)
    assert signals(node, one, hashes[-1])[1] == reply_byte(500, StopReason.END_TURN)


def test_a_queued_request_is_used_when_it_starts_and_once(node: Node, engine: MakeEngine) -> None:
    one = engine()
    hashes = one.put(*"ab")
    before = signals(node, one, hashes[-1])[3]

    def reports(phase: RequestPhase, run: list[bytes] | None) -> None:
        told = None if run is None else packed(run)
        node.cache.report_usage("red", one.session.session_id, [UsageReport(one.ref, "r", phase, told)])

    reports(RequestPhase.QUEUED, hashes)
    assert signals(node, one, hashes[-1])[3] == before
    reports(RequestPhase.STARTED, None)
    assert signals(node, one, hashes[-1])[3] == before + 1
    asks(node, one, hashes, "r")
    reports(RequestPhase.FINISHED, None)
    assert signals(node, one, hashes[-1])[3] == before + 1


def test_blocks_that_return_are_kept_apart_from_new_ones(node: Node, engine: MakeEngine) -> None:
    one = engine()
    long = chain(*range(64))
    asks(node, one, long, "r1")
    one.put(*range(64))
    node.cache.evict("red", one.ref, None, 0)
    node.clock.advance(30.0)
    more = chain(*range(96))
    assert asks(node, one, more, "r2") == 0
    one.put(*range(96))
    history, _, reused, uses = signals(node, one, long[20])
    assert (history, reused, uses) == (history_byte(gap_code(30.0), reused=True), 1, 2)
    history, _, reused, uses = signals(node, one, more[-1])
    assert (history, reused, uses) == (history_byte(gap_code(30.0), reused=False), 0, 1)
    assert node.cache.check() == []


def test_what_is_worth_less_than_all_that_is_kept_is_declined(node: Node, engine: MakeEngine) -> None:
    one = engine()
    for number in range(200):
        one.put("kept", number)
    state = node.cache.state
    importance = state.policies["importance"]
    assert isinstance(importance, ImportancePolicy)
    importance.hazards.index[:] = 1.0
    nodes = state.catalog.tree.nodes
    nodes.gap_class[:1000] = history_byte(gap_code(10.0), reused=True)
    place = FIRST * (len(importance.hazards.index) // 18)
    importance.hazards.index[place : place + 56] = 1e-3
    free = slot_counts(node)[0]
    assert dict(one.reserve(chain("new", *range(40))).outcomes)[ReserveOutcome.RESERVED] == free
    state.policy = state.policies["lru"]
    assert dict(one.reserve(chain("newer", *range(40))).outcomes) == {ReserveOutcome.RESERVED: 41}


def test_two_tenants_teach_nothing_of_each_others_blocks(node: Node, engine: MakeEngine) -> None:
    red, blue = engine(), engine(tenant="blue")
    hashes = chain(*range(64))
    asks(node, red, hashes, "r1")
    node.clock.advance(30.0)
    ids = ("blue", blue.session.session_id, blue.ref, packed(hashes), 0, (), None)
    node.cache.acquire(*ids, request_id="b1")
    catalog = node.cache.state.catalog
    blue.put(*range(64))
    namespace = catalog.namespaces.get("blue", blue.ref)
    rows = catalog.find(catalog.namespaces.space(namespace, 0, 0), packed(hashes))
    assert np.unique(catalog.tree.nodes.gap_class[catalog.columns.node[rows]]).tolist() == [FIRST]


@pytest.mark.parametrize("name", ["importance", "lru"])
def test_either_policy_keeps_the_node_whole_under_pressure(name: str, node: Node, engine: MakeEngine) -> None:
    node.cache.state.policy = node.cache.state.policies[name]
    one = engine()
    for number in range(300):
        hashes = chain("run", number % 40, *range(number % 7))
        asks(node, one, hashes, f"r{number}")
        one.put("run", number % 40, *range(number % 7))
        node.clock.advance(1.0)
        finishes(node, one, f"r{number}")
    assert node.cache.check() == []
