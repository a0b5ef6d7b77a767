"""deploy/chart: rendered, against Kubernetes' schemas, and against what DESIGN asks of it."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from prefixd_server.base.config import Config
from prefixd_server.base.config_sources import load_config

from tests.deploy.conftest import CHART, Render, helm

VALUES = ("", "gpu", "multi-tenant")
CUSTOM = {"PodMonitor", "PrometheusRule"}
"""Kinds of the Prometheus operator, of which Kubernetes has no schemas."""
OLDEST, NEWEST = "1.27", "1.37"
"""Chart.yaml's kubeVersion, and the newest that the schemas know."""


def one(manifests: list[dict[str, Any]], kind: str, name: str = "test-prefixd") -> dict[str, Any]:
    """The only manifest of a kind and name."""
    (found,) = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pod(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    """The daemon's pod."""
    spec: dict[str, Any] = one(manifests, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def configuration(manifests: list[dict[str, Any]], directory: Path) -> Config:
    """The daemon's configuration, read as the daemon reads it."""
    file = directory / "prefixd.toml"
    file.write_text(one(manifests, "ConfigMap")["data"]["prefixd.toml"])
    return load_config(file=file)


@pytest.mark.parametrize("values", VALUES)
def test_helm_lints_it(values: str) -> None:
    files = [f"--values=values-{values}.yaml"] if values else []
    done = helm("lint", ".", "--strict", *files)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("values", VALUES)
def test_every_manifest_fits_its_schema(render: Render, values: str, version: str) -> None:
    manifests = [
        manifest for manifest in render(values, "example.enabled=true") if manifest["kind"] not in CUSTOM
    ]
    kinds = {manifest["kind"] for manifest in manifests}
    assert kinds >= {
        "DaemonSet",
        "ConfigMap",
        "ServiceAccount",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "Pod",
    }
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("values", VALUES)
def test_the_daemon_understands_the_configuration(render: Render, values: str, tmp_path: Path) -> None:
    config = configuration(render(values), tmp_path)
    assert config.socket_path == Path("/run/prefixd/prefixd.sock")
    assert config.server.data_dir == Path("/var/lib/prefixd")


def test_tenants_have_their_sockets_quotas_and_the_groups_that_the_pod_is_in(
    render: Render, tmp_path: Path
) -> None:
    manifests = render("multi-tenant")
    tenants = configuration(manifests, tmp_path).all_tenants
    assert [(tenant.name, tenant.group, tenant.admin) for tenant in tenants] == [
        ("operator", "10001", True),
        ("chat", "10010", False),
        ("batch", "10011", False),
    ]
    assert [tenant.quota_bytes >> 30 for tenant in tenants] == [0, 20, 8]
    assert pod(manifests)["securityContext"]["supplementalGroups"] == [10001, 10010, 10011]


@pytest.mark.parametrize(("values", "shared"), [("", False), ("gpu", True), ("multi-tenant", False)])
def test_the_ipc_namespace_is_the_node_s_only_with_the_hbm_tier(
    render: Render, values: str, shared: bool, tmp_path: Path
) -> None:
    manifests = render(values)
    assert pod(manifests).get("hostIPC", False) is shared
    assert bool(configuration(manifests, tmp_path).hbm.size_bytes) is shared


@pytest.mark.parametrize("values", VALUES)
def test_the_container_may_do_nothing_that_it_need_not(render: Render, values: str) -> None:
    spec = pod(render(values))
    assert spec["securityContext"]["runAsNonRoot"] is True
    (container,) = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    assert "hostNetwork" not in spec


@pytest.mark.parametrize("values", VALUES)
def test_the_memory_limit_holds_the_dram_tier(render: Render, values: str, tmp_path: Path) -> None:
    manifests = render(values)
    limits = pod(manifests)["containers"][0]["resources"]["limits"]
    held = sum(int(limits.get(name, "0Gi").removesuffix("Gi")) for name in ("memory", "hugepages-2Mi"))
    assert held << 30 > configuration(manifests, tmp_path).dram.size_bytes


@pytest.mark.parametrize("drain_s", [10, 120])
def test_a_stop_has_time_to_drain(render: Render, drain_s: int, tmp_path: Path) -> None:
    manifests = render("", f"drainTimeoutSeconds={drain_s}")
    assert configuration(manifests, tmp_path).drain.timeout_s == drain_s
    assert pod(manifests)["terminationGracePeriodSeconds"] >= drain_s + 10


@pytest.mark.parametrize("values", VALUES)
def test_any_other_key_can_be_set_beside_the_chart_s_own(render: Render, values: str, tmp_path: Path) -> None:
    extra = tmp_path / "extra.toml"
    extra.write_text(
        'listen = "127.0.0.1:7310"\ndram.segment = "1GiB"\nnvme.write_budget = "1TiB"\nlog.level = "debug"\n'
        "[leases]\nttl_max_s = 60\n"
    )
    config = configuration(render(values, "nvme.sizeGiB=100", files={"extraConfig": extra}), tmp_path)
    assert config.server.listen == "127.0.0.1:7310"
    assert config.dram.segment_bytes == 1 << 30
    assert (config.nvme.size_bytes, config.nvme.write_budget_bytes) == (100 << 30, 1 << 40)
    assert (config.log.level, config.leases.ttl_max_s) == ("debug", 60)


def test_an_upgrade_goes_node_by_node_and_never_runs_two_on_one(render: Render) -> None:
    strategy = one(render(""), "DaemonSet")["spec"]["updateStrategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0}}


def test_a_changed_configuration_is_an_upgrade(render: Render) -> None:
    def checksum(*settings: str) -> str:
        template = one(render("", *settings), "DaemonSet")["spec"]["template"]
        return str(template["metadata"]["annotations"]["checksum/config"])

    assert checksum() == checksum()
    assert checksum() != checksum("dram.sizeGiB=9")


def test_metrics_can_be_turned_off_with_everything_about_them(render: Render, tmp_path: Path) -> None:
    manifests = render("multi-tenant", "metrics.enabled=false")
    assert {*CUSTOM, "NetworkPolicy"} & {manifest["kind"] for manifest in manifests} == set()
    server = configuration(manifests, tmp_path).server
    assert (server.metrics, server.metrics_exposed) == ("", False)


def test_the_pod_monitor_scrapes_the_port_that_the_pod_has(render: Render) -> None:
    manifests = render("multi-tenant")
    monitor = one(manifests, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    ports = {port["name"]: port["containerPort"] for port in pod(manifests)["containers"][0]["ports"]}
    assert (endpoint["port"], endpoint["path"], ports["metrics"]) == ("metrics", "/metrics", 7311)
    labels = one(manifests, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_alerts_and_dashboard_are_those_of_the_files(render: Render) -> None:
    manifests = render("gpu")
    alerts = yaml.safe_load((CHART.parent / "prometheus/alerts.yaml").read_text())
    assert one(manifests, "PrometheusRule")["spec"] == alerts
    dashboard = one(manifests, "ConfigMap", "test-prefixd-dashboard")
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    shown = json.loads(dashboard["data"]["prefixd.json"])
    assert shown == json.loads((CHART.parent / "grafana/prefixd.json").read_text())


def test_the_example_engine_reaches_its_tenant_s_socket(render: Render) -> None:
    manifests = render("multi-tenant", "example.enabled=true")
    engine = one(manifests, "Pod", "test-prefixd-example-engine")["spec"]
    (container,) = engine["containers"]
    assert container["env"] == [{"name": "PREFIXD_SOCKET", "value": "/run/prefixd/chat.sock"}]
    assert engine["securityContext"]["supplementalGroups"] == [10010]
    assert container["volumeMounts"] == [{"name": "prefixd", "mountPath": "/run/prefixd"}]


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("dram.sizeGib=9", "sizeGib"),
        ("tenants[0].name=No Spaces", "tenants"),
        ("socketDir=relative", "socketDir"),
        ("nvme.sizeGiB=4,dataDir=", "needs a dataDir"),
    ],
)
def test_values_that_cannot_work_are_refused(setting: str, complaint: str) -> None:
    done = helm("template", "test", ".", "--set", setting)
    assert done.returncode != 0
    assert complaint in done.stderr


def test_the_chart_s_version_is_the_distribution_s() -> None:
    chart = (CHART / "Chart.yaml").read_text()
    version = tomllib.loads((CHART.parents[1] / "pyproject.toml").read_text())["project"]["version"]
    assert f"version: {version}\nappVersion: {version}\n" in chart
