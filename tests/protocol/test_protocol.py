"""A session and its drafters under a network that loses, repeats, delays and reorders their messages."""

from __future__ import annotations

import zlib
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from drafter.branches import MOST_BRANCHES
from drafter.session import Alternative, Branch, DraftSession, DraftSpec, Guess
from drafter.survival import on_the_wire
from outrider.engine.kv_blocks import BlockTable
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from verifier.draft_tree import Fixed
from verifier.drafter_seat import DrafterSeat
from verifier.session import DraftFate, Session, SessionSpec

PROMPT = (5, 6, 7)
VOCAB = 11
MAX_TOKENS = 200
WINDOW = 6
NAMES = (b"a", b"b", b"c")  # of the drafters: what one guesses wrong another may guess right
whose = st.sampled_from(range(len(NAMES)))


def digest(prefix: tuple[int, ...], salt: bytes) -> int:
    return zlib.crc32(salt + bytes(prefix))


def target_token(prefix: tuple[int, ...]) -> int:
    """Any pure function of the prefix will do for a target."""
    return digest(prefix, b"target") % VOCAB


def draft(prefix: tuple[int, ...], name: bytes) -> Guess:
    """Agrees with the target about two times in three; most other times one of its alternatives does."""
    right, other = target_token(prefix), digest(prefix, b"draft" + name) % VOCAB
    token = right if digest(prefix, b"agrees" + name) % 3 else other
    instead = [other if token == right else right, (other + 1) % VOCAB]
    alternatives = tuple(Alternative(each, 0.5, 0.5) for each in instead if each != token)
    return Guess(token, 0.6, 0.6, 0, 0.6, alternatives)


Message = tuple[int, list[int], list[int], bytes]  # base, tokens, parents, survival


def reference(length: int) -> list[int]:
    tokens = list(PROMPT)
    while len(tokens) < length:
        tokens.append(target_token(tuple(tokens)))
    return tokens


class Drafter:
    """One of the session's drafters, its seat, and what is on its way between them."""

    def __init__(self, verifier: Session, name: bytes) -> None:
        spec, self.name = verifier.spec, name
        self.verifier = verifier
        output = tuple(verifier.log[len(PROMPT) :])  # what its router tells it of
        self.session = DraftSession(DraftSpec(spec.session_id, spec.params, output, b"", VOCAB), WINDOW)
        self.seat = DrafterSeat(verifier, acknowledged=len(verifier.log))
        self.drafts: list[Message] = []  # on their way
        self.commits: list[tuple[int, tuple[int, ...]]] = []
        # What of the tokens is in its KV cache, by what apply() says stands; and the same for branches:
        self.cache: list[int] = []
        self.caches: dict[Branch, list[int]] = {}

    def draft(self) -> None:
        self.cache.extend(self.session.uncached(len(self.cache)))
        self.session.extend(draft(tuple(self.cache), self.name))
        self.tell_verifier()

    def commit(self) -> None:
        base = self.seat.acknowledged
        assert base is not None
        self.commits.append((base, tuple(self.verifier.log[base:])))

    def take(self, base: int, tokens: tuple[int, ...]) -> None:
        verdict = self.session.apply(base, tokens)
        for branch in verdict.dropped:
            del self.caches[branch]
        if verdict.adopted is not None:
            self.cache = self.caches.pop(verdict.adopted)
        del self.cache[verdict.standing :]

    def tell_verifier(self) -> None:
        base = len(self.session.log)
        tokens, parents, survival = self.session.tell()
        self.drafts.append((base, tokens, parents, on_the_wire(survival)))


class Link(RuleBasedStateMachine):
    """A session's verifier, and its drafters: each rule is about one of them."""

    def __init__(self) -> None:
        super().__init__()
        sampling = SamplingParams(temperature=0.0)
        params = SessionParams(PROMPT, sampling, MAX_TOKENS)
        spec = SessionSpec(b"s" * 16, params, (), VOCAB, b"k" * 16)
        self.verifier = Session(spec, num_speculative_tokens=4)
        self.drafters = [Drafter(self.verifier, name) for name in NAMES]

    # -- what the processes do --

    @rule(who=whose)
    def draft(self, who: int) -> None:
        if self.drafters[who].session.wants_token:
            self.drafters[who].draft()

    @rule(who=whose, data=st.data())
    def draft_on_a_branch(self, who: int, data: st.DataObject) -> None:
        one = self.drafters[who]
        session = one.session
        if not session.drafted:
            return
        index = data.draw(st.integers(0, len(session.drafted) - 1))
        at, guess = len(session.log) + index, session.drafted[index]
        rank = data.draw(st.integers(0, len(guess.alternatives) - 1))
        branch = next((b for b in session.branches if (b.at, b.rank) == (at, rank)), None)
        if branch is None:
            if len(session.branches) >= MOST_BRANCHES or at > len(one.cache):
                return
            branch = Branch(at, rank, guess.alternatives[rank].token, BlockTable(length=at))
            session.branches.append(branch)
            one.caches[branch] = one.cache[:at]
        one.caches[branch] += branch.uncached()
        branch.table.length = len(one.caches[branch])
        session.extend(draft(tuple(one.caches[branch]), one.name), branch)
        one.tell_verifier()

    @rule(who=whose)
    def reconnect(self, who: int) -> None:
        """What was on its way is lost, and everything is told again."""
        one = self.drafters[who]
        one.drafts.clear()
        one.commits.clear()
        one.session.tell_anew()
        one.tell_verifier()

    @rule(who=whose)
    def die(self, who: int) -> None:
        """Another comes in its place, which begins with what is committed. What it has said stands."""
        self.drafters[who].seat.leave()
        self.drafters[who] = Drafter(self.verifier, self.drafters[who].name)

    @precondition(lambda self: self.verifier.room > 0)
    @rule()
    def verify(self) -> None:
        nodes = self.verifier.nodes(least=0.0)
        log = tuple(self.verifier.log)
        chosen = [target_token((*log, *path)) for path in [[], *nodes.paths]]
        self.verifier.verify(nodes, chosen)
        for one in self.drafters:
            one.commit()

    @rule(left=st.lists(st.floats(0, 1), min_size=len(NAMES) + 1, max_size=len(NAMES) + 1))
    def believe(self, left: list[float]) -> None:
        """What is thought of drafters changes which of their guesses are verified, and nothing else."""
        seats = [one.seat for one in self.drafters]
        self.verifier.tree.believe(
            {seat: Fixed((factor,)) for seat, factor in zip(seats, left[1:], strict=True)}, agreed=left[0]
        )

    # -- what the network does --

    @rule(who=whose, data=st.data(), repeat=st.booleans())
    def deliver_draft(self, who: int, data: st.DataObject, repeat: bool) -> None:
        one = self.drafters[who]
        if one.drafts:
            index = data.draw(st.integers(0, len(one.drafts) - 1))
            message = one.drafts[index] if repeat else one.drafts.pop(index)
            fate, _ = one.seat.offer(*message, 0.0)
            assert fate in (DraftFate.TAKEN, DraftFate.STALE)

    @rule(who=whose, data=st.data(), repeat=st.booleans())
    def deliver_commit(self, who: int, data: st.DataObject, repeat: bool) -> None:
        one = self.drafters[who]
        if one.commits:
            index = data.draw(st.integers(0, len(one.commits) - 1))
            base, tokens = one.commits[index] if repeat else one.commits.pop(index)
            one.take(base, tokens)
            one.tell_verifier()

    @rule(who=whose, data=st.data(), commit=st.booleans())
    def lose(self, who: int, data: st.DataObject, commit: bool) -> None:
        one = self.drafters[who]
        lost: list[Any] = one.commits if commit else one.drafts
        if lost:
            lost.pop(data.draw(st.integers(0, len(lost) - 1)))

    @rule(who=whose, base=st.integers(0, 60), tokens=st.lists(st.integers(0, VOCAB + 2), max_size=8))
    def forge_draft(self, who: int, base: int, tokens: list[int]) -> None:
        """A drafter may send anything: only speed may change. (Its acknowledgement may lie, too.)"""
        seat = self.drafters[who].seat
        acknowledged = seat.acknowledged
        seat.offer(base, tokens, (), b"", 0.0)
        seat.acknowledged = acknowledged

    @rule(who=whose, other=whose)
    def copy_draft(self, who: int, other: int) -> None:
        """It sends what another one says, as if it were its own."""
        if self.drafters[other].drafts:
            seat = self.drafters[who].seat
            acknowledged = seat.acknowledged
            seat.offer(*self.drafters[other].drafts[-1], 0.0)
            seat.acknowledged = acknowledged

    # -- what must hold --

    @invariant()
    def the_log_is_the_targets_own(self) -> None:
        assert self.verifier.log == reference(len(self.verifier.log))

    @invariant()
    def each_drafter_knows_a_prefix(self) -> None:
        for one in self.drafters:
            assert one.session.log == self.verifier.log[: len(one.session.log)]

    @invariant()
    def the_caches_hold_what_they_should(self) -> None:
        for one in self.drafters:
            session = one.session
            trunk = [*session.log, *(guess.token for guess in session.drafted)]
            assert one.cache == trunk[: len(one.cache)]
            assert len(one.cache) >= len(session.log) - 1 or not session.drafted
            assert one.caches.keys() == set(session.branches)
            for branch, cache in one.caches.items():
                path = [*trunk[: branch.at], branch.token, *(guess.token for guess in branch.guesses)]
                assert cache == path[:-1]

    def teardown(self) -> None:
        """After quiet, a few undisturbed exchanges bring each drafter to the log's end."""
        for one in self.drafters:
            one.drafts.clear()
            one.commits.clear()
            for _ in range(3):
                one.tell_verifier()
                for message in one.drafts:
                    one.seat.offer(*message, 0.0)
                one.drafts.clear()
                base = one.seat.acknowledged
                assert base is not None
                one.take(base, tuple(self.verifier.log[base:]))
            assert one.session.log == self.verifier.log
            one.session.tell_anew()
            one.tell_verifier()
            one.seat.offer(*one.drafts[-1], 0.0)  # and the verifier to all that is drafted
        for one in self.drafters:
            guessed = [guess.token for guess in one.session.drafted]
            assert self.verifier.tree.length_of(one.seat) >= min(len(guessed), 1)
        one, tree = self.drafters[0], self.verifier.tree
        guessed = [guess.token for guess in one.session.drafted]
        for branch in one.session.branches[:1]:
            tree.advance([*guessed[: branch.at - len(one.session.log)], branch.token])
            assert tree.size >= 1  # and what follows it


TestLink = Link.TestCase
TestLink.settings = settings(max_examples=150, stateful_step_count=60)
