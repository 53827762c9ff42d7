"""Where guesses come from: what the drafter's service and its links know of it.

A proposer owns the sessions' guesses and knows nothing of transport. It is told of commits, extends each
session's trunk up to its window, and calls `on_change` when a session has news for its verifier, or
`on_failed` when it cannot draft for it any more. docs/drafts.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from drafter.session import DraftSession
from outrider.wire.description import TokenizerFiles, WorkerInfo
from outrider.wire.load import DrafterLoad
from outrider.worker.stepwatch import StepUnderWay

OnChange = Callable[[Sequence[DraftSession]], None]
OnFailed = Callable[[DraftSession, str], None]  # with the reason, a sentence


class Proposer(Protocol):
    """A source of guesses for many sessions."""

    @property
    def load(self) -> DrafterLoad:
        """Returns how busy it is; the share of time and the round trips are the service's to add."""
        ...

    @property
    def busy_seconds(self) -> float:
        """Returns the time spent on guesses since the start."""
        ...

    @property
    def under_way(self) -> StepUnderWay | None:
        """Returns the step that runs now: if it does not end, the process is replaced."""
        ...

    def open(self, session: DraftSession) -> object:
        """Starts drafting for a session. An id that is open already is started anew."""
        ...

    def close(self, session_id: bytes) -> None:
        """Drops a session, if it is open."""
        ...

    def set_window(self, session_id: bytes, window: int) -> None:
        """Allows a session so many guesses beyond its log."""
        ...

    def commit(self, session: DraftSession, base: int, tokens: Sequence[int]) -> None:
        """Takes in what the target committed from position `base` on."""
        ...

    async def probe(self) -> None:
        """Makes one guess. Raises if that does not work."""
        ...

    async def run(self) -> None:
        """Drafts until it cannot any more; raises why."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """A kind of draft, ready to be served: what it says of itself, and how a proposer is made."""

    info: WorkerInfo
    tokenizer: TokenizerFiles  # of its guesses; with an empty hash if they suit every tokenizer
    proposer: Callable[[OnChange, OnFailed], Proposer]
    note: str = ""  # on how it drafts, for its ready line
