"""A virtual environment for each client, made here, and `outrider serve` as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import start

ASKING = Path(__file__).parent / "asking"
WANTS_TORCH = {"guidellm"}
Client = Callable[[str, str, str], dict[str, Any]]


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    serve = start()
    yield serve.url
    serve.end()


@pytest.fixture
def asked(tmp_path: Path) -> Client:
    """Installs a package and lets its script ask: what the script tells, and the package's version."""

    def ask(package: str, url: str, prompt: str) -> dict[str, Any]:
        python = str(tmp_path / "bin" / "python")
        run(sys.executable, "-m", "venv", str(tmp_path))
        if package in WANTS_TORCH:  # which is here, and is gigabytes
            (outer,) = (tmp_path / "lib").glob("python*/site-packages")
            (outer / "outer.pth").write_text(sysconfig.get_path("purelib"))
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)
        name = package.partition("[")[0].removesuffix("-slim")
        told: dict[str, Any] = json.loads(
            run(python, str(ASKING / f"with_{name.replace('-', '_')}.py"), url, prompt).splitlines()[-1]
        )
        installed = json.loads(run(python, "-m", "pip", "list", "--format", "json"))
        versions = {each["name"].lower().replace("_", "-"): each["version"] for each in installed}
        return {**told, "version": versions[package.partition("[")[0]]}

    return ask


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
