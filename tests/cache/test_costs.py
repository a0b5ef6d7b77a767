"""What a copy saves: recomputation at the last copy, by what engines tell; a transfer elsewhere."""

from __future__ import annotations

import pytest
from prefixd_server.base.types import RequestPhase, Tier, UsageReport
from prefixd_server.cache.costs import NVME_READ, TOKENS_PER_S_UNTOLD, Costs
from prefixd_server.policy.cost import ATTENTION_DOUBLING_TOKENS
from prefixd_server.policy.weighed import WeighedImportance

from tests.cache.conftest import MakeEngine
from tests.support.engine import Engine
from tests.support.node import Node, packed

BLOCK_TOKENS = 16


def weights(node: Node, costs: Costs) -> list[float]:
    catalog = node.cache.state.catalog
    view = catalog.tree.view(Tier.DRAM, 0, lambda _node, _limit: 0)
    return costs.weight(view, view.leaves()).tolist()


def namespace_of(node: Node, engine: Engine):
    return node.cache.state.catalog.namespaces.get("red", engine.ref)


def test_the_last_copy_saves_its_recomputation_which_grows_with_depth(node: Node, engine: MakeEngine) -> None:
    engine().put(*range(100))
    (weight,) = weights(node, Costs(node.cache.state.catalog, weighs=True))
    deep = 1 + 99 * BLOCK_TOKENS / ATTENTION_DOUBLING_TOKENS
    assert weight == pytest.approx(BLOCK_TOKENS / TOKENS_PER_S_UNTOLD * deep)


def test_a_prefill_tells_the_rate_at_the_prompts_start(node: Node, engine: MakeEngine) -> None:
    one = engine()
    hashes = one.put(*range(50))
    report = UsageReport(
        one.ref, "r", RequestPhase.FINISHED, packed(hashes), prefill_time_s=0.1, prefill_token_count=400
    )
    node.cache.report_usage("red", one.session.session_id, [report])
    middle = 50 * BLOCK_TOKENS - 400 + 200
    expected = 4000 * (1 + middle / ATTENTION_DOUBLING_TOKENS)
    assert node.cache.state.costs.tokens_per_s(namespace_of(node, one)) == pytest.approx(expected)


def test_an_engines_hint_tells_it_too(node: Node, engine: MakeEngine) -> None:
    one = engine()
    ids = ("red", one.session.session_id, one.ref, 0, 0)
    node.cache.reserve(*ids, None, packed(one.put("x")), None, recompute_cost_s=0.016)
    rate = node.cache.state.costs.tokens_per_s(namespace_of(node, one))
    assert rate == pytest.approx(1000 * (1 + 8 / ATTENTION_DOUBLING_TOKENS))


def test_a_copy_above_another_saves_one_transfer_whatever_its_depth(node: Node, engine: MakeEngine) -> None:
    engine().put(*range(100))
    catalog = node.cache.state.catalog
    costs = Costs(catalog, weighs=True)
    catalog.columns.slot[Tier.NVME][:200] = 3
    catalog.slots[Tier.NVME] = catalog.slots[Tier.DRAM]
    assert weights(node, costs) == [pytest.approx(NVME_READ.seconds(65_536))]
    del catalog.slots[Tier.NVME]
    catalog.columns.slot[Tier.NVME][:200] = 0xFFFFFFFF


def test_where_nothing_is_weighed_all_blocks_weigh_the_same(node: Node, engine: MakeEngine) -> None:
    costs = node.cache.state.costs
    assert costs.weight_of_new(namespace_of(node, engine()), 1000) == 1.0


def test_a_deeper_block_outlives_a_shallower_one_where_cost_is_weighed(
    node: Node, engine: MakeEngine
) -> None:
    one = engine()
    state = node.cache.state
    shallow, deep = one.put("shallow"), one.put(*range(100))
    costs = Costs(state.catalog, weighs=True)
    view = state.catalog.tree.view(Tier.DRAM, 0, lambda _node, limit: limit)
    ((victim, _),) = WeighedImportance(costs.weight).victims(view, 1, state.clock.now(), state.rng)
    first = state.catalog.find(0, packed(shallow))
    assert victim == state.catalog.columns.node[first[0]]
    assert one.hits(deep) == 100
