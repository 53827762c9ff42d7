"""How answers to a request are read: what is reasoning, what calls tools; and the grammar that they obey."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.errors import InvalidRequest
from router import reasoning, tool_formats
from router.api.grammar_text import Structure
from router.api.schema import ChatRequest, CompletionRequest
from router.api.structured import compiled
from router.api.tools import calling_grammar, check_choice
from router.call_reading import CallReading
from router.reasoning import ReasoningReading
from router.requests import ServedModel
from router.tokenizer import Tokenizer
from router.tool_formats import OF_TEMPLATE
from router.xml_calls import json_parameters

Body = CompletionRequest | ChatRequest

END_OF_PROMPT = 32  # tokens in which it is seen if the prompt has begun to reason


@dataclass(frozen=True, slots=True)
class Formats:
    """How models write what is more than text: a format's name, or "auto" for that of the chat template."""

    tool_calls: str = OF_TEMPLATE
    reasoning: str = OF_TEMPLATE  # or "none"


AS_THE_TEMPLATE_SAYS = Formats()


def calls(body: Body, model: ServedModel, tool_call_parser: str) -> CallReading | None:
    """Returns how calls of tools are found in the answers."""
    if not isinstance(body, ChatRequest):
        return None
    check_choice(body.tools, body.tool_choice)
    if not body.tools or body.tool_choice.kind == "none":
        return None
    form = tool_formats.of_template(model.tokenizer.chat_template)
    if tool_call_parser != OF_TEMPLATE:
        form = tool_formats.FORMATS[tool_call_parser]
    several = body.parallel_tool_calls and body.tool_choice.kind != "named"
    typed = {tool.name: json_parameters(tool.schema) for tool in body.tools} if form.xml else {}
    return CallReading(form.name, several, typed)


def thinking(
    body: Body, prompt: Sequence[int], built: Tokenizer, model: ServedModel, parser: str
) -> ReasoningReading | None:
    """Returns how reasoning is found in the answers."""
    form = reasoning.named(parser, model.tokenizer.chat_template)
    if form is None or not isinstance(body, ChatRequest):
        return None
    if body.continue_final_message:
        return ReasoningReading(form.name, form.open_in(body.messages[-1].content))
    end = built.decode(prompt[-END_OF_PROMPT:], skip_special_tokens=False)
    return ReasoningReading(form.name, form.begun_by(end))


def grammar(
    body: Body,
    calling: CallReading | None,
    thinking: ReasoningReading | None,
    model: ServedModel,
    built: Tokenizer,
) -> str:
    """Returns the grammar of the answers; empty = any text. It begins behind the reasoning."""
    answer = _of_answer(body, calling, model, built)
    if thinking is None or not answer:
        return answer
    form = reasoning.FORMATS[thinking.format]
    behind = reasoning.grammar(form, thinking.begun, answer, built.token_id)
    return compiled(Structure("response_format", "ready", behind), model)


def _of_answer(body: Body, calls: CallReading | None, model: ServedModel, built: Tokenizer) -> str:
    structure = _structure(body)
    if calls is None or not isinstance(body, ChatRequest):
        return compiled(structure, model)
    form = tool_formats.FORMATS[calls.format]
    return calling_grammar(body.tools, body.tool_choice, calls.several, structure, form, model, built)


def _structure(body: Body) -> Structure | None:
    if body.response_format is not None and body.structured_outputs is not None:
        raise InvalidRequest(
            "response_format and structured_outputs both say what the text is like: give one of them",
            field="structured_outputs",
        )
    return body.response_format or body.structured_outputs
