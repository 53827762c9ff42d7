"""What is installed with Outrider may be used and passed on: its licences are among a few."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tests.cluster.process import ROOT
from tests.licences import UNKNOWN, Dependency, dependencies, licence, parts, refused


def test_no_dependency_has_a_licence_outside_the_set() -> None:
    found = dependencies()
    assert {"torch", "grpcio", "transformers", "redis"} <= {one.name for one in found if not one.extra}
    assert refused(found) == []


def test_the_page_lists_them_all() -> None:
    page = (ROOT / "docs" / "licences.md").read_text()
    missing = [one.name for one in dependencies() if f"| {one.name} | {one.licence} |" not in page]
    assert missing == [], "run `make licences`"


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ("License-Expression: MIT AND Zlib", "MIT AND Zlib"),
        ("License: Apache 2.0 License", "Apache-2.0"),
        ("License: MIT License\n\n        Copyright (c) 2022 Some", "MIT"),
        ("Classifier: License :: OSI Approved :: BSD License", "BSD-3-Clause"),
        ("License: see the file\nClassifier: License :: OSI Approved :: MIT License", "MIT"),
        ("License: Proprietary", UNKNOWN),
        ("Author: nobody", UNKNOWN),
    ],
)
def test_a_licence_is_read_from_what_the_package_says(tmp_path: Path, about: str, expected: str) -> None:
    folder = tmp_path / "some-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: some\nVersion: 1\n{about}\n")
    assert licence(Distribution.at(folder)) == expected


def test_all_licences_of_an_expression_count() -> None:
    assert parts("(MIT OR Apache-2.0) AND GPL-3.0-only") == ["MIT", "Apache-2.0", "GPL-3.0-only"]
    assert refused([Dependency("x", "MIT AND GPL-3.0-only", ""), Dependency("y", "MIT", "")])[0].name == "x"
    assert refused([Dependency("z", UNKNOWN, "")])
