"""vLLM's OpenAI server as a process, for tests that ask it over HTTP as users do."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.support.vllm_process import ROOT, engine_environment

READY_TIMEOUT_S = 180.0
REPLY_TIMEOUT_S = 120.0


class VllmServer:
    """One server on a port of its own; a context manager that leaves nothing running.

    Args:
        name: of the log file.
        options: command-line options without their dashes; True for a flag, dicts become JSON.
        directory: for its log and its caches.
    """

    def __init__(self, name: str, options: dict[str, Any], directory: Path) -> None:
        self.log_path = directory / f"{name}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for option, value in (options | {"host": "127.0.0.1", "port": self.port}).items():
            command.append("--" + option.replace("_", "-"))
            if value is not True:
                command.append(json.dumps(value) if isinstance(value, dict) else str(value))
        environment = engine_environment(
            directory, VLLM_ENABLE_V1_MULTIPROCESSING="1", OMP_WAIT_POLICY="passive"
        )
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=ROOT, env=environment, start_new_session=True
            )

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        """What it has said so far."""
        return self.log_path.read_text()

    def __enter__(self) -> VllmServer:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._healthy():
            assert self.process.poll() is None, f"the server ended: {self.log[-4000:]}"
            assert time.monotonic() < deadline, f"the server is not ready: {self.log[-4000:]}"
            time.sleep(0.2)  # polls another process: there is nothing to wait on
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        """Ends the server and the processes that it has started: they are a process group."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def complete(self, prompts: Sequence[list[int]], **fields: Any) -> list[dict[str, Any]]:
        """Replies to prompts (token ids) that are all in flight at once: {"tokens", "cached", "reason"}.

        salts: cache salt per prompt. Other fields go into every request.
        """
        return asyncio.run(self._complete(prompts, fields.pop("salts", None), fields))

    def post(self, path: str, **parameters: Any) -> None:
        """A call of the server's own, such as /reset_prefix_cache."""
        httpx.post(self.url + path, params=parameters, timeout=REPLY_TIMEOUT_S).raise_for_status()

    def metric(self, name: str) -> float:
        """A counter from /metrics; 0 while it has not been counted."""
        text = httpx.get(f"{self.url}/metrics", timeout=REPLY_TIMEOUT_S).text
        values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(name + "{")]
        return sum(map(float, values))

    async def _complete(
        self, prompts: Sequence[list[int]], salts: Sequence[str] | None, fields: dict[str, Any]
    ) -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=len(prompts))
        async with httpx.AsyncClient(base_url=self.url, timeout=REPLY_TIMEOUT_S, limits=limits) as client:
            return list(
                await asyncio.gather(
                    *(
                        _reply(client, tokens, fields | ({"cache_salt": salts[index]} if salts else {}))
                        for index, tokens in enumerate(prompts)
                    )
                )
            )

    def _healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False


async def _reply(client: httpx.AsyncClient, tokens: list[int], fields: dict[str, Any]) -> dict[str, Any]:
    request = {"prompt": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True} | fields
    answer = await client.post("/v1/completions", json=request)
    answer.raise_for_status()
    told = answer.json()
    (choice,) = told["choices"]
    details = told["usage"].get("prompt_tokens_details") or {}
    return {
        "tokens": choice["token_ids"],
        "cached": int(details.get("cached_tokens") or 0),
        "reason": choice["finish_reason"],
    }
