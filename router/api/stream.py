"""The events of a streamed answer: chunks, then usage where it is asked for, then [DONE]."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from outrider.errors import OutriderError
from router.api.generate import Chunk, Result
from router.api.responses import Envelope, Json, error_body, totals, usage
from router.api.schema import StreamOptions
from router.metrics import Metrics

logger = logging.getLogger(__name__)

Items = AsyncGenerator[tuple[int, Chunk | Result], None]

DONE = "[DONE]"


async def events(
    first: tuple[int, Chunk | Result],
    rest: Items,
    envelope: Envelope,
    options: StreamOptions,
    prompt_tokens: list[int],
    metrics: Metrics,
) -> AsyncGenerator[str, None]:
    """JSON texts, then [DONE]. An error in the middle is an event too: the HTTP status has long been sent.

    `prompt_tokens`: of each session, by index. Closing it closes the sessions."""
    shape = envelope.shape
    completed = [0] * len(prompt_tokens)
    results: dict[int, Result] = {}

    def chunk(index: int, choice: Json) -> str:
        if not options.include_usage:
            return to_json(envelope.chunk(choice))
        so_far = usage(prompt_tokens[index], completed[index]) if options.continuous_usage_stats else None
        return to_json(envelope.chunk(choice, usage=so_far))

    async with aclosing(rest):
        try:
            for index in range(len(prompt_tokens)):
                opening = shape.opening(index)
                if opening is not None:
                    yield chunk(index, opening)
            async for index, item in _chained(first, rest):
                if isinstance(item, Result):
                    results[index] = item
                    yield chunk(index, shape.delta(index, None, item.finish_reason.value))
                    continue
                completed[index] += len(item.token_ids)
                if item.text:
                    yield chunk(index, shape.delta(index, item.text, None))
            if options.include_usage:
                yield to_json(envelope.chunk(**totals(results[index] for index in sorted(results))))
        except OutriderError as error:
            metrics.request_refused(error.kind)
            yield to_json(error_body(error))
        except Exception:
            logger.exception("a streamed answer failed")
            metrics.request_refused(OutriderError.kind)
            yield to_json(error_body(internal_error()))
        yield DONE


async def _chained(
    first: tuple[int, Chunk | Result], rest: Items
) -> AsyncGenerator[tuple[int, Chunk | Result], None]:
    yield first
    async for item in rest:
        yield item


def internal_error() -> OutriderError:
    """What a client sees of an error that nobody foresaw."""
    return OutriderError("the server failed to answer this request; its log says why")


def to_json(body: Json) -> str:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"))
