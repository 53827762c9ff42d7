"""One session's tokens to text: detokenizing, stop strings, usage and statistics. Knows no transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from outrider.errors import DeadlineExceeded, OutriderError
from outrider.wire.logprobs import PromptLogprobs
from outrider.wire.session import FinishReason
from router.api.acceptance import SpeculationStats
from router.api.logprobs import Scored, Scoring
from router.api.prompt_logprobs import ScoredPrompt
from router.api.provenance import Provenance, Step
from router.api.threads import Retelling
from router.api.validation import Generation
from router.detokenize import Detokenizer
from router.metrics import Metrics
from router.requests import Events, GenerationRequest, SessionBegun, SessionEnded, TokensCommitted
from router.stop import StopMatcher
from router.tool_parser import Call, CallDelta, CallParser, joined

GROUP = 256  # steps of a log that are told at once


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one target step gave. The text lags behind where a character or a stop string may be open."""

    text: str
    token_ids: tuple[int, ...]
    position: int  # output tokens up to the end of it
    scored: tuple[Scored, ...] = ()  # of `token_ids`, if asked for
    prompt: ScoredPrompt | None = None  # with the first output, if asked for
    step: Step | None = None  # where the tokens came from, if asked for
    calls: tuple[CallDelta, ...] = ()  # of tools, after the text


@dataclass(slots=True)
class Details:
    """What is told of an output's tokens beside its text, if there is any."""

    scored: list[Scored] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    calls: Sequence[CallDelta] = ()  # pieces of calls, in a stream
    prompt: ScoredPrompt | None = None

    @classmethod
    def of(cls, chunk: Chunk) -> Details:
        if not chunk.scored and chunk.step is None and not chunk.calls and chunk.prompt is None:
            return NO_DETAILS
        return cls(list(chunk.scored), [] if chunk.step is None else [chunk.step], chunk.calls, chunk.prompt)

    def __bool__(self) -> bool:
        return bool(self.scored or self.steps or self.calls) or self.prompt is not None

    def add(self, chunk: Chunk) -> None:
        self.scored += chunk.scored
        if chunk.step is not None:
            self.steps.append(chunk.step)
        self.prompt = self.prompt or chunk.prompt


NO_DETAILS = Details()


@dataclass(slots=True)
class Usage:
    """Token counts of a session, so far or in the end."""

    prompt_tokens: int
    completion_tokens: int = 0  # up to and including the token that ended the text
    cached_prompt_tokens: int = 0  # of the prompt: found in the KV cache


@dataclass(frozen=True, slots=True)
class Result:
    """The last item of a session."""

    text: str  # what only the end has settled
    finish_reason: FinishReason
    usage: Usage
    speculation: SpeculationStats
    numerics_changes: int = 0  # of verifiers with other numerics, amid the text
    stop: str = ""  # the stop string that ended it; empty = none
    cut: DeadlineExceeded | None = None  # the text goes on, but its client's time was over
    calls: tuple[CallDelta, ...] = ()  # what only the end has settled
    called: tuple[Call, ...] = ()  # all calls of tools

    @property
    def reason(self) -> str:
        """The finish reason in OpenAI's words."""
        calling = self.called and self.finish_reason is FinishReason.STOP
        return "tool_calls" if calling else self.finish_reason.openai

    @property
    def position(self) -> int:
        """The end counts as one token: who has it is further than who has only the last token."""
        return self.usage.completion_tokens + (self.cut is None)


@dataclass(slots=True)
class _Output:
    """The text of one session, token by token, up to its end."""

    detokenizer: Detokenizer
    matcher: StopMatcher
    end_ids: frozenset[int]  # tokens that end the text
    include_end: bool  # and are part of it
    echo: str  # comes before the output
    dropped: bool  # the output is no part of the text
    score_prompt: Callable[[PromptLogprobs], ScoredPrompt]
    min_tokens: int  # before which no stop string is looked for
    usage: Usage
    scoring: Scoring | None = None  # if asked for
    provenance: Provenance | None = None  # if asked for
    parser: CallParser | None = None  # if the text may call tools
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    numerics: list[str] = field(default_factory=list)  # one after the other, that it was computed with

    def add(self, event: TokensCommitted, after: int) -> Chunk:
        """Takes a step's tokens; those after a stop string are dropped.

        The client has the first `after` tokens and their text: it is the same however steps were cut."""
        self.usage.cached_prompt_tokens = self.usage.cached_prompt_tokens or event.cached_prompt_tokens
        self.speculation.add(event.accepted, event.verified)
        if event.numerics:
            self.numerics.append(event.numerics)
        before, text, taken = self.usage.completion_tokens, "", 0
        scored: list[Scored] = []
        calls: tuple[CallDelta, ...] = ()
        prompt = None
        if before == 0 and event.tokens:
            text = self.echo if after == 0 else ""
            if event.prompt is not None and after == 0:
                prompt = self.score_prompt(event.prompt)
        if self.dropped:
            self.usage.completion_tokens += len(event.tokens)
            return Chunk(text, (), before + len(event.tokens), prompt=prompt)
        for token in event.tokens:
            taken += 1
            if token not in self.end_ids or self.include_end:
                may_stop = before + taken > self.min_tokens
                settled, called = self._parsed(self.matcher.push(self.detokenizer.push((token,)), may_stop))
                if before + taken > after:
                    text += settled
                    calls += called
            if self.scoring is not None and event.logprobs:
                told = self.scoring.push(token, event.logprobs[taken - 1])
                if before + taken > after:
                    scored.append(told)
            if self.matcher.stopped:
                break
        self.usage.completion_tokens += taken
        first = max(0, after - before)
        step = None if self.provenance is None else self.provenance.push(event, first, taken)
        return Chunk(
            text, event.tokens[first:taken], before + taken, tuple(scored), prompt, step, joined(calls)
        )

    def retell(self, steps: Iterator[TokensCommitted], after: int) -> tuple[list[Chunk], bool]:
        """Takes the next steps of a log. Returns what follows the first `after` tokens, and whether there may
        be more."""
        chunks, taken = [], 0
        for step in islice(steps, GROUP):
            taken += 1
            chunk = self.add(step, after)
            if chunk.position > after:
                chunks.append(chunk)
            if self.matcher.stopped:
                break
        return chunks, taken == GROUP and not self.matcher.stopped

    def _parsed(self, text: str) -> tuple[str, tuple[CallDelta, ...]]:
        return self.parser.push(text) if self.parser is not None else (text, ())

    def result(self, rest: str, reason: FinishReason) -> Result:
        """Returns the end of the text, with the rest of it."""
        text, calls = self._parsed(rest)
        if self.parser is not None:
            more, flushed = self.parser.flush()
            text, calls = text + more, joined(calls + flushed)
        return self._result(text, reason, calls=calls)

    def cut(self, error: DeadlineExceeded) -> Result:
        """Returns the end of what its client waited for."""
        return self._result("", FinishReason.CANCELLED, cut=error)

    def _result(self, text: str, reason: FinishReason, **rest: Any) -> Result:
        changes = max(0, len(self.numerics) - 1)
        called = () if self.parser is None else tuple(self.parser.calls)
        return Result(
            text,
            reason,
            self.usage,
            self.speculation,
            numerics_changes=changes,
            stop=self.matcher.found,
            called=called,
            **rest,
        )

    def finish(self) -> str:
        """The text that was still open; sets `stopped` where it completes a stop string."""
        may_stop = self.usage.completion_tokens > self.min_tokens
        text = self.matcher.push(self.detokenizer.flush(), may_stop)
        return text if self.matcher.stopped else text + self.matcher.flush()


async def generate(
    events: Events,
    generation: Generation,
    session: GenerationRequest,
    metrics: Metrics,
    after: int | None = None,
    retelling: Retelling | None = None,
) -> AsyncGenerator[SessionBegun | Chunk | Result, None]:
    """SessionBegun, chunks, then one Result. Closing it closes the session; so does a stop string, at once.

    If its time is over the Result tells it as `cut`, and text that was still open is left to who resumes it.
    `events`: all of the session. `after`: where it is resumed, the position of its client, who gets what
    follows it; None = a new session. `retelling`: its place, needed up to SessionBegun. Raises what `events`
    raises; chunks given before stay valid."""
    tokenizer, wording = generation.tokenizer, generation.wording
    hidden = frozenset[int]() if wording.special_tokens else tokenizer.special_ids
    echo = generation.echo(session)
    scored = session.params.logprobs is not None

    def score_prompt(told: PromptLogprobs) -> ScoredPrompt:
        return ScoredPrompt(
            ids=session.params.prompt,
            logprobs=told,
            token_bytes=tokenizer.token_bytes,
            hidden=hidden,
            asked=wording.prompt_logprobs,
            repeated=scored and bool(wording.echo),
        )

    calls = generation.calls
    end_ids = frozenset(session.params.stop_token_ids)
    output = _Output(
        detokenizer=tokenizer.detokenizer(calls.markers if calls is not None else (), wording.special_tokens),
        matcher=generation.stop.matcher(wording.include_stop),
        end_ids=end_ids,
        include_end=wording.include_stop,
        echo=echo,
        dropped=wording.drop_output,
        score_prompt=score_prompt,
        min_tokens=session.params.min_tokens,
        usage=Usage(prompt_tokens=len(session.params.prompt)),
        scoring=Scoring(tokenizer.token_bytes, hidden, len(echo)) if scored else None,
        provenance=Provenance(tokenizer.token_bytes, end_ids) if session.params.guesses else None,
        parser=None if calls is None else calls.parser(session.session_id or b""),
    )
    measured = metrics.session(session.model, len(session.params.prompt), resumed=after is not None)
    has = after or 0
    ended = "abort"
    last: Chunk | None = None  # that a stop string ends
    try:
        reason: FinishReason | None = None
        async with aclosing(events):
            async for event in events:
                if isinstance(event, SessionBegun):
                    async with aclosing(_retold(event, output, has, retelling)) as retold:
                        async for item in retold:
                            yield item
                    if output.matcher.stopped:
                        break
                    continue
                if isinstance(event, SessionEnded):
                    reason = event.reason
                    break
                chunk = output.add(event, has)
                if chunk.position > has:
                    measured.committed(event)
                if output.matcher.stopped:
                    last = chunk if chunk.position > has else None
                    break
                if chunk.position > has:
                    yield chunk
        rest = ""
        if output.matcher.stopped:  # the session is closed before its last text goes out
            if last is not None:
                yield last
        elif reason is None:
            raise OutriderError("the session ended without a reason; please send the request again")
        else:
            rest = output.finish()
        reason = FinishReason.STOP if output.matcher.stopped or reason is None else reason
        reason = FinishReason.LENGTH if wording.drop_output else reason
        ended = reason.openai
        yield output.result(rest, reason)
    except DeadlineExceeded as error:
        ended = FinishReason.CANCELLED.openai
        yield output.cut(error)
    except Exception:
        ended = "error"
        raise
    finally:
        measured.ended(ended)


async def _retold(
    begun: SessionBegun, output: _Output, after: int, retelling: Retelling | None
) -> AsyncGenerator[SessionBegun | Chunk, None]:
    """`begun`, once its client's place in what is known is found, and what is known after that."""
    steps, more = iter(begun.known), bool(begun.known)
    chunks: list[Chunk] = []

    async def go_on() -> tuple[list[Chunk], bool]:
        if retelling is None:
            return output.retell(steps, after)
        return await retelling.run(output.retell, steps, after)

    while more and not chunks:
        chunks, more = await go_on()
    yield begun
    while chunks or more:
        for chunk in chunks:
            yield chunk
            await asyncio.sleep(0)  # they come at once, and other answers are streaming
        chunks, more = await go_on() if more else ([], False)


async def generate_all(
    start: Callable[[GenerationRequest], Events],
    generation: Generation,
    metrics: Metrics,
    after: Sequence[int] | None = None,
    retelling: Retelling | None = None,
) -> AsyncGenerator[tuple[int, SessionBegun | Chunk | Result], None]:
    """All sessions of a request side by side: (index of the session, item). Closing it closes them all.

    `start` gives the events of a session; `after` as for `generate`, of each. `retelling`: their place, which
    they leave when all have come to there. Nothing comes before all have begun, which the first item says:
    one id is told for all. The first error of any session ends all of them and is raised, and so is the end
    of their time if none of them has any text."""
    told = False
    async with aclosing(_side_by_side(start, generation, metrics, after, retelling)) as items:
        async for index, item in items:
            if isinstance(item, Result) and item.cut is not None and not told:
                raise item.cut
            told = told or not isinstance(item, SessionBegun)
            yield index, item


async def _side_by_side(
    start: Callable[[GenerationRequest], Events],
    generation: Generation,
    metrics: Metrics,
    after: Sequence[int] | None,
    retelling: Retelling | None,
) -> AsyncGenerator[tuple[int, SessionBegun | Chunk | Result], None]:
    if len(generation.sessions) == 1:
        (session,) = generation.sessions
        has = None if after is None else after[0]
        async with aclosing(generate(start(session), generation, session, metrics, has, retelling)) as only:
            async for told in only:
                if retelling is not None and isinstance(told, SessionBegun):
                    retelling.leave()
                yield 0, told
        return
    begun = asyncio.Barrier(len(generation.sessions))
    items: asyncio.Queue[tuple[int, SessionBegun | Chunk | Result | Exception]] = asyncio.Queue(maxsize=1)

    async def pump(index: int, session: GenerationRequest) -> None:
        has = None if after is None else after[index]
        try:
            one = generate(start(session), generation, session, metrics, has, retelling)
            async with aclosing(one) as stream:
                async for item in stream:
                    if isinstance(item, SessionBegun):
                        await begun.wait()
                        if retelling is not None:
                            retelling.leave()
                        if index:
                            continue
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
