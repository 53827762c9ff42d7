"""Guesses without a model: what followed the same tokens before, in the prompt or in the output so far.

A guess costs microseconds, so all is done on the event loop when a commit or a window comes. No torch.
Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafter.acceptance_model import AcceptanceModel
from drafter.proposer import OnChange, OnFailed, Source
from drafter.session import DraftSession, Guess, LogConflict
from drafter.text_index import TextIndex
from outrider.sampling.ranked import Ranked
from outrider.wire.description import ModelInfo, TokenizerFiles, WorkerInfo
from outrider.wire.hello import Identity, Role
from outrider.wire.load import DrafterLoad
from outrider.worker.stepwatch import StepUnderWay

NAME = "ngram"
MOST_TOKENS = 2**20  # of prompt and output together
BLOCK = 16
MOST_GUESSES = 64  # beyond a log, whatever its window
SMOOTHING = 0.1  # weight of one more measured time


@dataclass(slots=True, eq=False)
class Text:
    """A session's log with the places that are like its end."""

    session: DraftSession
    index: TextIndex
    source: int = -1  # position that the next guess is copied from; -1 = nothing is like the log's end
    matched: int = 0  # tokens before it that are the same as the log's last

    def look_up(self) -> None:
        """Finds where the log's end has been before."""
        self.source, self.matched = self.index.longest_match() or (-1, 0)

    def copied(self, count: int) -> list[int]:
        """Returns the next `count` tokens from the source on, which may run into what is copied."""
        session, tokens = self.session, list[int]()
        if self.source < 0:
            return tokens
        known = len(session.log)
        for position in range(self.source, self.source + count):
            if position < known:
                tokens.append(session.log[position])
            elif position < session.length:
                tokens.append(session.drafted[position - known].token)
            else:
                tokens.append(tokens[position - session.length])
        self.source += len(tokens)
        return tokens


class NgramProposer:
    """Copies what followed the longest match. How likely a copy is right is learned from all sessions."""

    under_way: StepUnderWay | None = None  # no step is ever under way: nothing waits for one

    def __init__(self, on_change: OnChange, on_failed: OnFailed, clock: Callable[[], float]) -> None:
        self._on_change = on_change
        self._on_failed = on_failed
        self._clock = clock
        self._texts: dict[bytes, Text] = {}
        self._token_seconds = 0.0
        self.busy_seconds = 0.0
        # Greedy or drawn: noise in the target's draw makes the same match worth less.
        self._acceptance = {True: AcceptanceModel(), False: AcceptanceModel()}

    @property
    def load(self) -> DrafterLoad:
        rejections = sum(model.rejections for model in self._acceptance.values())
        return DrafterLoad(len(self._texts), self._token_seconds, rejections=rejections)

    def open(self, session: DraftSession) -> None:
        text = Text(session, TextIndex(session.log, session.spec.params.most_tokens))
        self._texts[session.id] = text
        text.look_up()
        self._propose(text)

    def close(self, session_id: bytes) -> None:
        self._texts.pop(session_id, None)

    def set_window(self, session_id: bytes, window: int) -> None:
        text = self._texts.get(session_id)
        if text is not None:
            text.session.window = window
            self._propose(text)
            self._tell(text)

    def commit(self, session: DraftSession, base: int, tokens: Sequence[int]) -> None:
        text = self._texts.get(session.id)
        if text is None or text.session is not session:
            return  # closed since
        before = len(session.log)
        unjudged = None if session.drafted else self._guesses(text, text.copied(1), 0)
        try:
            verdict = session.apply(base, tokens)
        except LogConflict as conflict:
            self.close(session.id)
            self._on_failed(session, str(conflict))
            return
        acceptance = self._acceptance[session.spec.params.sampling.greedy]
        acceptance.learn(verdict)
        if (
            unjudged and len(session.log) > before
        ):  # what it would have guessed without a window is a trial, too
            acceptance.judged(unjudged[0], session.log[before])
            session.judge(unjudged[0].token == session.log[before])
        text.index.extended()
        if not session.drafted:
            text.look_up()
        self._propose(text)
        self._tell(text)

    async def probe(self) -> None:
        TextIndex([1, 2, 1, 2], 4).longest_match()

    async def run(self) -> None:
        await asyncio.Event().wait()  # all is done when it is asked for

    def _propose(self, text: Text) -> None:
        """Adds guesses up to the session's window."""
        session, began = text.session, self._clock()
        window = min(session.window, MOST_GUESSES)
        wanted = min(window - len(session.drafted), session.last - session.length)
        if wanted <= 0 or text.source < 0 or session.resting:
            return
        guesses = self._guesses(text, text.copied(wanted), len(session.drafted))
        for guess in guesses:
            session.extend(guess)
        seconds = self._clock() - began
        self.busy_seconds += seconds
        each = seconds / len(guesses)
        self._token_seconds += (each - self._token_seconds) * (SMOOTHING if self._token_seconds else 1)

    def _guesses(self, text: Text, tokens: Sequence[int], depth: int) -> list[Guess]:
        """Returns the tokens as guesses. The longer the match, the surer they are."""
        if not tokens:
            return []
        session, share = text.session, text.matched / (text.matched + 1)
        draws = [Ranked((token,), (share,)) for token in tokens]
        depths = range(depth, depth + len(tokens))
        return self._acceptance[session.spec.params.sampling.greedy].guesses(
            draws, [session.recent] * len(tokens), depths
        )

    def _tell(self, text: Text) -> None:
        if text.session.untold_yet:
            self._on_change([text.session])


def ngram_source() -> Source:
    """Returns n-gram lookup as a kind of draft. It suits every tokenizer and every target."""
    incarnation = secrets.randbits(64)
    worker_id = f"drafter-{socket.gethostname()}-{NAME}-{incarnation:016x}"
    identity = Identity(Role.DRAFTER, worker_id, incarnation, NAME, "")
    model = ModelInfo(NAME, NAME, "n-gram lookup", 0, 2**31 - 1, MOST_TOKENS, (), "cpu", "none", True)
    return Source(
        WorkerInfo(identity, model, MOST_TOKENS // BLOCK, BLOCK),
        TokenizerFiles("", "", ""),
        lambda on_change, on_failed: NgramProposer(on_change, on_failed, time.monotonic),
    )
