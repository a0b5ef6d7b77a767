"""An SGLang engine as a process of its own, driven by JSON lines: `python -m tests.support.sglang_engine`.

Commands come on stdin, one object a line with a field "do"; each answers one line on the original stdout.
SGLang's own output goes to stderr. Used through sglang_process.py.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO


class Engine:
    """One engine; its scheduler is a process below this one."""

    def __init__(self) -> None:
        self._engine: Any = None

    def start(self, command: dict[str, Any]) -> dict[str, Any]:
        """An engine of these options."""
        import sglang  # noqa: PLC0415 - takes seconds; a scheduler's process imports this module too

        self._engine = sglang.Engine(**command["options"])
        return {}

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        """Runs prompts (token ids) together; tokens of each reply, and how many of its prompt were cached."""
        sampling = {"temperature": 0, "max_new_tokens": command["max_tokens"], "ignore_eos": True}
        outputs = self._engine.generate(input_ids=command["prompts"], sampling_params=sampling)
        return {
            "replies": [
                {"tokens": output["output_ids"], "cached": output["meta_info"]["cached_tokens"]}
                for output in outputs
            ]
        }

    def flush(self, _command: dict[str, Any]) -> dict[str, Any]:
        """The engine forgets what it keeps itself, on the device and in its host pool."""
        return {"flushed": bool(self._engine.flush_cache().success)}

    def update_weights(self, command: dict[str, Any]) -> dict[str, Any]:
        """Other weights of the same shape, in place."""
        succeeded, message = self._engine.update_weights_from_disk(command["model"])[:2]
        return {"updated": bool(succeeded), "message": message}

    def end(self, _command: dict[str, Any]) -> dict[str, Any]:
        """The engine goes."""
        self._engine.shutdown()
        return {}


def main(answers: TextIO) -> None:
    """Answers commands until stdin ends."""
    engine = Engine()
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(engine, command["do"])(command)), file=answers, flush=True)


if __name__ == "__main__":
    original = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    main(original)
