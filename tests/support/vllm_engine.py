"""A vLLM engine as a process of its own, driven by JSON lines: `python -m tests.support.vllm_engine`.

Commands come on stdin, one object a line with a field "do"; each answers one line on the original stdout.
vLLM's own output goes to stderr. Used by the tests and the demo through vllm_process.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from typing import Any, TextIO


class Engine:
    """One LLM at a time, with the engine core in this process."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._count = 0

    def start(self, command: dict[str, Any]) -> dict[str, Any]:
        """An engine of these options; "refused" tells why there is none."""
        from vllm import LLM  # noqa: PLC0415 - takes seconds; errors of the arguments come first

        begin = time.monotonic()
        try:
            self._llm = LLM(**command["options"])
        except ValueError as error:
            return {"refused": str(error)}
        return {"init_s": time.monotonic() - begin}

    def end(self, _command: dict[str, Any]) -> dict[str, Any]:
        """The engine goes, the process stays: the next start() is quick."""
        from vllm.distributed import cleanup_dist_env_and_memory  # noqa: PLC0415 - as above

        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
        cleanup_dist_env_and_memory()
        return {"ended": True}

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """Runs prompts (lists of token ids) together and answers with their replies.

        salts: cache salt per prompt. adapters: [name, number, path] per prompt. abort_after: prompt index to
        the number of steps after which it is aborted.
        """
        from vllm import SamplingParams  # noqa: PLC0415 - as above
        from vllm.lora.request import LoRARequest  # noqa: PLC0415 - as above

        sampling = SamplingParams(
            temperature=0, max_tokens=command["max_tokens"], logprobs=command.get("logprobs"), ignore_eos=True
        )
        engine = self._llm.llm_engine
        indexes: dict[str, int] = {}
        for index, tokens in enumerate(command["prompts"]):
            self._count += 1
            prompt: dict[str, Any] = {"prompt_token_ids": tokens}
            if command.get("salts"):
                prompt["cache_salt"] = command["salts"][index]
            adapter = (command.get("adapters") or {}).get(str(index))
            lora = LoRARequest(*adapter) if adapter else None
            indexes[f"r{self._count}"] = index
            engine.add_request(f"r{self._count}", prompt, sampling, lora_request=lora)
        return {"replies": self._run(engine, indexes, command.get("abort_after") or {})}

    def _run(
        self, engine: Any, indexes: dict[str, int], abort_after: dict[str, int]
    ) -> list[dict[str, Any] | None]:
        replies: list[dict[str, Any] | None] = [None] * len(indexes)
        first_at: dict[str, float] = {}
        begin, steps = time.monotonic(), 0
        while engine.has_unfinished_requests():
            gone = [name for name, index in indexes.items() if abort_after.get(str(index)) == steps]
            if gone:
                engine.abort_request(gone)
            for output in engine.step():
                first_at.setdefault(output.request_id, time.monotonic() - begin)
                if output.finished:
                    replies[indexes[output.request_id]] = _reply(
                        output, first_at[output.request_id], time.monotonic() - begin
                    )
            steps += 1
        return replies

    def settle(self, _command: dict[str, Any]) -> dict[str, Any]:
        """Steps until the engine holds nothing for a finished request any more: its saves are over."""
        core = self._llm.llm_engine.engine_core.engine_core
        deadline = time.monotonic() + 20
        while core.scheduler.has_requests():
            assert time.monotonic() < deadline, f"still holding {list(core.scheduler.requests)}"
            core.step_fn()
        return {"settled": True}

    def identity(self, command: dict[str, Any]) -> dict[str, Any]:
        """The engine's namespace, and the prefix hashes (hex) of a prompt."""
        from vllm import SamplingParams  # noqa: PLC0415 - as above
        from vllm.utils.hashing import sha256  # noqa: PLC0415 - as above
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher  # noqa: PLC0415 - as above
        from vllm.v1.request import Request  # noqa: PLC0415 - as above

        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        hasher = get_request_block_hasher(scheduler.block_size, sha256)
        request = Request(
            "hashed", command["prompt"], SamplingParams(max_tokens=1), None, block_hasher=hasher
        )
        return {
            "namespace": asdict(scheduler.connector._side.namespace),
            "hashes": [bytes(key).hex() for key in request.block_hashes],
        }

    def preemptions(self, command: dict[str, Any]) -> dict[str, Any]:
        """generate(), and how often requests were preempted meanwhile."""
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        counted = 0
        preempt = scheduler._preempt_request

        def count(*arguments: Any, **keywords: Any) -> None:
            nonlocal counted
            counted += 1
            preempt(*arguments, **keywords)

        scheduler._preempt_request = count
        answer = self.generate(command)
        scheduler._preempt_request = preempt
        return {**answer, "preemptions": counted}

    def reset(self, _command: dict[str, Any]) -> dict[str, Any]:
        """What an operator calls after weights were updated in place."""
        return {"reset": self._llm.reset_prefix_cache(reset_connector=True)}

    def forget(self, _command: dict[str, Any]) -> dict[str, Any]:
        """Empties the engine's own prefix cache, and not ours."""
        return {"forgotten": self._llm.reset_prefix_cache()}

    def nap(self, _command: dict[str, Any]) -> dict[str, Any]:
        """Sleeps and wakes, as an operator does who lends the machine out."""
        self._llm.sleep(level=1)
        self._llm.wake_up()
        return {"awake": True}

    def scale_weights(self, command: dict[str, Any]) -> dict[str, Any]:
        """Changes weights in place, as a trainer does."""
        factor = float(command["factor"])
        executor = self._llm.llm_engine.engine_core.engine_core.model_executor
        for name, parameter in executor.driver_worker.worker.get_model().named_parameters():
            if "layernorm" in name:
                parameter.data.mul_(factor)
        return {"scaled": factor}

    def metrics(self, _command: dict[str, Any]) -> dict[str, Any]:
        """Counters of vLLM and of the connector."""
        return {
            "metrics": {
                metric.name: metric.value
                for metric in self._llm.get_metrics()
                if hasattr(metric, "value") and ("prefix_cache" in metric.name or "prefixd" in metric.name)
            }
        }


def _reply(output: Any, first_s: float, total_s: float) -> dict[str, Any]:
    (completion,) = output.outputs
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            {str(token): entry.logprob for token, entry in position.items()}
            for position in completion.logprobs or ()
        ],
        "cached_tokens": output.num_cached_tokens,
        "finish_reason": completion.finish_reason,
        "first_s": first_s,
        "total_s": total_s,
    }


def main() -> None:
    """Serves commands until the end of stdin."""
    answers: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = Engine()
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(engine, command["do"])(command)), file=answers)


if __name__ == "__main__":
    main()
