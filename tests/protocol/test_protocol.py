"""Drafter and verifier sessions under a network that loses, repeats, delays and reorders their messages."""

from __future__ import annotations

import zlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drafter.session import DraftSession, DraftSpec
from outrider.sampling.params import SamplingParams
from verifier.session import DraftFate, Session, SessionSpec

PROMPT = (5, 6, 7)
VOCAB = 11
MAX_TOKENS = 200
WINDOW = 6


def digest(prefix: tuple[int, ...], salt: bytes) -> int:
    return zlib.crc32(salt + bytes(prefix))


def target_token(prefix: tuple[int, ...]) -> int:
    """Any pure function of the prefix will do for a target."""
    return digest(prefix, b"target") % VOCAB


def draft_token(prefix: tuple[int, ...]) -> int:
    """Agrees with the target about two times in three."""
    return target_token(prefix) if digest(prefix, b"agrees") % 3 else digest(prefix, b"draft") % VOCAB


def reference(length: int) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < length:
        tokens.append(target_token(tuple(tokens)))
    return tokens


class Link(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        sampling = SamplingParams(temperature=0.0)
        spec = SessionSpec(b"s" * 16, PROMPT, (), sampling, MAX_TOKENS, frozenset(), VOCAB, b"k" * 16)
        self.verifier = Session(spec, num_speculative_tokens=4)
        self.verifier.acknowledged = len(PROMPT)
        self.drafter = DraftSession(
            DraftSpec(spec.session_id, PROMPT, (), sampling, MAX_TOKENS, b"", VOCAB), WINDOW
        )
        self.drafts: list[tuple[int, tuple[int, ...]]] = []  # on their way
        self.commits: list[tuple[int, tuple[int, ...]]] = []
        # What of the tokens is in its KV cache, by what apply() says stands:
        self.cache: list[int] = []

    # -- what the processes do --

    @precondition(lambda self: self.drafter.wants_token)
    @rule()
    def draft(self) -> None:
        self.cache.extend(self.drafter.uncached(len(self.cache)))
        self.drafter.extend(draft_token((*self.drafter.log, *self.drafter.drafted)))
        self.tell_verifier()

    @precondition(lambda self: self.verifier.room > 0)
    @rule()
    def verify(self) -> None:
        path = self.verifier.path()
        log = tuple(self.verifier.log)
        chosen = [target_token((*log, *path[:j])) for j in range(len(path) + 1)]
        self.verifier.resolve(path, chosen)
        base = self.verifier.acknowledged
        self.commits.append((base, tuple(self.verifier.log[base:])))

    # -- what the network does --

    @precondition(lambda self: self.drafts)
    @rule(data=st.data(), repeat=st.booleans())
    def deliver_draft(self, data: st.DataObject, repeat: bool) -> None:
        index = data.draw(st.integers(0, len(self.drafts) - 1))
        base, tokens = self.drafts[index] if repeat else self.drafts.pop(index)
        assert self.verifier.offer(base, tokens, (), b"") in (DraftFate.TAKEN, DraftFate.STALE)

    @precondition(lambda self: self.commits)
    @rule(data=st.data(), repeat=st.booleans())
    def deliver_commit(self, data: st.DataObject, repeat: bool) -> None:
        index = data.draw(st.integers(0, len(self.commits) - 1))
        base, tokens = self.commits[index] if repeat else self.commits.pop(index)
        self.take(base, tokens)
        self.tell_verifier()

    @precondition(lambda self: self.drafts)
    @rule(data=st.data())
    def lose_draft(self, data: st.DataObject) -> None:
        self.drafts.pop(data.draw(st.integers(0, len(self.drafts) - 1)))

    @precondition(lambda self: self.commits)
    @rule(data=st.data())
    def lose_commit(self, data: st.DataObject) -> None:
        self.commits.pop(data.draw(st.integers(0, len(self.commits) - 1)))

    @rule(base=st.integers(0, 60), tokens=st.lists(st.integers(0, VOCAB + 2), max_size=8))
    def forge_draft(self, base: int, tokens: list[int]) -> None:
        """A drafter may send anything: only speed may change. (Its acknowledgement may lie, too.)"""
        acknowledged = self.verifier.acknowledged
        self.verifier.offer(base, tokens, (), b"")
        self.verifier.acknowledged = acknowledged

    # -- what must hold --

    @invariant()
    def the_log_is_the_targets_own(self) -> None:
        assert self.verifier.log == reference(len(self.verifier.log))

    @invariant()
    def the_drafter_knows_a_prefix(self) -> None:
        assert self.drafter.log == self.verifier.log[: len(self.drafter.log)]

    @invariant()
    def the_cache_holds_what_it_should(self) -> None:
        assert self.cache == [*self.drafter.log, *self.drafter.drafted][: len(self.cache)]

    def teardown(self) -> None:
        """After quiet, a few undisturbed exchanges bring the drafter to the log's end."""
        self.drafts.clear()
        self.commits.clear()
        for _ in range(3):
            self.tell_verifier()
            for base, tokens in self.drafts:
                self.verifier.offer(base, tokens, (), b"")
            self.drafts.clear()
            base = self.verifier.acknowledged
            self.take(base, tuple(self.verifier.log[base:]))
        assert self.drafter.log == self.verifier.log

    def take(self, base: int, tokens: tuple[int, ...]) -> None:
        standing = self.drafter.apply(base, tokens)
        del self.cache[standing:]

    def tell_verifier(self) -> None:
        self.drafts.append((len(self.drafter.log), tuple(self.drafter.drafted)))


TestLink = Link.TestCase
TestLink.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
