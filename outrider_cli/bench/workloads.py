"""Makes the prompts that are asked for, from text that the demo pair was not trained on.

All of it is found on the machine, so nothing is copied into the repository: the held-out modules of the
standard library, and the docstrings of installed packages, which are no part of the standard library. For one
version of Python and of these packages the prompts are the same in every run.
"""

from __future__ import annotations

import ast
import random
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

from demo.heldout import HELD_OUT, heldout_text
from outrider.errors import InvalidRequest
from outrider_cli.bench.suite import Conversation, suite

DOCUMENTED = ("numpy", "httpx", "rich", "typer", "prometheus_client", "redis", "torch")  # rich in sentences
PROMPT_CHARACTERS = 560  # about 128 tokens or more, of code and of prose
RANDOM_CHARACTERS = 200  # the same of random characters, which make short tokens


def prompts(workload: str, count: int) -> Sequence[str | Conversation]:
    """Returns `count` different prompts of a workload, or all conversations of a category of the suite.

    Raises InvalidRequest if it is unknown or gives fewer."""
    if workload in suite():
        return suite()[workload]
    source = WORKLOADS.get(workload)
    if source is None:
        raise InvalidRequest(f"--workload {workload} is not one of {', '.join(WORKLOADS)}")
    found = list(islice(source(), count))
    if len(found) < count:
        raise InvalidRequest(
            f"the workload {workload} has {len(found)} prompts on this machine and {count} are asked for: "
            "lower --streams or --repetitions"
        )
    return found


def code() -> Iterator[str]:
    """Yields whole lines of held-out modules, a block of each in turn."""
    sources = [list(blocks(heldout_text(name).splitlines())) for name in HELD_OUT]
    for turn in range(max(map(len, sources))):
        yield from (source[turn] for source in sources if turn < len(source))


def prose() -> Iterator[str]:
    """Yields English sentences out of docstrings, paragraph by paragraph."""
    for package in DOCUMENTED:
        for path in _modules(package):
            text = path.read_text(encoding="utf-8", errors="replace")
            yield from blocks([line for doc in docstrings(text) for line in paragraphs(doc)])


def noise() -> Iterator[str]:
    """Yields random characters: text that no model can foresee."""
    rng = random.Random(0)
    alphabet = string.ascii_letters + string.digits + string.punctuation + " " * 10
    while True:
        yield "".join(rng.choices(alphabet, k=RANDOM_CHARACTERS)).strip()


WORKLOADS: dict[str, Callable[[], Iterator[str]]] = {"code": code, "prose": prose, "random": noise}


def blocks(lines: Iterable[str], characters: int = PROMPT_CHARACTERS) -> Iterator[str]:
    """Yields runs of whole lines of at least so many characters; what is left over at the end is dropped.

    Each ends after a character that is no space, so that it is tokenized as in running text."""
    block = ""
    for line in lines:
        block += line + "\n"
        if len(block.strip()) >= characters:
            yield block.strip("\n").rstrip()
            block = ""


def docstrings(source: str) -> Iterator[str]:
    """Yields the docstrings of a module, its classes and its functions; none if it does not parse."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = ast.get_docstring(node)
            if found:
                yield found


def paragraphs(doc: str) -> Iterator[str]:
    """Yields the paragraphs of a docstring that are sentences, each in one line: no code and no tables."""
    for paragraph in re.split(r"\n\s*\n", doc):
        text = " ".join(paragraph.split())
        letters = sum(character.isalpha() or character in " ,." for character in text)
        if (
            60 <= len(text) <= PROMPT_CHARACTERS
            and letters >= 0.95 * len(text)
            and text[0].isupper()
            and text.endswith(".")
        ):
            yield text


def _modules(package: str) -> list[Path]:
    """Returns the source files of an installed package, without its tests; none if it is not installed."""
    spec = find_spec(package)
    roots = [Path(root) for root in (spec.submodule_search_locations or ())] if spec else []
    return [
        path
        for root in roots
        for path in sorted(root.rglob("*.py"))
        if not {"tests", "testing"} & set(path.relative_to(root).parts)
    ]
