"""Starts vLLM engine processes for tests and the demo, and talks to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from prefixd_client.namespace import ChecksumAlgorithm, KvGroup, NamespaceSpec

ROOT = Path(__file__).parents[2]
MODULE = "prefixd_client.connectors.vllm"
PATIENT = {"lookup_timeout_s": 30.0, "load_if_sooner": False, "wait_max_s": 20.0}
"""Settings under which what is kept is loaded, however busy the machine that runs the tests."""


def transfer_config(socket: Path | str, **extra: Any) -> dict[str, Any]:
    """vLLM's kv_transfer_config for the connector."""
    return {
        "kv_connector": "PrefixdConnector",
        "kv_connector_module_path": MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"socket": str(socket), **extra},
    }


def engine_options(model: Path, **changes: Any) -> dict[str, Any]:
    """LLM's arguments: small, eager, one block computed at a time so that results are reproducible."""
    return {
        "model": str(model),
        "max_model_len": 8320,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 256 << 20,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 16,
        "disable_log_stats": False,
    } | changes


def engine_environment(cache: Path, **changes: str) -> dict[str, str]:
    """One thread, one process, nothing from the network."""
    return {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    } | {
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CACHE_ROOT": str(cache / "vllm"),
        "XDG_CACHE_HOME": str(cache),
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    } | changes  # fmt: skip


class EngineProcess:
    """One process that runs an engine; a context manager that leaves nothing running.

    Args:
        name: of the log file in `directory`.
        options: LLM's arguments, see engine_options().
        directory: for its log and its caches.
        environment: changes to engine_environment().
    """

    def __init__(self, name: str, options: dict[str, Any], directory: Path, **environment: str) -> None:
        self.log_path = directory / f"{name}.log"
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.vllm_engine"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env=engine_environment(directory, **environment),
                text=True,
                start_new_session=True,
            )
        self.options = options
        self.refused = ""
        self.init_s = 0.0

    def __enter__(self) -> EngineProcess:
        """Returns when the engine takes commands, or has refused its configuration."""
        answer = self.ask("start", options=self.options)
        self.refused = str(answer.get("refused", ""))
        self.init_s = float(answer.get("init_s", 0.0))
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Sends a command and waits for its answer."""
        self.send(do, **fields)
        return self._answer()

    def send(self, do: str, **fields: Any) -> None:
        """Sends a command; answer() must follow."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The answer to the command that was sent."""
        return self._answer()

    def generate(self, *prompts: list[int], max_tokens: int = 16, **fields: Any) -> list[dict[str, Any]]:
        """Replies to prompts that run together, with the top 5 logprobs."""
        fields = {"logprobs": 5, **fields}
        replies: list[dict[str, Any]] = self.ask(
            "generate", prompts=prompts, max_tokens=max_tokens, **fields
        )["replies"]
        return replies

    def identity(self, tokens: list[int]) -> tuple[NamespaceSpec, list[bytes]]:
        """The engine's namespace, and a prompt's prefix hashes."""
        told = self.ask("identity", prompt=tokens)
        fields = told["namespace"]
        fields["kv_groups"] = tuple(KvGroup(**group) for group in fields["kv_groups"])
        fields["checksum_algorithm"] = ChecksumAlgorithm(fields["checksum_algorithm"])
        spec = NamespaceSpec(**fields)
        return spec, [bytes.fromhex(key) for key in told["hashes"]]

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self.log_path.read_text()

    def kill(self) -> None:
        """Ends it and the processes that it has started: they are a process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine ended: {self.log[-4000:]}"
        answer: dict[str, Any] = json.loads(line)
        return answer


PROCESS_COUNT = 2
"""Engines that follow each other take turns, so what one has computed another process loads."""


class EnginePool:
    """Keeps the processes of engines that have ended, as importing vLLM takes longer than starting it.

    Args:
        directory: for logs and caches.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._idle: list[EngineProcess] = []
        self._made = 0

    @contextmanager
    def engine(self, options: dict[str, Any]) -> Iterator[EngineProcess]:
        """An engine of these options; the one before it ran in another process."""
        if len(self._idle) < PROCESS_COUNT:
            self._made += 1
            self._idle.insert(0, EngineProcess(f"engine{self._made}", {}, self._directory))
        process = self._idle.pop(0)
        process.options = options
        try:
            yield process.__enter__()
            process.ask("end")
        except BaseException:
            process.kill()
            raise
        self._idle.append(process)

    def close(self) -> None:
        """Ends the processes."""
        while self._idle:
            self._idle.pop().kill()
