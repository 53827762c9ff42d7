"""One session as the drafter sees it: the committed log as far as it is known, and the guesses beyond it.

The trunk is the likeliest path beyond the log; branches leave it where it is likeliest to be wrong. Pure: no
clock, no I/O, no torch. KV blocks are held beside it as integers.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from drafter.survival import CERTAIN, FIRST_RECENT, recent_after
from outrider.engine.kv_blocks import BlockTable
from outrider.sampling.params import SamplingParams
from outrider.wire.session import SessionParams
from outrider.wire.trace_context import TraceContext

LEAST_TOLD = 1 / CERTAIN  # survival of the trunk: 0 of 0 would say as much of what stands beside it
MOST_WITH_OTHERS = 128  # tokens told at a time, if some only stand in the place of others


class CannotFollow(Exception):
    """The session cannot be drafted for any more; the message says why."""


class LogConflict(CannotFollow):
    """A commit contradicts an earlier one: its verifier does not keep an append-only log."""


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """A session as it was opened."""

    session_id: bytes
    params: SessionParams
    output: tuple[int, ...]  # committed so far
    draft_key: bytes
    target_vocab_size: int
    target: str = ""  # fingerprint of the model; empty = not known
    trace: TraceContext | None = None  # to which belongs what is done for it


@dataclass(frozen=True, slots=True)
class Alternative:
    """A token that would have been drafted in the place of a guess."""

    token: int
    share: float  # of the draw that the guess did not win
    chance: float  # P(the target goes here | it does not take the guess)


@dataclass(frozen=True, slots=True)
class Guess:
    """One drafted token, with what was known when it was drawn."""

    token: int
    confidence: float  # share of the draw that it won
    recent: float  # acceptance of its session
    depth: int  # guesses before it
    acceptance: float  # P(the target takes it | it took all before it)
    alternatives: tuple[Alternative, ...] = ()  # likeliest first


@dataclass(slots=True, eq=False)
class Branch:
    """Guesses at what follows if the target does not take the trunk's guess at a position."""

    at: int  # position at which it leaves the trunk
    rank: int  # which of that guess's alternatives it takes
    token: int  # the same as a token
    table: BlockTable  # its own place in the cache; what lies before `at` is the trunk's
    guesses: list[Guess] = field(default_factory=list)  # after `token`
    untold: int = 0  # of them, the last that the verifier has not been sent

    def uncached(self) -> list[int]:
        """Returns the tokens from the end of the cache on: the one that it begins with and the guesses after
        it."""
        return [self.token, *(guess.token for guess in self.guesses)][self.table.length - self.at :]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a commit said about the guesses."""

    standing: int = 0  # positions of the old log and draft that still stand, counted on the path that goes on
    judged: tuple[tuple[Guess, int], ...] = ()  # each with the target's token in its place
    rejected: bool = False  # whether the trunk was wrong
    adopted: Branch | None = None  # had the target's token there, and is the trunk now
    dropped: tuple[Branch, ...] = ()


class DraftSession:
    judges_log = True  # whether what would be drafted amid the log can be compared with it

    def __init__(self, spec: DraftSpec, window: int) -> None:
        self.spec = spec
        self.window = window
        self.resting = False  # its verifier takes no drafts for now
        self.beside = 0.0  # chance with which that takes a token beside a guess; 0 = it takes none
        self.first_sampling = spec.params.first_sampling
        self.greedy = spec.params.sampling.greedy  # the target's draw
        self.log: list[int] = [*spec.params.prompt, *spec.output]
        self.heard = len(self.log)  # how far the verifier has committed, as far as its words have been read
        self.drafted: list[Guess] = []  # the trunk
        self.branches: list[Branch] = []
        self.recent = FIRST_RECENT  # acceptance, a moving average
        self.scored = len(self.log)  # positions of the log that were compared with what was drafted there
        self.untold = 0  # guesses on the trunk, its last, that the verifier has not been sent
        self.told = 0  # guesses, on trunk and branches, that it has been sent since the last commit
        self.news = True  # whether the log or the trunk is not as it has been told

    @property
    def id(self) -> bytes:
        return self.spec.session_id

    @property
    def length(self) -> int:
        """Returns the number of tokens of the log and the trunk together."""
        return len(self.log) + len(self.drafted)

    def sampling_at(self, position: int) -> SamplingParams:
        """Returns how the token at a position is drawn."""
        params = self.spec.params
        if self.first_sampling is not None and position < len(params.prompt) + params.min_tokens:
            return self.first_sampling
        return params.sampling

    @property
    def last(self) -> int:
        """Returns the first position that needs no guess: the last output token is always the target's
        own."""
        return self.spec.params.most_tokens - 1

    @property
    def wants_token(self) -> bool:
        """Returns True if one more guess on the trunk is of use."""
        return len(self.drafted) < self.window and self.length < self.last and not self.resting

    @property
    def survival(self) -> float:
        """Returns P(the target takes the whole trunk)."""
        survival = 1.0
        for guess in self.drafted:
            survival *= guess.acceptance
        return survival

    def uncached(self, cached: int) -> list[int]:
        """Returns the tokens of log and trunk from position `cached` on."""
        start = cached - len(self.log)
        drafted = [guess.token for guess in self.drafted[max(start, 0) :]]
        return drafted if start >= 0 else self.log[cached:] + drafted

    def extend(self, guess: Guess, branch: Branch | None = None) -> None:
        """Adds a guess to the trunk or to a branch."""
        if branch is None:
            self.drafted.append(guess)
            self.untold += 1
            self.news = True
        else:
            branch.guesses.append(guess)
            branch.untold += 1

    def judge(self, accepted: bool) -> None:
        """Notes if the target took what was drafted at a position."""
        self.recent = recent_after(self.recent, accepted)

    def apply(self, base: int, tokens: Sequence[int]) -> Verdict:
        """Takes a commit in.

        What was drafted and is confirmed moves into the log. At the first difference the rest of the trunk is
        dropped, and the branch that has the target's token there takes its place. Branches that left the
        trunk before the log's new end are over. A commit that starts beyond the log (one before it was lost)
        changes nothing: the next acknowledgement tells the verifier where to start. Raises LogConflict if
        it contradicts the log.
        """
        known = len(self.log) - base
        if known < 0:
            return Verdict(self.length)
        if list(tokens[:known]) != self.log[base : base + len(tokens)]:
            raise LogConflict(f"the commit at position {base} contradicts the log")
        news = list(tokens[known:])
        agreed = _agreed(self.drafted, news)
        path, at = self.drafted[:agreed], len(self.log) + agreed  # the guesses that are judged
        rejected = agreed < min(len(self.drafted), len(news))
        adopted, standing = None, at
        if not news:  # the verifier has just come to know of us, perhaps after what was told
            self.tell_anew()
        if not rejected:
            self.drafted = self.drafted[agreed:]
            standing += len(self.drafted)
        else:
            path.append(self.drafted[agreed])
            adopted = next((b for b in self.branches if (b.at, b.token) == (at, news[agreed])), None)
            self.drafted = []
            self.untold = adopted.untold if adopted is not None else 0
            if adopted is not None:
                further = _agreed(adopted.guesses, news[agreed + 1 :])
                path += adopted.guesses[: min(further + 1, len(news) - agreed - 1)]
                standing += 1 + further
                if standing == len(self.log) + len(news):
                    self.drafted = adopted.guesses[further:]
                    standing += len(self.drafted)
        judged = tuple(zip(path, news, strict=False))
        if judged:  # then all before them was scored when they were drafted
            self.scored = len(self.log) + len(judged)
        self.log.extend(news)
        for guess, token in judged:
            self.judge(guess.token == token)
        end = len(self.log)
        kept = [] if rejected else [branch for branch in self.branches if branch.at >= end]
        dropped = [branch for branch in self.branches if branch not in kept and branch is not adopted]
        self.branches, self.news, self.told = kept, True, 0
        self.untold = min(self.untold, len(self.drafted))
        return Verdict(standing, judged, rejected, adopted, tuple(dropped))

    def tell_anew(self) -> None:
        """Starts telling from nothing, because the verifier may know nothing."""
        self.untold, self.told, self.news = len(self.drafted), 0, True
        for branch in self.branches:
            branch.untold = len(branch.guesses)

    @property
    def untold_yet(self) -> bool:
        """Returns True if there is anything to tell."""
        return self.news or self._all_untold > 0

    @property
    def _all_untold(self) -> int:
        return self.untold + sum(branch.untold for branch in self.branches)

    @property
    def worth_telling(self) -> bool:
        """Returns True if what is new makes a message: half of what the verifier was sent since its last
        commit, or no more to come on the trunk soon. So the first guesses, for which it may wait, go out one
        by one, and later ones, while its step runs, together."""
        return (self.news and not self.wants_token) or 2 * self._all_untold > self.told

    def tell(self) -> tuple[list[int], list[int], list[float]]:
        """Returns (tokens, parents, survival) of the paths with guesses that the verifier has not been sent,
        each from the log's end on, the trunk first, and of what may stand in the place of those guesses. They
        count as sent from now on. Parents are indices, -1 = the log's end; none are given if all that is told
        is the trunk. If there is nothing new, nothing at all."""
        grown = [branch for branch in self.branches if branch.untold]
        length = len(self.drafted)
        if not self.untold:
            length = max((branch.at - len(self.log) for branch in grown), default=0)
        told = _Telling()
        for index, guess in enumerate(self.drafted[:length]):
            told.add(guess.token, index - 1, guess.acceptance, LEAST_TOLD)
        for branch in grown:
            index = branch.at - len(self.log)
            parent = told.add(branch.token, index - 1, chance_of(self.drafted[index], branch.rank))
            known = len(branch.guesses) - branch.untold
            for place, guess in enumerate(branch.guesses):
                if place >= known:
                    told.others(guess, parent, self.beside)
                parent = told.add(guess.token, parent, guess.acceptance)
        branching = {(branch.at, branch.rank) for branch in self.branches if branch.guesses}
        for index in range(len(self.drafted) - self.untold, len(self.drafted)):
            begun = {rank for at, rank in branching if at == len(self.log) + index}
            told.others(self.drafted[index], index - 1, self.beside, begun)
        self.told += self._all_untold
        self.untold, self.news = 0, False
        for branch in grown:
            branch.untold = 0
        parents = told.parents if len(told.tokens) > length else []
        return told.tokens, parents, told.survival


class _Telling:
    """What is told at a time."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.survival: list[float] = []

    def add(self, token: int, parent: int, chance: float, least: float = 0.0) -> int:
        """Adds a token that the target takes with that chance if it has taken its parent, and with `least` at
        least, whatever that is. Returns its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.survival.append(max(least, chance if parent < 0 else self.survival[parent] * chance))
        return len(self.tokens) - 1

    def others(self, guess: Guess, parent: int, least: float, begun: Container[int] = ()) -> None:
        """Adds what may stand in the place of a guess, but for where a branch has `begun`. They cost no
        forward; so nothing follows them."""
        for rank, other in enumerate(guess.alternatives if least > 0 else ()):
            chance = chance_of(guess, rank)
            if chance >= least and rank not in begun and len(self.tokens) < MOST_WITH_OTHERS:
                self.add(other.token, parent, chance)


def chance_of(guess: Guess, rank: int) -> float:
    """Returns P(the target takes this alternative of a guess | it took all before it)."""
    return (1 - guess.acceptance) * guess.alternatives[rank].chance


def _agreed(guesses: Sequence[Guess], tokens: Sequence[int]) -> int:
    """Returns how many of the guesses are the first of these tokens."""
    agreed = 0
    while agreed < min(len(guesses), len(tokens)) and guesses[agreed].token == tokens[agreed]:
        agreed += 1
    return agreed
