"""How models write what they think before they answer, and which way a chat template tells of. Text in as it
comes; out come the reasoning and the answer. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.tool_formats import beginning, without

OF_TEMPLATE, NONE = "auto", "none"  # the format is the chat template's; all text is the answer
MAX_HELD = 64  # blanks that wait until it is known what follows them


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
    each.name: each for each in (DEEPSEEK_R1, QWEN3, GRANITE, MISTRAL, SEED_OSS)
}


def of_template(template: str) -> ReasoningFormat | None:
    """Returns the format of a model whose chat template this is; None if it tells of none. What begins the
    reasoning is seen in the prompt, so that nothing is implied."""
    return next((one for one in FORMATS.values() if not one.implied and one.closing in template), None)


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
    """Parts one text. Line ends at the beginning and at the end of the reasoning are left out."""

    def __init__(self, form: ReasoningFormat, begun: bool) -> None:
        self.over = False  # what comes is the answer
        self.thinking = begun
        self._form = form
        self._held = ""  # what is not told yet
        self._gap = 0  # characters of the gap that have come
        self._told = False  # some of the reasoning is
        self._opened = False  # the opening has come, or something else has

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
        far = len(self._held) - len(start) > MAX_HELD
        if start.startswith(opening) and not far:
            self.thinking, self._opened, self._held = True, True, start.removeprefix(opening)
        elif far or not opening.startswith(start):
            self.over, self._gap = True, len(self._form.gap)

    def _think(self) -> str:
        if not self._told:
            self._held = self._held.lstrip("\n")
            if not self._opened and self._may_open():
                return ""
        thought, closing, rest = self._held.partition(self._form.closing)
        if closing:
            self.thinking, self.over, self._held = False, True, rest
            return thought[: _trimmed(thought)]
        size = _trimmed(thought[: len(thought) - beginning(thought, self._form.closing)])
        self._held = thought[size:]
        self._told = self._told or size > 0
        return thought[:size]

    def _may_open(self) -> bool:
        """Drops the opening, which a model may write though its prompt has it. Returns whether it may yet
        come."""
        opening = self._form.opening
        if self._held != opening and opening.startswith(self._held):
            return True
        self._opened = True
        self._held = self._held.removeprefix(opening).lstrip("\n")
        return False

    def _answer(self) -> str:
        gap = self._form.gap
        while self._held and self._gap < len(gap):
            if self._held[0] != gap[self._gap]:
                self._gap = len(gap)
                break
            self._held, self._gap = self._held[1:], self._gap + 1
        text, self._held = self._held, ""
        return text


def _trimmed(text: str) -> int:
    """Returns how much of a text stands before the line ends at its end."""
    return max(len(text.rstrip("\n")), len(text) - MAX_HELD)


def grammar(form: ReasoningFormat, begun: bool, answer: str, token_id: Callable[[str], int | None]) -> str:
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
        rule = f"THOUGHTS: {without(form.closing)}"
    before = thought
    if not begun:
        opened = json.dumps(form.opening) if opening is None else f"<[{opening}]>"
        before = f"({opened} {thought})?"
    first, *rest = json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
    head = {"lark_grammar": f"start: {before} @answer\n{rule}\n"}
    return json.dumps({"grammars": [head, {**first, "name": "answer"}, *rest]})
