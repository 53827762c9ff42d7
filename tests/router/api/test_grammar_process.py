"""Who ends the process in which grammars are compiled ends nothing else, and no grammar is blamed for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from outrider.errors import InvalidRequest, Unavailable
from router.api.access import _owner, owner
from router.api.grammar_process import GrammarProcess
from router.api.threads import Threads
from router.line_process import TRIES, LineProcess
from tests.router.api.test_tools import asked


@pytest.fixture
def process() -> GrammarProcess:
    made = GrammarProcess("", (), 300)
    made._process = LineProcess("tests.router.api.killed_grammars", ["", []])
    return made


def test_a_grammar_whose_process_is_ended_is_compiled_by_the_next(
    process: GrammarProcess, tmp_path: Path
) -> None:
    assert process.compiled([str(tmp_path), 1], "") == {"text": "compiled"}
    running = process._process._process
    assert running is not None
    running.kill()
    running.wait()
    assert process.compiled([str(tmp_path), 0], "") == {"text": "compiled"}


def test_no_verdict_is_kept_of_a_grammar_whose_process_is_ended_again_and_again(
    process: GrammarProcess, tmp_path: Path
) -> None:
    with pytest.raises(Unavailable, match="was ended from outside; send it again"):
        process.compiled([str(tmp_path), TRIES], "")
    assert process.compiled([str(tmp_path), TRIES], "") == {"text": "compiled"}


def test_all_tools_together_cost_one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_for: list[object] = []
    compiled = GrammarProcess.compiled

    def counted(process: GrammarProcess, what: object, owner: str) -> dict[str, str]:
        asked_for.append(what)
        return compiled(process, what, owner)

    monkeypatch.setattr(GrammarProcess, "compiled", counted)
    told = {"properties": {"a": {"not": {"enum": ["x" * 20]}}}}
    many = [{"type": "function", "function": {"name": f"f{n}", "parameters": told}} for n in range(128)]
    with pytest.raises(InvalidRequest, match="Unimplemented keys"):
        asked(tools=many, tool_choice="required")
    assert len(asked_for) == 1


async def test_that_another_key_has_had_a_grammar_compiled_makes_none_come_sooner(
    process: GrammarProcess, tmp_path: Path
) -> None:
    """What its owner asks for again does."""
    threads, what = Threads(), [str(tmp_path), 0]
    known = process._answered.cache_info

    async def ask(name: str) -> None:
        _owner.set(name)
        answer = await threads.run(None, name, None, lambda: process.compiled(what, owner()))
        assert answer == {"text": "compiled"}

    for name, compiled in (("alice", 1), ("alice", 1), ("bob", 2), ("alice", 2)):
        await asyncio.create_task(ask(name))
        assert known().misses == compiled, name
