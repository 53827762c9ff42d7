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
from tests.forked import parent

pytestmark = pytest.mark.process


SECONDS = 240  # only a hang can reach them
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400", "HF_HUB_OFFLINE": "1"}


def fails(*arguments: str) -> str:
    """Starts a service that must fail, and returns what it said."""
    children = set(psutil.Process().children(recursive=True))
    command = [sys.executable, "-m", "outrider_cli", "serve", "--port", "0", "--grpc-port", "0"]
    ended = subprocess.run(
        [*command, "--kv-memory", KV_MEMORY, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
        timeout=SECONDS,
    )
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
    command = ("outrider_cli", "drafter", "--draft", str(draft), "--router", serve.grpc_address)
    told = (*command, "--kv-memory", KV_MEMORY)
    refused = parent().fork(told, ENVIRONMENT, errors=True)
    assert "the draft model's tokenizer differs" in refused.stdout.read().splitlines()[-1]
    assert refused.wait(SECONDS) == 1
    drafter = parent().fork((*told, "--target", str(TARGET)), ENVIRONMENT, errors=True)
    try:
        ready = next((line for line in drafter.stdout if "ready:" in line), "")
        drafter.send_signal(signal.SIGINT)
        drafter.wait(SECONDS)
    finally:
        drafter.kill()
    assert "drafts token by token for another tokenizer, 100% of whose tokens it has" in ready
