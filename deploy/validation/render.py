"""Manifests as plain data: a file of YAML as it is, a folder through kustomize."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import yaml

from deploy.validation.finding import Manifest
from outrider.errors import StartupError


def kubectl() -> str | None:
    """The program that renders a folder; None where it is not installed."""
    return shutil.which("kubectl")


def render(path: Path, program: str | None) -> list[Manifest]:
    """The manifests at `path`. Raises StartupError with what is wrong where there are none."""
    if path.is_dir():
        if program is None:
            raise StartupError(f"{path} is a folder for kustomize, and kubectl is not installed")
        command = [program, "kustomize", str(path)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if run.returncode:
            raise StartupError(f"kustomize cannot render {path}: {' '.join(run.stderr.split())}")
        text = run.stdout
    elif path.is_file():
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError):
            raise StartupError(f"{path} cannot be read as text") from None
    else:
        raise StartupError(f"there is no {path}")
    return parse(text, str(path))


def parse(text: str, name: str) -> list[Manifest]:
    try:
        documents = [entry for entry in yaml.load_all(text, _Loader) if entry is not None]
    except yaml.YAMLError as error:
        raise StartupError(f"{name} is no YAML: {' '.join(str(error).split())}") from None
    if not documents:
        raise StartupError(f"{name} holds no manifest")
    if not all(_is_manifest(entry) for entry in documents):
        raise StartupError(
            f"{name} holds something that is no manifest: each document needs apiVersion, kind and "
            "metadata.name"
        )
    return documents


def _is_manifest(entry: object) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("metadata"), dict):
        return False
    named = (entry.get("apiVersion"), entry.get("kind"), entry["metadata"].get("name"))
    return all(isinstance(word, str) and word for word in named)


class _Loader(yaml.SafeLoader):
    """Reads dates as the strings that they are to Kubernetes."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
