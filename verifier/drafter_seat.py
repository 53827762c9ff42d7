"""A drafter's place at a session: whose it is, how far its drafter knows the log, and what its drafts showed.

A session has a list of them. What they send stands in one tree, and each is judged by what itself has said:
how far it is believed, how often it is right, and whether it has gone quiet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from verifier.drafter_peer import DrafterPeer
from verifier.nodes import Nodes
from verifier.session import DraftFate, Session
from verifier.step_start import FIRST_ACCEPTANCE, Arrivals, Pace, acceptance_after
from verifier.survival_calibration import SurvivalCalibration


@dataclass(slots=True, eq=False)
class DrafterSeat:
    session: Session
    draft_key: bytes = b""  # from which every right to the seat follows; empty = it gets no drafter
    turn: int = 0  # the first whose drafter may still come
    peer: DrafterPeer | None = None
    shown: bytes = b""  # the right with which it came
    pace: Pace | None = None  # of its drafter; None = nobody drafts
    acknowledged: int | None = None  # log length that its drafter is known to have; None = no drafter yet
    caught_up: bool = False  # its drafter has said something of the log, since it came or drafts rested last
    arrivals: Arrivals = field(default_factory=Arrivals)
    acceptance: float = FIRST_ACCEPTANCE
    calibration: SurvivalCalibration = field(default_factory=SurvivalCalibration)
    unpaid: float = 0.0  # draft tokens that were accepted and not paid for yet
    drafter: str = ""  # worker_id of who has it, or had it last
    former: tuple[str, int] = ("", 0)  # who had it before, and up to which position what stands may be its

    def renew(self, draft_key: bytes) -> None:
        """The rights to it are given anew: who had it has lost it. What was learnt of its drafts stays."""
        self.leave()
        self.draft_key, self.turn, self.shown = draft_key, 0, b""

    def take(self, peer: DrafterPeer, turn: int, shown: bytes) -> None:
        """A drafter has come with the right of that turn. What was learnt of another is not held against
        it."""
        if shown != self.shown:
            self.calibration, self.acceptance = peer.calibration.copy(), FIRST_ACCEPTANCE
        if peer.worker_id != self.drafter:
            self.former = self.drafter, len(self.session.log) + len(self.session.tree.said.get(self, ()))
            self.drafter = peer.worker_id
        self.peer, self.turn, self.shown = peer, turn, shown
        self.seated(peer.pace)

    def leave(self) -> None:
        """Nobody drafts from here."""
        self.peer = None
        self.seated(None)

    def seated(self, pace: Pace | None) -> None:
        """Another drafter has taken over, which has missed nothing yet; None = nobody drafts."""
        self.pace = pace
        self.forget()

    def forget(self) -> None:
        """What its drafter was slow in is no fault of its: it has just come, or drafts have rested."""
        self.arrivals, self.caught_up = Arrivals(), False

    def drafter_of(self, position: int) -> str:
        """Returns the worker_id of who said first what this seat says of that position."""
        former, end = self.former
        return former if position < end else self.drafter

    @property
    def path(self) -> list[int]:
        """Returns the likeliest path of what its drafter has said."""
        return self.session.tree.path_of(self)

    def offer(
        self, base: int, tokens: list[int], parents: Sequence[int], survival: bytes, now: float
    ) -> tuple[DraftFate, bool]:
        """Folds a draft of its drafter into the session's tree.

        Returns what became of it, and whether the path of what this seat has said has grown."""
        tree = self.session.tree
        before = tree.length_of(self)
        fate = self.session.offer(base, tokens, parents, survival, self)
        if fate not in (DraftFate.AHEAD, DraftFate.BEYOND, DraftFate.BEFORE_OUTPUT):
            self.acknowledged = base
            self.caught_up = not self.session.resting  # perhaps it has nothing to guess
        grown = tree.length_of(self) - before
        if fate is not DraftFate.TAKEN or self.pace is None or grown <= 0:
            return fate, False
        self.arrivals.arrived(now, grown, self.pace)
        return fate, True

    def committed(self, nodes: Nodes, now: float) -> None:
        """A step that verified these nodes was committed: what comes from now on is for the next."""
        said = nodes.said.get(self, ())
        verified = len(said) - said.count(None)
        self.arrivals = self.arrivals.committed(now, verified, self.session.tree.length_of(self))
        expected = self.session.wanted > 0 and not self.session.resting
        if self.arrivals.missed and self.pace is not None and expected:
            self.pace.missed()

    def learn(self, nodes: Nodes, followed: Sequence[int], accepted: int) -> None:
        """Learns from a step that verified these nodes, of which the target took those `followed`; the first
        `accepted` of them were committed as drafted ones."""
        likeliest, beside = nodes.shown(self, followed)
        # Several that say a token have saved its time together.
        if nodes.is_path and len(nodes.said) == 1:
            self.unpaid += min(accepted, len(likeliest))
        else:
            sources = [nodes.sources(node) for node in followed[:accepted]]
            self.unpaid += sum(1 / len(each) for each in sources if self in each)
        self.calibration.judge(likeliest, beside)
        if self.peer is not None:
            self.peer.calibration.judge(likeliest, beside)

    def prevailed(self, depth: int, chance: float, right: bool) -> None:
        """Learns of a token of its drafter's that counted as likelier than another drafter's."""
        self.calibration.prevailing.judge(depth, chance, right)
        if self.peer is not None:
            self.peer.calibration.prevailing.judge(depth, chance, right)

    def judge(self, right: int, judged: int) -> None:
        """Learns that of the drafts that stood, the target's tokens showed `judged`: the first `right` were
        right."""
        self.acceptance = acceptance_after(self.acceptance, right, judged)
