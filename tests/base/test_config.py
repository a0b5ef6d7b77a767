"""base/config.py, base/config_sources.py, base/config_sample.py."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from prefixd_server.base.config import MIB, Config, DramConfig, HbmConfig, ServerConfig
from prefixd_server.base.config_sample import reference_table, sample_toml, shown_toml
from prefixd_server.base.config_sources import all_keys, load_config
from prefixd_server.base.errors import ConfigError

REFERENCE = Path(__file__).parents[2] / "docs" / "configuration.md"
SAMPLE = Path(__file__).parents[2] / "deploy" / "prefixd.toml"


def written(tmp_path: Path, text: str) -> Path:
    """A configuration file."""
    file = tmp_path / "prefixd.toml"
    file.write_text(text)
    return file


def refusal(**sources: object) -> ConfigError:
    """The error of sources that must be refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(flags={"socket": "/run/x.sock"}, **sources)  # type: ignore[arg-type]  # the tests' own keywords
    return caught.value


def test_flags_override_the_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, 'metrics = "127.0.0.1:1"\n[dram]\nsize = "1GiB"\n[log]\nlevel = "error"\n')
    config = load_config(
        file=file,
        environment={
            "PREFIXD_DRAM_SIZE": "2GiB",
            "PREFIXD_LOG_LEVEL": "warning",
            "PREFIXD_SOMETHING": "else",
        },
        flags={"dram.size": "3GiB", "socket": "/run/x.sock"},
    )
    assert config.dram.size_bytes == 3072 * MIB
    assert config.log.level == "warning"
    assert config.server.metrics == "127.0.0.1:1"
    assert config.drain == Config().drain


def test_the_committed_sample_is_the_one_generated_and_changes_nothing() -> None:
    assert SAMPLE.read_text() == sample_toml(), "run: prefixd config sample > deploy/prefixd.toml"
    assert load_config(file=SAMPLE) == Config()


def test_the_reference_page_holds_the_generated_table() -> None:
    assert REFERENCE.read_text().endswith(reference_table()), f"the table must be:\n{reference_table()}"


def test_every_line_of_the_sample_is_valid_when_uncommented(tmp_path: Path) -> None:
    lines = [
        line.removeprefix("# ") if " = " in line and line[2:3].islower() else line for line in sample_lines()
    ]
    parsed = tomllib.loads("\n".join(lines))
    named = {key for key, value in parsed.items() if not isinstance(value, dict)}
    named |= {
        f"{section}.{key}" for section, body in parsed.items() if isinstance(body, dict) for key in body
    }
    assert set(all_keys()) <= named


def sample_lines() -> list[str]:
    """The sample up to its tenants."""
    return sample_toml().partition("# Further tenants")[0].splitlines()


def test_what_is_shown_loads_as_the_same_configuration(tmp_path: Path) -> None:
    config = load_config(
        flags={
            "socket": "/run/x.sock",
            "dram.size": "96MiB",
            "dram.numa_nodes": "0,1",
            "leases.ttl_max_s": "0.5",
        },
        tenants=["name=batch,socket=/run/b.sock,mode=0600,quota=64MiB"],
    )
    assert load_config(file=written(tmp_path, shown_toml(config))) == config


@pytest.mark.parametrize(
    ("text", "key", "hint"),
    [
        ('[dram]\nsize = "1XB"\n', "dram.size", "such as"),
        ("[dram]\nsizes = 1\n", "dram.sizes", "did you mean dram.size"),
        ("[darm]\nsize = 1\n", "[darm]", "did you mean dram"),
        ("[dram]\nsize = 1024\n", "dram.size", "2MiB"),
        ("[dram]\nsegment = 3000000\n", "dram.segment", "multiple of 2MiB"),
        ('[dram]\nsegment = "1GiB"\n', "dram.segment", "must not exceed dram.size"),
        ('[hbm]\ndevice = "GPU-a"\ndevices = ["GPU-b"]\n', "hbm.device", "beside hbm.devices"),
        ('[hbm]\ndevices = ["GPU-a", "GPU-b", "GPU-a"]\n', "hbm.devices", "each once"),
        ('[hbm]\ndevices = [""]\n', "hbm.devices", "not be empty"),
        ("[movers]\nthread_count = 0\n", "movers.thread_count", "1 to 64"),
        ("[movers]\nthread_count = true\n", "movers.thread_count", "whole number"),
        ('[leases]\nttl_max_s = "soon"\n', "leases.ttl_max_s", "seconds"),
        ('[log]\nformat = "xml"\n', "log.format", "json, console"),
        ('listen = "0.0.0.0:7300"\n', "listen", "loopback"),
        ('listen = "7300"\n', "listen", "HOST:PORT"),
        ('socket_mode = "0888"\n', "socket_mode", "octal"),
        ('tenants = "a"\n', "tenants", "[[tenants]]"),
        ("[[tenants]]\nname = 'a'\n", "tenants[a].socket", "identity"),
        ("[[tenants]]\nsocket = '/run/a.sock'\n", "tenants[?].name", "must be set"),
        ("[[tenants]]\nname = 'a'\nsocket = '/run/x.sock'\n", "tenants[a].socket", "differ"),
        ("[[tenants]]\nname = 'default'\nsocket = '/run/a.sock'\n", "tenants[default].name", "differ"),
        (f"[[tenants]]\nname = 'a'\nsocket = '/run/{'x' * 120}'\n", "tenants[a].socket", "shorter"),
        ("dram = \n", "content", "TOML"),
    ],
)
def test_a_wrong_file_is_refused_naming_file_key_value_limit_and_remedy(
    tmp_path: Path, text: str, key: str, hint: str
) -> None:
    error = refusal(file=written(tmp_path, text))
    assert error.metadata["key"] == key
    assert hint in error.message
    assert "config check" in error.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nvme.directories", '["/mnt/a"]'),
        ("certificate_names", '["one"]'),
        ("dram.numa_nodes", "[0]"),
    ],
)
def test_a_list_given_as_text_is_separated_by_commas_and_nothing_else(key: str, value: str) -> None:
    """Or its brackets would be part of a directory's name."""
    with pytest.raises(ConfigError, match=r"separated by commas, without brackets"):
        load_config(flags={key: value})


def test_the_error_names_where_a_value_came_from(tmp_path: Path) -> None:
    file = written(tmp_path, "[dram]\nsize = 1\n")
    assert f"file {file}" in refusal(file=file).message
    assert "PREFIXD_DRAM_SIZE" in refusal(environment={"PREFIXD_DRAM_SIZE": "1"}).message
    assert "--tenant" in refusal(tenants=["name"]).message
    with pytest.raises(ConfigError, match=r"flag --dram-size: dram\.size = 1"):
        load_config(flags={"dram.size": "1"})
    with pytest.raises(ConfigError, match="--set leases"):
        load_config(flags={"leases.ttl_max_s": "never"})
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(file=tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("size_mib", "segment_mib", "count"),
    [(2, 2, 1), (100, 16, 6), (512, 16, 32), (4096, 128, 32), (65536, 256, 256)],
)
def test_automatic_segments_are_a_32nd_within_bounds(size_mib: int, segment_mib: int, count: int) -> None:
    config = Config(dram=DramConfig(size_bytes=size_mib * MIB))
    assert (config.segment_bytes, config.segment_count) == (segment_mib * MIB, count)


@pytest.mark.parametrize(
    ("hbm", "devices", "segment_count"),
    [
        (HbmConfig(), ("",), 0),
        (HbmConfig(size_bytes=8 * MIB, segment_bytes=2 * MIB, device="GPU-a"), ("GPU-a",), 4),
        (
            HbmConfig(size_bytes=4 * MIB, segment_bytes=2 * MIB, devices=("GPU-b", "GPU-a")),
            ("GPU-b", "GPU-a"),
            2,
        ),
    ],
    ids=["off", "one", "two"],
)
def test_hbm_lies_on_the_devices_named_as_much_on_each(
    hbm: HbmConfig, devices: tuple[str, ...], segment_count: int
) -> None:
    config = Config(hbm=hbm).checked()
    assert (config.hbm_devices, config.hbm_segment_count) == (devices, segment_count)


def test_without_root_and_runtime_directory_the_socket_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(ConfigError, match="--socket"):
        load_config()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1000")
    assert load_config().socket_path == Path("/run/user/1000/prefixd/prefixd.sock")


def test_the_first_tenant_has_every_right() -> None:
    (first,) = Config(server=ServerConfig(socket=Path("/run/x.sock"))).all_tenants
    assert (first.name, first.admin, first.mode) == ("default", True, 0o660)
