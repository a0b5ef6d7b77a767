"""`prefixd simulate` as operators and scripts call it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from prefixd_server.simulate.command import simulate

from tests.support.requests import BLOCK_TOKENS, conversations

SCRIPT_FIELDS = {
    "trace",
    "policy",
    "fraction",
    "capacity_blocks",
    "prefix_hit_token_ratio",
    "block_hit_ratio",
    "pinning",
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations as a trace file."""
    trace = conversations(3, 200)
    path = tmp_path_factory.mktemp("traces") / "talk.jsonl"
    with path.open("w") as file:
        for request in range(trace.request_count):
            record = {
                "timestamp_ms": 1e3 * trace.arrival_s[request],
                "input_length": int(trace.input_tokens[request]),
                "output_length": int(trace.output_tokens[request]),
                "block_tokens": BLOCK_TOKENS,
                "hash_ids": trace.run(request).tolist(),
            }
            file.write(json.dumps(record) + "\n")
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(simulate, [str(argument) for argument in arguments])


def results(path: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = json.loads(path.read_text())
    return read


def test_the_form_that_scripts_rely_on(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    told = run(log, "--policy", "importance,lru,optimum", "--fraction", "0.05,0.2", "--json", out)
    assert told.exit_code == 0, told.output
    rows = results(out)
    assert [(row["policy"], row["fraction"]) for row in rows] == [
        (policy, fraction) for policy in ("importance", "lru", "optimum") for fraction in (0.05, 0.2)
    ]
    for row in rows:
        assert row.keys() >= SCRIPT_FIELDS
        assert row["trace"] == "talk"
        assert "arrival instant" in row["pinning"]
        assert 0 <= row["block_hit_ratio"] <= 1
    bound = {row["fraction"]: row["prefix_hit_token_ratio"] for row in rows if row["policy"] == "optimum"}
    assert all(0 < row["prefix_hit_token_ratio"] <= bound[row["fraction"]] for row in rows)
    assert "arrival instant" in told.output
    assert "Run the policy" in told.output


def test_processes_in_parallel_give_what_one_gives(log: Path, tmp_path: Path) -> None:
    arguments = (log, "--policy", "importance,lru", "--fraction", "0.1", "--seeds", "2")
    outs = [tmp_path / name for name in ("one", "two")]
    for out, processes in zip(outs, ("1", "2"), strict=True):
        assert run(*arguments, "--processes", processes, "--json", out).exit_code == 0
    one, two = (
        [{k: v for k, v in row.items() if k != "references_per_s"} for row in results(out)] for out in outs
    )
    assert one == two
    assert [row["seed_count"] for row in one] == [2, 1]


def test_several_tiers_tell_hits_links_and_ssd_writes(log: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    told = run(
        *(log, "--policy", "lru,optimum", "--hbm", "1GiB", "--dram", "1GiB,2GiB", "--nvme", "8GiB"),
        *("--json", out, "--html", page, "--processes", "1"),
    )
    assert told.exit_code == 0, told.output
    rows = results(out)
    assert [row["dram_bytes"] for row in rows] == [1 << 30, 2 << 30]
    for row in rows:
        assert set(row["hit_token_ratio_by_tier"]) == {"HBM", "DRAM", "NVME"}
        assert sum(row["hit_token_ratio_by_tier"].values()) == pytest.approx(row["prefix_hit_token_ratio"])
        assert row["ttft_mean_s"] <= row["ttft_p99_s"] <= row["ttft_p999_s"]
        assert row["ssd_written_bytes"] == row["link_bytes"]["DRAM to NVMe"] > 0
        for name, total in row["link_bytes"].items():
            assert sum(row["link_bytes_over_time"][name]) == total
        assert "until the request ends" in row["pinning"]
    assert "left out, not for several tiers: optimum" in told.output
    assert "Of what was tried, buy" in told.output
    assert "Moved over the links" in page.read_text()


def test_a_log_of_prompts_is_replayed_by_bytes(tmp_path: Path) -> None:
    log, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts = ["system prompt " * 4 + question for question in ("one", "two", "three", "one")]
    log.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    told = run(log, "--block-tokens", "8", "--policy", "lru", "--fraction", "1", "--json", out)
    assert told.exit_code == 0, told.output
    (row,) = results(out)
    assert row["prefix_hit_token_ratio"] > 0.6


def test_how_replies_ended_can_be_ignored(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    told = run(log, "--policy", "lru", "--fraction", "0.1", "--ignore-stop", "--json", out)
    assert told.exit_code == 0, told.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policy", "belady"), "unknown policy belady"),
        (("--fraction", "0"), "above 0"),
        (("--fraction", "nan"), "above 0"),
        (("--fraction", "half"), "not a list of numbers"),
        (("--dram", "lots"), "lots"),
        (("--policy", "optimum", "--dram", "1GiB"), "not for several tiers"),
        (("--seeds", "0"), "--seeds"),
    ],
)
def test_a_wrong_option_is_refused_in_words(log: Path, arguments: tuple[str, ...], words: str) -> None:
    told = run(log, *arguments)
    assert told.exit_code == 2
    assert words in told.output


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_wrong_line_is_named_before_anything_is_replayed(log: Path, tmp_path: Path, processes: str) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text('{"timestamp_ms": 1}\n')
    told = run(log, wrong, "--policy", "lru", "--processes", processes)
    assert told.exit_code == 2
    assert f"{wrong}:1: a field is missing" in told.output


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_result_that_cannot_be_written_is_refused_before_anything_is_replayed(
    log: Path, tmp_path: Path, option: str
) -> None:
    told = run(log, "--policy", "lru", "--fraction", "0.1", option, tmp_path / "absent" / "out")
    assert told.exit_code == 2
    assert "Run the policy" not in told.output
    assert option in told.output
    assert str(tmp_path / "absent") in told.output


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (("--dram", "1MiB"), "--dram"),
        (("--dram", "1MiB", "--nvme", "8GiB"), "--dram"),
        (("--dram", "1GiB", "--nvme", "1MiB"), "--nvme"),
        (("--dram", "0"), "--dram"),
        (("--hbm", "1GiB", "--dram", "0", "--nvme", "1GiB"), "--dram"),
    ],
)
def test_a_tier_that_holds_no_block_is_refused_in_words(
    log: Path, sizes: tuple[str, ...], words: str
) -> None:
    told = run(log, "--policy", "lru", *sizes)
    assert told.exit_code == 2, told.exception
    assert words in told.output


def test_sizes_of_nothing_leave_a_tier_out(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    told = run(log, "--policy", "lru", "--dram", "0,1GiB", "--nvme", "0,8GiB", "--json", out)
    assert told.exit_code == 0, told.output
    sizes = [(row["dram_bytes"] >> 30, row["nvme_bytes"] >> 30) for row in results(out)]
    assert sizes == [(0, 8), (1, 0), (1, 8)]


def test_traces_of_one_name_are_told_apart(log: Path, tmp_path: Path) -> None:
    other, out = tmp_path / "talk.jsonl", tmp_path / "out.json"
    other.write_text("".join(log.read_text().splitlines(keepends=True)[:20]))
    told = run(log, other, "--policy", "lru", "--fraction", "0.2", "--json", out)
    assert told.exit_code == 0, told.output
    first, second = results(out)
    assert (first["trace"], second["trace"]) == (str(log), str(other))
    assert (first["seed_count"], second["seed_count"]) == (1, 1)
    assert first["input_tokens"] > second["input_tokens"]
    assert told.output.count("Run the policy") == 2
