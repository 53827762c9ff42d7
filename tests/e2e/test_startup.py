"""What a user sees when the service cannot start: the reason, in a line, and nothing left running.

What a checkpoint may lack is tests/engine/test_loading.py's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.conftest import DRAFT, KV_MEMORY, ROOT, TARGET, Serve

pytestmark = pytest.mark.process


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "outrider_cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400", "HF_HUB_OFFLINE": "1"},
    )


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    with started(*arguments) as process:
        try:
            said, _ = process.communicate(timeout=240)
        finally:
            process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, said)


def fails(*arguments: str) -> str:
    """Starts a service that must fail, and returns what it said."""
    children = set(psutil.Process().children(recursive=True))
    ended = run("serve", "--port", "0", "--grpc-port", "0", "--kv-memory", KV_MEMORY, *arguments)
    assert ended.returncode not in (0, None), ended.stdout
    assert "Traceback" not in ended.stdout
    assert not set(psutil.Process().children(recursive=True)) - children
    return ended.stdout


def copy(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    return folder


def test_a_damaged_checkpoint(tmp_path: Path) -> None:
    target = copy(TARGET, tmp_path / "target")
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: 2**20])
    assert "model.safetensors" in fails("--target", str(target), "--drafters", "0")


@pytest.mark.parametrize("flag", ["--port", "--grpc-port"])
def test_a_port_in_use(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        said = fails(flag, port)
    assert port in said and flag in said


def test_a_draft_whose_tokenizer_differs_is_refused_unless_it_is_told_the_targets(
    serve: Serve, tmp_path: Path
) -> None:
    draft = copy(DRAFT, tmp_path / "draft")
    file = draft / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    by_id = {number: token for token, number in vocabulary.items()}
    vocabulary[by_id[300]], vocabulary[by_id[301]] = 301, 300
    file.write_text(json.dumps(tokenizer))
    told = ("drafter", "--draft", str(draft), "--router", serve.grpc_address, "--kv-memory", KV_MEMORY)
    ended = run(*told)
    assert ended.returncode == 1
    assert "the draft model's tokenizer differs" in ended.stdout.splitlines()[-1]
    with started(*told, "--target", str(TARGET)) as drafter:
        assert drafter.stdout is not None
        ready = next((line for line in drafter.stdout if "ready:" in line), "")
        drafter.send_signal(signal.SIGINT)
    assert "drafts token by token for another tokenizer, 100% of whose tokens it has" in ready
