"""One engine process of the demo: answers prompts that come as JSON lines on stdin.

Each line is {"tokens": [...], "cached": bool, "new_tokens": n}. With cached false the prompt is computed with
no cache at all, which is the reference. The answer has the digest of the bytes of all logits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from prefixd_client import Client, ClientOptions
from prefixd_client.connectors.transformers import Generation, PrefixCachedModel

WARM_UP_TOKENS = 300
PATIENT = ClientOptions(lookup_timeout_s=2.0, write_timeout_s=5.0)
"""The demo is about hits; a serving engine's deadlines would turn some into misses on a busy laptop."""


def main() -> None:
    """Load the model, say ready, answer until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--socket", required=True)
    arguments = parser.parse_args()
    with Client(arguments.socket, engine_name="transformers", options=PATIENT) as client:
        cached = PrefixCachedModel.from_pretrained(arguments.model, client)
        uncached = PrefixCachedModel(cached.model, None)
        uncached.generate(list(range(3, 3 + WARM_UP_TOKENS)), 2)
        _say({"ready": True})
        for line in sys.stdin:
            request = json.loads(line)
            model = cached if request["cached"] else uncached
            _say(_answer(model.generate(request["tokens"], request["new_tokens"])))


def _answer(generation: Generation) -> dict[str, Any]:
    """What the demo shows and compares."""
    stats = generation.prefill.stats
    logits = torch.cat([generation.prefill.logits[None], generation.logits]).contiguous()
    return {
        "hit_tokens": stats.hit_token_count,
        "stored_tokens": stats.stored_token_count,
        "ttft_s": stats.load_s + stats.compute_s,
        "reply": generation.tokens,
        "logits_sha256": hashlib.sha256(logits.view(torch.uint8).numpy().tobytes()).hexdigest(),
    }


def _say(message: dict[str, Any]) -> None:
    """One line to the demo."""
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    main()
