"""What a model's requests tell the daemon arrives there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prefixd_client import Client, ClientOptions
from prefixd_client.connectors.transformers import PrefixCachedModel

from tests.support.companions import until
from tests.support.daemon import running_daemon
from tests.support.models import BLOCK_TOKENS, prompt, tiny_llama

PATIENT = ClientOptions(lookup_timeout_s=10.0, write_timeout_s=10.0)
"""The daemon's loop shares this process with the model."""


def answer(client: Client, attention: str) -> None:
    """One request, away from the daemon's loop."""
    model = PrefixCachedModel(tiny_llama(attn_implementation=attention), client, block_tokens=BLOCK_TOKENS)
    model.generate(prompt(5 * BLOCK_TOKENS + 3), 3)


@asynccontextmanager
async def answered(attention: str) -> AsyncIterator[tuple]:
    """A daemon to which one request was reported from start to end: (the engine's session, the catalog)."""
    async with running_daemon() as daemon:
        socket = daemon.config.all_tenants[0].socket
        client = await asyncio.to_thread(Client, socket, engine_name="transformers", options=PATIENT)
        try:
            await asyncio.to_thread(answer, client, attention)
            (session,) = daemon.cache.sessions.open_of()
            await until(lambda: session.decode_latency_s is not None)
            yield session, daemon.cache.state.catalog
        finally:
            await asyncio.to_thread(client.close)


async def test_latencies_and_attention_of_a_finished_request_arrive() -> None:
    async with answered("eager") as (session, catalog):
        assert session.decode_latency_s > 0
        assert session.prefill_tokens_per_s > 0
        assert 0 < catalog.tree.attention.sum() <= 1


async def test_a_model_without_attention_weights_reports_its_latencies_only() -> None:
    async with answered("sdpa") as (session, catalog):
        assert session.decode_latency_s > 0
        assert catalog.tree.attention.sum() == 0
