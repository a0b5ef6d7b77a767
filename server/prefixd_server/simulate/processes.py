"""Runs jobs in parallel processes, and tells of each that is done."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_all(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    process_count: int,
    done: Callable[[Result], None],
) -> list[Result]:
    """`work` of every job; results in the jobs' order.

    Args:
        work: a module's function, since another process calls it.
        process_count: one runs everything here.
        done: told of each result as it comes.
    """
    if process_count <= 1 or len(jobs) <= 1:
        results = []
        for job in jobs:
            results.append(work(job))
            done(results[-1])
        return results
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(process_count, len(jobs)), mp_context=context) as pool:
        futures: list[Future[Result]] = [pool.submit(work, job) for job in jobs]
        for future in as_completed(futures):
            done(future.result())
        return [future.result() for future in futures]
