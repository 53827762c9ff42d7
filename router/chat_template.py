"""Chat templates: a conversation to the text that the model was trained on.

Rendered as transformers' `apply_chat_template` does it (same Jinja settings, globals and variables), without
transformers: a sandbox, since a template comes with a checkpoint and is somebody else's program.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.errors import InvalidRequest
from router.rendering import Conversation

MARK = "<end of what is to be continued> "

PROBE = "The quick brown fox"  # a text that a template leaves as it is


class _GenerationBlock(Extension):
    """`{% generation %} ... {% endgeneration %}` marks an assistant's words for training, no more."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own interface)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter this one escapes nothing for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class ChatTemplate:
    """A compiled template. An empty source renders nothing: the model was not made for chat."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        self._template = environment.from_string(source) if source else None
        self._special_tokens = dict(special_tokens)
        self._in_parts = self._template is not None and self._takes_parts()

    def render(self, conversation: Conversation, *, now: Callable[[], datetime] = datetime.now) -> str:
        """Returns the prompt up to the place at which the output begins.

        Raises InvalidRequest if there is no template, or if it refuses these messages."""
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template: send a prompt to /v1/completions instead of messages",
                field="messages",
            )
        turns, rendering = [dict(turn) for turn in conversation.turns], conversation.rendering
        if rendering.continue_final_message:
            turns[-1]["content"] = (turns[-1].get("content") or "") + MARK
        try:
            text = self._template.render(
                {
                    **self._special_tokens,
                    **rendering.variables,
                    "messages": [self._shaped(turn) for turn in turns],
                    "tools": list(conversation.tools) or None,
                    "documents": None,
                    "add_generation_prompt": rendering.add_generation_prompt,
                    "strftime_now": lambda form: now().strftime(form),
                }
            )
        except Exception as error:  # it is a program: it may divide by zero, or call itself without end
            raise InvalidRequest(
                f"messages are refused by the model's chat template: {error}", field="messages"
            ) from error
        return _up_to_mark(text) if rendering.continue_final_message else text

    def _shaped(self, message: Mapping[str, Any]) -> dict[str, Any]:
        text = message.get("content")
        if not self._in_parts or not isinstance(text, str):
            return dict(message)
        return {**message, "content": [{"type": "text", "text": text}]}

    def _takes_parts(self) -> bool:
        """Returns whether a text is lost unless it is a list of parts, as templates of multimodal models have
        it."""
        for self._in_parts in (False, True):
            try:
                if PROBE in self.render(Conversation([{"role": "user", "content": PROBE}])):
                    return self._in_parts
            except InvalidRequest:
                continue
        return False


def _up_to_mark(text: str) -> str:
    """Returns what stands before the end of the last turn's content, as transformers does it: a template that
    trims contents takes the blank from the mark, and the blanks at the end of the content, too."""
    before, mark, after = text.rpartition(MARK.strip())
    if not mark:
        raise InvalidRequest(
            "continue_final_message: the model's chat template leaves the last message out",
            field="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()
