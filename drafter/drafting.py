"""A session in the draft model's hands: its guesses, its KV blocks, and its share of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from drafter.acceptance_model import AcceptanceModel
from drafter.look_up import LookUp
from drafter.session import Branch, DraftSession, Guess
from outrider.engine.engine import Work
from outrider.engine.kv_blocks import BlockPool, BlockTable
from outrider.engine.scheduler import Candidate
from outrider.engine.state_slots import MOST_DRAFTS, StateSlots
from outrider.grammar import Place
from outrider.sampling.sampler import Row, TokenCounts


@dataclass(slots=True, eq=False)
class Drafting:
    """A session with what the steps need beside its tokens."""

    session: DraftSession
    counts: TokenCounts | None  # of the log; kept only if the request has penalties
    place: Place | None = None  # in the request's grammar, if it has one
    table: BlockTable = field(default_factory=BlockTable)
    look_up: LookUp | None = None  # what a cheaper source expects; None = it has not been asked yet

    @property
    def ready(self) -> bool:
        """Returns whether no grammar holds it up."""
        return self.place is None or (self.place.ready and self.place.fault is None)

    def wants_token(self, states: StateSlots | None) -> bool:
        """Returns whether one more guess on the trunk is of use now, and can be taken back. `states`: of a
        model that keeps some."""
        may = states is None or len(self.session.drafted) < MOST_DRAFTS
        return may and self.session.wants_token and self.ready

    def room(self, states: StateSlots | None) -> int:
        """Returns how many more guesses on the trunk are of use, and can be taken back. `states` as above."""
        session = self.session
        window = session.window if states is None else min(session.window, MOST_DRAFTS)
        return min(window - len(session.drafted), session.last - session.length)

    def lost(self, states: StateSlots | None) -> bool:
        """Returns whether what it has read is to be read again, since others needed the slot of its state."""
        return states is not None and states.lost(self.table.blocks, self.table.length)

    @property
    def one_row(self) -> bool:
        """Returns whether a draw means something behind all that is drafted and nowhere else: it needs more
        than the model's logits, or is not the target's token."""
        return self.counts is not None or self.place is not None or not self.session.judges_log

    @property
    def id(self) -> bytes:
        return self.session.id

    def candidate(self, length: int) -> Candidate:
        """Returns the session as the scheduler sees it, to be read up to so many tokens."""
        table, tenant = self.table, self.session.spec.params.tenant
        return Candidate(length - table.length, 0, table.length, len(table.blocks), tenant=tenant)


@dataclass(frozen=True, slots=True)
class Part:
    """A session's share of a step, on its trunk or on a branch."""

    drafting: Drafting
    start: int  # tokens in the cache before
    tokens: tuple[int, ...]  # that run
    rows: int  # draws after the last of them
    branch: Branch | None = None
    masks: int = 0  # of the tokens, the last: they stand for guesses before them
    checked: int = 0  # of the tokens, the last: what a cheaper source expects

    @property
    def first(self) -> int:
        """Returns the position of the first row."""
        return self.start + len(self.tokens) - self.rows + 1

    def work(self) -> Work:
        table = self.drafting.table if self.branch is None else self.branch.table
        return Work(table.blocks, self.start, self.tokens, self.rows, standing=len(self.drafting.session.log))

    def free_slots(self, pool: BlockPool) -> int:
        """Returns how many more tokens its trunk could have in the cache."""
        table = self.drafting.table
        return (len(table.blocks) + pool.available) * pool.block_size - table.length

    def draws(self) -> list[Row]:
        drafting, branch = self.drafting, self.branch
        session = drafting.session
        drafted: tuple[int, ...] = ()
        if drafting.one_row:  # it is for what follows all that is drafted
            trunk = session.drafted if branch is None else session.drafted[: branch.at - len(session.log)]
            drafted = tuple(guess.token for guess in trunk)
            if branch is not None:
                drafted += (branch.token, *(guess.token for guess in branch.guesses))
        allowed = None
        if drafting.place is not None and self.rows:
            (allowed,) = drafting.place.masks(drafted, last=1)
        return [
            Row(session.sampling_at(position), position, drafting.counts, drafted, allowed=allowed)
            for position in range(self.first, self.first + self.rows)
        ]


def take(part: Part, guesses: Sequence[Guess], model: AcceptanceModel, pool: BlockPool) -> int:
    """Adds the guesses that a step drew, and compares those that come after the fact. Returns how many the
    trunk has got."""
    drafting, session = part.drafting, part.drafting.session
    end = part.start + len(part.tokens) - part.checked
    drawn: list[int] = []  # on the trunk
    for at, guess in enumerate(guesses, part.first):
        if part.branch is not None:
            session.extend(guess, part.branch)
        elif at == session.length:
            session.extend(guess)
            drawn.append(guess.token)
            if 0 <= at - end < part.checked and guess.token != part.tokens[at - part.start]:
                break  # what was run behind it is none of what it guesses
        elif session.scored <= at < len(session.log):
            model.judged(guess, session.log[at])
            session.judge(guess.token == session.log[at])
    if part.branch is None:
        read = end - part.masks + (len(drawn) - 1 if part.checked else 0)
        pool.truncate(drafting.table, read)
        session.scored = max(session.scored, min(read + 1, len(session.log)))
        pool.seal(drafting.table, session.log)
        if drafting.look_up is not None:
            drafting.look_up.judge(drawn, part.checked)
    return len(drawn)
