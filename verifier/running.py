"""A session in the verifier's hands: its log, its KV blocks, and what its drafts and their drafter showed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outrider.engine.engine import Work
from outrider.engine.kv_blocks import BlockTable
from outrider.sampling.sampler import Row, TokenCounts
from verifier.session import Outcome, Session, SessionSpec
from verifier.step_start import FIRST_ACCEPTANCE, Arrivals, Awaited, Pace, acceptance_after
from verifier.survival_calibration import SurvivalCalibration

Path = tuple[list[int], list[float]]
"""Draft tokens that may be verified, and of each P(accepted | all before it are), as it was promised."""

NO_PATH: Path = ([], [])


@dataclass(slots=True, eq=False)
class Running:
    """A session with what the steps need beside its log."""

    session: Session
    counts: TokenCounts | None  # kept only where the request has penalties
    arrivals: Arrivals = field(default_factory=Arrivals)
    table: BlockTable = field(default_factory=BlockTable)
    pace: Pace | None = None  # of its drafter; None = nobody drafts
    acceptance: float = FIRST_ACCEPTANCE
    trust: SurvivalCalibration = field(default_factory=SurvivalCalibration)
    found_tokens: int = 0  # of its log, cached when it came
    cached_prompt_tokens: int | None = None  # at its first start
    preemptions: int = 0  # times that its blocks were taken from it, or lost with another verifier
    orphaned: bool = False  # its router is gone, and may come back
    id: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.id = self.session.spec.session_id
        self.preemptions = int(bool(self.session.spec.output))

    def adopted(self, spec: SessionSpec) -> None:
        """A router has it, and has opened it so: the same request, and as much of the log as it knows."""
        self.session.spec = spec
        self.orphaned = False

    def drafted_by(self, pace: Pace | None) -> None:
        """Another drafter has taken over, which has missed nothing yet; None = nobody drafts."""
        self.pace, self.arrivals = pace, Arrivals()

    @property
    def begun(self) -> bool:
        """Whether any of it has run here."""
        return self.cached_prompt_tokens is not None

    @property
    def pending(self) -> int:
        return len(self.session.log) - self.table.length

    @property
    def unread(self) -> int:
        """Tokens that are to be read before the next one can be drawn; 0 while it decodes, or a step runs."""
        pending = len(self.session.log) - (self.table.length if self.begun else self.found_tokens)
        return pending - 1 if pending > 1 else 0

    @property
    def decoding(self) -> bool:
        """Whether only its last token has not run yet, and drafts may follow that."""
        return bool(self.table.blocks) and self.pending == 1

    def path(self) -> Path:
        return self.session.path() if self.pace is not None and self.decoding else NO_PATH

    def survival(self, chances: list[float]) -> list[float]:
        """[j] = P(draft tokens 0..j are accepted), as far as the promise is believed."""
        factor, survives, survival = self.trust.factor, 1.0, []
        for chance in chances:
            survives *= factor * chance
            survival.append(survives)
        return survival

    def awaited(self, believed: float = 1.0) -> Awaited | None:
        """What it waits for, where it may verify more than it has and somebody drafts. `believed`: by which
        all that may come is multiplied."""
        pace, arrivals = self.pace, self.arrivals
        if pace is None or not self.decoding or arrivals.silent:
            return None
        tokens, chances = self.session.path()
        wanted = self.session.wanted
        if len(tokens) >= wanted:
            return None
        return Awaited(
            arrivals.committed_at,
            arrivals.last_at,
            len(tokens),
            wanted,
            self.acceptance,
            pace.lead,
            pace.token,
            believed * pace.punctual * self.trust.factor ** len(tokens) * math.prod(chances),
        )

    def settle(self, part: Part, chosen: list[int], now: float) -> Outcome:
        """Commits what a step chose for it, and learns from what became of its drafts."""
        session = self.session
        stood = session.tree.path[: len(part.path) + 1]
        outcome = session.verify(part.path, chosen)
        self.trust.observe(part.chances, outcome.accepted)
        # Of what stood, not of what was verified: those were chosen as the likelier ones.
        judged, right = min(len(stood), len(outcome.tokens)), 0
        while right < judged and stood[right] == outcome.tokens[right]:
            right += 1
        self.acceptance = acceptance_after(self.acceptance, right, judged)
        self.arrivals = self.arrivals.committed(now, outcome.verified, len(session.tree.path))
        if self.arrivals.missed and self.pace is not None and session.wanted > 0:
            self.pace.missed()
        if self.counts is not None:
            self.counts.extend(outcome.tokens)
        return outcome


@dataclass(slots=True, eq=False)
class Part:
    """A session's share of a step."""

    running: Running
    start: int  # tokens in the cache before
    tokens: int  # committed tokens that run
    path: list[int]  # draft tokens that follow them
    chances: list[float]  # of each of those: P(accepted | all before it are), as promised
    final: bool  # whether the log's last token is among them, so that a token is drawn

    def work(self) -> Work:
        log = self.running.session.log
        tokens = [*log[self.start : self.start + self.tokens], *self.path]
        return Work(self.running.table.blocks, self.start, tokens, len(self.path) + 1 if self.final else 0)

    def rows(self) -> list[Row]:
        if not self.final:
            return []
        running = self.running
        params, position = running.session.spec.params.sampling, len(running.session.log)
        after = [None, *self.path]
        if not params.penalized:  # then what stands before a row is of no account
            return [Row(params, position + j, None, (), token) for j, token in enumerate(after)]
        return [
            Row(params, position + j, running.counts, self.path[:j], token) for j, token in enumerate(after)
        ]
