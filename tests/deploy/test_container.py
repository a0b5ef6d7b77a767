"""The container's entry point with the chart's arguments, files and probes; the image and compose files."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prefixd_client import Client
from prefixd_server.app.cli import main
from prefixd_server.base.config_sources import load_config

from tests.deploy.conftest import Render
from tests.support.clients import PATIENT, run_of, spec, stored
from tests.support.ports import free_port
from tests.support.repository import ROOT
from tests.support.wire import short_directory

DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
SERVING = health_pb2.HealthCheckResponse.SERVING


def instruction(name: str) -> list[str]:
    """The words of a JSON instruction of the Dockerfile, from its last stage."""
    words: list[str] = json.loads(re.findall(rf"^{name} (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])
    return words


def probe(spec: dict[str, Any]) -> bool:
    """What a kubelet makes of a gRPC probe."""
    with grpc.insecure_channel(f"127.0.0.1:{spec['grpc']['port']}") as channel:
        request = health_pb2.HealthCheckRequest(service=spec["grpc"].get("service", ""))
        try:
            return bool(health_pb2_grpc.HealthStub(channel).Check(request, timeout=1).status == SERVING)
        except grpc.RpcError:
            return False


def wait_until(holds: Any, process: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when it holds; the process must live meanwhile."""
    deadline = time.monotonic() + 30
    while not holds():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)  # polls another process: there is nothing to wait on


def test_the_entry_point_serves_with_the_chart_s_values_answers_its_probes_and_drains(render: Render) -> None:
    with short_directory() as node:
        probes, metrics = free_port(), free_port()
        manifests = render(
            *("multi-tenant", f"socketDir={node}/run", f"dataDir={node}/data", "dram.sizeGiB=1"),
            *("extraConfig=", f"probes.port={probes}", f"metrics.port={metrics}", "drainTimeoutSeconds=30"),
            *("tenants[0].quotaGiB=1", "tenants[1].quotaGiB=1", f"socketGroup={os.getgid() or 1}"),
            *(f"tenants[{index}].group={os.getgid() or 1}" for index in (0, 1)),
        )
        (template,) = [m["spec"]["template"] for m in manifests if m["kind"] == "DaemonSet"]
        (config,) = [m["data"]["prefixd.toml"] for m in manifests if "prefixd.toml" in m.get("data", {})]
        (container,) = template["spec"]["containers"]
        (node / "run").mkdir()
        # A pod has an address of its own; tests stay on loopback.
        (node / "prefixd.toml").write_text(config.replace("0.0.0.0", "127.0.0.1"))
        arguments = [word.replace("/etc/prefixd", str(node)) for word in container["args"]]
        environment = {item["name"]: item["value"] for item in container["env"]}
        command = [str(Path(sys.executable).with_name(instruction("ENTRYPOINT")[0])), *arguments]
        log = node / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command, stderr=sink, stdout=sink, env={"PATH": os.environ["PATH"], **environment}
            )
        try:
            wait_until(lambda: probe(container["startupProbe"]), process, log)
            assert probe(container["readinessProbe"])
            assert probe(container["livenessProbe"])
            with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=10) as answer:
                assert b'prefixd_blocks_asked_total{tenant="chat"} 0.0' in answer.read()
            names = {path.name for path in (node / "run").iterdir()}
            assert names >= {"prefixd.sock", "chat.sock", "batch.sock", "prefixd.sock.fd"}
            with Client(node / "run/prefixd.sock", options=PATIENT) as engine:
                namespace, run = engine.namespace(spec()), run_of(3)
                stored(namespace, run)
                lease = namespace.acquire(run)
                assert lease is not None
                process.send_signal(signal.SIGTERM)
                wait_until(lambda: not probe(container["readinessProbe"]), process, log)
                assert probe(container["livenessProbe"])
                assert process.poll() is None
                lease.release()
            assert process.wait(template["spec"]["terminationGracePeriodSeconds"]) == 0
        finally:
            process.kill()
            process.wait()


def test_the_image_runs_an_installed_command_that_knows_its_arguments_and_is_not_root() -> None:
    assert instruction("ENTRYPOINT") == ["prefixd"]
    verb, *flags = instruction("CMD")
    context = main.commands[verb].make_context(verb, list(flags))
    assert context.params["data_dir"] == "/var/lib/prefixd"
    user = re.findall(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    values = yaml.safe_load((ROOT / "deploy/chart/values.yaml").read_text())
    assert user == [(str(values["user"]["uid"]), str(values["user"]["gid"]))]


def test_the_image_s_build_sees_what_it_copies() -> None:
    allowed = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    copied = [
        word
        for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)
        for word in line.split()[:-1]
    ]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)


def test_compose_starts_the_daemon_with_arguments_and_files_that_exist() -> None:
    folder = ROOT / "deploy/compose"
    services = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    daemon = services["prefixd"]
    context = main.commands["serve"].make_context("serve", list(daemon["command"][1:]))
    flags = {name: value for name, value in context.params.items() if isinstance(value, str)}
    config = load_config(
        flags={"socket": "/run/prefixd/prefixd.sock", "dram.size": flags["dram_size"]}
        | {name: flags[name] for name in ("metrics", "data_dir")},
        environment=daemon["environment"],
    )
    assert config.server.metrics == "0.0.0.0:7311"
    mounted = [
        source
        for service in services.values()
        for source, *_ in (volume.split(":") for volume in service.get("volumes", []))
        if source.startswith(".")
    ]
    assert mounted
    assert [source for source in mounted if not (folder / source).exists()] == []
    (job,) = yaml.safe_load((folder / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["prefixd:7311"]}]
