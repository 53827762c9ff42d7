"""A session in the verifier's hands: its log, its KV blocks, and the seats of its drafters."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from math import prod
from typing import NamedTuple

from outrider.engine.kv_blocks import BlockTable
from outrider.grammar import Place
from outrider.sampling.sampler import TokenCounts
from outrider.wire.guesses import DrafterCounts, Guess, Guesses
from outrider.wire.logprobs import OutputLogprobs, PromptLogprobs
from verifier import own_guesses
from verifier.disputes import Claims, prevailed
from verifier.draft_tree import Belief
from verifier.drafter_peer import DrafterPeer
from verifier.drafter_seat import DrafterSeat
from verifier.nodes import NO_NODES, Nodes, Source, alike
from verifier.own_guesses import Own, OwnGuesses
from verifier.session import NO_BRANCH, Outcome, Session, SessionSpec
from verifier.session_trace import SessionTrace
from verifier.step_start import Awaited
from verifier.survival_calibration import Agreement, SurvivalCalibration

MOST_CUT = 4  # paths that are tried at a step, of a session whose drafts do not obey its grammar
USUAL_SMOOTHING = 0.1  # weight of a step in what a session commits a step lately

Moves = tuple[tuple[int, int], ...]
"""Slots of keys and values: from, to."""


class Lesson(NamedTuple):
    """What a step showed of a session's drafts."""

    nodes: Nodes
    followed: list[int]  # those that the target took
    accepted: int
    tokens: tuple[int, ...]  # that were committed
    stood: list[list[int]]  # what each seat had said
    claims: Claims  # what each source had, where they contradicted one another


@dataclass(slots=True, eq=False)
class Running:
    """A session with what the steps need beside its log."""

    session: Session
    counts: TokenCounts | None  # kept only where the request has penalties
    place: Place | None = None  # kept only where the request has a grammar
    table: BlockTable = field(default_factory=BlockTable)
    found_tokens: int = 0  # of its log, cached when it came
    digests: list[bytes] = field(default_factory=list)  # of its log's first blocks, until it begins here
    cached_prompt_tokens: int | None = None  # at its first start
    preemptions: int = 0  # times that its blocks were taken from it, or lost with another verifier
    passed: int = 0  # sessions that came later and began before it, as it did not fit
    orphaned: bool = False  # its router is gone, and may come back
    logprobs: OutputLogprobs = field(default_factory=OutputLogprobs)  # of the end of its log, if asked for
    told: list[Outcome] = field(default_factory=list)  # its steps here, if their guesses were asked for
    prompt: PromptLogprobs | None = None  # as far as they are known, if its router is to hear of them
    moves: Moves = ()  # of what a branch had, to its place in the cache: before the next step
    trace: SessionTrace | None = None  # None = nobody asks for it
    agreement: Agreement = field(default_factory=Agreement)
    usual: float = 1.0  # tokens that it has committed a step lately
    _lesson: Lesson | None = None  # that nobody has learnt from yet
    speculated: SurvivalCalibration | None = None  # of the target's speculator; None = it guesses nothing
    own: OwnGuesses | None = field(init=False)  # None = the verifier itself has none for it
    seats: list[DrafterSeat] = field(init=False)  # one for each drafter that may draft for it
    id: bytes = field(init=False)
    prompt_hash: bytes = field(init=False)  # and salt: sessions with the same one share all of the prompt

    def __post_init__(self) -> None:
        self.id = self.session.spec.session_id
        params = self.session.spec.params
        self.prompt_hash = blake2b(array("I", params.prompt), key=params.cache_salt).digest()
        self.own = OwnGuesses.of(params, self.session.spec.output)
        self.seats = [DrafterSeat(self.session, self.session.spec.draft_key)]
        self.preemptions = int(bool(self.session.spec.output))
        if params.prompt_logprobs is not None and not self.session.spec.output:
            self.prompt = PromptLogprobs()

    def adopted(self, spec: SessionSpec) -> None:
        """A router has it, and has opened it so: the same request, and as much of the log as it knows."""
        self.session.spec = spec
        self.orphaned = False
        if self.trace is not None:
            self.trace.adopted()

    def continues(self, spec: SessionSpec) -> bool:
        """Returns whether a router that opens a session so can have this one: it is what the other asks for,
        and what is told with tokens is known of all that the router has missed. Of those that were committed
        elsewhere it is not."""
        known = len(spec.params.prompt) + len(spec.output)
        missed = len(self.session.log) - known
        scored = spec.params.logprobs is None or missed <= len(self.logprobs)
        guessed = not spec.params.guesses or missed <= 0 or (bool(self.told) and self.told[0].base <= known)
        prompted = spec.params.prompt_logprobs is None or bool(spec.output) or self.prompt is not None
        return scored and guessed and prompted and self.session.continues(spec)

    @property
    def unscored(self) -> int | None:
        """Returns the position of the first token whose logits a prompt waits for; None = there is none."""
        if self.prompt is None or len(self.prompt) >= len(self.session.spec.params.prompt) - 1:
            return None
        return len(self.prompt)

    def seat(self, number: int) -> DrafterSeat:
        """Returns the seat of that number. There are only as many as were asked for."""
        while len(self.seats) <= number:
            self.seats.append(DrafterSeat(self.session, self.session.spec.draft_key))
        return self.seats[number]

    def seat_of(self, peer: DrafterPeer) -> DrafterSeat | None:
        """Returns the seat that a drafter has; None if it has none."""
        for seat in self.seats:
            if seat.peer is peer:
                return seat
        return None

    @property
    def cacheable(self) -> Sequence[int]:
        """Returns the tokens of which all but the last may be found cached: the others are to run here."""
        unscored = self.unscored
        return self.session.log if unscored is None else self.session.log[: unscored + 1]

    @property
    def drafted(self) -> bool:
        """Returns whether a drafter guesses for it."""
        return any(seat.pace is not None for seat in self.seats)

    @property
    def fault(self) -> str | None:
        """Returns why its grammar cannot be followed any more; None = it can."""
        return None if self.place is None else self.place.fault

    @property
    def lost(self) -> bool:
        """Returns whether its grammar cannot be followed any more."""
        return self.fault is not None

    @property
    def begun(self) -> bool:
        """Returns whether any of it has run here."""
        return self.cached_prompt_tokens is not None

    @property
    def pending(self) -> int:
        return len(self.session.log) - self.table.length

    @property
    def unread(self) -> int:
        """Returns how many tokens are to be read before the next one can be drawn; 0 while it decodes, or a
        step runs."""
        pending = len(self.session.log) - (self.table.length if self.begun else self.found_tokens)
        return pending - 1 if pending > 1 else 0

    @property
    def ready(self) -> bool:
        """Returns whether no grammar holds it up."""
        return self.place is None or self.place.ready

    @property
    def decoding(self) -> bool:
        """Returns whether only its last token has not run yet, and drafts may follow that."""
        table = self.table
        return len(self.session.log) - table.length == 1 and len(table.blocks) > 0

    def take_moves(self) -> Moves:
        """Returns what is to be moved in the cache, which the next step does."""
        moves, self.moves = self.moves, ()
        return moves

    def nodes(self, least: float = NO_BRANCH) -> Nodes:
        """Returns the draft tokens that it may verify now: the likeliest path, and beside it what survives
        with `least` at least."""
        guessed = self.own is not None or self.speculated is not None
        if not (self.decoding and (guessed or self.drafted)):
            return NO_NODES
        nodes, place = self.session.nodes(least), self.place
        if place is None:
            return nodes
        path, fitting = NO_NODES, 0
        for _ in range(MOST_CUT):
            if not nodes.tokens:
                return nodes
            path = nodes.in_chains()
            (_, end), *_ = path.chains
            fits = place.fits(path.tokens[:end])
            if fits is None:
                return NO_NODES
            if fits == end:
                return nodes
            fitting = fits
            self.session.tree.cut(path.tokens[: fitting + 1])  # it never may come here; another path may
            nodes = self.session.nodes(least)
        return path.first(fitting)

    def awaited(self, gain: float = 1.0) -> list[Awaited]:
        """Returns what it waits for, if it may verify more than it has: the next tokens of the drafter from
        which most may be expected, of those that answer. Of the path that stands a drafter has said a
        beginning: what it says behind that is of use where all of that is right, and the path wrong after it.

        `gain`: by which all that may come is multiplied."""
        if not self.decoding or self.session.resting:
            return []
        tree, wanted = self.session.tree, self.session.wanted
        if len(tree.path) >= wanted:
            return []
        chances, expected = [*tree.chances, 0.0], list[Awaited]()
        for seat in self.seats:
            if (pace := seat.pace) is None or seat.arrivals.silent:
                continue
            said = len(tree.said.get(seat, ()))
            stands = gain * prod(chances[:said]) * (1 - chances[said])
            found = Awaited(
                seat.arrivals.committed_at,
                seat.arrivals.last_at,
                said,
                wanted,
                seat.acceptance,
                pace.lead,
                pace.token,
                stands * pace.punctual * seat.calibration.at(said),
            )
            expected.append(found)
        return [max(expected, key=lambda one: one.survival * one.acceptance)] if expected else []

    def settle(self, nodes: Nodes, chosen: list[int], now: float) -> Outcome:
        """Commits what a step chose that verified these nodes, and lets each seat learn from what became of
        them."""
        outcome = self.commit(nodes, chosen, now)
        self.learn()
        return outcome

    def commit(self, nodes: Nodes, chosen: list[int], now: float) -> Outcome:
        """Commits what a step chose that verified these nodes. What there is to learn waits for `learn`."""
        session, place = self.session, self.place
        most = len(nodes.tokens) + 1
        claims = session.tree.claims(most)
        stood = [
            [token for token, _ in claims.get(seat, ())] if claims else seat.path[:most]
            for seat in self.seats
        ]
        known = None if place is None else place.known  # what follows the rows without a mask is not
        followed = nodes.follow(chosen, known)
        guesses = self._guesses(nodes, followed, known) if session.spec.params.guesses else ()
        outcome = session.verify(nodes, chosen, known, followed)
        if guesses:
            outcome = outcome._replace(guesses=guesses)
        if self.own is not None or self.speculated is not None:
            told = [*followed, *_beyond(nodes, followed, known)]
            outcome = outcome._replace(own=own_guesses.counts(nodes.said, told, outcome.accepted))
        if len(self.seats) > 1 or (self.speculated is not None and self.drafted):
            outcome = outcome._replace(drafters=self._counts(nodes, followed[: outcome.accepted], known))
        self.usual += USUAL_SMOOTHING * (max(len(outcome.tokens), 1) - self.usual)
        if place is not None and outcome.finish is None:  # nothing can be said of what is behind an end
            place.follow(outcome.tokens)
        for seat in self.seats:
            seat.committed(nodes, now)
        self._lesson = Lesson(nodes, followed, outcome.accepted, outcome.tokens, stood, claims)
        if self.counts is not None:
            self.counts.extend(outcome.tokens)
        if self.own is not None and outcome.finish is None:
            self.own.follow(session.log, len(outcome.tokens))
            self.own.add_to(session.tree, session.wanted, None if place is None else place.likely)
        return outcome

    def learn(self) -> None:
        """Lets each seat learn from what became of its drafts in the last step, before more of them come."""
        lesson, self._lesson = self._lesson, None
        if lesson is None:
            return
        if len(lesson.nodes.said) > 1:
            self._judge_agreement(lesson.nodes, lesson.followed)
        for seat, path in zip(self.seats, lesson.stood, strict=False):  # a seat may have been added since
            seat.learn(lesson.nodes, lesson.followed, lesson.accepted)
            # Of what stood, not of what was verified: those were chosen as the likelier ones.
            seat.judge(alike(path, lesson.tokens), min(len(path), len(lesson.tokens)))
        for source, depth, chance, right in prevailed(lesson.claims, lesson.tokens) if lesson.claims else ():
            if isinstance(source, DrafterSeat):
                source.prevailed(depth, chance, right)
        beliefs: dict[Source, Belief] = {seat: seat.calibration for seat in self.seats}
        if self.speculated is not None:
            self.speculated.judge(*lesson.nodes.shown(Own.SPECULATOR, lesson.followed))
            beliefs[Own.SPECULATOR] = self.speculated
        self.session.tree.believe(beliefs, self.agreement.factor)

    def _judge_agreement(self, nodes: Nodes, followed: Sequence[int]) -> None:
        """Learns of the likeliest tokens at each place to which the target came, if several had said them."""
        for depth, (node, *_) in nodes.judged(followed):
            if len(nodes.sources(node)) > 1:
                right = depth < len(followed) and followed[depth] == node
                self.agreement.judge(nodes.chances[node], right)

    def _counts(
        self, nodes: Nodes, accepted: Sequence[int], known: Sequence[bool] | None
    ) -> tuple[DrafterCounts, ...]:
        """Returns how many of the draft tokens each drafter had said."""
        verified, right, alone = Counter[Source](), Counter[Source](), Counter[Source]()
        for node in range(len(nodes.tokens)):
            if known is not None and not known[1 + node]:
                continue
            sources = list(nodes.sources(node))
            verified.update(sources)
            right.update(sources if node in accepted else ())
            alone.update(sources if len(sources) == 1 else ())
        return tuple(
            DrafterCounts(max(seat.turn, 0), verified[seat], right[seat], alone[seat])
            for seat in self.seats
            if verified[seat]
        )

    def _guesses(self, nodes: Nodes, followed: list[int], known: Sequence[bool] | None) -> Guesses:
        """Returns for each token that the target took, and of the likeliest path that stood behind them, who
        had said it, and how sure that one was."""
        base, guesses = len(self.session.log), []
        for depth, node in enumerate([*followed, *_beyond(nodes, followed, known)]):
            said = [(chance, source) for source, chance in nodes.sources(node).items()]
            chance, seat = max(said, key=lambda one: one[0], default=(0.0, None))
            drafter = seat.value if isinstance(seat, Own) else ""
            if isinstance(seat, DrafterSeat):
                drafter = seat.drafter_of(base + depth)
            guesses.append(Guess(nodes.tokens[node], chance, drafter))
        return tuple(guesses)


def _beyond(nodes: Nodes, followed: Sequence[int], known: Sequence[bool] | None) -> list[int]:
    """Returns the likeliest path that stood behind those that the target took, as far as it is `known`."""
    return [node for node in nodes.beyond(followed) if known is None or known[1 + node]]
