"""Anthropic's Messages: a request is a chat, and its answer is told in their shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field, PlainValidator

from outrider.errors import InvalidRequest, OutriderError
from outrider.wire.session import FinishReason, SessionId
from router.api import answers, neutral, schema
from router.api.connection import ServerSentEvent
from router.api.fields import Fields, refused, shown
from router.api.generate import Details, Result
from router.api.position import Position, event_id
from router.api.refusals import anthropic_error
from router.api.responses import Json, totals
from router.api.stream import Items, to_json
from router.requests import SessionBegun

SHAPE = "message"
BESIDES = frozenset({"citations"})  # of a part that an answer had: it changes nothing

Speaker = Literal["user", "assistant"]


def _speaker(value: object) -> str:
    if value not in get_args(Speaker):
        raise refused(f"must be user or assistant, not {shown(value)}")
    return str(value)


def _text(value: object) -> str:
    return schema.content_text(value, ignored=BESIDES)


Text = Annotated[str, PlainValidator(_text, json_schema_input_type=schema.Contents)]


class Turn(Fields):
    """One turn of a conversation."""

    role: Annotated[str, PlainValidator(_speaker, json_schema_input_type=Speaker)]
    content: Text


class CountRequest(schema.ModelFields):
    """POST /v1/messages/count_tokens."""

    neutral = neutral.MESSAGES

    messages: Annotated[list[Turn], schema.Messages]
    system: Text = Field(default="", description="What comes before the conversation.")


class MessagesRequest(schema.SharedFields):
    """POST /v1/messages."""

    neutral = neutral.MESSAGES

    messages: Annotated[list[Turn], schema.Messages]
    system: Text = Field(default="", description="What comes before the conversation.")
    max_tokens: int = Field(description="Most output tokens.", json_schema_extra={"minimum": 1})
    stop_sequences: Annotated[
        tuple[str, ...], PlainValidator(schema.stop_strings, json_schema_input_type=schema.Stop)
    ] = Field(default=(), description="The text ends before the first of them.")

    def as_chat(self) -> schema.ChatRequest:
        return schema.as_chat(self, turns(self), max_tokens=self.max_tokens, stop=self.stop_sequences)


def turns(body: MessagesRequest | CountRequest) -> Iterator[tuple[str, str]]:
    """(role, text) of each turn. Raises InvalidRequest if the last one is the assistant's."""
    if body.messages[-1].role == "assistant":
        raise InvalidRequest(
            "messages must end with a turn of the user: to continue the assistant's is not supported by this "
            "server",
            field="messages",
        )
    if body.system:
        yield "system", body.system
    for turn in body.messages:
        yield turn.role, turn.content


@dataclass(frozen=True, slots=True)
class MessageTelling:
    """Tells the answer."""

    id: SessionId
    model: str
    seed: int
    prompt_tokens: int
    from_start = False

    def whole(self, texts: Sequence[str], results: Sequence[Result], details: Sequence[Details]) -> Json:
        (text,), (result,) = texts, results
        return {
            **self._message([{"type": "text", "text": text, "citations": None}], self._usage(result)),
            **_stop(result),
            "metrics": totals(results)["metrics"],
        }

    async def events(self, items: Items, after: Position | None) -> AsyncGenerator[ServerSentEvent, None]:
        """The events; `after` as for stream.events. The last three have no id: who lacks one gets them
        again."""
        opened = after is not None
        position = after[0] if after else 0
        async with aclosing(items):
            async for _, item in items:
                if isinstance(item, SessionBegun):
                    continue
                if not opened:
                    opened = True
                    usage = _usage(self.prompt_tokens, 0, 0)
                    yield _event("message_start", message=self._message([], usage))
                    block = {"type": "text", "text": "", "citations": None}
                    at = event_id(self.id, [position])
                    yield _event("content_block_start", at, index=0, content_block=block)
                has, position = position, max(position, item.position)
                if item.text and item.position > has:
                    delta = {"type": "text_delta", "text": item.text}
                    at = event_id(self.id, [position])
                    yield _event("content_block_delta", at, index=0, delta=delta)
                if isinstance(item, Result):
                    yield _event("content_block_stop", index=0)
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


def _usage(prompt: int, cached: int, output: int) -> answers.MessageUsage:
    """Anthropic counts the tokens that were found cached apart from the others."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }


def _stop(result: Result) -> Json:
    reason = "stop_sequence" if result.stop else "end_turn"
    if result.finish_reason is FinishReason.LENGTH:
        reason = "max_tokens"
    if result.cut is not None:
        reason = result.finish_reason.openai
    return {"stop_reason": reason, "stop_sequence": result.stop or None}


def _event(kind: str, id: str | None = None, **fields: object) -> ServerSentEvent:
    return ServerSentEvent(to_json({"type": kind, **fields}), id, kind)
