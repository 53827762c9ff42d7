"""Our own rules: rules.yaml for each manifest, and what must hold among those that are applied together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from deploy.validate import schema
from deploy.validate.manifest import Manifest, groups

OPERATORS_PORT = "metrics"  # which KubeRay adds to every pod


@cache
def _rules() -> Any:
    return yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text())


def check(manifest: Manifest, manifests: list[Manifest]) -> Iterator[schema.Problem]:
    """Yields what is wrong with a manifest that is applied with the others."""
    yield from schema.check(manifest, {**_rules().get(manifest["kind"], {}), "$defs": _rules()["$defs"]})
    pods = [labels for each in manifests for labels in _pod_labels(each)]
    for path, selector in _selectors(manifest):
        for label, value in _wanted(selector):
            if not any(labels.get(label) == value for labels in pods):
                yield path, f"selects {label}={value}, which no pod here has"
    if manifest["kind"] == "PodMonitor":
        yield from _ports_that_no_pod_has(manifest, manifests)


def _ports_that_no_pod_has(monitor: Manifest, manifests: list[Manifest]) -> Iterator[schema.Problem]:
    """Yields the ports that a PodMonitor names and no pod of a RayService here has."""
    services = [each for each in manifests if each["kind"] == "RayService"]
    containers = [one for service in services for group in groups(service) for one in group.containers]
    known = {OPERATORS_PORT, *(port.get("name") for one in containers for port in one.get("ports") or [])}
    for i, endpoint in enumerate(monitor["spec"].get("podMetricsEndpoints") or []):
        if endpoint.get("port") not in known:
            told = f"names the port {endpoint.get('port')!r}, which no pod here has"
            yield f"spec.podMetricsEndpoints[{i}].port", told


def _pod_labels(manifest: Manifest) -> Iterator[dict[str, str]]:
    """Yields the labels of each pod template, without those that the operator adds."""
    if manifest["kind"] == "RayService":
        for group in groups(manifest):
            written = group.spec["template"].get("metadata", {}).get("labels") or {}
            yield {**written, **(group.spec.get("labels") or {})}
    elif "template" in manifest.get("spec", {}):
        yield manifest["spec"]["template"].get("metadata", {}).get("labels") or {}


def _selectors(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    """Yields (path, selector of pods) of each. One that selects no pod protects nothing, and says nothing."""
    spec, kind = manifest.get("spec") or {}, manifest["kind"]
    if kind == "Service":
        yield "spec.selector", {"matchLabels": spec.get("selector")}
    elif kind in ("PodDisruptionBudget", "PodMonitor", "ServiceMonitor"):
        yield "spec.selector", spec.get("selector") or {}
    elif kind == "NetworkPolicy":
        yield "spec.podSelector", spec["podSelector"]
        for way, side in (("ingress", "from"), ("egress", "to")):
            for i, rule in enumerate(spec.get(way) or []):
                for j, peer in enumerate(rule.get(side) or []):
                    if "namespaceSelector" not in peer:
                        yield f"spec.{way}[{i}].{side}[{j}].podSelector", peer.get("podSelector") or {}


def _wanted(selector: Manifest) -> Iterator[tuple[str, str]]:
    """Yields (label, one value that must be on some pod), each on its own: every pool that is named must
    exist."""
    for label, value in (selector.get("matchLabels") or {}).items():
        if not label.startswith("ray.io/"):  # which the operator adds
            yield label, value
    for expression in selector.get("matchExpressions") or []:
        if expression["operator"] == "In":
            yield from ((expression["key"], value) for value in expression["values"])
