"""What makes a namespace: its fields on the wire, weights by content, the CPU's class."""

from __future__ import annotations

import os
from dataclasses import fields

import pytest
from prefixd.v1 import types_pb2
from prefixd_client import InvalidArgument, KvGroup, namespace, weights
from prefixd_client.namespace import NamespaceSpec, isa_class, weights_fingerprint

from tests.support.clients import spec

OLD = 1_000_000_000


@pytest.fixture(autouse=True)
def cache_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weight_file(folder, name, content, age=OLD):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(content)
    os.utime(path, (age, age))
    return path


def test_every_field_goes_over_the_wire() -> None:
    ours = {item.name for item in fields(NamespaceSpec)} | {"checksum_algorithm", "encoding"}
    assert ours == {item.name for item in types_pb2.NamespaceSpec.DESCRIPTOR.fields}
    message = spec(hash_seed="s", shard_count=3).to_wire()
    assert (message.hash_seed, message.shard_count, message.kv_groups[0].kind) == ("s", 3, 1)


@pytest.mark.parametrize(
    "changes", [{"hash_bytes": 8}, {"kv_groups": ()}, {"kv_groups": (KvGroup(block_bytes=0, layer_count=1),)}]
)
def test_a_spec_that_the_client_cannot_work_with_is_refused(changes) -> None:
    with pytest.raises(InvalidArgument):
        spec(**changes)


def test_weights_are_told_by_content_and_name_not_by_folder_or_order(tmp_path) -> None:
    one = [weight_file(tmp_path / "a", f"{n}.safetensors", bytes([n]) * 10) for n in (1, 2)]
    same = [weight_file(tmp_path / "b", f"{n}.safetensors", bytes([n]) * 10) for n in (1, 2)]
    other = [weight_file(tmp_path / "c", f"{n}.safetensors", bytes([n]) * 11) for n in (1, 2)]
    assert weights_fingerprint(one) == weights_fingerprint(reversed(same))
    assert weights_fingerprint(one) != weights_fingerprint(other)
    assert weights_fingerprint(one).startswith("sha256:")


def test_an_unchanged_file_is_hashed_once(tmp_path, monkeypatch) -> None:
    path = weight_file(tmp_path / "a", "w.bin", b"x" * 100)
    expected = weights_fingerprint([path])
    monkeypatch.setattr(weights, "_content_digest", lambda _path: pytest.fail("hashed again"))
    assert weights_fingerprint([path]) == expected


def test_a_changed_file_is_hashed_again(tmp_path) -> None:
    path = weight_file(tmp_path / "a", "w.bin", b"x" * 100)
    before = weights_fingerprint([path])
    weight_file(tmp_path / "a", "w.bin", b"y" * 100, OLD + 1)
    assert weights_fingerprint([path]) != before


def test_a_file_changed_just_now_is_not_remembered(tmp_path, cache_home) -> None:
    path = tmp_path / "w.bin"
    path.write_bytes(b"x")
    weights_fingerprint([path])
    assert not (cache_home / "prefixd" / "weights.json").exists()


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff", b'{"a": 1}'])
def test_a_damaged_cache_costs_time_only(tmp_path, cache_home, content) -> None:
    path = weight_file(tmp_path / "a", "w.bin", b"x")
    expected = weights_fingerprint([path])
    (cache_home / "prefixd" / "weights.json").write_bytes(content)
    assert weights_fingerprint([path]) == expected


def test_no_files_have_no_fingerprint() -> None:
    with pytest.raises(InvalidArgument):
        weights_fingerprint([])


@pytest.mark.parametrize(
    ("info", "strongest"),
    [
        ("flags\t: fpu avx2 avx512f avx512_bf16\n", "avx512_bf16"),
        ("flags\t: fpu avx2\n", "avx2"),
        ("Features\t: fp asimd sve\n", "sve"),
        ("nothing\n", "base"),
    ],
)
def test_the_isa_class_is_the_strongest_feature(tmp_path, monkeypatch, info, strongest) -> None:
    (tmp_path / "cpuinfo").write_text(info)
    monkeypatch.setattr(namespace, "CPU_INFO", tmp_path / "cpuinfo")
    assert isa_class().split(":")[1] == strongest
