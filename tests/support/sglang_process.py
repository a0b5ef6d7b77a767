"""Starts SGLang engine processes for tests, and talks to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
STANDINS = ROOT / "tests/engines/sglang/standins"
BLOCK = 64
IDLE_TIMEOUT_S = 60.0


def engine_options(model: Path, socket: Path, layout: str, **extra: Any) -> dict[str, Any]:
    """Engine's arguments: small, on the CPU, with our storage; `extra` are the storage's settings."""
    storage = {
        "backend_name": "prefixd",
        "module_path": "prefixd_client.connectors.sglang",
        "class_name": "PrefixdHiCache",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "socket": str(socket),
        "lookup_timeout_s": 5.0,
        "wait_max_s": 8.0,
        "save_patience_s": 20.0,
    } | extra
    return {
        "model_path": str(model),
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "dtype": "float32",
        "mem_fraction_static": 0.1,
        "max_total_tokens": 8192,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "skip_tokenizer_init": True,
        "log_level": "info",
        "host": "127.0.0.1",
        "page_size": BLOCK,
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_write_policy": "write_through",
        "hicache_io_backend": "direct",
        "hicache_mem_layout": layout,
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(storage),
    }


class EngineProcess:
    """One engine; a context manager that leaves nothing running. It starts at once: two may start together.

    Args:
        name: of the log file in `directory`.
        options: Engine's arguments, see engine_options().
        directory: for its log and its caches.
    """

    def __init__(self, name: str, options: dict[str, Any], directory: Path) -> None:
        self.log_path = directory / f"{name}.log"
        usual = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        environment = usual | {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(directory),
            "PYTHONPATH": str(STANDINS),
        }
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.sglang_engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=environment,
                text=True,
                start_new_session=True,
            )

        self._send("start", options=options)

    def __enter__(self) -> EngineProcess:
        """Returns when the engine takes prompts."""
        try:
            self._answer()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        self._send(do, **fields)
        return self._answer()

    def generate(self, *prompts: list[int], max_tokens: int = 8) -> list[dict[str, Any]]:
        """Replies to prompts that run together."""
        replies: list[dict[str, Any]] = self.ask("generate", prompts=prompts, max_tokens=max_tokens)[
            "replies"
        ]
        return replies

    def forget(self) -> None:
        """The engine forgets what it keeps itself, as soon as it is idle."""
        deadline = time.monotonic() + IDLE_TIMEOUT_S
        while not self.ask("flush")["flushed"]:
            assert time.monotonic() < deadline, self.log[-4000:]
            time.sleep(0.05)  # polls another process: there is nothing to wait on

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self.log_path.read_text()

    def kill(self) -> None:
        """Ends it and the processes that it has started: they are a process group."""
        with suppress(ProcessLookupError):  # ended by itself, and its children with it
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, do: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended: {self.log[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer
