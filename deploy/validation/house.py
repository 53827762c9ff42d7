"""What we ask of manifests beyond what a cluster refuses: mistakes that would show late, or never."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from deploy.validation.finding import Finding, Group, Manifest, groups, name_of, place

PINNED = re.compile(r".+(:[\w][\w.-]*|@sha256:[0-9a-f]{64})")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[KMGTPE]i?)?")
SECRET_NAMES = re.compile(r"PASSWORD|TOKEN|SECRET|AUTH", re.IGNORECASE)
URL_PASSWORD = re.compile(r"rediss?://[^@\s]*:(?!\$\()[^@\s$]+@")
OPERATOR_LABELS = {"ray.io/node-type", "ray.io/group", "ray.io/cluster", "ray.io/serve"}
WORKLOADS = ("StatefulSet", "Deployment", "DaemonSet", "Job")


def check(manifests: list[Manifest]) -> Iterator[Finding]:
    """Findings in manifests that are applied together."""
    yield from _duplicates(manifests)
    pods = [pod for manifest in manifests for pod in _pods(manifest)]
    for manifest, path, spec, _ in pods:
        yield from _pod(manifest, path, spec)
    labels = [labels for _, _, _, labels in pods]
    for manifest in manifests:
        yield from _selectors(manifest, labels)
        if manifest.get("kind") == "PodDisruptionBudget":
            yield from _budget(manifest)
        if manifest.get("kind") == "RayService":
            yield from _ingress(manifest)
            yield from _password_in_config(manifest)


def missing_secrets(manifests: list[Manifest]) -> list[str]:
    """Secrets that pods need and that are not among the manifests: they must be there before."""
    present = {entry["metadata"]["name"] for entry in manifests if entry.get("kind") == "Secret"}
    needed = {name for manifest in manifests for name in _secret_names(manifest)}
    return sorted(needed - present)


def _pods(manifest: Manifest) -> Iterator[tuple[Manifest, str, Manifest, dict[str, str]]]:
    """(manifest, path, spec, labels) of each pod template."""
    if manifest.get("kind") == "RayService":
        for group in groups(manifest):
            kind = "head" if group.name == "head" else "worker"
            own = {"ray.io/node-type": kind, "ray.io/group": group.name if kind == "worker" else "headgroup"}
            written = group.spec.get("template", {}).get("metadata", {}).get("labels") or {}
            yield manifest, group.pod_path, group.pod, written | (group.spec.get("labels") or {}) | own
    elif manifest.get("kind") in WORKLOADS:
        template = manifest.get("spec", {}).get("template") or {}
        labels = template.get("metadata", {}).get("labels") or {}
        yield manifest, "spec.template.spec", template.get("spec") or {}, labels


def _pod(manifest: Manifest, path: str, pod: Manifest) -> Iterator[Finding]:
    """The restricted level of Kubernetes' pod security standards, and what _container asks."""
    context = pod.get("securityContext") or {}
    if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
        yield Finding(
            place(manifest, f"{path}.securityContext"), "must have runAsNonRoot: true and no user 0"
        )
    if (context.get("seccompProfile") or {}).get("type") != "RuntimeDefault":
        yield Finding(
            place(manifest, f"{path}.securityContext"), "must have seccompProfile of type RuntimeDefault"
        )
    for i, container in enumerate(pod.get("containers") or []):
        at = f"{path}.containers[{i}]"
        for problem in _container(container):
            yield Finding(place(manifest, f"{at}.{problem[0]}"), problem[1])


def _container(container: Manifest) -> Iterator[tuple[str, str]]:
    context = container.get("securityContext") or {}
    if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
        yield "securityContext", "must have allowPrivilegeEscalation: false and not be privileged"
    if "ALL" not in ((context.get("capabilities") or {}).get("drop") or []):
        yield "securityContext.capabilities", "must drop ALL"
    image = str(container.get("image", ""))
    if not PINNED.fullmatch(image) or image.endswith(":latest"):
        yield "image", f"must name a version, not {image or 'nothing'}"
    resources = container.get("resources") or {}
    for kind, names in (("requests", ("cpu", "memory")), ("limits", ("memory",))):
        given = resources.get(kind) or {}
        for name in names:
            if name not in given:
                yield f"resources.{kind}", f"must say how much {name}"
        for name, amount in given.items():
            if not QUANTITY.fullmatch(str(amount)):
                yield f"resources.{kind}.{name}", f"must be a quantity such as 250m or 2Gi, not {amount}"
    for entry in container.get("env") or []:
        if "value" in entry and SECRET_NAMES.search(entry.get("name", "")):
            yield f"env.{entry['name']}", "must come from a Secret by valueFrom"
        if URL_PASSWORD.search(str(entry.get("value", ""))):
            yield f"env.{entry['name']}", "must take its password from a variable that comes from a Secret"


def _selectors(manifest: Manifest, pods: list[dict[str, str]]) -> Iterator[Finding]:
    """A selector that matches no pod of ours protects nothing, and says nothing."""
    spec, kind = manifest.get("spec") or {}, manifest.get("kind")
    own: list[tuple[str, Any]] = []
    if kind == "Service" and spec.get("selector"):
        own.append(("spec.selector", {"matchLabels": spec["selector"]}))
    if kind in ("PodDisruptionBudget", "PodMonitor", "ServiceMonitor"):
        own.append(("spec.selector", spec.get("selector")))
    if kind == "NetworkPolicy":
        own.append(("spec.podSelector", spec.get("podSelector")))
        for direction, side in (("ingress", "from"), ("egress", "to")):
            for i, rule in enumerate(spec.get(direction) or []):
                for j, peer in enumerate(rule.get(side) or []):
                    if "podSelector" in peer and "namespaceSelector" not in peer:
                        own.append((f"spec.{direction}[{i}].{side}[{j}].podSelector", peer["podSelector"]))
    for path, selector in own:
        for label, values in _wanted(selector or {}):
            if not any(pod.get(label) in values for pod in pods):
                shown = f"{label}={' or '.join(sorted(values))}"
                yield Finding(place(manifest, path), f"selects {shown}, which no pod here has")


def _wanted(selector: Manifest) -> Iterator[tuple[str, set[str]]]:
    """(label, one value that must be on some pod), each on its own: every pool that is named must exist."""
    for label, value in (selector.get("matchLabels") or {}).items():
        if label not in OPERATOR_LABELS:
            yield label, {value}
    for expression in selector.get("matchExpressions") or []:
        if expression.get("operator") == "In":
            for value in expression.get("values") or []:
                yield expression["key"], {value}


def _budget(manifest: Manifest) -> Iterator[Finding]:
    """Kubernetes counts pods of a RayCluster by an integer minAvailable only: it has no scale subresource."""
    spec = manifest.get("spec") or {}
    if "maxUnavailable" in spec or not isinstance(spec.get("minAvailable"), int):
        sentence = "must be an integer minAvailable: Kubernetes cannot count a share of a RayCluster's pods"
        yield Finding(place(manifest, "spec"), sentence)


def _ingress(manifest: Manifest) -> Iterator[Finding]:
    """The operator's Service is made from the head's ports; pods without clients answer for themselves."""
    spec = manifest.get("spec") or {}
    if not spec.get("excludeHeadPodFromServeSvc"):
        yield Finding(
            place(manifest, "spec.excludeHeadPodFromServeSvc"), "must be true: clients enter by routers"
        )
    for group in groups(manifest):
        ports = _port_names(group)
        if group.name == "head" and not {"serve", "serve-grpc"} <= ports:
            sentence = "must have the ports serve and serve-grpc, of which the operator makes the Service"
            yield Finding(place(manifest, f"{group.pod_path}.containers[0].ports"), sentence)
        first = group.containers[0] if group.containers else {}
        if group.name != "head" and "serve" not in ports and "readinessProbe" not in first:
            sentence = (
                "is needed without a port serve: the operator's own asks a proxy that reaches no router"
            )
            yield Finding(place(manifest, f"{group.pod_path}.containers[0].readinessProbe"), sentence)


def _port_names(group: Group) -> set[str]:
    return {port.get("name", "") for container in group.containers for port in container.get("ports") or []}


def _password_in_config(manifest: Manifest) -> Iterator[Finding]:
    if URL_PASSWORD.search(manifest.get("spec", {}).get("serveConfigV2") or ""):
        sentence = "must hold no password: leave store out and set OUTRIDER_STORE from a Secret"
        yield Finding(place(manifest, "spec.serveConfigV2"), sentence)


def _secret_names(value: Any) -> Iterator[str]:
    """Names of Secrets that are referred to anywhere inside, those that are optional left out."""
    if isinstance(value, list):
        for inner in value:
            yield from _secret_names(inner)
    elif isinstance(value, dict):
        reference = value.get("secretKeyRef") or value.get("secretRef")
        if isinstance(reference, dict) and not reference.get("optional"):
            yield str(reference.get("name"))
        options = value.get("authOptions")
        if isinstance(options, dict) and options.get("secretName"):
            yield str(options["secretName"])
        for inner in value.values():
            yield from _secret_names(inner)


def _duplicates(manifests: list[Manifest]) -> Iterator[Finding]:
    """Two manifests of one name: the later would silently win."""
    seen: set[tuple[str, str]] = set()
    for manifest in manifests:
        key = (name_of(manifest), str(manifest.get("metadata", {}).get("namespace")))
        if key in seen:
            yield Finding(name_of(manifest), "is there twice; keep one")
        seen.add(key)
