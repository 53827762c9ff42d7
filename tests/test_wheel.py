"""The wheel holds what a user runs: the roles, the command line, Ray's application and the demo models."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INSTALLED = ("outrider", "outrider_cli", "router", "verifier", "drafter", "distillation", "deploy")
MODEL = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What a wheel of this checkout installs. It is built from a copy: building leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    without = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "grown", "results")
    shutil.copytree(ROOT, folder / "copy", ignore=without)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index"]
    where = ["--no-build-isolation", "--wheel-dir", str(folder), str(folder / "copy")]
    subprocess.run([*command, *where], check=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_module_of_the_roles_and_of_the_command_line_is_installed(files: set[str]) -> None:
    modules = {
        path.relative_to(ROOT).as_posix()
        for room in INSTALLED
        for path in (ROOT / room).rglob("*.py")
        if not path.is_relative_to(ROOT / "deploy" / "validate")
    }
    assert "outrider_cli/bench/run.py" in modules
    assert modules - files == set()


@pytest.mark.parametrize("model", ["target", "draft"])
def test_the_demo_pair_is_installed(model: str, files: set[str]) -> None:
    assert {"demo/pair.py", *(f"demo/models/{model}/{name}" for name in MODEL)} <= files


def test_nothing_is_installed_that_only_this_checkout_needs(files: set[str]) -> None:
    rooms = {name.partition("/")[0] for name in files if not name.startswith("outrider-")}
    assert rooms == {*INSTALLED, "demo"}
    kept_out = ("demo/training/", "deploy/validate/", "deploy/kuberay/", "deploy/docker/")
    assert [name for name in files if name.startswith(kept_out)] == []


def test_the_page_is_installed(files: set[str]) -> None:
    page = {path.relative_to(ROOT).as_posix() for path in (ROOT / "router" / "page").iterdir()}
    assert "router/page/index.html" in page and page <= files
