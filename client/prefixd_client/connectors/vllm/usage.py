"""One request's life as the daemon's policy wants to know it: queued, started, finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prefixd_client.values import RequestPhase, StopReason, UsageReport


@dataclass(slots=True)
class Life:
    """Times of one request, in seconds of a monotonic clock.

    Prefill is from the request's first step to the end of the step that computed its last prompt token;
    decoding is from there to the finish.
    """

    request_id: str
    started_at: float | None = None
    prefilled_at: float | None = None
    engine_hit_blocks: int = 0
    loaded_tokens: int = 0

    def queued(self, hashes: Sequence[bytes], queue_position: int) -> UsageReport:
        """The request has come; its whole run is told here, once."""
        return UsageReport(
            request_id=self.request_id,
            phase=RequestPhase.QUEUED,
            block_hashes=tuple(hashes),
            queue_position=queue_position,
        )

    def start(self, now: float, request: Any, block_tokens: int) -> None:
        """The request is scheduled for the first time: what is computed and not loaded, the engine had."""
        self.started_at = now
        self.engine_hit_blocks = max(0, request.num_computed_tokens - self.loaded_tokens) // block_tokens

    def started(self) -> UsageReport:
        """The same, to tell."""
        return UsageReport(
            request_id=self.request_id,
            phase=RequestPhase.STARTED,
            engine_hit_block_count=self.engine_hit_blocks,
        )

    def prefilled(self, now: float) -> float:
        """Output of a request that has started has begun; the seconds from its first step on."""
        assert self.started_at is not None
        self.prefilled_at = now
        return now - self.started_at

    def computed_tokens(self, request: Any, block_tokens: int) -> int:
        """Tokens of the prompt that the engine has computed: neither loaded nor in its own cache."""
        cached = self.engine_hit_blocks * block_tokens + self.loaded_tokens
        return max(0, int(request.num_prompt_tokens) - cached)

    def finished(self, now: float, request: Any, block_tokens: int) -> UsageReport:
        """The request is over, however it ended."""
        output = int(request.num_output_tokens)
        decode = prefill = None
        if self.prefilled_at is not None and self.started_at is not None:
            prefill = self.prefilled_at - self.started_at
            decode = (now - self.prefilled_at) / (output - 1) if output > 1 else None
        return UsageReport(
            request_id=self.request_id,
            phase=RequestPhase.FINISHED,
            output_token_count=output,
            stop_reason=stop_reason(request),
            decode_latency_s=decode,
            prefill_time_s=prefill,
            prefill_token_count=self.computed_tokens(request, block_tokens),
        )


def stop_reason(request: Any) -> StopReason:
    """Why the reply ended, in the wire's words. vLLM does not tell a tool call from a turn's end."""
    reason = request.get_finished_reason()
    name = "" if reason is None else str(reason)
    return {"stop": StopReason.END_TURN, "length": StopReason.LENGTH, "repetition": StopReason.LENGTH}.get(
        name, StopReason.ABORT
    )
