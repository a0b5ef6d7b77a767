"""The same calls to our storage and to SGLang's own file storage: the same answers, and the same bytes.

SGLang's controller makes the calls, by its own functions over its own host pools. Its file storage has no
zero-copy calls, so there the controller's copying ones are the reference for both of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tests.support.sglang_contract import (  # noqa: E402 - needs SGLang
    Controller,
    behind,
    file_storage,
    host_pool,
    keys,
    scrambled,
    storage_config,
)

LAYOUTS = ("layer_first", "page_first", "page_first_direct")


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    """The host pool's."""
    return str(request.param)


@pytest.fixture
def reference(layout: str, tmp_path: Path) -> Controller:
    """SGLang's file storage."""
    pool = host_pool(layout)
    return Controller(file_storage(pool, storage_config(), tmp_path), pool, zero_copy=False)


@pytest.fixture(params=[True, False], ids=["zero-copy", "copying"])
def ours(
    request: pytest.FixtureRequest, layout: str, daemon: Any, storage_of: Callable[..., Any]
) -> Controller:
    """Our storage over an equal pool."""
    pool = host_pool(layout)
    return Controller(storage_of(daemon, pool), pool, zero_copy=request.param)


def test_a_prompt_that_grows_is_saved_found_and_loaded_alike(ours, reference) -> None:
    run = keys(12)
    told = []
    for controller in (ours, reference):
        saved, loaded = controller.room(12), controller.room(12)
        answers = [controller.hits(run)]
        answers += [controller.load(run, loaded), controller.save(run[:5], saved[: 5 * 16])]
        answers += [controller.hits(run), controller.hits(run[:5]), controller.hits(run[3:5], *run[:3])]
        answers += [controller.save(run[:5], saved[: 5 * 16]), controller.load(run, loaded)]
        answers += [controller.save(run[5:], saved[5 * 16 :], *run[:5]), controller.hits(run)]
        before = controller.bytes_at(saved)
        scrambled(controller.pool, seed=1)
        answers += [controller.load(run, loaded), controller.bytes_at(loaded) == before]
        told.append((answers, controller.bytes_at(loaded)))
    assert told[0] == told[1]
    assert told[0][0][0] == 0
    assert told[0][0][-2:] == [12, True]


def test_prompts_that_part_share_what_they_have_in_common(ours, reference) -> None:
    stem = keys(4)
    branches = [stem + keys(3, seed, after=stem[-1]) for seed in (1, 2)]
    told = []
    for controller in (ours, reference):
        answers = []
        for branch in branches:
            indices = controller.room(7)
            answers += [controller.hits(branch), controller.save(branch, indices)]
        answers += [controller.hits(branch) for branch in (*branches, keys(7, seed=3))]
        answers += [controller.load(branches[1], controller.room(7))]
        told.append(answers)
    assert told[0] == told[1] == [0, True, 4, True, 7, 7, 0, 7]


def test_the_calls_for_single_blocks_answer_alike(ours, reference) -> None:
    run = keys(4)
    told = []
    for controller in (ours, reference):
        storage, pool = controller.storage, controller.pool
        flat = [pool.get_data_page(int(first)) for first in controller.room(4)[::16]]
        answers: list[Any] = [storage.batch_exists(run, behind()), storage.exists(run[0])]
        answers += [storage.get(run[0], pool.get_dummy_flat_data_page())]
        answers += [storage.set(run[0], flat[0]), storage.set(run[0], flat[0]), storage.exists(run[0])]
        answers += [storage.batch_set(run[1:3], flat[1:3]), storage.batch_exists(run)]
        targets = [pool.get_dummy_flat_data_page() for _ in run]
        found = storage.batch_get(run, targets)
        answers += [block is None or block is target for block, target in zip(found, targets, strict=True)]
        answers += [None if block is None else block.tolist() for block in found]
        single = storage.get(run[1], pool.get_dummy_flat_data_page())
        told.append([*answers, single.tolist() == flat[1].tolist()])
    assert told[0] == told[1]
    assert told[0][:9] == [0, False, None, True, True, True, True, 3, True]


def test_what_one_way_has_saved_the_other_loads(layout, daemon, storage_of) -> None:
    run = keys(6)
    pools = [host_pool(layout), scrambled(host_pool(layout), seed=1)]
    writer, reader = (
        Controller(storage_of(daemon, pool), pool, zero_copy=zero_copy)
        for pool, zero_copy in zip(pools, (True, False), strict=True)
    )
    saved, loaded = writer.room(6), reader.room(6)
    assert writer.save(run, saved)
    assert reader.load(run, loaded) == 6
    assert reader.bytes_at(loaded) == writer.bytes_at(saved)
