"""A vLLM worker on a GPU without vLLM: the connector's loads and saves over KV in device memory.

Run as a program it is the worker's process, and holds the scheduler's client too; commands as in
tests/support/engine_commands.py. Over the stand-in driver torch's part is played by the driver's own copies;
on a real GPU it is torch's.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefixd_client import Client, ClientOptions
from prefixd_client.connectors.vllm.device_copies import DeviceCopies
from prefixd_client.connectors.vllm.jobs import LoadJob, SaveJob
from prefixd_client.connectors.vllm.kv_memory import KvMemory
from prefixd_client.connectors.vllm.loads import Loads
from prefixd_client.connectors.vllm.saves import Saves, SaveWay
from prefixd_client.connectors.vllm.tallies import Tallies
from prefixd_client.device_driver import Driver
from prefixd_client.device_memory import DeviceMemory
from prefixd_client.leases import ReadLease
from prefixd_client.namespace import ChecksumAlgorithm, KvGroup, NamespaceSpec

from tests.support.engine_churn import block_data, run_hashes
from tests.support.engine_commands import answer_commands
from tests.support.engine_process import PATIENT, EngineProcess
from tests.support.fake_cuda import FakeCuda, uuid_of
from tests.support.repository import ROOT
from tests.support.stand_in_gpu import ENDED_TIMEOUT_S, Gate, StandInGpu

BLOCKS = 32
LAYERS = {"layer0": (2, 16, 256), "layer1": (2, 16, 256), "narrow": (1, 16, 128)}
"""Shape of a block in float16: heads, tokens, K and V."""
WIDTH = 2
BLOCK_BYTES = sum(math.prod(shape) * WIDTH for shape in LAYERS.values())
STAGING_BYTES = 3 * BLOCK_BYTES


class VllmWorker(EngineProcess):
    """The process, from outside; one with the same instance is a rank of the same engine."""

    def __init__(
        self, socket: Path, machine: FakeCuda, *, instance: str, device: int = 0, shard: int = 0, **more: Any
    ) -> None:
        setting = {"device": uuid_of(device), "shard": shard, "shard_count": 1, **more}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.vllm_worker", str(socket), instance, json.dumps(setting)],
            env=os.environ | machine.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        self.instance_id = ""


def stand_in_gpu(uuid: str) -> StandInGpu:
    """A worker's, over the stand-in driver."""
    return StandInGpu(uuid, LAYERS, BLOCKS, "torch.float16")


class TorchGpu:
    """The same on a real GPU."""

    def __init__(self, uuid: str) -> None:
        import torch  # noqa: PLC0415 - takes seconds, and the stand-in does without
        from prefixd_client.connectors.vllm.torch_paging import TorchPaging  # noqa: PLC0415 - as above

        self._torch: Any = torch
        device = torch.device("cuda", Driver(uuid).ordinal)
        torch.cuda.set_device(device)
        self.tensors = {
            name: torch.zeros(BLOCKS, *shape, dtype=torch.float16, device=device)
            for name, shape in LAYERS.items()
        }
        self.memory = KvMemory.of(self.tensors, list(LAYERS), BLOCKS)
        self._paging = TorchPaging(self.memory)
        self.compute_stream = self._paging.compute_stream
        self.gate = Gate()

    def gather(self, block_ids: Sequence[int], run: DeviceMemory, stream: int) -> None:
        self.gate.pass_through()
        self._paging.gather(block_ids, run, stream)

    def scatter(self, run: DeviceMemory, block_ids: Sequence[int], stream: int) -> None:
        self.gate.pass_through()
        self._paging.scatter(run, block_ids, stream)

    def write(self, block: int, data: bytes) -> None:
        held, at = self._torch.frombuffer(bytearray(data), dtype=self._torch.float16), 0
        for tensor in self.tensors.values():
            part = held[at : at + tensor[block].numel()]
            tensor[block].copy_(part.view(tensor.shape[1:]), non_blocking=True)
            at += part.numel()

    def read(self, block: int) -> bytes:
        return b"".join(tensor[block].cpu().numpy().tobytes() for tensor in self.tensors.values())


class WorkerCommands:
    """What the process does for a test."""

    def __init__(
        self, client: Client, scheduler: Client, device: str, shard: int, shard_count: int, timeout_s: float
    ) -> None:
        is_real = os.environ.get("PREFIXD_REAL_GPU") == "1"
        self._gpu: Any = TorchGpu(device) if is_real else stand_in_gpu(device)
        self._shard = shard
        spec = NamespaceSpec(
            model_id="n",
            weights_fingerprint="revision:1",
            model_config_fingerprint="00",
            kv_dtype="float16",
            kv_layout="test",
            attention_backend="none",
            block_tokens=16,
            kv_groups=(KvGroup(block_bytes=BLOCK_BYTES, layer_count=len(LAYERS)),),
            hash_algorithm="vllm-sha256",
            engine_name="vllm",
            layout_version="1",
            tensor_parallel_size=shard_count,
            shard_count=shard_count,
            checksum_algorithm=ChecksumAlgorithm.LANES_64,
        )
        self._namespace = client.namespace(spec)
        self._acquires = scheduler.namespace(spec)
        self._client = client
        self._copies = [
            DeviceCopies(self._gpu.memory, Driver(device), self._gpu, STAGING_BYTES, timeout_s)
            for _ in range(2)
        ]
        tallies = Tallies()
        self._loads = Loads(self._copies[0], shard, lambda _: self._namespace, tallies)
        way = SaveWay(lambda _: self._namespace, client.run, 1.0)
        self._saves = Saves(self._copies[1], way, shard, writes=True, tallies=tallies)
        self._jobs = 0

    def compute(self, run: str, first: int, blocks: list[int]) -> None:
        """The engine computes blocks first, ... of a run into these of its KV cache; nothing waits for it."""
        for block, key in zip(blocks, run_hashes(run, first + len(blocks))[first:], strict=True):
            self._gpu.write(block, block_data(key, self._shard, BLOCK_BYTES))

    def start_save(self, run: str, blocks: list[int]) -> None:
        """Starts to save a run from its root."""
        self._jobs += 1
        hashes = tuple(run_hashes(run, len(blocks)))
        self._saves.start(SaveJob(self._jobs, "r", None, b"", hashes, tuple(blocks), None))  # type: ignore[arg-type]  # the namespace is found without

    def save_ended(self) -> int:
        """Waits for the save's end; how many leading blocks are kept."""
        for _ in range(int(ENDED_TIMEOUT_S / 0.001)):
            counts = self._saves.take().counts
            if self._jobs in counts:
                return counts[self._jobs]
            threading.Event().wait(0.001)
        raise AssertionError("the save does not end")

    def save(self, run: str, blocks: list[int]) -> int:
        """Saves, and waits for the end as the engine's steps do."""
        self.start_save(run, blocks)
        return self.save_ended()

    def acquire(self, run: str, count: int) -> dict[str, Any]:
        """What the scheduler finds: hits by tier, and the token."""
        lease = self._acquires.acquire(run_hashes(run, count), shards=())
        if lease is None:
            return {"hits": [], "token": ""}
        return {"hits": [[tier.name, blocks] for tier, blocks in lease.run.hits], "token": self._given(lease)}

    @staticmethod
    def _given(lease: ReadLease) -> str:
        return lease.hand_over().hex()

    def start_load(self, token: str, blocks: list[int], start: int = 0, in_step: bool = False) -> None:
        """Starts to load blocks of a lease into these of the KV cache."""
        self._jobs += 1
        self._loads.start(LoadJob(self._jobs, "r", None, bytes.fromhex(token), start, tuple(blocks), in_step))  # type: ignore[arg-type]  # as above

    def loaded(self) -> dict[str, Any] | None:
        """What the last load has come to, when it has ended."""
        results = self._loads.take()
        if not results.counts:
            return None
        return {"good": results.counts[self._jobs], "bad": sorted(results.bad), "done": sorted(results.done)}

    def load(self, token: str, blocks: list[int], start: int = 0) -> dict[str, Any]:
        """Loads, and waits for the end as the engine's steps do."""
        self.start_load(token, blocks, start)
        return self.load_ended()

    def load_ended(self) -> dict[str, Any]:
        """Waits for the load's end."""
        for _ in range(int(ENDED_TIMEOUT_S / 0.001)):
            found = self.loaded()
            if found is not None:
                return found
            threading.Event().wait(0.001)
        raise AssertionError("the load does not end")

    def right(self, run: str, first: int, blocks: list[int]) -> list[bool]:
        """Which of these blocks of the KV cache hold blocks first, ... of the run, bit by bit."""
        keys = run_hashes(run, first + len(blocks))[first:]
        return [
            self._gpu.read(block) == block_data(key, self._shard, BLOCK_BYTES)
            for block, key in zip(blocks, keys, strict=True)
        ]

    def damage(self, run: str, index: int) -> None:
        """Overwrites a part of a block where it lies in the cache, with what the staging piece holds."""
        source = self._copies[0]._staging
        with self._namespace.acquire(run_hashes(run, index + 1), shards=(self._shard,)) as lease:  # type: ignore[union-attr]  # it hits
            way = lease._way([DeviceMemory(source, BLOCK_BYTES)], 0)
            extents = lease._extents[self._shard, 0]
            for span, own_way in lease._spans(extents, index, index + 1, BLOCK_BYTES, way):
                own_way.device.copy([(span.address, source, 100)], 0)

    def shut_gate(self) -> None:
        """The next load stops before it writes to the KV cache, the next save before it reads."""
        self._gpu.gate.reached.clear()
        self._gpu.gate.is_open.clear()

    def wait_at_gate(self) -> None:
        """Returns when one has come there."""
        assert self._gpu.gate.reached.wait(ENDED_TIMEOUT_S)

    def open_gate(self) -> None:
        """Lets it go on."""
        self._gpu.gate.is_open.set()

    def lost(self) -> list[bool]:
        """Whether loads and saves have given the device up."""
        return [copies.is_lost for copies in self._copies]

    def wait_ready(self, not_boot: str = "") -> str:
        """Waits until both clients have a session, in another boot than this; which boot it is."""
        for _ in range(int(ENDED_TIMEOUT_S / 0.005)):
            found = [used.status() for used in (self._client, self._acquires._client)]
            if all(status.state == "ready" and status.boot_id.hex() != not_boot for status in found):
                return found[0].boot_id.hex()
            threading.Event().wait(0.005)
        raise AssertionError("no session")

    def wait_away(self) -> None:
        """Waits until the worker's client has lost its session."""
        for _ in range(int(ENDED_TIMEOUT_S / 0.005)):
            if self._client.status().state != "ready":
                return
            threading.Event().wait(0.005)
        raise AssertionError("still ready")

    def close(self) -> None:
        """Ends loads and saves; everything of theirs is given back."""
        self._loads.close()
        self._saves.close()


def main() -> None:
    """See the module."""
    socket, instance, text = sys.argv[1:]
    setting = {"timeout_s": 10.0, "redeemers": None} | json.loads(text)
    redeemers = setting.pop("redeemers")
    if redeemers is None:
        redeemers = [setting["device"]]
    own = ClientOptions(**PATIENT, device_uuid=setting["device"])
    others = ClientOptions(**PATIENT, redeemer_devices=tuple(redeemers))
    with (
        Client(socket, instance, "test", own) as client,
        Client(socket, instance, "test", others) as scheduler,
    ):
        answer_commands(client, WorkerCommands(client, scheduler, **setting))


if __name__ == "__main__":
    main()
