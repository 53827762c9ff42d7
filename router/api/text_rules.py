"""The rules of `text_fields`: pure functions over a request's fields."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from outrider.errors import InvalidRequest
from outrider.wire.logprobs import MAX_ANSWER_LOGPROBS, MAX_PROMPT_LOGPROBS
from router.api.schema import CHOICES, TOP_LOGPROBS, ChatRequest, CompletionRequest
from router.api.wording import Wording
from router.requests import ServedModel
from router.tokenizer import Tokenizer

MAX_ECHO = 2**20  # characters of a request's prompts that its answers repeat: they are kept with the first
MOST_GUESSES = 32  # a step that are counted: drafts are rarely longer


def stop_tokens(body: CompletionRequest | ChatRequest, model: ServedModel, ruled: bool) -> tuple[int, ...]:
    """Returns the ids that end the text. `ruled`: a grammar has the model's own at its end."""
    own: Collection[int] = () if body.ignore_eos and not ruled else model.eos_token_ids
    found = {*own, *body.stop_token_ids}
    if body.min_tokens and len(found) >= model.vocab_size:
        raise InvalidRequest("stop_token_ids leave no token that min_tokens could take", field="min_tokens")
    return tuple(sorted(found))


def check_min_tokens(least: int, most: int, ruled: bool) -> None:
    if not 0 <= least <= most:
        raise InvalidRequest(
            f"min_tokens must be from 0 to {most} here (max_tokens), not {least}", field="min_tokens"
        )
    if least and ruled:
        raise InvalidRequest(
            "min_tokens must be 0 with response_format, structured_outputs, a forced call or strict tools: "
            "these say where the text ends",
            field="min_tokens",
        )


def prompt_logprobs(body: CompletionRequest | ChatRequest) -> int | None:
    """Returns of how many likeliest tokens a request is told at each position of its prompts; None = of none
    at all."""
    count = body.prompt_logprobs
    if count is not None:
        TOP_LOGPROBS.check("prompt_logprobs", count)
    elif repeats(body) and isinstance(body, CompletionRequest):
        count = body.logprobs
    if count is not None and candidates(body) > 1:
        raise InvalidRequest(
            "n and best_of must be 1 with prompt_logprobs, or echo and logprobs: these are the same for "
            "each answer",
            field="n",
        )
    return count


def check_prompt_logprobs(count: int | None, prompts: Sequence[Sequence[int]]) -> None:
    tokens = sum(map(len, prompts))
    if count is not None and tokens * (1 + count) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs, or echo with logprobs, would tell {tokens * (1 + count)} numbers of {tokens} "
            f"tokens with {count} likeliest at each; an answer has at most {MAX_PROMPT_LOGPROBS}: ask for "
            "fewer, or send several requests",
            field="prompt_logprobs",
        )


def check_details(
    body: CompletionRequest | ChatRequest, logprobs: int | None, most_tokens: list[int]
) -> None:
    """Bounds what is told of the tokens of several answers, which are held until they are all there."""
    guesses = 1 + MOST_GUESSES if body.return_speculation else 0
    each = guesses + (0 if logprobs is None else 1 + logprobs)
    if len(most_tokens) > 1 and (numbers := sum(most_tokens) * each) > MAX_ANSWER_LOGPROBS:
        raise InvalidRequest(
            f"logprobs, best_of or return_speculation would tell up to {numbers} numbers of "
            f"{len(most_tokens)} answers; several have at most {MAX_ANSWER_LOGPROBS}: ask for a lower "
            "max_tokens or for fewer, or send several requests",
            field="max_tokens",
        )


def candidates(body: CompletionRequest | ChatRequest) -> int:
    """Returns how many answers are made for each prompt."""
    if body.best_of is None:
        return body.n
    CHOICES.check("best_of", body.best_of)
    if body.best_of < body.n:
        raise InvalidRequest(f"best_of must be at least n ({body.n}), not {body.best_of}", field="best_of")
    return body.best_of


def repeats(body: CompletionRequest | ChatRequest) -> bool:
    """Returns whether the text repeats its prompt."""
    return isinstance(body, CompletionRequest) and body.echo


def wording(body: CompletionRequest | ChatRequest, built: Tokenizer) -> Wording:
    return Wording(
        include_stop=body.include_stop_str_in_output,
        special_tokens=not body.skip_special_tokens,
        echo=_echo(body, built) if isinstance(body, CompletionRequest) and body.echo else (),
        drop_output=0 in (body.max_tokens, body.max_completion_tokens),
        prompt_logprobs=body.prompt_logprobs is not None,
        best=body.n if candidates(body) > body.n else 0,
        hide_logprobs=not body.logprobs if isinstance(body, ChatRequest) else body.logprobs is None,
    )


def _echo(body: CompletionRequest, built: Tokenizer) -> tuple[str, ...]:
    """Returns the prompts as text. A few bytes of a token id may be a hundred of text."""
    echo, left = list[str](), MAX_ECHO
    for prompt in body.prompt:
        if isinstance(prompt, str):
            text = prompt
        elif built.writes_more(prompt, left):
            raise _too_much_echo()
        else:
            text = built.decode(prompt, skip_special_tokens=body.skip_special_tokens)
        echo.append(text)
        left -= len(text)
        if left < 0:
            raise _too_much_echo()
    return tuple(echo)


def _too_much_echo() -> InvalidRequest:
    return InvalidRequest(
        f"echo would repeat more than {MAX_ECHO} characters of prompts: send fewer together", field="echo"
    )
