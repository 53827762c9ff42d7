"""OpenAI's response objects, whole and in chunks, with `seed` and vLLM's `metrics` at the top level."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from outrider.errors import OutriderError
from outrider.wire.session import SessionId
from router.api.acceptance import SpeculationStats
from router.api.answers import Error
from router.api.figures import OutputTokens, Totals, Usage
from router.api.logprobs import Scored, of_chat, of_completion
from router.api.output import NO_DETAILS, Details, Result
from router.api.provenance import steps_json
from router.tool_parser import Call, CallDelta

Json = Mapping[str, object]


class Shape(Protocol):
    """What differs between the two endpoints."""

    name: str  # as kept with a session
    id_prefix: str
    whole: str  # `object` of a whole answer
    chunk: str  # `object` of a chunk

    def choice(self, index: int, text: str, result: Result, details: Details = NO_DETAILS) -> Json:
        """Returns one whole answer. `details`: of its tokens, if asked for."""
        ...

    def opening(self, index: int) -> Json | None:
        """Returns the choice of the chunk that comes before any text, if there is one."""
        ...

    def delta(self, index: int, text: str | None, reason: str | None, details: Details = NO_DETAILS) -> Json:
        """Returns the choice of a chunk: text, pieces of calls, or the reason for the end."""
        ...

    def beside(self, details: Details) -> Json:
        """Returns what an answer or a chunk tells of its prompt beside its choices."""
        ...


class CompletionShape:
    name = "completion"
    id_prefix = "cmpl-"
    whole = chunk = "text_completion"

    def choice(self, index: int, text: str, result: Result, details: Details = NO_DETAILS) -> Json:
        return self.delta(index, text, result.reason, details)

    def opening(self, index: int) -> None:
        return None

    def delta(self, index: int, text: str | None, reason: str | None, details: Details = NO_DETAILS) -> Json:
        prompt = details.prompt
        logprobs: Json | None = of_completion(details.scored) if details.scored else None
        if prompt is not None and prompt.repeated:
            logprobs = prompt.before(details.scored)
        told = {"index": index, "text": text or "", "logprobs": logprobs, "finish_reason": reason}
        if prompt is not None and prompt.asked:
            told["prompt_logprobs"] = prompt.entries()
        return _with_steps(told, details)

    def beside(self, details: Details) -> Json:
        return {}


class ChatShape:
    name = "chat"
    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, index: int, text: str, result: Result, details: Details = NO_DETAILS) -> Json:
        message: dict[str, object] = {"role": "assistant", "content": text, "refusal": None}
        if details.reasoning:
            message |= {"content": text or None, **_reasoned(details.reasoning)}
        if result.called:
            message |= {"content": text or None, "tool_calls": [_called(call) for call in result.called]}
        logprobs = _of_chat(details.scored)
        told = {"index": index, "message": message, "logprobs": logprobs, "finish_reason": result.reason}
        return _with_steps(told, details)

    def opening(self, index: int) -> Json:
        return self._chunk(index, {"role": "assistant", "content": ""}, None)

    def delta(self, index: int, text: str | None, reason: str | None, details: Details = NO_DETAILS) -> Json:
        silent = not text and (details.calls or details.reasoning)
        delta: dict[str, object] = {} if text is None or silent else {"content": text}
        if details.reasoning:
            delta |= _reasoned(details.reasoning)
        if details.calls:
            delta["tool_calls"] = [_call_delta(call) for call in details.calls]
        return self._chunk(index, delta, reason, details)

    def beside(self, details: Details) -> Json:
        return {} if details.prompt is None else {"prompt_logprobs": details.prompt.entries()}

    def _chunk(self, index: int, delta: Json, reason: str | None, details: Details = NO_DETAILS) -> Json:
        logprobs = _of_chat(details.scored)
        told = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return _with_steps(told, details)


def _reasoned(text: str) -> Json:
    """Returns vLLM's name for it, and DeepSeek's, which vLLM had before."""
    return {"reasoning": text, "reasoning_content": text}


def _called(call: Call) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: CallDelta) -> Json:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _of_chat(scored: Sequence[Scored]) -> Json | None:
    return of_chat(scored) if scored else None


def _with_steps(choice: Json, details: Details) -> Json:
    """Returns the choice, with where its tokens came from for who asked for that."""
    return {**choice, "speculation": steps_json(details.steps)} if details.steps else choice


SHAPES: Mapping[str, Shape] = {shape.name: shape for shape in (CompletionShape(), ChatShape())}


@dataclass(frozen=True)
class Envelope:
    """The fields that are the same on every object of one response."""

    shape: Shape
    id: SessionId
    created: int  # unix seconds
    model: str
    seed: int
    n: int = 1  # answers to each prompt that are told

    def whole(self, texts: Sequence[str], results: Sequence[Result], details: Sequence[Details]) -> Json:
        told = enumerate(zip(texts, results, details, strict=True))
        choices = [self.shape.choice(index, *each) for index, each in told]
        beside = self.shape.beside(details[0])
        return {**self._head(self.shape.whole), "choices": choices, **beside, **totals(results, self.n)}

    def chunk(self, *choices: Json, **rest: object) -> Json:
        return {**self._head_of_chunks, "choices": choices, **rest}

    @cached_property
    def _head_of_chunks(self) -> Json:
        return self._head(self.shape.chunk)

    def _head(self, object: str) -> Json:
        return {
            "id": self.shape.id_prefix + self.id.hex(),
            "object": object,
            "created": self.created,
            "model": self.model,
            "seed": self.seed,
        }


def totals(results: Iterable[Result], n: int = 1) -> Totals:
    """Returns `usage` and `metrics` over all answers of a response, `n` of them told to each prompt, which
    counts once."""
    prompt = completion = cached = changes = 0
    reasoning: int | None = None
    speculation, predicted = SpeculationStats(), False
    for index, result in enumerate(results):
        if index % n == 0:
            prompt += result.usage.prompt_tokens
            cached += result.usage.cached_prompt_tokens
        for each in (result, *result.untold):
            completion += each.usage.completion_tokens
            if each.usage.reasoning_tokens is not None:
                reasoning = (reasoning or 0) + each.usage.reasoning_tokens
            speculation.merge(each.speculation)
            changes += each.numerics_changes
        predicted = predicted or result.usage.predicted
    used = usage(prompt, completion, reasoning)
    used["prompt_tokens_details"] = {"cached_tokens": cached}
    details: OutputTokens = used.get("completion_tokens_details", {})
    if predicted:
        details["accepted_prediction_tokens"] = speculation.own.predicted_accepted
        details["rejected_prediction_tokens"] = speculation.own.predicted - speculation.own.predicted_accepted
    if details:
        used["completion_tokens_details"] = details
    return {
        "usage": used,
        "metrics": {"speculative_decoding": speculation.as_json(), "numerics_changes": changes},
    }


def usage(prompt_tokens: int, completion_tokens: int, reasoning_tokens: int | None = None) -> Usage:
    told: Usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if reasoning_tokens is not None:
        told["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return told


def error_body(error: OutriderError) -> Error:
    return {"error": {"message": error.message, "type": error.kind, "param": error.field, "code": error.code}}
