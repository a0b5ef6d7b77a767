"""A Hugging Face causal language model that takes its prompts' KV from prefixd and stores what it computes.

Exactness. Floating-point results depend on the shapes that are multiplied, so the connector computes a
prompt in chunks of one block, cut at multiples of block_tokens, always: cold and warm then run the very
same kernels on the very same shapes for each chunk they compute, and a loaded block holds the very bytes
that computing would have given. Logits with a hit are bit-equal to logits without. Three rules follow. The
block that holds the last token is computed even if it is cached, as the logits come from it. Blocks that
fill up while tokens are generated one by one are not stored, for their bytes differ in the last bits from a
prefill's. And all that chooses a kernel is part of the namespace (see identity).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from prefixd_client.client import Client, Namespace
from prefixd_client.errors import InvalidArgument
from prefixd_client.prefix_hash import chain_hashes
from prefixd_client.values import RequestPhase, StopReason, UsageReport

from .attention import attention_mass
from .identity import files_fingerprint, namespace_spec, state_fingerprint
from .kv_cache import BlockCache, probe_shape
from .refusal import refuse_unsupported
from .results import Generation, Prefill, PrefillStats

WAIT_MAX_S = 2.0
"""Computing a prompt that is worth keeping takes longer."""
BLOCK_TOKENS = 128
"""Tokens per block: a chunk this long keeps the cores busy, and little is computed twice."""


class PrefixCachedModel:
    """Wraps a model. One thread at a time; the client behind it may be shared.

    The model is put into evaluation mode. Weights that change in place need weights_changed() before the next
    prompt.

    Args:
        model: a causal language model on the CPU, with full attention in every layer.
        client: connected or not; None computes everything and stores nothing.
        block_tokens: tokens per block, 1 or more.
        model_id: name of the model; the configuration's own by default.
        weights: fingerprint of the weights; computed over the model's memory by default.
        tokenizer_fingerprint: empty when the caller vouches for its token ids.
        wait_max_s: longest wait for blocks that come from slower tiers.

    Raises:
        UnsupportedModel: the model's KV does not follow the prefix law.
    """

    def __init__(
        self,
        model: Any,
        client: Client | None,
        *,
        block_tokens: int = BLOCK_TOKENS,
        model_id: str | None = None,
        weights: str | None = None,
        tokenizer_fingerprint: str = "",
        wait_max_s: float = WAIT_MAX_S,
    ) -> None:
        if block_tokens < 1:
            raise InvalidArgument(
                "block_tokens", block_tokens, "must be 1 or more", f"leave it at {BLOCK_TOKENS}"
            )
        refuse_unsupported(model)
        self.model = model.eval()
        self._client = client
        self._model_id = model_id or model.config._name_or_path or type(model).__name__
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._wait_max_s = wait_max_s
        with torch.no_grad():
            self.shape = probe_shape(model, block_tokens)
        self._sees_attention = model.config.get_text_config()._attn_implementation == "eager"
        self._namespace = self._open(weights)

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        client: Client | None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        attn_implementation: str = "sdpa",
        block_tokens: int = BLOCK_TOKENS,
    ) -> PrefixCachedModel:
        """Load a model from a local directory and fingerprint its weight files, which is cached by file."""
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - takes seconds, only needed here

        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attn_implementation, local_files_only=True
        )
        weights = files_fingerprint(Path(directory)) if client is not None else None
        return cls(model, client, block_tokens=block_tokens, model_id=Path(directory).name, weights=weights)

    def weights_changed(self) -> None:
        """Open the namespace of the weights as they are now in memory."""
        self._namespace = self._open(None)

    def prefill(
        self, tokens: Sequence[int], *, request_id: str | None = None, room_tokens: int = BLOCK_TOKENS
    ) -> Prefill:
        """Load the longest cached prefix, compute the rest, store the new full blocks.

        Args:
            tokens: the prompt, 1 token or more.
            request_id: names the request in usage reports; made up when None. End it with finish().
            room_tokens: tokens that the cache takes behind the prompt without growing.
        """
        if not len(tokens):
            raise InvalidArgument("tokens", "[]", "needs 1 token or more", "give the prompt's token ids")
        began = time.perf_counter()
        name = request_id or uuid.uuid4().hex
        block_tokens = self.shape.block_tokens
        hashes = chain_hashes(tokens, block_tokens)
        self._report(UsageReport(request_id=name, phase=RequestPhase.STARTED, block_hashes=hashes), hashes)
        cache = BlockCache(self.shape, len(tokens) + room_tokens)
        hit = self._load(cache, hashes[: (len(tokens) - 1) // block_tokens], name)
        loaded = time.perf_counter()
        output = self._compute(cache, tokens, hit * block_tokens)
        computed = time.perf_counter()
        stored = self._store(cache, hashes, hit, computed - loaded)
        stats = PrefillStats(
            token_count=len(tokens),
            hit_token_count=hit * block_tokens,
            stored_token_count=stored * block_tokens,
            load_s=loaded - began,
            compute_s=computed - loaded,
            store_s=time.perf_counter() - computed,
        )
        attentions = output.attentions if self._sees_attention else ()
        mass = attention_mass(attentions, block_tokens, len(hashes))
        return Prefill(name, hashes, output.logits[0, -1], cache, stats, mass)

    def generate(
        self, tokens: Sequence[int], max_new_tokens: int, *, request_id: str | None = None
    ) -> Generation:
        """Answer a prompt greedily and report the finished request.

        Ends at the configuration's end-of-sequence token, which is not part of the reply, or at
        max_new_tokens.
        """
        prefill = self.prefill(tokens, request_id=request_id, room_tokens=max_new_tokens)
        ends = self.model.config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        reply: list[int] = []
        chosen_from = []
        logits, stop = prefill.logits, StopReason.LENGTH
        began = time.perf_counter()
        while len(reply) < max_new_tokens:
            token = int(logits.argmax())
            if token in ends:
                stop = StopReason.END_TURN
                break
            reply.append(token)
            chosen_from.append(logits)
            if len(reply) < max_new_tokens:
                logits = self._forward(prefill.cache, [token]).logits[0, -1]
        latency = (time.perf_counter() - began) / len(reply) if reply else None
        self.finish(prefill, len(reply), stop, decode_latency_s=latency)
        stacked = torch.stack(chosen_from) if chosen_from else prefill.logits[:0].view(0, len(prefill.logits))
        return Generation(reply, stacked, prefill, stop)

    def finish(
        self,
        prefill: Prefill,
        output_token_count: int,
        stop_reason: StopReason,
        *,
        decode_latency_s: float | None = None,
    ) -> None:
        """Report that a request has ended, with what the policy learns from. Never waits.

        Attention mass is told block by block, so the run goes with it.

        Args:
            prefill: of the request.
            output_token_count: tokens of the reply.
            stop_reason: why it ended.
            decode_latency_s: mean time per token of the reply.
        """
        stats = prefill.stats
        self._report(
            UsageReport(
                request_id=prefill.request_id,
                phase=RequestPhase.FINISHED,
                block_hashes=prefill.block_hashes if len(prefill.attention_mass) else (),
                output_token_count=output_token_count,
                stop_reason=stop_reason,
                decode_latency_s=decode_latency_s,
                prefill_time_s=stats.compute_s,
                prefill_token_count=stats.token_count - stats.hit_token_count,
                attention_mass=prefill.attention_mass,
            ),
            prefill.block_hashes,
        )

    def _open(self, weights: str | None) -> Namespace | None:
        """The namespace of the model as it is; None without a client."""
        if self._client is None:
            return None
        spec = namespace_spec(
            self.model,
            self.shape,
            model_id=self._model_id,
            weights=weights or state_fingerprint(self.model),
            tokenizer_fingerprint=self._tokenizer_fingerprint,
        )
        return self._client.namespace(spec)

    def _load(self, cache: BlockCache, hashes: Sequence[bytes], request_id: str) -> int:
        """Copy the longest cached prefix into the cache; returns its blocks, 0 when the daemon is away."""
        if self._namespace is None or not hashes:
            return 0
        lease = self._namespace.acquire(hashes, request_id=request_id, max_wait_s=self._wait_max_s)
        if lease is None:
            return 0
        with lease:
            loaded = lease.load(cache.block_memory(0, lease.block_count))
        cache.set_length(loaded * self.shape.block_tokens)
        return loaded

    def _compute(self, cache: BlockCache, tokens: Sequence[int], start: int) -> Any:
        """Run tokens[start:] through the model, a block at a time; returns the last chunk's output."""
        output: Any = None
        for first in range(start, len(tokens), self.shape.block_tokens):
            chunk = tokens[first : first + self.shape.block_tokens]
            is_last = first + len(chunk) == len(tokens)
            output = self._forward(cache, chunk, attentions=self._sees_attention and is_last)
        return output

    def _forward(self, cache: BlockCache, chunk: Sequence[int], *, attentions: bool = False) -> Any:
        """Append one chunk to the cache; the output has the logits of its last token only."""
        with torch.no_grad():
            return self.model(
                input_ids=torch.tensor([list(chunk)], dtype=torch.long),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
                output_attentions=attentions,
            )

    def _store(self, cache: BlockCache, hashes: Sequence[bytes], hit: int, compute_s: float) -> int:
        """Store the computed full blocks that nobody has; returns how many became visible to others."""
        new = hashes[hit:]
        if self._namespace is None or not new:
            return 0
        lease = self._namespace.reserve(
            new, parent_hash=hashes[hit - 1] if hit else b"", recompute_cost_s=compute_s
        )
        if lease is None:
            return 0
        memory = cache.block_memory(hit, len(hashes))
        with lease:
            return lease.store([memory[index] for index in lease.reserved_indexes]).visible

    def _report(self, report: UsageReport, has_blocks: object) -> None:
        """Queue a usage report; a prompt without a full block is nobody's business."""
        if self._namespace is not None and has_blocks:
            self._namespace.report_usage(report)
