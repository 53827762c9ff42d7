"""How an answer to Anthropic's Messages is told, in their shapes."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from outrider.errors import OutriderError
from outrider.wire.session import FinishReason, SessionId
from router.api import answers
from router.api.connection import ServerSentEvent
from router.api.json_text import to_json
from router.api.output import Chunk, Details, Result
from router.api.position import Position, event_id
from router.api.refusals import anthropic_error
from router.api.responses import Json, totals
from router.api.stream import Items
from router.requests import SessionBegun

SHAPE = "message"


@dataclass(frozen=True, slots=True)
class MessageTelling:
    """Tells the answer."""

    id: SessionId
    model: str
    seed: int
    prompt_tokens: int
    from_start = True  # which blocks there are follows from the whole text

    def whole(self, texts: Sequence[str], results: Sequence[Result], details: Sequence[Details]) -> Json:
        (text,), (result,), (own,) = texts, results, details
        thought = [_thinking_block(own.reasoning)] if own.reasoning else []
        said = [_text_block(text)] if text or not (result.called or thought) else []
        calls = [_use_block(call.id, call.name, _input(call.arguments)) for call in result.called]
        return {
            **self._message([*thought, *said, *calls], self._usage(result)),
            **_stop(result),
            "metrics": totals(results)["metrics"],
        }

    async def events(self, items: Items, after: Position | None) -> AsyncGenerator[ServerSentEvent, None]:
        """The events; `after` as for stream.events, but that `items` are those from the start. Only the last
        event of what came at once has an id, and the last ones of all have none: who lacks one gets them
        again."""
        opened, has, blocks = after is not None, after[0] if after else 0, _Blocks()
        async with aclosing(items):
            async for _, item in items:
                if isinstance(item, SessionBegun):
                    continue
                if not opened:
                    opened = True
                    usage = _usage(self.prompt_tokens, 0, 0)
                    yield _event("message_start", message=self._message([], usage))
                told = list(blocks.add(item))
                if item.position > has:
                    for number, (kind, fields) in enumerate(told, 1):
                        at = event_id(self.id, [item.position]) if number == len(told) else None
                        yield _event(kind, at, **fields)
                if isinstance(item, Result):
                    for kind, fields in blocks.end():
                        yield _event(kind, **fields)
                    metrics = totals([item])["metrics"]
                    yield _event("message_delta", delta=_stop(item), usage=self._usage(item), metrics=metrics)
                    yield _event("message_stop")

    def refused(self, error: OutriderError) -> Sequence[ServerSentEvent]:
        return [ServerSentEvent(to_json(anthropic_error(error)), event="error")]

    def _message(self, content: Sequence[Json], usage: answers.MessageUsage) -> Json:
        return {
            "id": f"msg_{self.id.hex()}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
            "seed": self.seed,
        }

    def _usage(self, result: Result) -> answers.MessageUsage:
        return _usage(self.prompt_tokens, result.usage.cached_prompt_tokens, result.usage.completion_tokens)


class _Blocks:
    """The content of an answer as it comes: what the model thinks, a text, and the uses of tools."""

    def __init__(self) -> None:
        self._last = -1  # block that has begun
        self._saying = False  # it is a text

    def add(self, item: Chunk | Result) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the events of what is new: (kind, fields)."""
        if item.reasoning:
            if self._last < 0:
                yield self._begin(_thinking_block(""))
            yield self._delta("thinking_delta", "thinking", item.reasoning)
        if item.text:
            if not self._saying:
                self._saying = True
                yield from self._close()
                yield self._begin(_text_block(""))
            yield self._delta("text_delta", "text", item.text)
        for call in item.calls:
            if call.id:
                yield from self._close()
                yield self._begin(_use_block(call.id, call.name, {}))
            if call.arguments:
                yield self._delta("input_json_delta", "partial_json", call.arguments)

    def end(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the events of the end: an answer has at least one block."""
        if self._last < 0:
            yield self._begin(_text_block(""))
        yield from self._close()

    def _begin(self, block: Json) -> tuple[str, dict[str, Any]]:
        self._last += 1
        return "content_block_start", {"index": self._last, "content_block": block}

    def _delta(self, kind: str, name: str, text: str) -> tuple[str, dict[str, Any]]:
        return "content_block_delta", {"index": self._last, "delta": {"type": kind, name: text}}

    def _close(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._last >= 0:
            yield "content_block_stop", {"index": self._last}


def _text_block(text: str) -> Json:
    return {"type": "text", "text": text, "citations": None}


def _thinking_block(text: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _use_block(id: str, name: str, input: Json) -> Json:
    return {"type": "tool_use", "id": id, "name": name, "input": input}


def _input(arguments: str) -> Json:
    """Returns the arguments as the object that they are; an empty one if they were cut off, or cannot be told
    as JSON again: for half of a surrogate pair, hundreds of levels, or a number that is too large for one."""
    try:
        told = json.loads(arguments)
        json.dumps(told, allow_nan=False)
        to_json(told)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _usage(prompt: int, cached: int, output: int) -> answers.MessageUsage:
    """Anthropic counts the tokens that were found cached apart from the others."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _stop(result: Result) -> Json:
    reason = "stop_sequence" if result.stop else "tool_use" if result.called else "end_turn"
    if result.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    if result.cut is not None:
        reason = result.finish_reason.openai
    return {"stop_reason": reason, "stop_sequence": result.stop or None}


def _event(kind: str, id: str | None = None, **fields: object) -> ServerSentEvent:
    return ServerSentEvent(to_json({"type": kind, **fields}), id, kind)
