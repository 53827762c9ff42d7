"""The overlays pass every check, and hold what they should."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.app import LEAVE_SECONDS, build
from deploy.args import parse as parse_arguments
from deploy.validate.__main__ import main, validate
from deploy.validate.manifest import Manifest, groups, parse, render
from deploy.validate.serve import arguments, check_text
from outrider import __version__
from outrider.errors import StartupError
from outrider.store.logs import MAX_BYTES

Rendered = Callable[[str], list[Manifest]]
KUBERAY = Path(__file__).parents[3] / "deploy" / "kuberay"
OVERLAYS = ("cpu-demo", "gpu")


def one(manifests: list[Manifest], kind: str, name: str = "outrider") -> Any:
    (found,) = [e for e in manifests if e["kind"] == kind and e["metadata"]["name"] == name]
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_has_no_mistakes(overlay: str, rendered: Rendered) -> None:
    assert validate(rendered(overlay)).findings == []


def test_what_has_no_schema_here_is_said(rendered: Rendered) -> None:
    said = validate(rendered("gpu")).unchecked
    names = ("PodMonitor/outrider", "PodMonitor/outrider-router", "PrometheusRule/outrider")
    assert sorted(line.split(": ")[1] for line in said) == list(names)


def test_prometheus_reaches_routers_at_the_ports_that_serve_gives_them(rendered: Rendered) -> None:
    from ray.serve._private.constants import RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT as FIRST

    manifests = rendered("gpu")
    (router,) = [group for group in groups(one(manifests, "RayService")) if group.name == "router"]
    ports = {port["name"]: port["containerPort"] for port in router.containers[0]["ports"]}
    endpoints = one(manifests, "PodMonitor", "outrider-router")["spec"]["podMetricsEndpoints"]
    asked = [ports[endpoint["port"]] for endpoint in endpoints]
    (rule,) = one(manifests, "NetworkPolicy", "outrider-router-metrics")["spec"]["ingress"]
    assert asked == [port["port"] for port in rule["ports"]] == [FIRST, FIRST + 1]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_of_this_version(overlay: str, rendered: Rendered) -> None:
    images = [group.containers[0]["image"] for group in groups(one(rendered(overlay), "RayService"))]
    assert len(images) == 4
    assert {image.partition(":")[2].rpartition("-")[0] for image in images} == {__version__}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_drafters_reach_verifiers_redis_and_the_head_only(overlay: str, rendered: Rendered) -> None:
    manifests = rendered(overlay)
    reached = set()
    for policy in (entry for entry in manifests if entry["kind"] == "NetworkPolicy"):
        selector = policy["spec"]["podSelector"]
        if selector in ({}, {"matchLabels": {"pool": "draft"}}):
            for rule in policy["spec"].get("egress", []):
                for peer in rule["to"]:
                    pods = peer.get("podSelector", {})
                    reached |= {*pods.get("matchLabels", {}).values()} or {"dns"} - {
                        name for e in pods.get("matchExpressions", []) for name in e["values"]
                    }
                    reached |= {name for e in pods.get("matchExpressions", []) for name in e["values"]}
    assert reached - {"dns"} == {"head", "target", "redis"}
    everything = one(manifests, "NetworkPolicy", "outrider-deny")["spec"]
    assert everything == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}


def test_clients_enter_by_routers_only(rendered: Rendered) -> None:
    """The operator's Service selects all workers: a target port by name leaves out those without it."""
    rayservice = one(rendered("gpu"), "RayService")
    ports = rayservice["spec"]["serveService"]["spec"]["ports"]
    assert {port["name"]: port["targetPort"] for port in ports} == {
        "serve": "serve",
        "serve-grpc": "serve-grpc",
    }
    named = {
        group.name: {port["name"] for port in group.containers[0].get("ports", [])}
        for group in groups(rayservice)
    }
    assert {"serve", "serve-grpc"} <= named["router"]
    assert named["draft"] == named["target"] == set()


def test_the_application_takes_its_store_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no password stands in the configuration of a RayService."""
    address = "redis://:secret@outrider-redis:6379/0"
    monkeypatch.setenv("OUTRIDER_STORE", address)
    _, store, *workers = build({"insecure": True})._bound_deployment.init_args
    assert store == address
    assert [worker._bound_deployment.init_args[-1] for worker in workers] == [address] * 2
    monkeypatch.delenv("OUTRIDER_STORE")
    _, store, *_ = build({})._bound_deployment.init_args
    assert store._bound_deployment.name == "Registry"


def test_the_configuration_for_a_laptop_has_no_mistakes() -> None:
    assert list(check_text((KUBERAY.parent / "serve.yaml").read_text())) == []


def test_no_secret_is_written_outside_of_the_demo() -> None:
    written = [path for path in KUBERAY.rglob("*.yaml") if "password=" in path.read_text()]
    assert [path.parent.name for path in written] == ["cpu-demo"]


def test_the_command_says_what_is_wrong(
    tmp_path: Path, rendered: Rendered, capsys: pytest.CaptureFixture[str]
) -> None:
    manifests = rendered("cpu-demo")
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(yaml.safe_dump_all(manifests))
    one(manifests, "RayService")["metadata"]["name"] = "Outrider"
    bad.write_text(yaml.safe_dump_all(manifests))
    assert main([str(good)]) == 0
    assert capsys.readouterr().out.endswith("no mistakes\n")
    assert main([str(good), str(bad)]) == 1
    out = capsys.readouterr().out
    assert f"{bad}: RayService/Outrider: metadata.name: must be small letters" in out
    assert out.endswith("1 mistakes\n")


def test_what_is_missing_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing.yaml")]) == 2
    assert "cannot be read as text" in capsys.readouterr().err
    with pytest.raises(StartupError, match="kubectl is not installed"):
        render(KUBERAY / "overlays" / "gpu", None)


def test_a_folder_that_kustomize_cannot_read_is_a_sentence(tmp_path: Path) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed")
    with pytest.raises(StartupError, match="kustomize cannot render") as refused:
        render(tmp_path)
    assert "\n" not in refused.value.message


def test_the_store_of_the_workers_is_the_redis_of_the_cluster(rendered: Rendered) -> None:
    """The variable is made of another one, which must come before it; the address is that of the Service."""
    for group in groups(one(rendered("gpu"), "RayService")):
        names = [entry["name"] for entry in group.containers[0]["env"]]
        assert names.index("OUTRIDER_REDIS_PASSWORD") < names.index("OUTRIDER_STORE")
        (store,) = [e["value"] for e in group.containers[0]["env"] if e["name"] == "OUTRIDER_STORE"]
        assert store == "redis://:$(OUTRIDER_REDIS_PASSWORD)@outrider-redis:6379/0"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_redis_holds_all_logs_and_stays_below_its_limit(overlay: str, rendered: Rendered) -> None:
    (container,) = one(rendered(overlay), "StatefulSet", "outrider-redis")["spec"]["template"]["spec"][
        "containers"
    ]
    args = container["args"]
    options = dict(zip(args[1::2], args[2::2], strict=True))
    limit = quantity(container["resources"]["limits"]["memory"])
    most = int(options["--maxmemory"].removesuffix("mb")) * 2**20
    assert 1.25 * MAX_BYTES <= most <= limit / 2, "it may take twice as much while it rewrites its file"
    # Evicts what has a TTL, and of that what was used longest ago: neither Ray's state nor registrations.
    assert options["--maxmemory-policy"] == "volatile-lru"


def quantity(text: str) -> int:
    return int(text.removesuffix("Mi")) * 2**20


def test_a_date_is_the_string_that_it_is_to_kubernetes() -> None:
    text = "{apiVersion: v1, kind: ConfigMap, metadata: {name: a}, data: {since: 2026-01-01}}"
    assert parse(text, "it")[0]["data"]["since"] == "2026-01-01"


@pytest.mark.parametrize(
    "document",
    ["[]", "{kind: 5, apiVersion: v1, metadata: {name: a}}", "{kind: A, apiVersion: v1, metadata: x}"],
)
def test_what_is_no_manifest_is_a_sentence(document: str) -> None:
    with pytest.raises(StartupError, match=r"each document needs apiVersion, kind and metadata\.name"):
        parse(document, "it")


def test_files_of_another_kind_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xd0\x00")
    assert main([str(binary)]) == 2
    assert "cannot be read as text" in capsys.readouterr().err


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_replicas_have_the_time_that_they_may_take_to_leave(overlay: str, rendered: Rendered) -> None:
    """Kubernetes' time for a pod holds Ray's for a node, which holds ours for a worker."""
    service = one(rendered(overlay), "RayService")
    args = arguments(service)
    assert args is not None
    ours = {"router": args.router.drain_seconds, "target": args.verifier.drain_seconds, "draft": 0.0}
    for group in groups(service):
        if group.name == "head":
            continue
        env = {entry["name"]: entry.get("value") for entry in group.containers[0]["env"]}
        drain = float(env["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        assert ours[group.name] + LEAVE_SECONDS < drain < group.pod["terminationGracePeriodSeconds"]


def test_certificates_reach_every_pod_and_fit_the_names_that_workers_register(tmp_path: Path) -> None:
    """components/tls beside an overlay: the Secret that cert-manager makes is the one that pods mount."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: the overlays cannot be rendered")
    parts = {
        "resources": [os.path.relpath(KUBERAY / "overlays" / "gpu", tmp_path)],
        "components": [os.path.relpath(KUBERAY / "components" / "tls", tmp_path)],
    }
    (tmp_path / "kustomization.yaml").write_text(json.dumps({"namespace": "outrider", **parts}))
    manifests = render(tmp_path)
    assert validate(manifests).findings == []
    certificate = one(manifests, "Certificate", "outrider-tls")["spec"]
    for group in groups(one(manifests, "RayService")):
        mounts = {mount["name"]: mount["mountPath"] for mount in group.containers[0].get("volumeMounts", [])}
        secrets = {
            volume["name"]: volume["secret"]["secretName"]
            for volume in group.pod.get("volumes", [])
            if "secret" in volume
        }
        if group.name != "head":  # which runs no replica
            assert (mounts["tls"], secrets["tls"]) == ("/tls", certificate["secretName"])
            assert ("models" in mounts) == (group.name != "router")
    files = {"cert": "/tls/tls.crt", "key": "/tls/tls.key", "ca": "/tls/ca.crt"}  # as cert-manager names them
    told = parse_arguments({"tls": {**files, "domain": "outrider.pod.cluster.local"}})
    name = told.network.advertised("10.0.0.1")
    assert certificate["dnsNames"] == [f"*.{name.partition('.')[2]}"]


def test_only_routers_are_told_the_clients_keys(rendered: Rendered) -> None:
    for overlay in OVERLAYS:
        told = {
            group.name
            for group in groups(one(rendered(overlay), "RayService"))
            if any(entry["name"] == "OUTRIDER_API_KEYS" for entry in group.containers[0].get("env", []))
        }
        assert told == {"router"}
