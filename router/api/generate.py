"""One session's tokens to text: detokenizing, stop strings, usage and statistics. Knows no transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from outrider.errors import OutriderError
from router.api.acceptance import SpeculationStats
from router.api.validation import Generation
from router.detokenize import Detokenizer
from router.metrics import Metrics
from router.requests import FinishReason, GenerationRequest, SessionEnded, SessionRunner, TokensCommitted
from router.stop import StopMatcher


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one target step gave. The text lags behind where a character or a stop string may be open."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class Usage:
    """Token counts of a session, so far or in the end."""

    prompt_tokens: int
    completion_tokens: int = 0  # up to and including the token that ended the text
    cached_prompt_tokens: int = 0  # of the prompt: found in the KV cache


@dataclass(frozen=True, slots=True)
class Result:
    """The last item of a session."""

    finish_reason: FinishReason
    usage: Usage
    speculation: SpeculationStats


@dataclass(slots=True)
class _Output:
    """The text of one session, token by token, up to its end."""

    detokenizer: Detokenizer
    matcher: StopMatcher
    end_ids: frozenset[int]  # tokens that end the text and are no part of it
    usage: Usage
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, event: TokensCommitted) -> Chunk:
        """Takes a step's tokens; those after a stop string are dropped."""
        self.usage.cached_prompt_tokens = self.usage.cached_prompt_tokens or event.cached_prompt_tokens
        self.speculation.add(event.accepted, event.verified)
        text, taken = "", 0
        for token in event.tokens:
            taken += 1
            if token not in self.end_ids:
                text += self.matcher.push(self.detokenizer.push((token,)))
            if self.matcher.stopped:
                break
        self.usage.completion_tokens += taken
        return Chunk(text, event.tokens[:taken])

    def finish(self) -> str:
        """The text that was still open; sets `stopped` where it completes a stop string."""
        text = self.matcher.push(self.detokenizer.flush())
        return text if self.matcher.stopped else text + self.matcher.flush()


async def generate(
    runner: SessionRunner, generation: Generation, session: GenerationRequest, metrics: Metrics
) -> AsyncGenerator[Chunk | Result, None]:
    """Chunks, then one Result. Closing it closes the session; so does a stop string, at once.

    Raises what the runner raises (Unavailable, Overloaded); chunks given before stay valid."""
    output = _Output(
        detokenizer=generation.tokenizer.detokenizer(),
        matcher=StopMatcher(generation.stop),
        end_ids=frozenset() if session.ignore_eos else generation.model.eos_token_ids,
        usage=Usage(prompt_tokens=len(session.prompt)),
    )
    measured = metrics.session(session.model, len(session.prompt))
    ended = "abort"
    try:
        reason: FinishReason | None = None
        async with aclosing(runner.run(session)) as events:
            async for event in events:
                if isinstance(event, SessionEnded):
                    reason = event.reason
                    break
                measured.committed(event)
                chunk = output.add(event)
                if output.matcher.stopped:
                    break
                yield chunk
        if output.matcher.stopped:  # the session is closed before its last text goes out
            yield chunk
        elif reason is None:
            raise OutriderError("the session ended without a reason; please send the request again")
        else:
            rest = output.finish()
            if rest:
                yield Chunk(rest, ())
        reason = FinishReason.STOP if output.matcher.stopped or reason is None else reason
        ended = reason.value
        yield Result(reason, output.usage, output.speculation)
    except Exception:
        ended = "error"
        raise
    finally:
        measured.ended(ended)


async def generate_all(
    runner: SessionRunner, generation: Generation, metrics: Metrics
) -> AsyncGenerator[tuple[int, Chunk | Result], None]:
    """All sessions of a request side by side: (index of the prompt, item). Closing it closes them all.

    The first error of any session ends all of them and is raised."""
    items: asyncio.Queue[tuple[int, Chunk | Result | Exception]] = asyncio.Queue(maxsize=1)

    async def pump(index: int, session: GenerationRequest) -> None:
        try:
            async with aclosing(generate(runner, generation, session, metrics)) as stream:
                async for item in stream:
                    await items.put((index, item))
        except Exception as error:
            await items.put((index, error))

    tasks = [asyncio.create_task(pump(index, session)) for index, session in enumerate(generation.sessions)]
    running = len(tasks)
    try:
        while running:
            index, item = await items.get()
            if isinstance(item, Exception):
                raise item
            yield index, item
            if isinstance(item, Result):
                running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
