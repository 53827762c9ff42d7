"""What Kubernetes itself defines: services, policies, secrets, and the pod templates inside a RayService."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache

import kubernetes_validate

from deploy.validation.finding import Finding, Manifest, as_path, groups, place

KUBERNETES = "1.34"  # whose schemas are used
BUILT_IN = ("v1", "apps/v1", "batch/v1", "policy/v1", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1")


def check(manifest: Manifest) -> Iterator[Finding]:
    """Findings in a built-in object; those of a RayService are in its pod templates."""
    if manifest.get("kind") == "RayService":
        for group in groups(manifest):
            yield from _errors(
                {"apiVersion": "v1", "kind": "Pod", "spec": group.pod}, manifest, group.pod_path
            )
    elif manifest.get("apiVersion") in BUILT_IN:
        yield from _errors(manifest, manifest, "")


def knows(manifest: Manifest) -> bool:
    """Whether there is a schema for it here."""
    return manifest.get("apiVersion") in BUILT_IN


def _errors(checked: Manifest, manifest: Manifest, prefix: str) -> Iterator[Finding]:
    problem = _problem(json.dumps(checked))
    if problem is not None:
        path, message = problem
        yield Finding(place(manifest, prefix + path.removeprefix("spec") if prefix else path), message)


@cache  # reading the schemas takes a third of a second, every time
def _problem(text: str) -> tuple[str, str] | None:
    """(path, message) of the worst problem of an object, written as JSON."""
    checked = json.loads(text)
    try:
        kubernetes_validate.validate(checked, KUBERNETES, strict=True)
    except kubernetes_validate.ValidationError as error:
        return as_path(error.absolute_path), error.message
    except kubernetes_validate.SchemaNotFoundError:
        return "kind", f"Kubernetes {KUBERNETES} has no such kind in {checked['apiVersion']}"
    return None
