"""A session whose draft model has other tokens than its target: what passes between them is text.

The model reads the committed text in its own tokens and goes on from there. The text that it drafts becomes
guesses in the target's tokens, as the target's tokenizer divides it (string-level exact match: Timor et al.,
arXiv 2502.05202). It drafts greedily: noise that is keyed by the target's tokens has no place in its draw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from drafter.proposer import OnChange, OnFailed
from drafter.session import Branch, CannotFollow, DraftSession, Guess, Verdict
from drafter.stepper import DraftStepper
from outrider.sampling.params import SamplingParams
from outrider.vocabulary import Vocabulary, is_special
from outrider.wire.load import DrafterLoad
from outrider.worker.stepwatch import StepUnderWay

GREEDY = SamplingParams(temperature=0.0)
MOST_REREAD = 16  # tokens at the end of a text that are divided anew as it goes on
WRONG = -1  # no token's id: stands for the target's where it did not take a guess


class RetokenizedSession(DraftSession):
    """The session as the draft model sees it, in its own tokens; `theirs` is the same in the target's.

    What `log` spells and `_covered`, the first bytes of the draft, together are what the target committed."""

    judges_log = False

    def __init__(self, theirs: DraftSession, draft: Vocabulary, target: Vocabulary, context: int) -> None:
        """`context`: most tokens of the model's own that it can read."""
        self.theirs = theirs
        self._draft, self._target, self._context = draft, target, context
        self._covered = b""
        read = draft.tokens(target.spell(theirs.log))
        if tuple(read[: len(draft.first)]) != draft.first:
            read = [*draft.first, *read]
        spec = theirs.spec
        params = replace(
            spec.params,
            prompt=tuple(read) or (0,),
            sampling=GREEDY,
            max_tokens=max(context - len(read), 0),
            grammar="",
            min_tokens=0,
        )
        super().__init__(replace(spec, params=params, output=(), target_vocab_size=draft.size), theirs.window)
        self.greedy = theirs.greedy

    # The verifier's stream and the router change these two of the session in the target's tokens.

    @property
    def window(self) -> int:
        return self.theirs.window

    @window.setter
    def window(self, tokens: int) -> None:
        self.theirs.window = tokens

    @property
    def resting(self) -> bool:
        return self.theirs.resting

    @resting.setter
    def resting(self, resting: bool) -> None:
        pass

    @property
    def wants_token(self) -> bool:
        theirs = self.theirs
        if not theirs.wants_token or self.length >= self.last or len(self.drafted) >= 8 + 2 * self.window:
            return False
        return not (self.drafted and is_special(self._draft.piece(self.drafted[-1].token)))

    @property
    def untold_yet(self) -> bool:
        return self.theirs.untold_yet

    @property
    def worth_telling(self) -> bool:
        return self.theirs.worth_telling

    def extend(self, guess: Guess, branch: Branch | None = None) -> None:
        super().extend(guess, branch)
        self._translate()

    def apply(self, base: int, tokens: Sequence[int]) -> Verdict:
        """Takes a commit in, in the target's tokens.

        Raises CannotFollow if it contradicts the log, or makes it longer than the model can read."""
        before = len(self.theirs.log)
        self.theirs.apply(base, tokens)
        news = self.theirs.log[before:]
        if not news:
            return Verdict(self.length)
        text, kept = self._covered + self._target.spell(news), 0
        for guess in self.drafted:
            piece = self._draft.piece(guess.token)
            if not text.startswith(piece):
                break
            text, kept = text[len(piece) :], kept + 1
        taken, left = self.drafted[:kept], self.drafted[kept:]
        self.log += [guess.token for guess in taken]
        judged = [(guess, guess.token) for guess in taken]
        goes_on = bool(left) and self._draft.piece(left[0].token).startswith(text)
        if goes_on:  # perhaps amid a token
            self.drafted, self._covered, standing = left, text, len(self.log) + len(left)
        else:
            judged += [(guess, WRONG) for guess in left[:1]]
            self.drafted, self._covered, standing = [], b"", self._read(text)
        for guess, token in judged:
            self.judge(guess.token == token)
        if len(self.log) >= self._context:
            raise CannotFollow(too_long(self._context))
        self.scored = len(self.log)
        self._translate()
        return Verdict(standing, tuple(judged), rejected=bool(left) and not goes_on)

    def _read(self, text: bytes) -> int:
        """Adds text to the log, whose last word may be divided anew. Returns how many tokens still stand."""
        cut = len(self.log)
        while not text[:1].isspace() and cut > max(len(self.log) - MOST_REREAD, 0):
            piece = self._draft.piece(self.log[cut - 1])
            if is_special(piece):
                break
            cut -= 1
            if piece[:1].isspace():
                break
        former = self.log[cut:]
        now = self._draft.tokens(self._draft.spell(former) + text)
        self.log[cut:] = now
        same = [a == b for a, b in zip(former, now, strict=False)]
        return cut + (same.index(False) if False in same else len(same))

    def _translate(self) -> None:
        """Gives `theirs` the guesses that the draft makes, but for the last, which may become longer."""
        theirs, starts, text = self.theirs, list[int](), b""
        for guess in self.drafted:
            starts.append(max(len(text) - len(self._covered), 0))
            text += self._draft.piece(guess.token)
        text = text[len(self._covered) :]
        told = self._target.spell([guess.token for guess in theirs.drafted])
        if not text.startswith(told):
            return
        end = len(told)
        for token in self._target.tokens(text[end:], sure=True)[: theirs.last - theirs.length]:
            start, end = end, end + len(self._target.piece(token))
            mine = [g for at, g in zip(starts, self.drafted, strict=True) if start <= at < end]
            chance = prod(guess.acceptance for guess in mine)
            theirs.extend(Guess(token, chance, theirs.recent, len(theirs.drafted), chance))


def too_long(context: int) -> str:
    return f"the text has more tokens of the draft model's than its context, {context}"


class Retokenizing:
    """A draft model's stepper as a proposer for a target that has other tokens."""

    def __init__(
        self,
        stepper: Callable[[OnChange, OnFailed], DraftStepper],
        draft: Vocabulary,
        target: Vocabulary,
        context: int,
        on_change: OnChange,
        on_failed: OnFailed,
    ) -> None:
        """`context`: most tokens of the model's own that it can read."""
        self._draft, self._target, self._context = draft, target, context
        self._on_change, self._on_failed = on_change, on_failed
        self._sessions: dict[bytes, RetokenizedSession] = {}
        self._stepper = stepper(self._changed, self._failed)

    @property
    def load(self) -> DrafterLoad:
        return self._stepper.load

    @property
    def busy_seconds(self) -> float:
        return self._stepper.busy_seconds

    @property
    def under_way(self) -> StepUnderWay | None:
        return self._stepper.under_way

    def open(self, session: DraftSession) -> None:
        read = RetokenizedSession(session, self._draft, self._target, self._context)
        self._sessions[session.id] = read
        self._stepper.open(read)
        if len(read.log) >= self._context:  # told once it is known whose session it is
            asyncio.get_running_loop().call_soon(self._failed, read, too_long(self._context))

    def close(self, session_id: bytes) -> None:
        self._sessions.pop(session_id, None)
        self._stepper.close(session_id)

    def set_window(self, session_id: bytes, window: int) -> None:
        self._stepper.set_window(session_id, window)

    def commit(self, session: DraftSession, base: int, tokens: Sequence[int]) -> None:
        read = self._sessions.get(session.id)
        if read is not None and read.theirs is session:
            self._stepper.commit(read, base, tokens)

    async def probe(self) -> None:
        await self._stepper.probe()

    async def run(self) -> None:
        await self._stepper.run()

    def _changed(self, sessions: Sequence[DraftSession]) -> None:
        self._on_change([each.theirs for each in sessions if isinstance(each, RetokenizedSession)])

    def _failed(self, session: DraftSession, reason: str) -> None:
        read = self._sessions.get(session.id)
        if read is session and isinstance(read, RetokenizedSession):
            self.close(session.id)
            self._on_failed(read.theirs, reason)
