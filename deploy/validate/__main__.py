"""`python -m deploy.validate PATH ...`: says what is wrong with manifests, without a cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deploy.validate import rules, schema, serve
from deploy.validate.manifest import Manifest, name_of, render
from outrider.errors import StartupError


class Report(NamedTuple):
    """Everything about some manifests."""

    findings: list[str]  # "RayService/outrider: spec.rayClusterConfig.rayVersion: must be ..."
    unchecked: list[str]  # what there is no schema of


def validate(manifests: list[Manifest]) -> Report:
    """Runs all checks: schemas first, and rules if those found nothing: rules take the structure for
    given."""
    found = [said for each in manifests for said in _said(each, schema.check_manifest(each))]
    found = found or [said for each in manifests for said in _said(each, _by_rules(each, manifests))]
    unchecked = [
        f"not checked: {name_of(each)}: there is no schema of {each['apiVersion']} here"
        for each in manifests
        if each["kind"] != "RayService" and not schema.built_in(each)
    ]
    return Report(list(dict.fromkeys(found)), unchecked)


def _by_rules(manifest: Manifest, manifests: list[Manifest]) -> Iterator[schema.Problem]:
    yield from rules.check(manifest, manifests)
    if manifest["kind"] == "RayService":
        yield from serve.check_service(manifest)


def _said(manifest: Manifest, problems: Iterator[schema.Problem]) -> Iterator[str]:
    """Yields the problems as lines. A schema lets some shapes pass that a rule does not expect, such as a
    null."""
    try:
        for path, sentence in problems:
            yield ": ".join(part for part in (name_of(manifest), path, sentence) if part)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        yield f"{name_of(manifest)}: is not built as its kind must be ({error})"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0 = nothing wrong, 1 = findings, 2 = a path that cannot be read."""
    parser = argparse.ArgumentParser("python -m deploy.validate", description="Checks manifests.")
    parser.add_argument("path", nargs="+", type=Path, help="a folder for kustomize, or a file of YAML")
    wrong = 0
    try:
        for path in parser.parse_args(arguments).path:
            report = validate(render(path))
            for line in (*report.findings, *report.unchecked):
                print(f"{path}: {line}")
            wrong += len(report.findings)
    except StartupError as error:
        print(f"deploy.validate: {error.message}", file=sys.stderr)
        return 2
    print(f"{wrong} mistakes" if wrong else "no mistakes")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
