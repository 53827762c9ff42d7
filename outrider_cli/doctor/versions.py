"""Python and the packages, against what Outrider asks for."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from outrider_cli.doctor.finding import Finding

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
SHOWN = ("torch", "transformers", "grpcio", "protobuf")


def asked_for() -> tuple[str, list[str]]:
    """Returns the versions of Python that will do, and the packages: those of this checkout, or of the
    installed wheel."""
    if PROJECT.is_file():
        project = tomllib.loads(PROJECT.read_text())["project"]
        return project["requires-python"], project["dependencies"]
    told = metadata.metadata("outrider")
    return told["Requires-Python"], metadata.requires("outrider") or []


def python(wanted: str, version: str = platform.python_version()) -> Finding:
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("python", version)
    return Finding("python", f"it is {version}, and {wanted} is wanted", "make the environment with another")


def packages(wanted: Iterable[str], version_of: Callable[[str], str] = metadata.version) -> list[Finding]:
    """Returns a line for each that is missing or does not fit, or one for all. `version_of` raises
    PackageNotFoundError."""
    found: dict[str, str] = {}
    wrong = []
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        name = requirement.name
        try:
            found[name] = version_of(name)
        except metadata.PackageNotFoundError:
            wrong.append(Finding("packages", f"{name} is not installed", f"pip install '{requirement}'"))
            continue
        if not requirement.specifier.contains(found[name], prereleases=True):
            said = f"{name} is {found[name]}, and {requirement.specifier} is wanted"
            wrong.append(Finding("packages", said, f"pip install '{requirement}'"))
    shown = ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found)
    return wrong or [Finding("packages", f"{shown}, and {len(found) - len(SHOWN)} others fit")]
