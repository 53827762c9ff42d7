"""A generation request and what becomes of it, free of any transport: the seam between API and sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from outrider.store.logs import Lead
from outrider.wire.description import TokenizerFiles as TokenizerFiles
from outrider.wire.guesses import NO_OWN, DrafterCounts, Guesses, OwnCounts
from outrider.wire.logprobs import Logprobs, PromptLogprobs
from outrider.wire.session import FinishReason, SessionId, SessionParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue. Validated against the model before it gets here."""

    model: str
    params: SessionParams  # prompt and output fit the context
    num_speculative_tokens: int | None = None  # None = adaptive, 0 = off, k = at most k
    session_id: SessionId | None = None  # where the client is told it; None = drawn later
    owner: str = ""  # name of the API key that it was asked with; empty = keys are not asked for
    fingerprint: str | None = None  # of the model that it was validated against; None = any of that name
    first_token_by: float | None = None  # on the event loop's clock; refused where that cannot be
    deadline: float | None = None  # on the event loop's clock; ended then


class TokensCommitted(NamedTuple):
    """What one target step fixed for a session."""

    tokens: tuple[int, ...]  # `accepted` drafted ones, then the target's own
    accepted: int  # draft tokens accepted
    verified: int  # draft tokens verified: those, and the likeliest path behind them; 0 = a plain step
    cached_prompt_tokens: int = 0  # with the first output: prompt tokens found in the KV cache
    numerics: str = ""  # of the verifier, with the first output and if it is not that of the step before
    logprobs: Logprobs = ()  # of the tokens, if asked for
    guesses: Guesses = ()  # the draft tokens verified, if asked for
    prompt: PromptLogprobs | None = None  # with the first output, if asked for
    beside: int = 0  # draft tokens verified on other branches
    own: OwnCounts = NO_OWN
    drafters: tuple[DrafterCounts, ...] = ()  # of a session that has had several at a time
    seconds: float | None = None  # since the session was begun here; None = only its log tells of it


@dataclass(frozen=True, slots=True)
class SessionBegun:
    """The first event: from now on its client may be told its id, as another router could go on with it."""

    known: Iterable[TokensCommitted] = ()  # of one that is resumed, what came before; to be gone through once
    over: bool = False  # no more comes: it is told from its log alone


@dataclass(frozen=True, slots=True)
class SessionEnded:
    reason: FinishReason


SessionEvent = SessionBegun | TokensCommitted | SessionEnded


class Events(Protocol):
    """The events of one session, as an asynchronous iterator that can be closed."""

    def __aiter__(self) -> AsyncIterator[SessionEvent]: ...
    def __anext__(self) -> Awaitable[SessionEvent]: ...
    def aclose(self) -> Awaitable[object]: ...


@dataclass(eq=False)
class Resumption:
    """A client's coming back to an answer. Of several that come at once, at whichever routers, the one that
    takes its first session last has them all: else each might get some, and nobody the answer."""

    first: SessionId
    lead: Lead | None = None  # once that one is here
    led: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Recalled:
    """A session that was begun, as its log has it."""

    request: GenerationRequest  # with its session_id
    answer: bytes  # what the API keeps with it, as given to `run`
    output_tokens: int = 0  # so far


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that at least one registered verifier runs, or ran until a moment ago."""

    name: str
    fingerprint: str
    vocab_size: int
    max_context: int  # most tokens of prompt and output together
    eos_token_ids: frozenset[int]
    tokenizer: TokenizerFiles
    created: int  # unix seconds
    aliases: tuple[str, ...] = ()  # other names under which it may be asked for
    numerics: tuple[str, ...] = ()  # of its verifiers: those of one give the same logits to the bit
    absent_context: int = 0  # the longest of its verifiers that were here a moment ago and are not now


class SessionRunner(Protocol):
    """What the API needs of the sessions; router/sessions.py is the implementation."""

    def model(self, name: str) -> ServedModel:
        """The served model of that name; an empty name is the only (or first) one.

        Raises UnknownModel, or Unavailable where no verifier is registered, nor was a moment ago."""
        ...

    def models(self) -> list[ServedModel]: ...

    def ready(self) -> bool:
        """Whether at least one verifier takes requests."""
        ...

    def run(self, request: GenerationRequest, answer: bytes = b"") -> Events:
        """Runs the session; the first event is SessionBegun, the last SessionEnded. `answer` is kept in the
        session's log, unread.

        Closing it (aclose, or cancelling the task that iterates it) closes the session on every
        worker at once; its log stays for a while, so that it can be resumed. Raises Unavailable, Overloaded
        or Superseded; what was yielded before stays valid."""
        ...

    def check_room(self, owner: str, sessions: int = 1) -> None:
        """Before anything is done for a request: raises Overloaded if so many of that owner's would not be
        let in."""
        ...

    def degraded(self) -> str:
        """A sentence where something is away that requests can do without; empty = nothing is."""
        ...

    async def recall(self, session_id: SessionId) -> Recalled:
        """What was asked for, by this router or another. Raises UnknownSession, and Unavailable where the
        store cannot be asked."""
        ...

    def resume(self, session_id: SessionId, resumption: Resumption | None = None) -> Events:
        """SessionBegun with all steps that its log has, then new events as by `run`. Whoever else
        iterates the session hears Superseded. `resumption`: of the answer that it is of, whose first session
        is resumed, too; None = it is the only one. Raises what `recall` and `run` raise."""
        ...

    def together(self, requests: Sequence[GenerationRequest]) -> AbstractContextManager[None]:
        """Has a place for each of these sessions of one answer, or for none: raises Overloaded. Meanwhile
        they can be resumed, also those that are over: an answer is resumed with all of its sessions."""
        ...

    async def cancel(self, session_id: SessionId) -> None:
        """Ends a session of this router or of another: it raises Cancelled. Ids that are unknown, or of
        sessions that are over, are ignored."""
        ...
