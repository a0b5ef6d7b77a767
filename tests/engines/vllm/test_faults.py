"""The daemon dies, hangs and comes back in the middle of everything: replies stay right, engines run on."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.vllm_harness import VOCABULARY, Harness, right_reply

SHORT = {"lookup_timeout_s": 0.1, "save_patience_s": 0.2}
REATTACH_S = 20.0


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, count)]


def wait_until(state: Callable[[], bool]) -> None:
    """Polls another process's effects, which nothing here can wait on."""
    deadline = time.monotonic() + REATTACH_S
    while not state():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def wait_attached(engine: Harness) -> None:
    """Returns when every client of the engine has a session."""
    clients = [engine.connector._client, *(worker.side._client for worker in engine.workers)]
    wait_until(lambda: all(client.status().state == "ready" for client in clients))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_without_a_daemon_computes_and_attaches_when_one_comes(
    own_daemon, engine_of, ranks
) -> None:
    own_daemon.kill()
    prompt = tokens(300)
    with engine_of(own_daemon, ranks=ranks, **SHORT) as engine:
        assert engine.ask(prompt) == right_reply(prompt, 4)
        own_daemon.start()
        wait_attached(engine)
        assert engine.ask(prompt) == right_reply(prompt, 4)
        assert engine.ask(prompt) == right_reply(prompt, 4)
        assert engine.cached == {"r1": 0, "r2": 0, "r3": 288}


@pytest.mark.parametrize("way", [{}, {"async_load": False}, {"ranks": 2}], ids=str)
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3, 5, 8])
def test_a_daemon_that_is_killed_costs_no_reply(own_daemon, engine_of, way, steps_before) -> None:
    prompt = tokens(500)
    with engine_of(own_daemon, **way, **SHORT) as engine:
        engine.ask(prompt[:300])
        names = [engine.add(prompt, 40), engine.add(tokens(200, seed=1), 40)]
        for _ in range(steps_before):
            engine.step()
        own_daemon.kill()
        engine.run()
        assert engine.replies[names[0]] == right_reply(prompt, 40)
        assert engine.replies[names[1]] == right_reply(tokens(200, seed=1), 40)
        assert engine.ask(prompt) == right_reply(prompt, 4)


@pytest.mark.parametrize("steps_before", [0, 2, 4])
def test_a_daemon_that_hangs_costs_no_reply_and_is_used_again(own_daemon, engine_of, steps_before) -> None:
    prompt = tokens(500)
    with engine_of(own_daemon, **SHORT) as engine:
        engine.ask(prompt)
        engine.add(prompt, 40)
        for _ in range(steps_before):
            engine.step()
        own_daemon.signal(signal.SIGSTOP)
        engine.run()
        assert engine.replies["r2"] == right_reply(prompt, 40)
        assert engine.ask(tokens(300, seed=1)) == right_reply(tokens(300, seed=1), 4)
        own_daemon.signal(signal.SIGCONT)
        wait_attached(engine)
        assert engine.ask(prompt) == right_reply(prompt, 4)
        assert engine.cached["r4"] == 480


def test_a_restarted_daemon_is_filled_again(own_daemon, engine_of) -> None:
    prompt = tokens(300)
    with engine_of(own_daemon, **SHORT) as engine:
        engine.ask(prompt)
        own_daemon.kill()
        own_daemon.start()
        wait_attached(engine)
        for expected in (0, 288):
            assert engine.ask(prompt) == right_reply(prompt, 4)
            assert engine.cached[max(engine.cached, key=lambda name: int(name[1:]))] == expected
        assert own_daemon.problems() == []


def test_the_schedulers_thread_makes_no_call_to_the_daemon(own_daemon, engine_of, monkeypatch) -> None:
    """So no hook can wait for one, whether the daemon answers or is stopped."""
    with engine_of(own_daemon, block_count=40, **SHORT) as engine:
        callers: set[int] = set()
        client = engine.connector._client
        send = client.run

        def watched(call: Any) -> Any:
            callers.add(threading.get_ident())
            return send(call)

        monkeypatch.setattr(client, "run", watched)
        for number in (signal.SIGCONT, signal.SIGSTOP, signal.SIGCONT):
            own_daemon.signal(number)
            names = [engine.add(tokens(250, seed=seed), 100) for seed in range(6)]
            engine.step()
            engine.abort(names[0])
            engine.run()
            engine.scheduler.reset_prefix_cache(reset_connector=True)
        assert callers
        assert threading.get_ident() not in callers
