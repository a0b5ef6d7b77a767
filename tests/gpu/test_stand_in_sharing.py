"""The stand-in driver shares memory between processes, and refuses what would be undefined there."""

from __future__ import annotations

from tests.support.cuda_peer import CudaPeer
from tests.support.fake_cuda import FakeCuda

SIZE = 1 << 20


def test_two_processes_share_an_allocation(careless: FakeCuda) -> None:
    with CudaPeer(careless) as owner, CudaPeer(careless) as other:
        memory = owner.ask("allocate", SIZE)
        opened = other.ask("open", owner.ask("export", memory))
        owner.ask("write", memory, "hello")
        assert other.ask("read", opened, 5) == "hello"
        other.ask("write", opened + SIZE - 3, "end")
        assert owner.ask("read", memory + SIZE - 3, 3) == "end"


def test_the_exporting_process_cannot_open_its_own_handle(careless: FakeCuda) -> None:
    with CudaPeer(careless) as owner:
        handle = owner.ask("export", owner.ask("allocate", SIZE))
        assert owner.ask("open", handle) == "CUDA_ERROR_INVALID_CONTEXT"


def test_a_handle_is_opened_once_and_closed_once(careless: FakeCuda) -> None:
    with CudaPeer(careless) as owner, CudaPeer(careless) as other:
        handle = owner.ask("export", owner.ask("allocate", SIZE))
        opened = other.ask("open", handle)
        assert other.ask("open", handle) == "CUDA_ERROR_INVALID_VALUE"
        assert other.ask("close", opened) is None
        assert other.ask("close", opened) == "CUDA_ERROR_INVALID_VALUE"
        assert other.ask("read", opened, 1) == "CUDA_ERROR_INVALID_VALUE"


def test_memory_that_is_open_elsewhere_is_not_freed(careless: FakeCuda) -> None:
    with CudaPeer(careless) as owner, CudaPeer(careless) as other:
        memory = owner.ask("allocate", SIZE)
        opened = other.ask("open", owner.ask("export", memory))
        assert owner.ask("free", memory) == "CUDA_ERROR_INVALID_VALUE"
        other.ask("close", opened)
        assert owner.ask("free", memory) is None


def test_memory_of_the_dead_stays_in_use_while_somebody_has_it_open(careless: FakeCuda) -> None:
    before = careless.in_use_bytes()
    with CudaPeer(careless) as other:
        with CudaPeer(careless) as owner:
            handle = owner.ask("export", owner.ask("allocate", SIZE))
            opened = other.ask("open", handle)
            owner.kill()
        assert careless.in_use_bytes() == before + SIZE + (1 << 20)  # and the other's context
        assert other.ask("read", opened, 1) == "J"
        other.ask("close", opened)
        assert careless.in_use_bytes() == before + (1 << 20)
        assert other.ask("open", handle) == "CUDA_ERROR_INVALID_VALUE"
    assert careless.in_use_bytes() == before


def test_a_forked_child_may_not_use_its_parents_driver(careless: FakeCuda) -> None:
    with CudaPeer(careless) as owner:
        assert owner.ask("fork") == "CUDA_ERROR_NOT_INITIALIZED"
