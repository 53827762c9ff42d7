"""`python -m deploy.validate PATH ...`: says what is wrong with manifests, without a cluster.

A folder is rendered by `kubectl kustomize`, a file is taken as it is. The schema of a RayService is in
KubeRay's CRD (1 MB, not kept here): looked for at --crd, at $OUTRIDER_RAYSERVICE_CRD and at CRD_BESIDE.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from deploy.validation import core, house, operator, pools, schema, serve
from deploy.validation.finding import Finding, Manifest, name_of
from deploy.validation.render import kubectl, render
from outrider.errors import StartupError

CRD_VARIABLE = "OUTRIDER_RAYSERVICE_CRD"
# Beside the repository.
CRD_BESIDE = Path(__file__).parents[2] / "shared" / "data" / "rayservice-crd-v1.7.0.yaml"
RULES = (operator.check, serve.check, pools.check)  # for one manifest each


@dataclass(frozen=True, slots=True)
class Report:
    """Everything about some manifests."""

    findings: list[Finding]
    skipped: list[str]  # sentences: what was not checked, and why
    notes: list[str]  # sentences: what must be there before


def find_crd(given: Path | None = None) -> Path | None:
    """The CRD's file; None where there is none. Raises StartupError where one was named and is not there."""
    named = given or (Path(os.environ[CRD_VARIABLE]) if os.environ.get(CRD_VARIABLE) else None)
    if named is not None and not named.is_file():
        raise StartupError(f"there is no CRD file {named}; name the rayservices CRD of KubeRay 1.7")
    return named or (CRD_BESIDE if CRD_BESIDE.is_file() else None)


def validate(manifests: list[Manifest], crd: Path | None) -> Report:
    """All checks: schemas first, and rules where those found nothing: rules take the structure for given.

    `crd` is None where a RayService cannot be held against its schema.
    """
    rayservices = [entry for entry in manifests if entry.get("kind") == "RayService"]
    findings = [found for entry in manifests for found in _guarded(core.check(entry), name_of(entry), crd)]
    if crd is not None:
        known = schema.load(crd)
        findings += [found for entry in rayservices for found in schema.check(entry, known)]
    findings = findings or list(_rules(manifests, crd))
    skipped = [
        f"{name_of(entry)}: no schema of {entry.get('apiVersion')} here; only its selectors were checked"
        for entry in manifests
        if entry not in rayservices and not core.knows(entry)
    ]
    if rayservices and crd is None:
        skipped.append(
            f"the RayService's schema and CEL rules: name the CRD's file with --crd or ${CRD_VARIABLE}"
        )
    notes = [
        f"the Secret {name} must be in the namespace before" for name in house.missing_secrets(manifests)
    ]
    return Report(list(dict.fromkeys(findings)), skipped, notes)


def _rules(manifests: list[Manifest], crd: Path | None) -> Iterator[Finding]:
    yield from _guarded(house.check(manifests), "all manifests", crd)
    for entry in manifests:
        for check in RULES:
            yield from _guarded(check(entry), name_of(entry), crd)


def _guarded(findings: Iterator[Finding], place: str, crd: Path | None) -> Iterator[Finding]:
    """Those findings. A schema lets some shapes pass that a rule does not expect, such as null in a list."""
    try:
        yield from findings
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        advice = "" if crd is not None else "; name the CRD's file with --crd to hear more"
        yield Finding(place, f"is not built as its kind must be ({error}){advice}")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 = nothing wrong, 1 = findings, 2 = a path that cannot be read."""
    parser = argparse.ArgumentParser(
        "python -m deploy.validate", description="Checks manifests without a cluster."
    )
    parser.add_argument("path", nargs="+", type=Path, help="a folder for kustomize, or a file of YAML")
    parser.add_argument(
        "--crd", type=Path, help=f"the rayservices CRD of KubeRay 1.7 (default: ${CRD_VARIABLE})"
    )
    options = parser.parse_args(arguments)
    wrong = 0
    try:
        crd = find_crd(options.crd)
        for path in options.path:
            report = validate(render(path, kubectl()), crd)
            for finding in report.findings:
                print(f"{path}: {finding}")
            for sentence in report.skipped:
                print(f"{path}: not checked: {sentence}")
            for sentence in report.notes:
                print(f"{path}: note: {sentence}")
            wrong += len(report.findings)
    except StartupError as error:
        print(f"deploy.validate: {error.message}", file=sys.stderr)
        return 2
    print(f"{wrong} mistakes" if wrong else "no mistakes")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
