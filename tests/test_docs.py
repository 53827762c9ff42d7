"""What README and docs name is there: commands and their options, files, sections, metrics, results."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.core import TyperGroup
from typer.exceptions import TyperException
from typer.main import get_command

from outrider_cli.app import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "demo" / "models" / "README.md"]
COMMANDS = get_command(app)
WORDS = {"...": "WORD", "PRICE": "1"}  # what stands for a value, and one
PATH = re.compile(
    r"(benchmarks|demo|deploy|distillation|docs|drafter|outrider|proto|router|tests|verifier)/[\w./-]*"
)
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]+))?\)")


def names_of(pages: list[Path] = PAGES) -> Iterator[tuple[str, str]]:
    """Yields each page's name and what stands in it as code, on one line."""
    for page in pages:
        for code in re.findall(r"`([^`]+)`", page.read_text()):
            yield page.name, " ".join(code.split())


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """Returns the command that the words name, and the rest of them. Raises KeyError if there is none."""
    command: Any = COMMANDS
    while isinstance(command, TyperGroup) and words:
        command, words = command.commands[words[0]], words[1:]
    return command, words


def told(text: str) -> Iterator[list[str]]:
    """Yields the words of each `outrider` command that stands on lines of its own."""
    for line in re.sub(r"\\\n\s+", " ", text).splitlines():
        if found := re.match(r"\s+(?:\.venv/bin/)?outrider (.*)", line):
            yield [WORDS.get(word, word) for word in shlex.split(found[1], comments=True)]


def wrong(words: list[str]) -> str | None:
    """Returns what is wrong with the words of a command."""
    try:
        command, rest = command_of(words)
        command.make_context("outrider", rest)
    except KeyError as error:
        return f"there is no command {error}"
    except TyperException as error:
        return str(error)
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_to_paste_are_understood(page: Path) -> None:
    assert [(words, fault) for words in told(page.read_text()) if (fault := wrong(words))] == []


def test_a_command_with_a_mistake_is_noticed() -> None:
    first, second, third = told(
        "    outrider verifier --tarket T\n    outrider draft\n    outrider plan \\\n      --sessions x\n"
    )
    assert "--tarket" in str(wrong(first))
    assert wrong(second) == "there is no command 'draft'"
    assert third == ["plan", "--sessions", "x"] and "valid integer" in str(wrong(third))


def test_options_of_commands_exist() -> None:
    """In `outrider NAME --option`, amid a sentence."""
    found, missing = 0, []
    for page, code in names_of():
        if re.match(r"outrider [a-z].* -", code):
            command, rest = command_of(code.split()[1:])
            known = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)} | {
                "--help"
            }
            missing += [(page, code) for word in rest if word.startswith("-") and word not in known]
            found += 1
    assert missing == [] and found > 10


def test_links_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for path, section in LINK.findall(page.read_text()):
            there = page.parent / path if path else page
            if not there.exists() or (section and section not in sections(there)):
                broken.append((page.name, path, section))
    assert broken == []


def sections(page: Path) -> set[str]:
    """Returns the names by which links reach a page's sections."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def test_files_that_are_named_are_there() -> None:
    named = {(page, code) for page, code in names_of() if PATH.fullmatch(code)}
    assert len(named) > 60
    # What a command writes, or a request names, is not there.
    assert [each for each in sorted(named) if not (ROOT / each[1]).exists() and "grown" not in each[1]] == []


def test_each_file_of_a_room_has_a_line_in_architecture() -> None:
    rooms = re.split(r"^## ", (ROOT / "docs" / "architecture.md").read_text(), flags=re.MULTILINE)
    told_of = {}
    for room in rooms:
        name, _, rows = room.partition("\n")
        if name.endswith("/"):
            first = re.findall(r"^\| (`.*?) \|", rows, re.MULTILINE)
            told_of[name] = {f"{name}{file}" for cell in first for file in re.findall(r"`([^`]+)`", cell)}
    assert {"router/", "verifier/", "drafter/", "outrider/engine/"} <= told_of.keys()
    there = {
        path.relative_to(ROOT).as_posix()
        for name in told_of
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.stat().st_size
    }
    lines = set().union(*told_of.values())
    assert lines - there == set()
    assert {path for path in there - lines if not path.endswith("__init__.py")} == set()


def test_metrics_that_are_named_exist() -> None:
    source = "".join(path.read_text() for path in sorted((ROOT / "router").rglob("*.py")))
    named = {code for _, code in names_of() if re.fullmatch(r"(outrider_|vllm:)\w+", code)} - {"outrider_cli"}
    assert len(named) > 15
    assert [name for name in sorted(named) if f'"{name}"' not in source] == []


@pytest.mark.parametrize("folder", ["benchmarks/results", "docs/images"])
def test_results_and_pictures_are_told_of(folder: str) -> None:
    text = "".join(page.read_text() for page in PAGES)
    stems = {path.name.partition(".")[0] for path in (ROOT / folder).iterdir()}
    assert stems
    assert [stem for stem in sorted(stems) if not re.search(rf"\b{stem}\b", text)] == []
