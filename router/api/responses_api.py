"""OpenAI's Responses, none of them stored: a request is a chat, and its answer is told in their shapes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, PlainValidator

from outrider.errors import OutriderError
from outrider.sampling.params import SamplingParams
from outrider.wire.session import FinishReason, SessionId
from router.api import neutral, schema
from router.api.connection import ServerSentEvent
from router.api.fields import checked_text, json_type, refused, shown
from router.api.generate import Details, Result
from router.api.position import Position, event_id
from router.api.responses import Json, totals
from router.api.stream import Items, to_json
from router.requests import SessionBegun

SHAPE = "response"
NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}  # a chat's field -> how it is called here
PARTS = ("input_text", "output_text", "text")
BESIDES = frozenset({"annotations", "logprobs"})  # of a part that an answer had: they change nothing
ITEM_FIELDS = frozenset({"type", "role", "content", "id", "status", "phase"})
MAX_METADATA_KEY, MAX_METADATA_VALUE = 64, 512  # bytes
OPENING_EVENTS = 4


class InputPart(BaseModel):
    """A part of an item's content, as the document tells it."""

    type: Literal["input_text", "output_text", "text"]
    text: schema.Content


class InputItem(BaseModel):
    """An item of the input, as the document tells it: a message."""

    type: Literal["message"] = "message"
    role: schema.Role
    content: schema.Content | Annotated[list[InputPart], Field(max_length=schema.MAX_PARTS)]


Turns = tuple[tuple[str, str], ...]
Items_ = Annotated[list[InputItem], Field(min_length=1, max_length=schema.MAX_MESSAGES)]
Metadata = Annotated[dict[str, schema.Content], Field(max_length=neutral.MAX_ENTRIES)]


def _input(value: object) -> Turns:
    if isinstance(value, str):
        return (("user", checked_text(value)),)
    if not isinstance(value, list):
        raise refused(f"must be a string or an array of items, not {json_type(value)}")
    if not 1 <= len(value) <= schema.MAX_MESSAGES:
        raise refused(f"must be from 1 to {schema.MAX_MESSAGES} items, not {len(value)}")
    return tuple(_turn(index, item) for index, item in enumerate(value))


def _turn(index: int, item: object) -> tuple[str, str]:
    if not isinstance(item, dict):
        raise refused(f"must be a string or an array of items; item {index} is {json_type(item)}")
    kind = item.get("type") or "message"
    if kind != "message":
        raise refused(f'must be items of type "message"; item {index} is of type {shown(kind)}')
    if item.get("role") not in get_args(schema.Role):
        roles = ", ".join(get_args(schema.Role))
        raise refused(f"must have a role of {roles} in each item; item {index} has {shown(item.get('role'))}")
    if any(item[name] is not None for name in item.keys() - ITEM_FIELDS):
        raise refused(f'must have items of the fields "type", "role" and "content"; item {index} has others')
    return item["role"], schema.content_text(item.get("content"), PARTS, BESIDES)


def _metadata(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise refused("must be an object of strings")
    if len(value) > neutral.MAX_ENTRIES:
        raise refused(f"must have at most {neutral.MAX_ENTRIES} entries")
    for key, text in value.items():
        checked_text(key, MAX_METADATA_KEY)
        checked_text(text, MAX_METADATA_VALUE)
    return value


class ResponsesRequest(schema.SharedFields):
    """POST /v1/responses."""

    neutral = neutral.RESPONSES

    input: Annotated[Turns, PlainValidator(_input, json_schema_input_type=schema.Content | Items_)] = Field(
        description="What the user says, or the items of a conversation."
    )
    instructions: Annotated[
        str | None, PlainValidator(checked_text, json_schema_input_type=schema.Content)
    ] = Field(default=None, description="What comes before the conversation.")
    max_output_tokens: int | None = Field(
        default=None, description="Absent = the rest of the context.", json_schema_extra={"minimum": 1}
    )
    metadata: Annotated[dict[str, str], PlainValidator(_metadata, json_schema_input_type=Metadata)] = Field(
        default_factory=dict, description="The answer repeats it."
    )

    def as_chat(self) -> schema.ChatRequest:
        before = (("system", self.instructions),) if self.instructions else ()
        return schema.as_chat(self, before + self.input, max_tokens=self.max_output_tokens)

    def repeated(self) -> Mapping[str, Any]:
        """Returns what the answer repeats of it, and a session does not hold."""
        return {name: getattr(self, name) for name in ("instructions", "max_output_tokens", "metadata")}


@dataclass(slots=True)
class ResponseTelling:
    """Tells the answer. An event's sequence number follows from the tokens that it comes after: it is the
    same however they came, and numbers are left out where one event tells of several."""

    id: SessionId
    created: int  # unix seconds
    model: str
    sampling: SamplingParams
    repeated: Mapping[str, Any]
    from_start = True  # the last events tell the whole text once more
    _sequence: int = field(default=0, init=False)

    def whole(self, texts: Sequence[str], results: Sequence[Result], details: Sequence[Details]) -> Json:
        (text,), (result,) = texts, results
        return self._ended(text, result)

    async def events(self, items: Items, after: Position | None) -> AsyncGenerator[ServerSentEvent, None]:
        """The events; `after` as for stream.events, but that `items` are those from the start. What comes
        after the text has no id: who lacks some of it gets it again."""
        opened, has, texts = after is not None, after[0] if after else 0, []
        part: dict[str, Any] = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        async with aclosing(items):
            async for _, item in items:
                if isinstance(item, SessionBegun):
                    continue
                if not opened:
                    opened = True
                    yield self._event(0, "created", response=self._response("in_progress", []))
                    yield self._event(1, "in_progress", response=self._response("in_progress", []))
                    yield self._event(
                        2, "output_item.added", output_index=0, item=self._item("in_progress", [])
                    )
                    at = event_id(self.id, [0])
                    yield self._event(3, "content_part.added", at, **part, part=_part(""))
                sequence = OPENING_EVENTS + item.position
                texts.append(item.text)
                if item.text and item.position > has:
                    at = event_id(self.id, [item.position])
                    yield self._event(sequence, "output_text.delta", at, **part, delta=item.text, logprobs=[])
                if not isinstance(item, Result):
                    continue
                text = "".join(texts)
                yield self._event(sequence + 1, "output_text.done", **part, text=text, logprobs=[])
                yield self._event(sequence + 2, "content_part.done", **part, part=_part(text))
                ended = self._ended(text, item)
                (done,) = ended["output"]
                yield self._event(sequence + 3, "output_item.done", output_index=0, item=done)
                yield self._event(sequence + 4, str(ended["status"]), response=ended)

    def refused(self, error: OutriderError) -> Sequence[ServerSentEvent]:
        told = {"code": error.code or error.kind, "message": error.message, "param": error.field}
        body = {"type": "error", **told, "sequence_number": self._sequence}
        return [ServerSentEvent(to_json(body), event="error")]

    def _event(self, sequence: int, name: str, id: str | None = None, **fields: object) -> ServerSentEvent:
        self._sequence = sequence + 1
        kind = f"response.{name}"
        return ServerSentEvent(to_json({"type": kind, "sequence_number": sequence, **fields}), id, kind)

    @property
    def _item_id(self) -> str:
        return f"msg_{self.id.hex()}"

    def _item(self, status: str, content: Sequence[Json]) -> Json:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _ended(self, text: str, result: Result) -> dict[str, Any]:
        why = "max_output_tokens" if result.finish_reason is FinishReason.LENGTH else None
        if result.cut is not None:
            why = result.finish_reason.openai
        status = "completed" if why is None else "incomplete"
        told, counts = self._response(status, [self._item(status, [_part(text)])]), totals([result])
        usage = counts["usage"]
        return {
            **told,
            "incomplete_details": None if why is None else {"reason": why},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
            "metrics": counts["metrics"],
        }

    def _response(self, status: str, output: Sequence[Json]) -> Json:
        return {
            "id": f"resp_{self.id.hex()}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            **self.repeated,
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "seed": self.sampling.seed,
            "store": False,
            "temperature": self.sampling.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _part(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
