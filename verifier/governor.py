"""Which of a few ways to run a verifier commits most: known by trying them in turn, not by a model. Pure.

The price of a token (price.py) follows from a model of the step. The model is wrong where the drafts' work
takes something from the target: cores, memory, a GPU; and where the drafts are not what they promise. So now
and then another way takes the place of the usual one for a block of steps. It is held against the usual one's
blocks before and after it, so that a drift of the load, which touches both, cancels. What counts is what
sessions commit a second in steps that read no prompt.

- The first steps of a block are left out: who drafts again has to catch up first.
- Blocks with another number of sessions are not compared.
- Nothing is decided before the usual way has run again. If its two blocks differ, the load has changed,
  perhaps just as the trial began: the answer counts the less.
- A trial ends as soon as the answer is clear, by how much the steps of its blocks differ, and by how much
  earlier answers did; what one trial leaves open, the next goes on with.
- What a trial loses is paid for before the next one, BUDGET of the time: so trials are rare where the gain is
  clear, and frequent where it is in doubt, which is where they lose nothing.
- If the usual way suddenly commits more or less, or the number of sessions is another, what was found counts
  little, and one trial may come before it is paid for.

Time is that of the steps alone: an idle verifier learns nothing, and forgets nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

BUDGET = 0.015  # share of the time that comparing may cost, in steps that commit nothing
BLOCK_STEPS, BLOCK_SECONDS = 6, 0.5  # of a block, at least
HOPELESS_STEPS, HOPELESS = 3, 0.6  # a block is cut short there, if it commits so much less than the other way
SETTLING_STEPS = 2  # left out at a block's begin, at least
SETTLING_SECONDS = 4.0  # and at most, if nothing is heard of drafters
BEHIND = 0.5  # share of the sessions whose drafters have to catch up, above which they have not yet
MOST_PAIRS = 4  # of a trial
SURE = 2.0  # standard errors
LEAST_SPREAD = 0.03  # standard deviation of an answer, however little the steps of its blocks differ
DOUBT, LEAST_DOUBT = 2.0, 1.0  # times the variance that those show: before answers tell it, and at least
DOUBT_RATE = 0.25  # weight of one more answer in it
FORGETTING = 0.5  # of earlier trials, when another begins
ALARM_FORGETTING = 0.1  # of them, when the load has changed
ALIKE, OTHER = 1.25, 1.5  # ratios of sessions: up to which blocks are compared; from which it is another load
MOST_DEBT = 2.0  # seconds that a way's trials may have to pay for: it is not forgotten for ever
LEAST_DEBT = 0.2  # seconds: a trial that lost nothing is no reason for another at once
HOLD = 4.0  # a trial's time, that passes before the next at least
LEVEL_RATE = 0.2  # weight of one more block in what the usual way commits
LEAST_ALARM = 0.15  # change of that, as a logarithm, that is heeded
ALARM = 2.5  # standard deviations


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A step in which nobody's prompt was read."""

    seconds: float  # from when the engine was free for it to its end
    committed: float  # tokens
    sessions: int
    behind: float | None  # share of drafters that have yet to catch up; None = no drafts are taken


@dataclass(slots=True)
class Block:
    """Steps in a row that ran one way."""

    steps: int = 0  # of those that count
    seconds: float = 0.0
    committed: float = 0.0
    session_steps: int = 0
    squares: tuple[float, float, float] = (0.0, 0.0, 0.0)  # sums: committed^2, both multiplied, seconds^2
    settled: bool = False
    settling: int = 0  # steps that did not count, since it began or was interrupted
    settling_seconds: float = 0.0  # of all of them
    lost: float = 0.0  # seconds of all steps
    gained: float = 0.0  # tokens of all of them

    def take(self, step: StepSeen) -> None:
        self.lost += step.seconds
        self.gained += step.committed
        self.settled = self.settled or self._settles(step)
        if not self.settled:
            self.settling += 1
            self.settling_seconds += step.seconds
            return
        self.steps += 1
        self.seconds += step.seconds
        self.committed += step.committed
        self.session_steps += step.sessions
        tokens, both, seconds = self.squares
        count, took = step.committed, step.seconds
        self.squares = tokens + count * count, both + count * took, seconds + took * took

    def interrupt(self) -> None:
        """What follows comes after steps of others: who drafts has to catch up again. The block does not wait
        for more than SETTLING_SECONDS in all, or it would never end where answers are short."""
        self.settled, self.settling = False, 0

    def _settles(self, step: StepSeen) -> bool:
        if self.settling < SETTLING_STEPS:
            return False
        return (
            step.behind is None
            or step.behind <= BEHIND
            or self.settling_seconds + step.seconds >= SETTLING_SECONDS
        )

    def full(self, against: Block | None) -> bool:
        """Returns whether it says enough, `against` being one of the other way."""
        if self.steps >= BLOCK_STEPS and self.seconds >= BLOCK_SECONDS:
            return True
        return against is not None and self.steps >= HOPELESS_STEPS and self.rate < HOPELESS * against.rate

    @property
    def rate(self) -> float:
        return max(self.committed, 0.5) / max(self.seconds, 1e-9)

    @property
    def variance(self) -> float:
        """Returns that of the rate's logarithm, as the steps tell it: of a ratio of two sums."""
        tokens, both, seconds = self.squares
        rate, count = self.rate, self.steps
        off = max(0.0, tokens - 2 * rate * both + rate * rate * seconds)
        return off / max(self.committed, 0.5) ** 2 * count / max(count - 1, 1)

    @property
    def sessions(self) -> float:
        return self.session_steps / max(self.steps, 1)


@dataclass(slots=True)
class Answers:
    """How much more a way commits than the usual one: logarithms of ratios; and what a trial of it loses."""

    mean: float = 0.0
    precision: float = 0.0  # one over the variance of the mean, as the blocks tell it; 0 = nothing is known
    doubt: float = DOUBT  # by which that variance is multiplied, as the answers tell it
    debt: float = 0.0  # seconds lost that are not paid for
    last_loss: float = 0.0
    tried_at: float = -1.0  # by the steps' seconds

    @property
    def error(self) -> float:
        return math.sqrt(max(self.doubt, LEAST_DOUBT) / self.precision) if self.precision else math.inf

    def with_one(self, answer: float, variance: float) -> Answers:
        """Returns them with one more."""
        one = 1 / (variance + LEAST_SPREAD**2)
        total, doubt = self.precision + one, self.doubt
        if self.precision:
            surprise = (answer - self.mean) ** 2 / (1 / one + 1 / self.precision)
            doubt += DOUBT_RATE * (surprise - doubt)
        mean = self.mean + (answer - self.mean) * one / total
        return replace(self, mean=mean, precision=total, doubt=doubt)

    def forget(self, kept: float) -> None:
        self.precision *= kept

    @property
    def better(self) -> bool:
        return self.mean > SURE * self.error

    @property
    def worse(self) -> bool:
        return self.mean < -SURE * self.error


@dataclass(slots=True)
class Level:
    """What the usual way commits, block by block, so that a change is noticed."""

    sessions: float = 0.0
    mean: float = 0.0
    variance: float = 0.0
    blocks: int = 0
    outside: int = 0  # blocks in a row

    def changed(self, block: Block) -> bool:
        """Takes a block in. Returns whether the usual way does not commit what it did."""
        found = math.log(block.rate)
        if not self.blocks or not alike(self.sessions, block.sessions):
            other = self.blocks > 0 and not alike(self.sessions, block.sessions, OTHER)
            self.sessions, self.mean, self.variance, self.blocks = block.sessions, found, block.variance, 1
            self.outside = 0
            return other
        off = found - self.mean
        if self.blocks > 2 and abs(off) > max(LEAST_ALARM, ALARM * math.sqrt(self.variance)):
            self.outside += 1
            if self.outside < 2:  # one such block may be an accident
                return False
            self.blocks = 0
            self.changed(block)
            return True
        self.outside = 0
        self.blocks += 1
        self.mean += LEVEL_RATE * off
        self.variance += LEVEL_RATE * (off * off - self.variance)
        return False


def alike(one: float, other: float, ratio: float = ALIKE) -> bool:
    return one <= ratio * other and other <= ratio * one


@dataclass(slots=True)
class Trial:
    way: int
    before: Block  # the usual way's last one
    tried: Block | None = None  # the other way's, while the usual one runs again
    blocks: int = 0  # of the other way
    began: float = 0.0
    loss: float = 0.0  # seconds of the usual way's work
    done: bool = False  # the next block of the usual way is the last


@dataclass(slots=True)
class Governor:
    """Says which way the next step runs, and hears what it committed."""

    ways: int
    draw: Callable[[], float]  # from [0, 1): so that two verifiers that share something do not keep step
    usual: int = 0
    trials: int = 0  # since the start
    answers: list[Answers] = field(init=False)  # against the usual way
    _trial: Trial | None = None
    _block: Block = field(default_factory=Block)
    _level: Level = field(default_factory=Level)
    _now: float = 0.0
    _held_until: float = 0.0
    _alarmed: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.answers = [Answers() for _ in range(self.ways)]

    @property
    def way(self) -> int:
        """Returns which one the next step runs."""
        trial = self._trial
        return self.usual if trial is None or trial.tried is not None else trial.way

    def gain(self, way: int, over: int) -> float:
        """Returns how much one commits over another, as last compared; 0 = not compared yet."""
        pair = [each for each in (way, over) if each != self.usual]
        if way == over or not all(self.answers[each].precision for each in pair):
            return 0.0
        return math.exp(self.answers[way].mean - self.answers[over].mean)

    def observe(self, step: StepSeen) -> None:
        """Takes in a step that ran as `way` said."""
        self._now += step.seconds
        block, trial = self._block, self._trial
        block.take(step)
        if not block.full(None if trial is None else trial.tried or trial.before):
            return
        self._block = Block()
        if trial is None:
            self._held(block)
        elif trial.tried is None:
            self._tried(trial, block)
        else:
            self._came_back(trial, trial.tried, block)

    def _held(self, block: Block) -> None:
        others = [answers for way, answers in enumerate(self.answers) if way != self.usual]
        shares = range(len(others), 0, -1)  # the first ways are the likelier ones
        for answers, share in zip(others, shares, strict=True):
            answers.debt = max(0.0, answers.debt - BUDGET * block.lost * share / sum(shares))
        self._look(block)
        due = [way for way in range(self.ways) if way != self.usual and self._due(way)]
        if due:
            way = min(due, key=lambda way: self.answers[way].tried_at)
            self._alarmed.discard(way)
            self.answers[way].forget(FORGETTING)
            self._trial = Trial(way, block, began=self._now)
            self.trials += 1

    def resume(self) -> None:
        """Goes on after steps that it was not told of. The block that they interrupted goes on, too: answers
        may be shorter than a block."""
        self._block.interrupt()

    def alarm(self) -> None:
        """What was found counts little: the load is another."""
        self._alarmed = {way for way in range(self.ways) if way != self.usual}
        for answers in self.answers:
            answers.forget(ALARM_FORGETTING)
            answers.doubt = DOUBT

    def _look(self, block: Block) -> None:
        """Notices from a block of the usual way if it does not commit what it did."""
        if self._level.changed(block):
            self.alarm()

    def _due(self, way: int) -> bool:
        answers = self.answers[way]
        if way in self._alarmed:
            return answers.debt <= max(answers.last_loss, MOST_DEBT / 2)
        return (answers.debt <= 0 or answers.mean > 0) and self._now >= self._held_until

    def _tried(self, trial: Trial, block: Block) -> None:
        trial.blocks += 1
        trial.loss += block.lost - block.gained / trial.before.rate
        if alike(trial.before.sessions, block.sessions):
            found = self.answers[trial.way].with_one(
                math.log(block.rate / trial.before.rate), block.variance + trial.before.variance
            )
            trial.done = found.worse or found.better
        trial.tried = block

    def _came_back(self, trial: Trial, tried: Block, block: Block) -> None:
        before, trial.before, trial.tried = trial.before, block, None
        trial.loss += (block.lost - block.seconds) - (block.gained - block.committed) / block.rate
        answers = self.answers[trial.way]
        compared = alike(before.sessions, tried.sessions) and alike(block.sessions, tried.sessions)
        if compared:
            one, other = math.log(before.rate), math.log(block.rate)
            # If the two differ by more than their steps do, the load changed, and nobody knows when.
            variance = tried.variance + max(before.variance + block.variance, (one - other) ** 2) / 4
            answers = answers.with_one(math.log(tried.rate) - (one + other) / 2, variance)
            self.answers[trial.way] = answers
        if answers.better:
            self._end(trial)
            self._switch(trial, answers)
        elif (compared and answers.worse) or trial.done or trial.blocks >= MOST_PAIRS:
            self._end(trial)
            self._look(block)

    def _end(self, trial: Trial) -> None:
        answers, self._trial = self.answers[trial.way], None
        answers.last_loss = max(LEAST_DEBT, trial.loss)
        answers.debt = min(max(answers.debt + trial.loss, LEAST_DEBT), MOST_DEBT)
        answers.tried_at = self._now
        self._held_until = self._now + HOLD * (0.75 + self.draw() / 2) * (self._now - trial.began)

    def _switch(self, trial: Trial, found: Answers) -> None:
        """The way that was on trial is the usual one from now on. To try the former one again has to be
        earned: it would lose what it does less."""
        former, gain = self.answers[self.usual], found.mean
        loss = trial.before.lost * (1 - math.exp(-gain))
        for answers in self.answers:
            answers.mean -= gain
            answers.precision = min(answers.precision, found.precision)
        former.mean, former.precision, former.doubt = -gain, found.precision, found.doubt
        former.debt, former.last_loss, former.tried_at = min(loss, MOST_DEBT), loss, self._now
        self.usual = trial.way
        self._alarmed.discard(self.usual)
        self.answers[self.usual] = Answers()
        self._level = Level()
