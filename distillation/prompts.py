"""What the target answers: a user's prompts, or questions that a chat model makes up by itself.

A chat model that is given its template up to where a user's message begins writes such a message (Xu et al.,
Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from outrider.errors import StartupError

MARK = "OUTRIDER-QUESTION"
QUESTION_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids to go on from."""

    ids: tuple[int, ...]
    category: str = ""


@dataclass(frozen=True, slots=True)
class Template:
    """How a chat model's question begins, and the text that ends it."""

    before: tuple[int, ...]
    after: str


def template_of(tokenizer: Any, target: str) -> Template:
    """Raises StartupError if the target's tokenizer has no template that shows where a question stands."""
    wanted = f"{target} has no chat template to make up questions with: give --prompts"
    if not tokenizer.chat_template:
        raise StartupError(wanted)
    try:
        told = _rendered(tokenizer, [{"role": "user", "content": MARK}], answering=False)
    except Exception:  # a template is a program
        raise StartupError(wanted) from None
    before, found, after = told.partition(MARK)
    if not found or not after.strip() or not (ids := _encoded(tokenizer, before)):
        raise StartupError(wanted)
    return Template(ids, after.strip())


def prompt_of(tokenizer: Any, template: Template, written: list[int]) -> Prompt | None:
    """Returns the prompt that asks the question written; None if it is none."""
    special = set(tokenizer.all_special_ids)
    plain = list(takewhile(lambda token: token not in special, written))
    question = tokenizer.decode(plain).partition(template.after)[0].strip()
    if not question:
        return None
    return Prompt(_encoded(tokenizer, _rendered(tokenizer, [{"role": "user", "content": question}])))


def read(file: Path, tokenizer: Any) -> list[Prompt]:
    """Returns the prompts of a file. Raises StartupError, which names the line."""
    try:
        if file.is_char_device():
            raise StartupError(f"--prompts {file} is a device: name a file")
        older = file.with_name(f"{file.name}.1")  # where --record of a router keeps what is older
        # JSON's texts may have any other line end.
        lines = {
            each: each.read_text(encoding="utf-8").split("\n")
            for each in (older, file)
            if each.is_file() or each is file
        }
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--prompts {file} cannot be read ({error})") from None
    found = [
        _prompt(line, number, each, tokenizer)
        for each, its in lines.items()
        for number, line in enumerate(its, 1)
        if line.strip()
    ]
    if len(found) < 2:
        raise StartupError(
            f"--prompts {file} has {len(found)} prompts: give at least 2, of which 1 is held out"
        )
    return found


def shuffled(prompts: list[Prompt], seed: int) -> Iterator[Prompt]:
    """Yields the prompts for ever, in another order each time."""
    chooser = random.Random(seed)
    while True:
        yield from chooser.sample(prompts, len(prompts))


def _prompt(line: str, number: int, file: Path, tokenizer: Any) -> Prompt:
    where = f"--prompts {file}, line {number}"
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        raise StartupError(f"{where}: is no JSON") from None
    told = told if isinstance(told, dict) else {}
    category = told.get("category", "")
    if isinstance(told.get("prompt"), str) and isinstance(category, str):
        try:
            ids = tuple(tokenizer(told["prompt"])["input_ids"])
        except TypeError:
            raise StartupError(f"{where}: is no valid Unicode: it has half of a surrogate pair") from None
    elif "ids" in told and isinstance(category, str):  # as `--record` of a router writes them
        ids = tuple(told["ids"]) if isinstance(told["ids"], list) else ()
        if not all(type(token) is int and 0 <= token < len(tokenizer) for token in ids):
            raise StartupError(f"{where}: has ids that are no tokens of this target")
    elif isinstance(told.get("messages"), list) and isinstance(category, str):
        try:
            ids = _encoded(tokenizer, _rendered(tokenizer, told["messages"]))
        except Exception as error:  # the template refuses what it does not know
            raise StartupError(f"{where}: the chat template refuses the messages ({error})") from None
    else:
        raise StartupError(f'{where}: must be {{"prompt": TEXT}}, {{"messages": [...]}} or {{"ids": [...]}}')
    if not ids:
        raise StartupError(f"{where}: is empty")
    return Prompt(ids, category)


def _rendered(tokenizer: Any, messages: list[dict[str, str]], answering: bool = True) -> str:
    """Returns the conversation, up to where the answer begins if it is to be answered."""
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering)
    return text


def _encoded(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
