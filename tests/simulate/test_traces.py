"""Reading request logs: both forms, packed or not, and what is said of a line that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import zstandard
from prefixd_server.base.errors import ConfigError
from prefixd_server.base.types import StopReason
from prefixd_server.simulate.traces import load_tokenizer, read_trace


def line(at_ms: int, ids: list[int], **more: Any) -> dict[str, Any]:
    known = {"timestamp_ms": at_ms, "input_length": 512 * len(ids), "output_length": 5, "block_tokens": 512}
    return known | {"hash_ids": ids} | more


def written(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in lines))
    return path


TWO = [line(3000, [7, 9], stop="tool_use"), line(1000, [7, 8], stop="end_turn")]


def test_requests_come_in_order_of_arrival_with_dense_ids(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "log.jsonl", TWO))
    assert trace.name == "log"
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert [trace.run(i).tolist() for i in range(2)] == [[0, 1], [0, 2]]
    assert trace.block_count == 3
    assert trace.stops == (StopReason.END_TURN, StopReason.TOOL_USE)


def test_a_packed_trace_of_several_frames_is_read_whole(tmp_path: Path) -> None:
    plain = written(tmp_path / "log.jsonl", TWO)
    packed = tmp_path / "log.jsonl.zst"
    lines = plain.read_bytes().splitlines(keepends=True)
    packed.write_bytes(b"".join(zstandard.compress(part) for part in lines))
    assert read_trace(packed).ids.tolist() == read_trace(plain).ids.tolist()
    assert read_trace(packed).name == "log"


@pytest.mark.parametrize(
    "wrong",
    [
        '{"timestamp_ms": 1}',
        "[1, 2]",
        "no json",
        json.dumps(line(5, [7]) | {"output_length": -1}),
        json.dumps(line(5, [7]) | {"output_length": "many"}),
        json.dumps(line(5, [7]) | {"hash_ids": [1.5]}),
        json.dumps(line(5, [7]) | {"hash_ids": [[1], [2]]}),
        json.dumps(line(5, [7]) | {"block_tokens": 16}),
        json.dumps(line(5, [7]) | {"block_tokens": 512.5}),
        json.dumps(line(5, [7]) | {"timestamp_ms": float("nan")}),
        json.dumps(line(5, [7]) | {"timestamp_ms": float("inf")}),
        json.dumps(line(5, [7]) | {"input_length": 10**30}),
        json.dumps(line(5, [7]) | {"output_length": 10**30}),
        json.dumps(line(5, [2**80])),
        json.dumps(line(5, [7, 9, 7])),
        '{"timestamp_ms": ' + "1" * 5000 + "}",
        "[" * 100_000,
    ],
)
def test_a_wrong_line_is_named_with_its_file_and_number(tmp_path: Path, wrong: str) -> None:
    path = written(tmp_path / "log.jsonl", TWO)
    path.write_text(path.read_text() + "\n" + wrong + "\n")
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert raised.value.reason == "TRACE_UNREADABLE"
    assert f"{path}:4:" in str(raised.value)


def test_a_line_that_is_no_text_is_named_however_far_the_file_was_read(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", TWO)
    path.write_bytes(path.read_bytes() + b"\xff\n")
    with pytest.raises(ConfigError, match=f"{path}:3:"):
        read_trace(path)


@pytest.mark.parametrize("tokens", [0, -512])
def test_blocks_without_tokens_are_refused(tmp_path: Path, tokens: int) -> None:
    path = written(tmp_path / "log.jsonl", [line(1, [7], block_tokens=tokens)])
    with pytest.raises(ConfigError, match=f"{path}:1:.*block_tokens is {tokens}"):
        read_trace(path)


def test_hashes_of_64_bits_are_whole_numbers(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", [line(1, [2**63 + 5, 3]), line(2, [2**63 + 5, 2**64 - 1])])
    trace = read_trace(path)
    first, second = (trace.run(at).tolist() for at in range(2))
    assert first[0] == second[0]
    assert len({*first, *second}) == 3


def test_an_id_that_follows_two_different_blocks_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "log.jsonl", [line(1, [7, 8]), line(2, [6, 8])])
    with pytest.raises(ConfigError, match="id 8 follows different blocks"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("", "TRACE_EMPTY"), (json.dumps(line(1, []) | {"block_tokens": 0}), "TRACE_WITHOUT_HASHES")],
)
def test_a_log_without_anything_to_judge_says_so(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert raised.value.reason == reason


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    noise = tmp_path / "noise"
    noise.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent", noise):
        with pytest.raises(ConfigError, match=str(path)):
            read_trace(path)


# -- logs of prompts ---------------------------------------------------------------------------

PROMPTS = [
    {"prompt": "abcdefgh", "timestamp": 10.0, "output": "xyz", "stop": "length"},
    {"prompt": "abcdxxxxrest", "timestamp_ms": 12_000, "output_length": 9},
    {"prompt": "abcdefghijk", "timestamp": 11.0},
]


def test_bytes_count_as_tokens_where_no_tokenizer_is_given(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path / "prompts.jsonl", PROMPTS), block_tokens=4)
    assert trace.arrival_s.tolist() == [0.0, 1.0, 2.0]
    first, again, other = (trace.run(i).tolist() for i in range(3))
    assert first == again
    assert other[0] == first[0]
    assert not set(other[1:]) & set(first)
    assert trace.input_tokens.tolist() == [8, 11, 12]
    assert trace.output_tokens.tolist() == [3, 0, 9]
    assert trace.stops[0] is StopReason.LENGTH


def test_prompts_of_which_none_fills_a_block_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "prompts.jsonl", [{"prompt": "hello"}, {"prompt": ""}])
    with pytest.raises(ConfigError, match="fills a block of 512 tokens: lower --block-tokens"):
        read_trace(path)


def test_equal_blocks_after_different_beginnings_are_different(tmp_path: Path) -> None:
    path = written(tmp_path / "prompts.jsonl", [{"prompt": "aaaabbbb"}, {"prompt": "ccccbbbb"}])
    trace = read_trace(path, block_tokens=4)
    assert len({*trace.run(0).tolist(), *trace.run(1).tolist()}) == 4
    assert trace.arrival_s.tolist() == [0.0, 1.0]


def test_a_prompt_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "prompts.jsonl", [{"prompt": "abcd"}, {"prompt": 5}])
    with pytest.raises(ConfigError, match=f"{path}:2:"):
        read_trace(path)


def test_a_tokenizer_file_makes_the_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    encode = load_tokenizer(tmp_path / "tokenizer.json")
    path = written(tmp_path / "prompts.jsonl", [{"prompt": "a b a b a"}])
    trace = read_trace(path, encode, block_tokens=2)
    assert trace.input_tokens.tolist() == [5]
    assert len(trace.run(0)) == 2


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(tmp_path / "tokenizer.json")
    assert raised.value.reason == "TOKENIZER_UNREADABLE"
