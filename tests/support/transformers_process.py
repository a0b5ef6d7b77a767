"""An engine process of its own: answers one prompt and prints what it hit and what it computed.

Where the prompt is given several times, the last answer is printed.

python -m tests.support.transformers_process SOCKET MODEL_DIRECTORY TOKEN_COUNT [DEVICE_UUID [PROMPT_COUNT]]
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from prefixd_client import Client, ClientOptions
from prefixd_client.connectors.transformers import Prefill, PrefixCachedModel

from tests.support.models import BLOCK_TOKENS, prompt


def digest(prefill: Prefill) -> str:
    """Of every bit of the logits."""
    return hashlib.sha256(prefill.logits.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def main() -> None:
    """See the module."""
    socket, directory, token_count, *more = sys.argv[1:]
    device, prompt_count = [*more, *("", "1")[len(more) :]]
    patient = ClientOptions(lookup_timeout_s=10.0, write_timeout_s=10.0, device_uuid=device)
    with Client(socket, engine_name="transformers", options=patient) as client:
        model = PrefixCachedModel.from_pretrained(
            directory, client, dtype=torch.float32, block_tokens=BLOCK_TOKENS
        )
        for _ in range(int(prompt_count)):
            prefill = model.prefill(prompt(int(token_count)))
        print(json.dumps({"hit": prefill.stats.hit_token_count, "digest": digest(prefill)}))


if __name__ == "__main__":
    main()
