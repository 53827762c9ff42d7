"""Manifests as plain data: a file of YAML as it is, a folder through kustomize."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from outrider.errors import StartupError

Manifest = dict[str, Any]  # one document of YAML


@dataclass(frozen=True, slots=True)
class Group:
    """The head, or a worker group, of a RayService."""

    name: str  # head, or its groupName
    spec: Manifest

    @property
    def pod(self) -> Any:
        """Returns the pod's spec."""
        return self.spec["template"]["spec"]

    @property
    def containers(self) -> Any:
        return self.pod["containers"]


def groups(rayservice: Manifest) -> list[Group]:
    """Returns the groups, the head first."""
    cluster = rayservice["spec"]["rayClusterConfig"]
    workers = [Group(spec["groupName"], spec) for spec in cluster.get("workerGroupSpecs") or []]
    return [Group("head", cluster["headGroupSpec"]), *workers]


def name_of(manifest: Manifest) -> str:
    """Returns Kind/name, as it is printed before a path."""
    return f"{manifest['kind']}/{manifest['metadata']['name']}"


def render(path: Path, program: str | None = shutil.which("kubectl")) -> list[Manifest]:
    """Returns the manifests at `path`; a folder needs kubectl. Raises StartupError if there are none."""
    try:
        return parse(_kustomized(path, program) if path.is_dir() else path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path} cannot be read as text: {error}") from None


def _kustomized(path: Path, program: str | None) -> str:
    if program is None:
        raise StartupError(f"{path} is a folder for kustomize, and kubectl is not installed")
    run = subprocess.run([program, "kustomize", path], capture_output=True, text=True, timeout=60)
    if run.returncode:
        raise StartupError(f"kustomize cannot render {path}: {' '.join(run.stderr.split())}")
    return run.stdout


def parse(text: str, name: str) -> list[Manifest]:
    try:
        documents = [entry for entry in yaml.load_all(text, _Loader) if entry is not None]
    except yaml.YAMLError as error:
        raise StartupError(f"{name} is no YAML: {' '.join(str(error).split())}") from None
    if not documents or not all(map(_is_manifest, documents)):
        raise StartupError(f"{name} is no manifest: each document needs apiVersion, kind and metadata.name")
    return documents


def _is_manifest(entry: object) -> bool:
    match entry:
        case {"apiVersion": str(version), "kind": str(kind), "metadata": {"name": str(name)}}:
            return bool(version and kind and name)
    return False


class _Loader(yaml.SafeLoader):
    """Reads dates as the strings that they are to Kubernetes."""


_Loader.add_constructor("tag:yaml.org,2002:timestamp", lambda _, node: str(node.value))
