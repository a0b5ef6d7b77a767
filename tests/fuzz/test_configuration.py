"""The configuration under fire: any file, variable or flag gives a whole configuration or one clear error."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prefixd_server.base.config_sample import sample_toml, shown_toml
from prefixd_server.base.config_sources import ENVIRONMENT_PREFIX, FILE_BYTES_MAX, all_keys, load_config
from prefixd_server.base.errors import ConfigError

from tests.support.fuzzing import corpus, examples
from tests.support.hostile import mutated

SOCKET = {"socket": "/run/prefixd-fuzz/p.sock"}
KEYS = sorted(all_keys())
SAMPLE = "\n".join(
    line.removeprefix("# ") if "=" in line or "[" in line else line for line in sample_toml().splitlines()
)
TENANT_KEYS = ["name", "socket", "mode", "group", "admin", "quota", "token_file", "lease_count_max", "x"]

texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "0",
            "-1",
            "1e400",
            "nan",
            "inf",
            "true",
            "auto",
            "off",
            "512MiB",
            "1PiB",
            "9" * 5000,
            "0o777",
            "0777",
        ]
    ),
    st.sampled_from(
        ["a:1", "[::]:1", ":1", "a:99999", "a:" + "9" * 5000, "²", "٣", "1_0", "_", "0x10", "\0", "x" * 2000]
    ),
)


def loaded(**sources: Any) -> None:
    """Loads; what comes out is whole: shown as a file it gives itself again."""
    try:
        config = load_config(**sources)
    except ConfigError as error:
        refused = error
    else:
        assert config.checked() == config
        assert tomllib.loads(shown_toml(config))
        return
    assert refused.reason == "CONFIG_INVALID"
    assert "key" in refused.metadata
    assert len(refused.message) < 30_000


@examples(300)
@given(st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=9)), texts, max_size=4))
@example({"dram.numa_nodes": "²"})
def test_any_flags_are_a_configuration_or_refused(flags: Mapping[str, str]) -> None:
    loaded(flags=SOCKET | dict(flags))


@examples(150)
@given(st.dictionaries(st.sampled_from(KEYS), texts, max_size=4))
def test_any_variables_are_a_configuration_or_refused(variables: Mapping[str, str]) -> None:
    environment = {
        ENVIRONMENT_PREFIX + key.replace(".", "_").upper(): value for key, value in variables.items()
    }
    loaded(flags=SOCKET, environment=environment)


@examples(150)
@given(
    st.one_of(
        st.text(max_size=40),
        st.dictionaries(st.sampled_from(TENANT_KEYS), texts, max_size=5).map(
            lambda pairs: ",".join(f"{key}={value}" for key, value in pairs.items())
        ),
    )
)
def test_any_tenant_is_a_configuration_or_refused(tenant: str) -> None:
    loaded(flags=SOCKET, tenants=[tenant])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file, written again and again."""
    return tmp_path_factory.mktemp("configuration") / "prefixd.toml"


@examples(150)
@given(st.one_of(st.binary(max_size=100), mutated(SAMPLE.encode())))
@example(b"x = " + b"[" * 100_000)
@example(b"dram = 1")
@example(b"tenants = [1]")
@example(b"[[tenants]]\nname = 1")
def test_any_file_is_a_configuration_or_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    loaded(file=file, flags=SOCKET)


@pytest.mark.parametrize("path", corpus("configuration"), ids=lambda path: path.name)
def test_the_corpus_is_refused_by_key(path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(file=path, flags=SOCKET)
    assert refused.value.reason == "CONFIG_INVALID"


def test_a_file_beyond_its_limit_is_refused(file: Path) -> None:
    file.write_bytes(b"#" * (FILE_BYTES_MAX + 1))
    with pytest.raises(ConfigError, match="at most 1MiB"):
        load_config(file=file)


def test_a_source_that_is_no_file_is_refused(file: Path) -> None:
    for path in (file.parent, file.with_name("missing"), Path("/proc/self/mem")):
        with pytest.raises(ConfigError):
            load_config(file=path)
