"""What becomes of an output's tokens: its text, the calls in it, its end, and what is told of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from outrider.errors import DeadlineExceeded
from outrider.wire.logprobs import PromptLogprobs
from outrider.wire.session import FinishReason
from router.api.acceptance import SpeculationStats
from router.api.logprobs import HeldScores, Scored, Scoring
from router.api.prompt_logprobs import ScoredPrompt
from router.api.provenance import Provenance, Step
from router.detokenize import Detokenizer
from router.reasoning import Splitter
from router.requests import TokensCommitted
from router.stop import StopMatcher
from router.tool_parser import Call, CallDelta, CallParser, joined

GROUP = 256  # steps of a log that are told at once, at most
GROUP_NUMBERS = 2**12  # and of all answers to a request: steps, and log-probabilities of their tokens


def group(answers: int, logprobs: int | None) -> int:
    """Returns how many steps of a log are told at once, where a request has so many answers. They lie there
    until a client takes them, as objects, which the garbage collector goes through."""
    numbers = 1 if logprobs is None else 2 + logprobs
    return max(1, min(GROUP, GROUP_NUMBERS // (answers * numbers)))


class Chunk(NamedTuple):
    """What one target step gave. The text lags behind where a character or a stop string may be open."""

    text: str
    token_ids: tuple[int, ...]
    position: int  # output tokens up to the end of it
    scored: Sequence[Scored] = ()  # of `token_ids`, if asked for
    prompt: ScoredPrompt | None = None  # with the first output, if asked for
    step: Step | None = None  # where the tokens came from, if asked for
    calls: tuple[CallDelta, ...] = ()  # of tools, after the text
    reasoning: str = ""  # before the text
    reasoning_tokens: int | None = None  # so far

    @property
    def beside(self) -> bool:
        """Whether there is anything beside the text."""
        return bool(self.scored or self.calls or self.reasoning or self.step or self.prompt)


@dataclass(slots=True)
class Details:
    """What is told of an output's tokens beside its text, if there is any."""

    scored: list[Scored] | HeldScores = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    calls: Sequence[CallDelta] = ()  # pieces of calls, in a stream
    prompt: ScoredPrompt | None = None
    reasoning: str = ""

    @classmethod
    def of(cls, chunk: Chunk) -> Details:
        if not chunk.beside:
            return NO_DETAILS
        steps = [] if chunk.step is None else [chunk.step]
        return cls(list(chunk.scored), steps, chunk.calls, chunk.prompt, chunk.reasoning)

    def __bool__(self) -> bool:
        return bool(self.scored or self.steps or self.calls or self.reasoning) or self.prompt is not None

    def add(self, chunk: Chunk) -> None:
        self.reasoning += chunk.reasoning
        self.scored.extend(chunk.scored)
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
    predicted: bool = False  # the request has a prediction
    reasoning_tokens: int | None = None  # of the completion, with what marks them; None = not looked for


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
    calling: bool = False  # amid the last of them
    reasoning: str = ""  # what only the end has settled
    untold: tuple[Result, ...] = ()  # of the answers to the prompt that others were better than

    @property
    def reason(self) -> str:
        """The finish reason in OpenAI's words."""
        called = self.called and not self.calling and self.finish_reason is FinishReason.STOP
        return "tool_calls" if called else self.finish_reason.openai

    @property
    def position(self) -> int:
        """The end counts as one token: who has it is further than who has only the last token."""
        return self.usage.completion_tokens + (self.cut is None)


@dataclass(slots=True)
class Output:
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
    splitter: Splitter | None = None  # if the text may begin with reasoning
    parser: CallParser | None = None  # if it may call tools
    group: int = GROUP  # steps of a log that are told at once
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    numerics: list[str] = field(default_factory=list)  # one after the other, that it was computed with

    def add(self, event: TokensCommitted, after: int) -> Chunk:
        """Takes a step's tokens; those after a stop string are dropped.

        The client has the first `after` tokens and their text: it is the same however steps were cut."""
        self.usage.cached_prompt_tokens = self.usage.cached_prompt_tokens or event.cached_prompt_tokens
        if event.verified:
            self.speculation.add(event.accepted, event.verified, event.beside, event.own, event.drafters)
        if event.numerics:
            self.numerics.append(event.numerics)
        before, text, taken, reasoning = self.usage.completion_tokens, "", 0, ""
        scored: list[Scored] = []
        calls: tuple[CallDelta, ...] = ()
        called: tuple[CallDelta, ...]
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
                told = self.matcher.push(self.detokenizer.push((token,)), may_stop)
                thought, called = "", ()
                if self.splitter is not None:
                    thought, told = self._split(self.splitter, told, before + taken)
                if self.parser is not None:
                    told, called = self.parser.push(told)
                if before + taken > after:
                    reasoning += thought
                    text += told
                    calls += called
            if self.scoring is not None and event.logprobs:
                one = self.scoring.push(token, event.logprobs[taken - 1])
                if before + taken > after:
                    scored.append(one)
            if self.matcher.stopped:
                break
        self.usage.completion_tokens += taken
        first = max(0, after - before)
        step = None if self.provenance is None else self.provenance.push(event, first, taken)
        ids, at = event.tokens[first:taken], before + taken
        so_far = self.usage.reasoning_tokens
        return Chunk(
            text, ids, at, tuple(scored), prompt, step, joined(calls) if calls else (), reasoning, so_far
        )

    def retell(self, steps: Iterator[TokensCommitted], after: int) -> tuple[list[Chunk], bool]:
        """Takes the next steps of a log. Returns what follows the first `after` tokens, and whether there may
        be more."""
        chunks, taken = [], 0
        for step in islice(steps, self.group):
            taken += 1
            chunk = self.add(step, after)
            if chunk.position > after:
                chunks.append(chunk)
            if self.matcher.stopped:
                break
        return chunks, taken == self.group and not self.matcher.stopped

    def _split(self, splitter: Splitter, text: str, position: int) -> tuple[str, str]:
        """Returns what this text, up to so many tokens, settles of the reasoning, and of what follows it."""
        thinking = splitter.thinking
        thought, rest = splitter.push(text)
        if thinking or splitter.thinking:
            self.usage.reasoning_tokens = position
        return thought, rest

    def result(self, rest: str, reason: FinishReason) -> Result:
        """Returns the end of the text, with the rest of it."""
        reasoning = ""
        calls: tuple[CallDelta, ...] = ()
        if self.splitter is not None:
            (reasoning, rest), flushed = self.splitter.push(rest), self.splitter.flush()
            reasoning, rest = reasoning + flushed[0], rest + flushed[1]
        if self.parser is not None:
            (rest, first), (more, last) = self.parser.push(rest), self.parser.flush()
            rest, calls = rest + more, joined(first + last)
        return self._result(rest, reason, calls=calls, reasoning=reasoning)

    def cut(self, error: DeadlineExceeded) -> Result:
        """Returns the end of what its client waited for."""
        return self._result("", FinishReason.CANCELLED, cut=error)

    def _result(self, text: str, reason: FinishReason, **rest: Any) -> Result:
        changes = max(0, len(self.numerics) - 1)
        called = () if self.parser is None else tuple(self.parser.calls)
        calling = self.parser is not None and self.parser.calling
        return Result(
            text,
            reason,
            self.usage,
            self.speculation,
            numerics_changes=changes,
            stop=self.matcher.found,
            called=called,
            calling=calling,
            **rest,
        )

    def finish(self) -> str:
        """The text that was still open; sets `stopped` where it completes a stop string."""
        may_stop = self.usage.completion_tokens > self.min_tokens
        text = self.matcher.push(self.detokenizer.flush(), may_stop)
        return text if self.matcher.stopped else text + self.matcher.flush()
