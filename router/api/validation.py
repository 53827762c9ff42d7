"""A request's fields and the model they are for, to sessions that answer them: the one place for rules."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from outrider.errors import ContextExceeded, InvalidRequest
from outrider.options.sessions import MAX_SEED
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from router import tokenizer
from router.api import reading, text_rules
from router.api.deadline import TimeLimits
from router.api.reading import AS_THE_TEMPLATE_SAYS, Formats
from router.api.schema import (
    CHOICES,
    LEAST_TOKENS,
    MAX_CHOICES,
    PRIORITY,
    SPECULATIVE_TOKENS,
    TOP_LOGPROBS,
    ChatRequest,
    CompletionRequest,
)
from router.api.tools import Tool
from router.api.turns import ChatMessage
from router.api.wording import Wording
from router.call_reading import CallReading
from router.rendering import USUAL, Conversation, Rendering
from router.requests import GenerationRequest, ServedModel
from router.stop import StopStrings
from router.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
USUAL_TOKEN = 8  # bytes; of a longer text it is found out first, at little cost, if it can fit
LEAST_COUNTED = 64 * 1024  # bytes
LEAST_LONGEST_TOKEN = 16  # bytes: a tokenizer of short tokens may still drop or join what it does not know
DRAWN_SEEDS = 2**53  # drawn seeds are below it: JSON readers that hold numbers as doubles keep them whole

Body = CompletionRequest | ChatRequest
Prompt = tuple[str, tuple[int, ...]]  # its name in messages, and its token ids
DrawBelow = Callable[[int], int]  # a uniform integer from 0 to its argument - 1


@dataclass(frozen=True, slots=True)
class Generation:
    """A valid request: `n` sessions for each prompt, one after the other, that differ in their seeds."""

    model: ServedModel
    tokenizer: Tokenizer
    sessions: tuple[GenerationRequest, ...]  # at least one
    stop: StopStrings
    n: int = 1
    calls: CallReading | None = None  # None = nothing is a call
    wording: Wording = field(default=Wording())

    @property
    def seed(self) -> int:
        return self.sessions[0].params.sampling.seed

    @property
    def told(self) -> tuple[GenerationRequest, ...]:
        """For each answer that is told one session of its prompt: of `n` perhaps only the likeliest are."""
        told = self.wording.best or self.n
        return tuple(one for index, one in enumerate(self.sessions) if index % self.n < told)

    def echo(self, session: GenerationRequest) -> str:
        """Returns what comes before the output of one of the sessions."""
        if not self.wording.echo:
            return ""
        index = next(index for index, one in enumerate(self.sessions) if one is session)
        return self.wording.echo[index // self.n]

    def of_tenant(self, tenant: bytes, salt: bytes) -> Generation:
        """Returns the same, sharing cached prefixes with sessions of that salt only, and turns with those of
        other tenants."""
        sessions = (
            replace(session, params=replace(session.params, cache_salt=salt, tenant=tenant))
            for session in self.sessions
        )
        return replace(self, sessions=tuple(sessions))

    def until(self, limits: TimeLimits) -> Generation:
        """Returns the same, for a client that waits so long."""
        sessions = (
            replace(session, first_token_by=limits.first_token_by, deadline=limits.deadline)
            for session in self.sessions
        )
        return replace(self, sessions=tuple(sessions))


def prepare(
    body: Body, model: ServedModel, draw_below: DrawBelow, formats: Formats = AS_THE_TEMPLATE_SAYS
) -> Generation:
    """Raises InvalidRequest naming the field and its limit. Tokenizes: a large prompt takes its time."""
    choices(body)
    answers = text_rules.candidates(body)
    _check_stream_options(body)
    if body.num_speculative_tokens is not None:
        SPECULATIVE_TOKENS.check("num_speculative_tokens", body.num_speculative_tokens)
    PRIORITY.check("priority", body.priority)
    sampling = _sampling(body, draw_below)
    sampling.validate(model.vocab_size)
    built = tokenizer.load(model.tokenizer)
    logprobs = _logprobs(body)
    calls = reading.calls(body, model, formats.tool_calls)
    if answers > body.n and logprobs is None:
        logprobs = 0  # by which the best ones are found
    of_prompt = text_rules.prompt_logprobs(body)
    prompts = list(_prompts(body, built, model))
    thinking = reading.thinking(body, prompts[0][1], built, model, formats.reasoning)
    grammar = reading.grammar(body, calls, thinking, model, built)
    check_ids("stop_token_ids", body.stop_token_ids, model)
    stop_token_ids = text_rules.stop_tokens(body, model, bool(grammar))
    prediction = _prediction(body, built, model)
    sessions = []
    for name, prompt in prompts:
        _check_prompt(name, prompt, model)
        max_tokens = _max_tokens(body, room=model.max_context - len(prompt), context=model.max_context)
        text_rules.check_min_tokens(body.min_tokens, max_tokens, bool(grammar))
        for choice in range(answers):
            own = replace(sampling, seed=choice_seed(sampling.seed, choice))
            sessions.append(
                GenerationRequest(
                    model=model.name,
                    params=SessionParams(
                        prompt,
                        own,
                        max_tokens,
                        stop_token_ids,
                        logprobs=logprobs,
                        grammar=grammar,
                        guesses=body.return_speculation,
                        min_tokens=body.min_tokens,
                        prompt_logprobs=of_prompt,
                        priority=body.priority,
                        prediction=prediction,
                    ),
                    num_speculative_tokens=body.num_speculative_tokens,
                    fingerprint=model.fingerprint,
                )
            )
    text_rules.check_prompt_logprobs(of_prompt, [session.params.prompt for session in sessions])
    text_rules.check_details(body, logprobs, [session.params.max_tokens for session in sessions])
    wording = replace(text_rules.wording(body, built), reasoning=thinking)
    return Generation(model, built, tuple(sessions), StopStrings(body.stop), answers, calls, wording)


def _prediction(body: Body, built: Tokenizer, model: ServedModel) -> Sequence[int]:
    """Returns the tokens of the text that the client expects, once for all answers."""
    if not body.prediction:
        return ()
    check_bytes("prediction", body.prediction, built, model)
    tokens = built.encode_rendered(body.prediction)
    if len(tokens) > model.max_context:
        raise ContextExceeded(
            f"prediction has {len(tokens)} tokens; the context takes {model.max_context}", field="prediction"
        )
    return array("I", tokens)


def _logprobs(body: Body) -> int | None:
    """Returns of how many likeliest tokens a request is told at each position; None = of none at all."""
    if isinstance(body, CompletionRequest):
        if body.logprobs is not None:
            TOP_LOGPROBS.check("logprobs", body.logprobs)
        return body.logprobs
    TOP_LOGPROBS.check("top_logprobs", body.top_logprobs)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs = true", field="top_logprobs")
    return body.top_logprobs if body.logprobs else None


def choices(body: Body) -> int:
    """Returns how many sessions a request asks for. Raises InvalidRequest if they are too many."""
    CHOICES.check("n", body.n)
    prompts = len(body.prompt) if isinstance(body, CompletionRequest) else 1
    answers, name = text_rules.candidates(body), "n" if body.best_of is None else "best_of"
    if prompts * answers > MAX_CHOICES:
        raise InvalidRequest(
            f"{name} must be at most {MAX_CHOICES // prompts} with {prompts} prompts, not {answers}: a "
            f"request has at most {MAX_CHOICES} answers",
            field=name,
        )
    return prompts * answers


def choice_seed(seed: int, choice: int) -> int:
    """Returns the seed of a prompt's answer at that index: alone, it gives the same text."""
    return (seed + choice) % (MAX_SEED + 1)


@contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Lets a refusal name a chat's field as the client does: `names` has some of its parts."""
    try:
        yield
    except InvalidRequest as error:
        field = name = error.field or ""
        for ours, theirs in names.items():
            name = re.sub(rf"\b{re.escape(ours)}\b", theirs, name)
        if name == field:
            raise
        raise type(error)(error.message.replace(field, name, 1), field=name) from None


def prepared_in(body: Body, size: int) -> int | None:
    """Returns the size by which `prepare` of a body of so many bytes has its place among others."""
    forced = isinstance(body, ChatRequest) and (
        body.tool_choice.forced or any(tool.strict for tool in body.tools)
    )
    return None if forced or body.response_format or body.structured_outputs else size


def _check_stream_options(body: Body) -> None:
    if body.stream_options.continuous_usage_stats and not body.stream_options.include_usage:
        raise InvalidRequest(
            "stream_options.continuous_usage_stats needs stream_options.include_usage = true",
            field="stream_options.continuous_usage_stats",
        )


def _sampling(body: Body, draw_below: DrawBelow) -> SamplingParams:
    return SamplingParams(
        temperature=body.temperature,
        top_k=0 if body.top_k == -1 else body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        seed=draw_below(DRAWN_SEEDS) if body.seed is None else body.seed,
    )


def _prompts(body: Body, built: Tokenizer, model: ServedModel) -> Iterator[Prompt]:
    """(the name under which a message speaks of it, token ids) of each prompt."""
    if isinstance(body, ChatRequest):
        yield (
            "messages",
            built.encode_rendered(rendered(body.messages, built, model, body.tools, body.rendering)),
        )
        return
    for index, prompt in enumerate(body.prompt):
        name = "prompt" if len(body.prompt) == 1 else f"prompt[{index}]"
        if body.suffix:
            yield name, _around(name, prompt, body, built, model)
        elif isinstance(prompt, str):
            check_bytes(name, prompt, built, model)
            # Empty stays empty, to be refused: a begin-of-text token alone would be a prompt of one token.
            yield name, built.encode(prompt) if prompt else ()
        else:
            yield name, prompt


def _around(
    name: str, prompt: str | tuple[int, ...], body: CompletionRequest, built: Tokenizer, model: ServedModel
) -> tuple[int, ...]:
    """Returns the prompt for what stands between it and the suffix."""
    if not isinstance(prompt, str) or body.echo:
        raise InvalidRequest("suffix is for a prompt of text, without echo", field="suffix")
    check_bytes(name, prompt, built, model)
    check_bytes("suffix", body.suffix, built, model)
    ids = built.around(prompt, body.suffix)
    if ids is None:
        raise InvalidRequest(
            f"suffix: {model.name!r} has no tokens for a text between two others (fill-in-the-middle): send "
            "a prompt alone",
            field="suffix",
        )
    return ids


def rendered(
    messages: Sequence[ChatMessage],
    built: Tokenizer,
    model: ServedModel,
    tools: Sequence[Tool] = (),
    rendering: Rendering = USUAL,
) -> str:
    """Returns the conversation as text. Whether a model is told of its tools is up to its template."""
    turns, told = [turn.for_template() for turn in messages], [tool.for_template() for tool in tools]
    text = built.render(Conversation(turns, told, rendering))
    check_bytes("messages", text, built, model)
    return text


def check_bytes(name: str, text: str, built: Tokenizer, model: ServedModel) -> None:
    """Refuses what cannot fit into the context, before it costs a tokenizer's time and memory."""
    most = model.max_context * max(built.longest_token, LEAST_LONGEST_TOKEN)
    if (size := len(text.encode())) > most:
        raise ContextExceeded(
            f"{name} has {size} bytes of text; the context of {model.max_context} tokens takes at most "
            f"{most}",
            field=_field(name),
        )
    if size > most_uncounted(model) and built.exceeds(text, model.max_context):
        raise ContextExceeded(
            f"{name} has more than {model.max_context} tokens; the context takes at most "
            f"{model.max_context - 1}, so that one is left to generate",
            field=_field(name),
        )


def most_uncounted(model: ServedModel) -> int:
    """Returns of how many bytes a text may be whose tokens are not counted first: it has no more of them."""
    return max(USUAL_TOKEN * model.max_context, LEAST_COUNTED)


def _field(name: str) -> str:
    return name.partition("[")[0]


def _check_prompt(name: str, prompt: Sequence[int], model: ServedModel) -> None:
    field = _field(name)
    if not prompt:
        raise InvalidRequest(f"{name} is empty: it takes at least one token", field=field)
    if len(prompt) >= model.max_context:
        raise ContextExceeded(
            f"{name} has {len(prompt)} tokens; the context of {model.max_context} takes at most "
            f"{model.max_context - 1}, so that one is left to generate",
            field=field,
        )
    check_ids(name, prompt, model)


def check_ids(name: str, ids: Sequence[int], model: ServedModel) -> None:
    for index, token in enumerate(ids):
        if not 0 <= token < model.vocab_size:
            raise InvalidRequest(
                f"{name} has token id {token} at index {index}; ids go from 0 to {model.vocab_size - 1}",
                field=_field(name),
            )


def _max_tokens(body: Body, *, room: int, context: int) -> int:
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = getattr(body, field)
    if body.max_tokens not in (None, wanted):
        raise InvalidRequest(
            f"max_tokens is {body.max_tokens} and max_completion_tokens is {wanted}: give one of them",
            field=field,
        )
    if wanted is None:
        return room if isinstance(body, ChatRequest) else min(DEFAULT_COMPLETION_TOKENS, room)
    least = 0 if text_rules.repeats(body) else LEAST_TOKENS
    if not least <= wanted <= room:
        kind = ContextExceeded if wanted > room else InvalidRequest
        raise kind(
            f"{field} must be from {least} to {room} here, not {wanted}: the prompt has "
            f"{context - room} tokens and the context holds {context}",
            field=field,
        )
    return max(int(wanted), LEAST_TOKENS)  # where none is told, one is drawn
