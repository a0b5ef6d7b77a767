"""The companion socket under fire: packets of any bytes, in any order, with descriptors nobody asked for."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefixd_server.media.dram import DramMedium
from prefixd_server.rpc.companion import Companion

from tests.support.companions import FakeCache, RawPeer, until
from tests.support.fuzzing import Growth, corpus, examples
from tests.support.hostile import mutated
from tests.support.wire import short_directory

MIB = 1 << 20
SESSION = bytes(range(16))
HELLO = json.dumps({"session": SESSION.hex()}).encode()
ASK = json.dumps({"segments": [1, 2, 3, 4]}).encode()
REASONS = {"PACKET_INVALID", "SESSION_UNKNOWN", "SESSION_ATTACHED", "CONNECTION_LIMIT", "HANDSHAKE_TIMEOUT"}

values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=40)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
named = st.dictionaries(st.sampled_from(["session", "segments", "error", "x"]), values, max_size=3)
packets = st.one_of(
    st.just(HELLO),
    st.just(HELLO),
    st.just(ASK),
    mutated(HELLO),
    mutated(ASK),
    st.binary(min_size=1, max_size=200),
    st.one_of(values, named).map(lambda value: json.dumps(value).encode()),
    st.sampled_from([b"[" * 4000, b"x" * 4096, b"x" * 4097, b'{"segments": [' + b"1," * 255 + b"1]}"]),
)


class Gate:
    """A companion socket over real memory, and what it must still be able to do."""

    def __init__(self, runner: asyncio.Runner, directory: Any) -> None:
        self.runner = runner
        self.path = directory / "s.fd"
        self.dram = DramMedium(2 * MIB, 4)
        assert self.dram.wait_prefaulted(30)
        self.cache = FakeCache(self.dram, {}, {1: "a", 2: "a", 3: "b"})
        self.companion = Companion(self.path, "a", self.cache, 0o660, "", connection_count_max=4)
        runner.run(self.companion.open())

    def attack(self, sent: list[bytes], descriptor_count: int = 0) -> list[tuple[dict[str, object], int]]:
        """Sends packets on one connection, then hangs up; (answer, descriptors with it) of each."""
        return self.runner.run(self._attack(sent, descriptor_count))

    async def _attack(self, sent: list[bytes], descriptor_count: int) -> list[tuple[dict[str, object], int]]:
        self.cache.sessions[SESSION] = "a"
        peer = RawPeer(self.path)
        gifts = [os.dup(peer.socket.fileno()) for _ in range(descriptor_count)]
        answers = []
        try:
            for packet in sent:
                socket.send_fds(peer.socket, [packet], gifts)
            peer.socket.shutdown(socket.SHUT_WR)
            while True:
                answer, fds = await peer.receive()
                for fd in fds:
                    os.close(fd)
                if answer is None:
                    break
                answers.append((answer, len(fds)))
        except (BrokenPipeError, ConnectionResetError):
            # It has hung up on us with packets of ours unread.
            assert sent
        finally:
            peer.close()
            for gift in gifts:
                os.close(gift)
        await until(lambda: self.companion.connection_count == 0)
        await until(lambda: self.companion.watched_count == 0)
        return answers

    def is_well(self) -> None:
        """A good client is served."""
        answers = self.attack([HELLO, ASK])
        assert answers[0] == ({"ok": True}, 0)
        assert [(answer.get("segment"), count) for answer, count in answers[1:]] == [
            (1, 1),
            (2, 1),
            (3, 0),
            (4, 0),
        ]

    def close(self) -> None:
        """Ends it."""
        self.runner.run(self.companion.close())
        self.dram.close()


@pytest.fixture(scope="module")
def gate() -> Iterator[Gate]:
    """See Gate; nothing has grown at the end."""
    with short_directory() as directory, asyncio.Runner() as runner, ExitStack() as closing:
        made = Gate(runner, directory)
        closing.callback(made.close)
        made.is_well()
        growth = Growth()
        yield made
        made.is_well()
        growth.check()


def check_answers(answers: list[tuple[dict[str, object], int]]) -> None:
    """Each answer is one of the protocol's; a refusal has its reason and its words, and comes last."""
    for place, (answer, descriptor_count) in enumerate(answers):
        if "segment" in answer:
            assert descriptor_count == ("error" not in answer)
        elif "error" in answer:
            assert place == len(answers) - 1
            assert answer["error"] in REASONS
            assert answer["message"]
        else:
            assert answer == {"ok": True}
            assert place == 0


@examples(300)
@given(st.lists(packets, max_size=5), st.integers(0, 3))
def test_every_packet_is_answered_or_refused_with_its_reason(
    gate: Gate, sent: list[bytes], descriptor_count: int
) -> None:
    answers = gate.attack(sent, descriptor_count)
    check_answers(answers)
    handed_out = sum(count for _, count in answers)
    assert not handed_out or sent[0] == HELLO or json.loads(sent[0])["session"].lower() == SESSION.hex()


@pytest.mark.parametrize("path", corpus("companion"), ids=lambda path: path.name)
@pytest.mark.parametrize("first", [[], [HELLO]], ids=["as hello", "as request"])
def test_the_corpus_is_refused_with_its_reason(gate: Gate, path: Any, first: list[bytes]) -> None:
    answers = gate.attack([*first, path.read_bytes()])
    check_answers(answers)
    assert answers[-1][0]["error"] == "PACKET_INVALID"
