"""How models write what they think before they answer, and which way a chat template tells of. Text in as it
comes; out come the reasoning and the answer. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

OF_TEMPLATE, NONE = "auto", "none"  # the format is the chat template's; all text is the answer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """One way: a text that begins with the opening is reasoning up to the closing, and an answer after it."""

    name: str  # vLLM's
    opening: str
    closing: str
    gap: str = ""  # what models write between the closing and the answer: part of neither
    implied: bool = False  # without an opening, too

    def open_in(self, text: str) -> bool:
        """Returns whether a text has begun to reason, and has not ended it."""
        return text.rfind(self.opening) > text.rfind(self.closing)

    def begun_by(self, prompt: str) -> bool:
        """Returns whether what follows a prompt is reasoning: chat templates may write the opening."""
        end = prompt.rstrip()
        return end.endswith(self.opening) or (self.implied and not end.endswith(self.closing))


QWEN3 = ReasoningFormat("qwen3", "<think>", "</think>", "\n\n")
DEEPSEEK_R1 = ReasoningFormat("deepseek_r1", "<think>", "</think>", "\n\n", implied=True)
GRANITE = ReasoningFormat("granite", "Here is my thought process:", "Here is my response:")
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
SEED_OSS = ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>")

FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each for each in (QWEN3, DEEPSEEK_R1, GRANITE, MISTRAL, SEED_OSS)
}


def of_template(template: str) -> ReasoningFormat | None:
    """Returns the format of a model whose chat template this is; None if it tells of none. What begins the
    reasoning is seen in the prompt, so that nothing is implied."""
    return next(
        (one for one in FORMATS.values() if not one.implied and one.closing in template), None
    )


def named(name: str, template: str) -> ReasoningFormat | None:
    """Returns the format that goes by a name, of a model with this chat template."""
    return of_template(template) if name == OF_TEMPLATE else FORMATS.get(name)


@dataclass(frozen=True, slots=True)
class ReasoningReading:
    """How reasoning is found in the answers to a request."""

    format: str  # name of a ReasoningFormat
    begun: bool  # the prompt ends amid it

    @property
    def markers(self) -> tuple[str, ...]:
        """Returns the special tokens that are part of the text."""
        form = FORMATS[self.format]
        return form.opening, form.closing

    def splitter(self) -> Splitter:
        return Splitter(FORMATS[self.format], self.begun)


class Splitter:
    """Of one text. Line ends at the beginning and at the end of the reasoning are left out."""

    def __init__(self, form: ReasoningFormat, begun: bool) -> None:
        self.over = False  # what comes is the answer
        self.thinking = begun
        self._form = form
        self._held = ""  # what is not told yet
        self._gap = 0  # characters of the gap that have come
        self._told = False  # some of the reasoning is

    def push(self, text: str) -> tuple[str, str]:
        """Returns what this text settles: of the reasoning, and of the answer."""
        if self.over and self._gap == len(self._form.gap):
            return "", text
        self._held += text
        if not self.thinking and not self.over:
            self._begin()
        thought = self._think() if self.thinking else ""
        return thought, self._answer() if self.over else ""

    def flush(self) -> tuple[str, str]:
        """Returns the rest, at the end of the text."""
        rest, self._held = self._held, ""
        if self.over:
            return "", rest
        return (rest, "") if self.thinking else ("", rest)

    def _begin(self) -> None:
        """Finds out if the text begins with the opening."""
        start, opening = self._held.lstrip(), self._form.opening
        if start.startswith(opening):
            self.thinking, self._held = True, start.removeprefix(opening)
        elif not opening.startswith(start):
            self.over, self._gap = True, len(self._form.gap)

    def _think(self) -> str:
        if not self._told:
            self._held = self._held.lstrip("\n")
        thought, closing, rest = self._held.partition(self._form.closing)
        if closing:
            self.thinking, self.over, self._held = False, True, rest
            return thought.rstrip("\n")
        size = len(thought) - _beginning(thought, self._form.closing)
        size = len(thought[:size].rstrip("\n"))
        self._held = thought[size:]
        self._told = self._told or size > 0
        return thought[:size]

    def _answer(self) -> str:
        gap = self._form.gap
        while self._held and self._gap < len(gap):
            if self._held[0] != gap[self._gap]:
                self._gap = len(gap)
                break
            self._held, self._gap = self._held[1:], self._gap + 1
        text, self._held = self._held, ""
        return text


def _beginning(text: str, word: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a word."""
    most = min(len(word) - 1, len(text))
    return next((count for count in range(most, 0, -1) if word.startswith(text[-count:])), 0)


def grammar(
    form: ReasoningFormat, begun: bool, answer: str, token_id: Callable[[str], int | None]
) -> str:
    """Returns the grammar of texts that may reason, or if `begun` go on with that, and then answer by a
    grammar, as llguidance has it.

    `token_id`: of a tag that is one token: only that token stands for it."""
    opening, closing = token_id(form.opening), token_id(form.closing)
    gap = f" {json.dumps(form.gap)}" if form.gap else ""
    if closing is None:
        thought = f"thoughts{gap}"
        rule = f"thoughts[suffix={json.dumps(form.closing)}]: /(.|\\n)*/"
    else:
        thought = f"THOUGHTS <[{closing}]>{gap}"
        escaped = re.sub(r"[^\w ]", lambda found: "\\" + found[0], form.closing)
        rule = f"THOUGHTS: /(.|\\n)*/ & ~/(.|\\n)*{escaped}(.|\\n)*/"
    before = thought
    if not begun:
        opened = json.dumps(form.opening) if opening is None else f"<[{opening}]>"
        before = f"({opened} {thought})?"
    first, *rest = (
        json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    )
    head = {"lark_grammar": f"start: {before} @answer\n{rule}\n"}
    return json.dumps({"grammars": [head, {**first, "name": "answer"}, *rest]})
