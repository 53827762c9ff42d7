"""The events of a streamed answer: chunks, then usage where it is asked for, then [DONE]."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from outrider.errors import OutriderError
from router.api.connection import ServerSentEvent
from router.api.json_text import long_json, to_json
from router.api.output import NO_DETAILS, Chunk, Details, Result
from router.api.position import event_id
from router.api.responses import Envelope, Json, totals, usage
from router.metrics import Metrics
from router.requests import SessionBegun

logger = logging.getLogger(__name__)

Items = AsyncGenerator[tuple[int, SessionBegun | Chunk | Result], None]

DONE = ServerSentEvent("[DONE]")


async def events(
    items: Items,
    envelope: Envelope,
    prompt_tokens: Sequence[int],
    *,
    include_usage: bool,
    continuous_usage_stats: bool,
    after: Sequence[int] | None = None,
) -> AsyncGenerator[ServerSentEvent, None]:
    """Each chunk has the position of who has it as its id. Closing it closes the sessions.

    `prompt_tokens`: of each session, by index. `after`: the position of a client that resumes; None = it has
    nothing. Raises what `items` raises."""
    shape = envelope.shape
    position = list(after or [0] * len(prompt_tokens))
    opened = after is not None
    results: dict[int, Result] = {}

    def chunk(
        index: int, choice: Json, tokens: tuple[int, int | None], details: Details = NO_DETAILS
    ) -> Json:
        """`tokens`: of the output so far, and of its reasoning."""
        told = shape.beside(details)
        if include_usage:
            so_far = usage(prompt_tokens[index], *tokens) if continuous_usage_stats else None
            told = {**told, "usage": so_far}
        return envelope.chunk(choice, **told)

    def progress(index: int, item: Chunk) -> Json:
        details = Details.of(item)
        tokens = item.position, item.reasoning_tokens
        return chunk(index, shape.delta(index, item.text, None, details), tokens, details)

    def here() -> str:
        return event_id(envelope.id, position)

    async with aclosing(items):
        async for index, item in items:
            if isinstance(item, SessionBegun):
                continue
            if not opened:  # not before there is something: until then an error can be a status
                opened = True
                openings = [(at, shape.opening(at)) for at in range(len(prompt_tokens))]
                begun = [chunk(at, opening, (0, None)) for at, opening in openings if opening is not None]
                for left, told in zip(range(len(begun))[::-1], begun, strict=True):
                    yield ServerSentEvent(to_json(told), None if left else here())  # who has it has them all
            has, position[index] = position[index], max(position[index], item.position)
            if isinstance(item, Result):
                results[index] = item
                tokens = item.usage.completion_tokens, item.usage.reasoning_tokens
                if item.cut is not None:  # without an id: who resumes has what it had before
                    end = shape.delta(index, None, item.reason)
                    yield ServerSentEvent(to_json(chunk(index, end, tokens)))
                elif item.position > has:
                    rest = Details(calls=item.calls, reasoning=item.reasoning)
                    end = shape.delta(index, item.text or None, item.reason, rest)
                    yield ServerSentEvent(to_json(chunk(index, end, tokens)), here())
            elif item.prompt is not None:  # which may be long
                yield ServerSentEvent(partial(long_json, partial(progress, index, item)), here())
            elif item.text or item.beside:
                yield ServerSentEvent(to_json(progress(index, item)), here())
    if include_usage:
        # Without an id: who has all chunks, but not the end of the stream, gets it again.
        ends = totals((results[index] for index in sorted(results)), envelope.n)
        yield ServerSentEvent(to_json(envelope.chunk(**ends)))
    yield DONE


def last_words(
    error: Exception, metrics: Metrics, told: Callable[[OutriderError], Sequence[ServerSentEvent]]
) -> Sequence[ServerSentEvent]:
    """An error in the middle of a stream, as `told` says it: the HTTP status has long been sent."""
    if not isinstance(error, OutriderError):
        logger.error("a streamed answer failed", exc_info=error)
        error = internal_error()
    metrics.request_refused(error.kind)
    return told(error)


def internal_error() -> OutriderError:
    """What a client sees of an error that nobody foresaw."""
    return OutriderError("the server failed to answer this request; its log says why")
