"""Drafter and verifier sessions under a network that loses, repeats, delays and reorders their messages."""

from __future__ import annotations

import zlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drafter.branches import MOST_BRANCHES
from drafter.session import Alternative, Branch, DraftSession, DraftSpec, Guess
from drafter.survival import on_the_wire
from outrider.engine.kv_blocks import BlockTable
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from verifier.drafter_seat import DrafterSeat
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


def draft(prefix: tuple[int, ...]) -> Guess:
    """Agrees with the target about two times in three; most other times one of its alternatives does."""
    right, other = target_token(prefix), digest(prefix, b"draft") % VOCAB
    token = right if digest(prefix, b"agrees") % 3 else other
    instead = [other if token == right else right, (other + 1) % VOCAB]
    alternatives = tuple(Alternative(each, 0.5, 0.5) for each in instead if each != token)
    return Guess(token, 0.6, 0.6, 0, 0.6, alternatives)


Message = tuple[int, list[int], list[int], bytes]  # base, tokens, parents, survival


def reference(length: int) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < length:
        tokens.append(target_token(tuple(tokens)))
    return tokens


class Link(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        sampling = SamplingParams(temperature=0.0)
        params = SessionParams(PROMPT, sampling, MAX_TOKENS)
        spec = SessionSpec(b"s" * 16, params, (), VOCAB, b"k" * 16)
        self.verifier = Session(spec, num_speculative_tokens=4)
        self.seat = DrafterSeat(self.verifier, acknowledged=len(PROMPT))
        self.drafter = DraftSession(DraftSpec(spec.session_id, params, (), b"", VOCAB), WINDOW)
        self.drafts: list[Message] = []  # on their way
        self.commits: list[tuple[int, tuple[int, ...]]] = []
        # What of the tokens is in its KV cache, by what apply() says stands; and the same for branches:
        self.cache: list[int] = []
        self.caches: dict[Branch, list[int]] = {}

    # -- what the processes do --

    @precondition(lambda self: self.drafter.wants_token)
    @rule()
    def draft(self) -> None:
        self.cache.extend(self.drafter.uncached(len(self.cache)))
        self.drafter.extend(draft(tuple(self.cache)))
        self.tell_verifier()

    @precondition(lambda self: self.drafter.drafted)
    @rule(data=st.data())
    def draft_on_a_branch(self, data: st.DataObject) -> None:
        session = self.drafter
        index = data.draw(st.integers(0, len(session.drafted) - 1))
        at, guess = len(session.log) + index, session.drafted[index]
        rank = data.draw(st.integers(0, len(guess.alternatives) - 1))
        branch = next((b for b in session.branches if (b.at, b.rank) == (at, rank)), None)
        if branch is None:
            if len(session.branches) >= MOST_BRANCHES or at > len(self.cache):
                return
            branch = Branch(at, rank, guess.alternatives[rank].token, BlockTable(length=at))
            session.branches.append(branch)
            self.caches[branch] = self.cache[:at]
        self.caches[branch] += branch.uncached()
        branch.table.length = len(self.caches[branch])
        session.extend(draft(tuple(self.caches[branch])), branch)
        self.tell_verifier()

    @rule()
    def reconnect(self) -> None:
        """What was on its way is lost, and everything is told again."""
        self.drafts.clear()
        self.commits.clear()
        self.drafter.tell_anew()
        self.tell_verifier()

    @precondition(lambda self: self.verifier.room > 0)
    @rule()
    def verify(self) -> None:
        nodes = self.verifier.nodes(least=0.0)
        log = tuple(self.verifier.log)
        chosen = [target_token((*log, *path)) for path in [[], *nodes.paths]]
        self.verifier.verify(nodes, chosen)
        base = self.seat.acknowledged
        self.commits.append((base, tuple(self.verifier.log[base:])))

    # -- what the network does --

    @precondition(lambda self: self.drafts)
    @rule(data=st.data(), repeat=st.booleans())
    def deliver_draft(self, data: st.DataObject, repeat: bool) -> None:
        index = data.draw(st.integers(0, len(self.drafts) - 1))
        message = self.drafts[index] if repeat else self.drafts.pop(index)
        fate, _ = self.seat.offer(*message, 0.0)
        assert fate in (DraftFate.TAKEN, DraftFate.STALE)

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
        acknowledged = self.seat.acknowledged
        self.seat.offer(base, tokens, (), b"", 0.0)
        self.seat.acknowledged = acknowledged

    # -- what must hold --

    @invariant()
    def the_log_is_the_targets_own(self) -> None:
        assert self.verifier.log == reference(len(self.verifier.log))

    @invariant()
    def the_drafter_knows_a_prefix(self) -> None:
        assert self.drafter.log == self.verifier.log[: len(self.drafter.log)]

    @invariant()
    def the_caches_hold_what_they_should(self) -> None:
        session = self.drafter
        trunk = [*session.log, *(guess.token for guess in session.drafted)]
        assert self.cache == trunk[: len(self.cache)]
        assert len(self.cache) >= len(session.log) - 1 or not session.drafted
        assert self.caches.keys() == set(session.branches)
        for branch, cache in self.caches.items():
            path = [*trunk[: branch.at], branch.token, *(guess.token for guess in branch.guesses)]
            assert cache == path[:-1]

    def teardown(self) -> None:
        """After quiet, a few undisturbed exchanges bring the drafter to the log's end."""
        self.drafts.clear()
        self.commits.clear()
        for _ in range(3):
            self.tell_verifier()
            for message in self.drafts:
                self.seat.offer(*message, 0.0)
            self.drafts.clear()
            base = self.seat.acknowledged
            self.take(base, tuple(self.verifier.log[base:]))
        assert self.drafter.log == self.verifier.log
        self.drafter.tell_anew()
        self.tell_verifier()
        self.seat.offer(*self.drafts[-1], 0.0)  # and the verifier to all that is drafted
        guessed, tree = [guess.token for guess in self.drafter.drafted], self.verifier.tree
        for branch in self.drafter.branches[:1]:
            tree.advance([*guessed[: branch.at - len(self.drafter.log)], branch.token])
            assert tree.size >= 1  # and what follows it

    def take(self, base: int, tokens: tuple[int, ...]) -> None:
        verdict = self.drafter.apply(base, tokens)
        for branch in verdict.dropped:
            del self.caches[branch]
        if verdict.adopted is not None:
            self.cache = self.caches.pop(verdict.adopted)
        del self.cache[verdict.standing :]

    def tell_verifier(self) -> None:
        base = len(self.drafter.log)
        tokens, parents, survival = self.drafter.tell()
        self.drafts.append((base, tokens, parents, on_the_wire(survival)))


TestLink = Link.TestCase
TestLink.settings = settings(max_examples=150, stateful_step_count=60)
