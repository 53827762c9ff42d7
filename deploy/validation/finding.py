"""A mistake in a manifest, and the plain data that manifests are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]  # one document of YAML


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake: where it is, and a sentence that says what to change."""

    place: str  # "RayService/outrider: spec.rayClusterConfig.rayVersion"
    sentence: str

    def __str__(self) -> str:
        return f"{self.place}: {self.sentence}"


@dataclass(frozen=True, slots=True)
class Group:
    """The head, or a worker group, of a RayService."""

    name: str  # head, or its groupName
    path: str  # from the root of the manifest
    spec: Manifest

    @property
    def pod(self) -> Manifest:
        """The pod's spec."""
        found: Manifest = self.spec.get("template", {}).get("spec", {})
        return found

    @property
    def pod_path(self) -> str:
        return f"{self.path}.template.spec"

    @property
    def containers(self) -> list[Manifest]:
        found: list[Manifest] = self.pod.get("containers") or []
        return found


def name_of(manifest: Manifest) -> str:
    """Kind/name, as it is printed before a path."""
    return f"{manifest.get('kind', '?')}/{manifest.get('metadata', {}).get('name', '?')}"


def place(manifest: Manifest, path: str) -> str:
    return f"{name_of(manifest)}: {path}" if path else name_of(manifest)


def groups(rayservice: Manifest) -> Iterator[Group]:
    """The head first."""
    cluster = rayservice.get("spec", {}).get("rayClusterConfig") or {}
    root = "spec.rayClusterConfig"
    if isinstance(cluster.get("headGroupSpec"), dict):
        yield Group("head", f"{root}.headGroupSpec", cluster["headGroupSpec"])
    for i, spec in enumerate(cluster.get("workerGroupSpecs") or []):
        yield Group(spec.get("groupName", f"[{i}]"), f"{root}.workerGroupSpecs[{i}]", spec)


def env_names(container: Manifest) -> set[str]:
    return {entry.get("name", "") for entry in container.get("env") or []}


def as_path(parts: object) -> str:
    """a.b[0].c of the parts of a path, names and indices."""
    path = ""
    for part in parts:  # type: ignore[attr-defined]  # any iterable of str and int
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path
