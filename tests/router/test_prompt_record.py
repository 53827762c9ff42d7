"""Prompts are kept in a file where somebody says so: whole lines, of bounded size, for one user to read."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from demo.pair import TARGET
from distillation.prompts import read
from outrider.errors import StartupError
from router import prompt_record
from router.prompt_record import PromptRecord
from router.requests import SessionBegun
from tests.router.asking import request
from tests.router.conftest import Rig


def test_distill_reads_what_is_recorded(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    record = PromptRecord(file)
    for prompt in ((1, 2, 3), (1, 2, 3), (4, 5), (1, 2, 3)):  # the second is another answer's to the same
        record.add("m", prompt)
    record.close()
    assert [prompt.ids for prompt in read(file, AutoTokenizer.from_pretrained(TARGET))] == [
        (1, 2, 3),
        (4, 5),
        (1, 2, 3),
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert {json.loads(line)["model"] for line in file.read_text().splitlines()} == {"m"}


def test_it_does_not_grow_without_end_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_record, "MOST_BYTES", 4000)
    monkeypatch.setattr(prompt_record, "MOST_WAITING", 8)
    file = tmp_path / "prompts.jsonl"
    for run in range(3):  # of the router
        record = PromptRecord(file)
        for at in range(200):
            record.add("m", (run, at, *range(50)))
        record.close()
    kept = [json.loads(line)["ids"] for part in tmp_path.iterdir() for line in part.read_text().splitlines()]
    assert {part.name for part in tmp_path.iterdir()} == {"prompts.jsonl", "prompts.jsonl.1"}
    assert sum(part.stat().st_size for part in tmp_path.iterdir()) <= 4000
    assert all(len(ids) == 52 for ids in kept) and kept[-1][0] == 2


def test_a_file_that_is_taken_away_is_begun_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, folder = tmp_path / "a" / "prompts.jsonl", tmp_path / "b"
    file.parent.mkdir()
    record = PromptRecord(file)
    for number in range(4):
        record.add("m", (number,))
        record._waiting.join()
        if number == 0:
            file.unlink()
        elif number == 1:  # its folder, too
            file.parent.rename(folder)
        elif number == 2:
            folder.rename(file.parent)
    record.close()
    assert [json.loads(line)["ids"] for line in file.read_text().splitlines()] == [[1], [3]]
    assert len(caplog.records) == 1, "nothing could be written meanwhile"


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--record /.* cannot be written \(No such file or directory\)"):
        PromptRecord(tmp_path / "nowhere" / "prompts.jsonl")


async def test_a_router_records_the_prompts_that_it_admits(rig: Rig, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    rig.sessions._record = record = PromptRecord(file)
    await rig.verifier()
    events = rig.sessions.run(request())
    assert isinstance(await anext(events), SessionBegun)
    await events.aclose()
    record.close()
    assert json.loads(file.read_text()) == {"model": "m", "ids": list(request().params.prompt)}


def test_a_file_that_is_there_is_the_users_alone_from_now_on(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.touch(0o644)
    PromptRecord(file).close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("read", [False, True])
def test_a_pipe_is_refused_whether_somebody_reads_from_it_or_not(tmp_path: Path, read: bool) -> None:
    file = tmp_path / "prompts.jsonl"
    os.mkfifo(file)
    reader = os.open(file, os.O_RDONLY | os.O_NONBLOCK) if read else None
    with pytest.raises(StartupError, match=r"--record .* cannot be written"):
        PromptRecord(file)
    if reader is not None:
        os.close(reader)
