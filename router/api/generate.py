"""A request's sessions to what its client is told of them, side by side. Knows no transport."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext

from outrider.errors import DeadlineExceeded, OutriderError
from outrider.wire.logprobs import PromptLogprobs
from outrider.wire.session import FinishReason
from router.api.asked import asked
from router.api.best import likeliest
from router.api.logprobs import Scoring
from router.api.output import Chunk, Output, Result, Usage, group
from router.api.position import cut
from router.api.prompt_logprobs import ScoredPrompt
from router.api.provenance import Provenance
from router.api.threads import Retelling
from router.api.validation import Generation
from router.metrics import Metrics
from router.requests import Events, GenerationRequest, SessionBegun, SessionEnded

Together = Callable[[Sequence[GenerationRequest]], AbstractContextManager[None]]  # SessionRunner's


async def generate(
    events: Events,
    generation: Generation,
    session: GenerationRequest,
    metrics: Metrics,
    after: int | None = None,
    retelling: Retelling | None = None,
    index: int = 0,
) -> AsyncGenerator[tuple[int, SessionBegun | Chunk | Result], None]:
    """SessionBegun, chunks, then one Result, each with `index`. Closing it closes the session; so does a stop
    string, at once.

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

    calls, reasoning = generation.calls, wording.reasoning
    markers = () if calls is None else calls.markers
    markers += () if reasoning is None else reasoning.markers
    end_ids = frozenset(session.params.stop_token_ids)
    output = Output(
        detokenizer=tokenizer.detokenizer(markers, wording.special_tokens),
        matcher=generation.stop.matcher(wording.include_stop),
        end_ids=end_ids,
        include_end=wording.include_stop,
        echo=echo,
        dropped=wording.drop_output,
        score_prompt=score_prompt,
        min_tokens=session.params.min_tokens,
        usage=Usage(
            len(session.params.prompt),
            predicted=bool(session.params.prediction),
            reasoning_tokens=None if reasoning is None else 0,
        ),
        scoring=Scoring(tokenizer.token_bytes, hidden, len(echo)) if scored else None,
        provenance=Provenance(tokenizer.token_bytes, end_ids) if session.params.guesses else None,
        splitter=None if reasoning is None else reasoning.splitter(),
        parser=None if calls is None else calls.parser(session.session_id or b""),
        group=group(len(generation.sessions), session.params.logprobs),
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
                            yield index, item
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
                    yield index, chunk
        rest = ""
        if output.matcher.stopped:  # the session is closed before its last text goes out
            if last is not None:
                yield index, last
        elif reason is None:
            raise OutriderError("the session ended without a reason; please send the request again")
        else:
            rest = output.finish()
        reason = FinishReason.STOP if output.matcher.stopped or reason is None else reason
        reason = FinishReason.LENGTH if wording.drop_output else reason
        ended = reason.openai
        yield index, output.result(rest, reason)
    except DeadlineExceeded as error:
        ended = FinishReason.CANCELLED.openai
        yield index, output.cut(error)
    except Exception:
        ended = "error"
        raise
    finally:
        measured.ended(ended)
        if (request := asked()) is not None:
            request.session_over(output.usage, output.speculation, ended, measured.first_token)


async def _retold(
    begun: SessionBegun, output: Output, after: int, retelling: Retelling | None
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


def _leave(retelling: Retelling, over: Sequence[bool]) -> None:
    """All have come to where their clients are. Those that go on are held by their sessions."""
    retelling.leave()
    if not any(over):
        retelling.release()


async def generate_all(
    start: Callable[[GenerationRequest], Events],
    together: Together,
    generation: Generation,
    metrics: Metrics,
    after: Sequence[int] | None = None,
    retelling: Retelling | None = None,
) -> AsyncGenerator[tuple[int, SessionBegun | Chunk | Result], None]:
    """All sessions of a request side by side: (index of the answer, item). Closing it closes them all.

    `start` gives the events of a session; `together` is entered where there are several: all of them begin,
    or none, and the one that is over first is still known when the others' client resumes. `after` as for
    `generate`, of each answer told. `retelling`: their place, which they leave when all have come to there.
    Nothing comes before all have begun, which the first item says: one id is told for all. The first error of
    any session ends all of them and is raised, and so is the end of their time if none of them has any
    text."""
    told = False
    if (request := asked()) is not None:
        request.asks(generation)
    if len(generation.sessions) > 1:
        if generation.wording.best:
            items = _likeliest(start, generation, metrics, after, retelling)
        else:
            items = _side_by_side(start, generation, metrics, after, retelling)
        keeping = together(generation.sessions)
    else:
        (session,), keeping = generation.sessions, nullcontext()
        has = None if after is None else after[0]
        items = generate(start(session), generation, session, metrics, has, retelling)
    with keeping:
        async with aclosing(items):
            async for each in items:
                _, item = each
                if isinstance(item, SessionBegun):
                    if retelling is not None and len(generation.sessions) == 1:
                        _leave(retelling, [item.over])
                elif isinstance(item, Result) and item.cut is not None and not told:
                    raise item.cut
                else:
                    told = True
                yield each


def _likeliest(
    start: Callable[[GenerationRequest], Events],
    generation: Generation,
    metrics: Metrics,
    after: Sequence[int] | None,
    retelling: Retelling | None,
) -> AsyncGenerator[tuple[int, SessionBegun | Chunk | Result], None]:
    """Whichever are told, their chunks end where the client of a resumed answer is."""
    from_start = None if after is None else [0] * len(generation.sessions)
    ends = frozenset(after or ())
    items = _side_by_side(lambda one: cut(start(one), ends), generation, metrics, from_start, retelling)
    wording = generation.wording
    return likeliest(items, generation.n, wording.best, after, hide_logprobs=wording.hide_logprobs)


async def _side_by_side(
    start: Callable[[GenerationRequest], Events],
    generation: Generation,
    metrics: Metrics,
    after: Sequence[int] | None,
    retelling: Retelling | None,
) -> AsyncGenerator[tuple[int, SessionBegun | Chunk | Result], None]:
    begun, over = asyncio.Barrier(len(generation.sessions)), list[bool]()
    items: asyncio.Queue[tuple[int, SessionBegun | Chunk | Result | Exception]] = asyncio.Queue(maxsize=1)

    async def pump(index: int, session: GenerationRequest) -> None:
        has = None if after is None else after[index]
        try:
            one = generate(start(session), generation, session, metrics, has, retelling, index)
            async with aclosing(one) as stream:
                async for told in stream:
                    _, item = told
                    if not isinstance(item, SessionBegun):
                        await items.put(told)
                        continue
                    over.append(item.over)
                    if len(over) == len(generation.sessions):  # then it comes before all that follows
                        await items.put((0, item))
                    await begun.wait()
                    if retelling is not None:
                        _leave(retelling, over)
        except Exception as error:
            await items.put((index, error))

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, session in enumerate(generation.sessions):
            tasks.append(asyncio.create_task(pump(index, session)))
            await asyncio.sleep(0)  # to open one takes its time: others have their turn before the next
        running = len(generation.sessions)
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
