"""How an answer to OpenAI's Responses is told, in their shapes. None is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from outrider.errors import OutriderError
from outrider.sampling.params import SamplingParams
from outrider.wire.session import FinishReason, SessionId
from router.api.connection import Parts, ServerSentEvent
from router.api.json_text import long_json, to_json, to_long_json
from router.api.logprobs import HeldScores, Scored, entries
from router.api.output import Chunk, Details, Result
from router.api.position import Position, event_id
from router.api.responses import Json, totals
from router.api.stream import Items
from router.requests import SessionBegun
from router.tool_parser import Call

SHAPE = "response"
FEW = 64  # tokens with log-probabilities, which are told at once


@dataclass(slots=True)
class ResponseTelling:
    """Tells the answer. An event's sequence number follows from the text before it: it is the same however
    the tokens came, and numbers are left out."""

    id: SessionId
    created: int  # unix seconds
    model: str
    sampling: SamplingParams
    repeated: Mapping[str, Any]
    from_start = True  # the last events tell the whole text once more
    _sequence: int = field(default=0, init=False)
    _position: int = field(default=0, init=False)
    _turning: int = field(default=0, init=False)  # events so far that are no deltas
    _last: int = field(default=-1, init=False)  # output item that has begun
    _thoughts: list[str] = field(default_factory=list, init=False)
    _saying: bool = field(default=False, init=False)  # a message has begun
    _texts: list[str] = field(default_factory=list, init=False)
    _scored: HeldScores = field(default_factory=HeldScores, init=False)
    _untold: list[Scored] = field(default_factory=list, init=False)  # of them, in no delta yet
    _call: Call | None = field(default=None, init=False)  # that has begun

    def whole(self, texts: Sequence[str], results: Sequence[Result], details: Sequence[Details]) -> Json:
        (text,), (result,), (own,) = texts, results, details
        return self._ended(text, result, own.scored, own.reasoning)

    async def events(self, items: Items, after: Position | None) -> AsyncGenerator[ServerSentEvent, None]:
        """The events; `after` as for stream.events, but that `items` are those from the start. Only the last
        event of what came at once has an id, and what comes after the text has none: who lacks some of it
        gets it again."""
        opened, has = after is not None, after[0] if after else 0
        opening = [
            self._turn(name, response=self._response("in_progress", []))
            for name in ("created", "in_progress")
        ]
        async with aclosing(items):
            async for _, item in items:
                if isinstance(item, SessionBegun):
                    continue
                if not opened:
                    opened = True
                    for event in opening:
                        yield event
                self._position = item.position
                told = list(self._add(item))
                if item.position > has:
                    for number, event in enumerate(told, 1):
                        at = event_id(self.id, [item.position]) if number == len(told) else None
                        yield ServerSentEvent(event.data, at, event.event)
                if not isinstance(item, Result):
                    continue
                for event in self._finish(item):
                    yield event

    def _finish(self, result: Result) -> Iterator[ServerSentEvent]:
        """Yields the last events."""
        ended = self._ended("".join(self._texts), result, self._scored, "".join(self._thoughts))
        status = str(ended["status"])
        yield from self._end(status)
        yield self._turn(status, response=ended)

    def _add(self, item: Chunk | Result) -> Iterator[ServerSentEvent]:
        """Yields the events of what is new."""
        if isinstance(item, Chunk):
            self._scored.extend(item.scored)
            self._untold += item.scored
        if item.reasoning:
            yield from self._thought(item.reasoning)
        if item.text:
            yield from self._said(item.text)
        for call in item.calls:
            if call.id:
                yield from self._close("completed")
                self._call = Call(call.id, call.name)
                yield from self._begin(_called(self._call, "in_progress"))
            assert self._call is not None
            if call.arguments:
                self._call.arguments += call.arguments
                place = {"item_id": _item_id(self._call), "output_index": self._last}
                yield self._delta("function_call_arguments.delta", **place, delta=call.arguments)

    def _thought(self, text: str) -> Iterator[ServerSentEvent]:
        if self._last < 0:
            yield from self._begin(self._reasoning("in_progress", []))
            yield self._turn("content_part.added", **self._part, part=_thought_part(""))
        self._thoughts.append(text)
        yield self._delta("reasoning_text.delta", **self._part, delta=text)

    def _said(self, text: str) -> Iterator[ServerSentEvent]:
        if not self._saying:
            yield from self._close("completed")
            self._saying = True
            yield from self._begin(self._item("in_progress", []))
            yield self._turn("content_part.added", **self._part, part=_part("", ()))
        self._texts.append(text)
        logprobs, self._untold = entries(self._untold), []
        if text:
            yield self._delta("output_text.delta", **self._part, delta=text, logprobs=logprobs)

    def _end(self, status: str) -> Iterator[ServerSentEvent]:
        """Yields the events of the end of the output, which has at least one item."""
        if self._last < 0:
            yield from self._said("")
        yield from self._close(status)

    def _begin(self, item: Json) -> Iterator[ServerSentEvent]:
        self._last += 1
        yield self._turn("output_item.added", output_index=self._last, item=item)

    def _close(self, status: str) -> Iterator[ServerSentEvent]:
        """Yields the end of the item that has begun."""
        if self._last < 0:
            return
        if not self._saying and self._call is None:
            text = "".join(self._thoughts)
            part = _thought_part(text)
            yield self._turn("reasoning_text.done", **self._part, text=text)
            yield self._turn("content_part.done", **self._part, part=part)
            item = self._reasoning(status, [part])
        elif self._call is None:
            text = "".join(self._texts)
            yield self._turn("output_text.done", **self._part, text=text, logprobs=entries(self._scored))
            part = _part(text, self._scored)
            yield self._turn("content_part.done", **self._part, part=part)
            item = self._item(status, [part])
        else:
            item = _called(self._call, status)
            place = {"item_id": item["id"], "output_index": self._last}
            told = {"name": self._call.name, "arguments": self._call.arguments}
            yield self._turn("function_call_arguments.done", **place, **told)
        yield self._turn("output_item.done", output_index=self._last, item=item)

    def _turn(self, name: str, /, **fields: object) -> ServerSentEvent:
        """It may tell all log-probabilities once more."""
        self._turning += 1
        written = _in_parts if len(self._scored) > FEW else to_long_json
        return self._event(self._position + 2 * self._turning - 2, name, written, **fields)

    def _delta(self, name: str, /, **fields: object) -> ServerSentEvent:
        return self._event(self._position + 2 * self._turning - 1, name, to_json, **fields)

    @property
    def _part(self) -> Json:
        id = self._item_id if self._saying else self._reasoning_id
        return {"item_id": id, "output_index": self._last, "content_index": 0}

    def refused(self, error: OutriderError) -> Sequence[ServerSentEvent]:
        told = {"code": error.code or error.kind, "message": error.message, "param": error.field}
        body = {"type": "error", **told, "sequence_number": self._sequence}
        return [ServerSentEvent(to_json(body), event="error")]

    def _event(
        self, sequence: int, name: str, written: Callable[[object], str | Parts], /, **fields: object
    ) -> ServerSentEvent:
        self._sequence = sequence + 1
        kind = f"response.{name}"
        return ServerSentEvent(written({"type": kind, "sequence_number": sequence, **fields}), None, kind)

    @property
    def _item_id(self) -> str:
        return f"msg_{self.id.hex()}"

    @property
    def _reasoning_id(self) -> str:
        return f"rs_{self.id.hex()}"

    def _reasoning(self, status: str, content: Sequence[Json]) -> Json:
        told = {"id": self._reasoning_id, "type": "reasoning", "status": status}
        return {**told, "summary": [], "content": content}

    def _item(self, status: str, content: Sequence[Json]) -> Json:
        return {
            "id": self._item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _ended(self, text: str, result: Result, scored: Sequence[Scored], reasoning: str) -> dict[str, Any]:
        why = "max_output_tokens" if result.finish_reason is FinishReason.LENGTH else None
        if result.cut is not None:
            why = result.finish_reason.openai
        status = "completed" if why is None else "incomplete"
        output: list[Json] = []
        if reasoning:
            ended = "completed" if text or result.called else status
            output.append(self._reasoning(ended, [_thought_part(reasoning)]))
        if text or not (result.called or reasoning):
            output.append(self._item("completed" if result.called else status, [_part(text, scored)]))
        for left, call in zip(range(len(result.called))[::-1], result.called, strict=True):
            output.append(_called(call, "completed" if left else status))
        told, counts = self._response(status, output), totals([result])
        usage = counts["usage"]
        return {
            **told,
            "incomplete_details": None if why is None else {"reason": why},
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": result.usage.reasoning_tokens or 0},
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
            "previous_response_id": None,
            "seed": self.sampling.seed,
            "store": False,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _in_parts(body: object) -> Parts:
    return lambda: long_json(lambda: body)


def _thought_part(text: str) -> Json:
    return {"type": "reasoning_text", "text": text}


def _part(text: str, scored: Sequence[Scored]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": entries(scored)}


def _item_id(call: Call) -> str:
    return f"fc_{call.id.removeprefix('call_')}"


def _called(call: Call, status: str) -> dict[str, Any]:
    return {
        "id": _item_id(call),
        "type": "function_call",
        "status": status,
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
    }
