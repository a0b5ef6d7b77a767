"""GPU memory: what copies by way of our code cost, against the device's own copy rate in the same run.

Runs of 64 blocks of 2 MiB. The segments belong to another process, as the daemon's do to an engine. Says so
and ends well where there is no GPU; docs/gpu.md keeps the output of machines that have one.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
from prefixd.v1 import types_pb2
from prefixd_client.copy import Span
from prefixd_client.device import DeviceMap
from prefixd_client.device_copy import Way, read_by
from prefixd_client.device_memory import DeviceMemory, checksum_of
from prefixd_client.device_paged import scatter
from prefixd_client.namespace import ChecksumAlgorithm
from prefixd_client.segments import MappedSegment
from prefixd_server.media.cuda import CudaFault, Gpu
from prefixd_server.media.hbm import HbmMedium
from prefixd_server.media.memfd import Memfd

BLOCK_BYTES = 2 << 20
BLOCK_COUNT = 64
RUN_BYTES = BLOCK_COUNT * BLOCK_BYTES
REPEAT_COUNT = 15
DEVICE_SHARE_MIN = 0.80
HOST_SHARE_MIN = 0.85
SCATTER_SHARE_MIN = 0.60
LAYER_COUNT = 32
TIMEOUT_S = 30.0


def owner(pipe: Connection, uuid: str, data: bytes) -> None:
    """The daemon's part: one segment, filled, until the bench is over."""
    medium = HbmMedium(uuid, RUN_BYTES, 1)
    medium.open()
    medium.allocate(0)
    medium.write(0, 0, memoryview(data))
    pipe.send(medium.handle(0))
    pipe.recv()


def rate(work: Callable[[], object]) -> float:
    """GB/s of a run, the median of many."""
    work()
    times = []
    for _ in range(REPEAT_COUNT):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return RUN_BYTES / statistics.median(times) / 1e9


def told(name: str, found: float, own: float, share_min: float) -> bool:
    """Prints one line; whether the limit is kept."""
    kept = found >= share_min * own
    share = f"{found / own:.0%} of {own:.1f} GB/s"
    print(f"{name:<44} {found:8.1f} GB/s  {share:>18}  limit {share_min:.0%}  {'ok' if kept else 'MISSED'}")
    return kept


def main() -> int:
    """0 when every limit is kept, or nothing can be measured."""
    try:
        gpu = Gpu()
    except CudaFault as fault:
        print(f"no GPU here, nothing is measured: {fault}")
        return 0
    name = gpu.call("cuDeviceGetName", 64, gpu.call("cuDeviceGet", 0)).split(b"\0")[0].decode()
    print(f"{name}, {gpu.uuid}, {gpu.free_bytes() / 2**30:.1f} GiB free")
    data = np.random.default_rng(1).bytes(RUN_BYTES)
    near, far = get_context("spawn").Pipe()
    daemon = get_context("spawn").Process(target=owner, args=(far, gpu.uuid, data), daemon=True)
    daemon.start()
    try:
        kept = measure(gpu, near.recv(), data)
    finally:
        near.send("over")
        daemon.join()
    if name.startswith("stand-in"):
        print("a stand-in driver: the numbers mean nothing")
        return 0
    return 0 if kept else 1


def measure(gpu: Gpu, handle: bytes, data: bytes) -> bool:
    """All lines; whether every limit is kept."""
    device = DeviceMap(gpu.uuid, TIMEOUT_S)
    device.learn(
        [
            types_pb2.DeviceSegment(
                segment_id=1, ipc_handle=handle, device_uuid=gpu.uuid, length_bytes=RUN_BYTES
            )
        ]
    )
    shared, _ = device.segment(1)
    source, target, stream = gpu.allocate(RUN_BYTES), gpu.allocate(RUN_BYTES), gpu.stream()
    blocks = range(0, RUN_BYTES, BLOCK_BYTES)
    own = rate(lambda: gpu.copy(target, source, RUN_BYTES, stream, TIMEOUT_S))
    copies = [(target + at, shared + at, BLOCK_BYTES) for at in blocks]
    kept = [told("get, device to device", rate(lambda: device.copy(copies, stream)), own, DEVICE_SHARE_MIN)]
    kept += host_to_device(gpu, device, target, stream)
    kept += torch_lines(device, shared, target, stream, data, own)
    device.close()
    return all(kept)


def host_to_device(gpu: Gpu, device: DeviceMap, target: int, stream: int) -> list[bool]:
    """A mapped DRAM segment to the device, beside the rate of pinned memory of our own."""
    plain = np.zeros(RUN_BYTES + 4096, np.uint8)
    base = -(-plain.ctypes.data // 4096) * 4096
    gpu.pin(base, RUN_BYTES)
    own = rate(lambda: gpu.copy(target, base, RUN_BYTES, stream, TIMEOUT_S))
    gpu.unpin(base)
    memory = Memfd(RUN_BYTES)
    segment = MappedSegment(2, memory.fd, RUN_BYTES)
    ctypes.memset(segment.address, 1, RUN_BYTES)
    device.pin(segment)
    copies = [(target + at, segment.address + at, BLOCK_BYTES) for at in range(0, RUN_BYTES, BLOCK_BYTES)]
    found = rate(lambda: device.copy(copies, stream))
    return [told("get, DRAM segment to device", found, own, HOST_SHARE_MIN)]


def torch_lines(
    device: DeviceMap, shared: int, target: int, stream: int, data: bytes, own: float
) -> list[bool]:
    """What needs torch on the device: verified gets, and a scatter into a paged cache as vLLM has it."""
    import torch  # noqa: PLC0415 - takes seconds

    if not torch.cuda.is_available():
        print("torch sees no GPU: verified gets and the scatter are not measured")
        return []
    way = Way(ChecksumAlgorithm.LANES_64, device, stream, True)
    pieces = [((target + at, BLOCK_BYTES),) for at in range(0, RUN_BYTES, BLOCK_BYTES)]
    sums = [
        checksum_of(data[at : at + BLOCK_BYTES], way.algorithm) for at in range(0, RUN_BYTES, BLOCK_BYTES)
    ]
    span = Span(shared, BLOCK_BYTES, 0, BLOCK_COUNT)
    assert read_by(way, span, pieces, sums, lambda: False) == (BLOCK_COUNT, False)
    verified = rate(lambda: read_by(way, span, pieces, sums, lambda: False))
    print(f"{'get, device to device, verified (LANES_64)':<44} {verified:8.1f} GB/s  no limit")
    run = torch.as_tensor(DeviceMemory(shared, RUN_BYTES), device="cuda").view(BLOCK_COUNT, BLOCK_BYTES)
    part = BLOCK_BYTES // LAYER_COUNT // 2
    layers = [
        torch.zeros(2 * BLOCK_COUNT, part, dtype=torch.bfloat16, device="cuda") for _ in range(LAYER_COUNT)
    ]
    ids = torch.randperm(2 * BLOCK_COUNT, device="cuda")[:BLOCK_COUNT]

    def work() -> None:
        scatter(run, layers, ids)
        torch.cuda.current_stream().synchronize()

    return [told("scatter into a paged KV cache, 32 layers", rate(work), own, SCATTER_SHARE_MIN)]


if __name__ == "__main__":
    sys.exit(main())
