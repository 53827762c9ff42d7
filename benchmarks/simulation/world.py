"""Simulates a verifier, its drafters and the line between them, in virtual time.

Discrete events, each for all sessions at once: a draft step ends, drafts arrive, a target step ends, its
commits arrive, the router's k and windows arrive. Which guesses are right stands in the traces; who decides
how many are drafted, verified and waited for is a Policy. Sessions decode only: prompts take no time. An
answer that ends is replaced by the next until there is none left. Outcome branches are not simulated: of a
tree there are the path and what could stand in the place of each of its guesses.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.costs import Costs
from benchmarks.simulation.traces import Book

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MOST_DRAFTS = 10  # k never exceeds it
BEYOND = 256  # positions that a trace must have after its answer's end
STEP_NOISE = 0.04  # of a step's time: standard deviation
ROUTER_SECONDS = 1e-3  # from the end of a step to the router's k at the verifier
WARM_UP = 0.15  # share of all tokens that are not counted
BINS = 10  # of predicted probability, for the error of calibration


@dataclass(frozen=True)
class Result:
    goodput: float  # tokens a second, once warm
    verified_per_token: float  # draft tokens verified, a committed token
    drafted_per_token: float
    waited: float  # share of the time in which the verifier waited for drafts
    messages_per_token: float  # of the router: changes of k and of windows
    error_of_calibration: float  # expected |predicted - accepted share| over bins of the promised probability
    price: float  # of a token in a step, at the end


class Policy(Protocol):
    """What is decided, and by whom. Arrays have one entry a session."""

    name: str

    @property
    def price(self) -> float:
        """Returns the committed tokens that one more token in a step costs."""
        ...

    def begin(self, world: World) -> None: ...

    def opened(self, session: int) -> None:
        """Notes that a new answer has begun in the place of an old one."""

    def k(self) -> Ints:
        """Returns the router's k, the most draft tokens of a step: [sessions]."""
        ...

    def windows(self, k: Ints) -> Ints:
        """Returns the router's windows, the most unverified tokens of a drafter: [sessions]."""
        ...

    def probabilities(self, sessions: Ints, depth: Ints, confidence: Floats) -> Floats:
        """Returns the drafter's P(accepted | all before it are) for one new token each."""
        ...

    def scored(self, session: int, confidence: Floats, accepted: NDArray[np.bool_]) -> None:
        """Tells the drafter what it would have guessed at newly committed positions, and if that was
        right."""

    def arrived(self, sessions: Ints) -> None:
        """Tells the verifier of one more draft token that continues the log, for each of these."""

    def start_at(self, now: float, free_since: float, usable: Ints) -> float:
        """Returns when the verifier starts its step; not after `now` = at once."""
        ...

    def admit(self, usable: Ints) -> Ints:
        """Returns how many of the arrived draft tokens the verifier admits, [sessions]."""
        ...

    def beside(self) -> Bools | None:
        """Returns which of the tokens that could stand in the place of a guess it admits beside the path:
        [sessions, MOST_DRAFTS, OTHERS]; None = none."""

    def stepped(self, seconds: float, waited: float, admitted: Ints, accepted: Ints, committed: Ints) -> None:
        """Tells what a step took, how long it was waited for before it began, and what it gave."""


class World:
    def __init__(
        self, book: Book, costs: Costs, sessions: int, round_trip: float, policy: Policy, seed: int
    ) -> None:
        self.book, self.costs, self.sessions, self.policy = book, costs, sessions, policy
        self.round_trip = round_trip
        self.now = 0.0
        self.rng = np.random.default_rng(seed)
        self.rows = np.arange(sessions)
        self.trace = np.arange(sessions)
        self.next_trace = sessions
        # The verifier: the log, and the path of drafts that arrived for it.
        self.log = np.zeros(sessions, np.int64)
        self.here_end = np.zeros(sessions, np.int64)  # position behind the last guess that arrived
        self.here_wrong = np.zeros(sessions, np.int64)  # position of that path's first wrong guess
        self.here_chance = np.ones((sessions, book.accepted.shape[1]))  # [s, p] P(guess p | those before it)
        self.answer = np.zeros(sessions, np.int64)  # of this place, counted: drafts for one before are late
        self.judged = np.zeros(
            sessions, np.int64
        )  # draft tokens up to the one that the last step did not take
        self.true = np.zeros(sessions, np.int64)  # of those, right
        self.branched = np.zeros(sessions, np.int64)  # 1 where the last step took a token beside the path
        self._beside = 0
        self.k = np.zeros(sessions, np.int64)
        # The drafters.
        self.known = np.zeros(sessions, np.int64)  # length of the log as far as they know it
        self.end = np.zeros(sessions, np.int64)
        self.wrong = np.zeros(sessions, np.int64)
        self.window = np.zeros(sessions, np.int64)
        self._answer_drafted = self.answer.copy()
        self._trace_drafted = self.trace.copy()
        self.draft_seconds = 0.0  # of a draft step, measured
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._drafting = False
        self._stepping = False
        self._free_since = 0.0
        self._news: list[Callable[[], None]] = []  # for the drafters, while they run a step
        self._drafted = self._verified = self._messages = 0
        self._waited = 0.0
        self._promises = np.zeros((BINS, 3))  # by promised probability: tokens judged, promised, accepted
        self._tokens = 0
        self._sent_k, self._sent_window = self.k.copy(), self.window.copy()

    def run(self) -> Result:
        """Runs until no answer is left to begin."""
        self.policy.begin(self)
        self.wrong = self.book.first_wrong[self.trace, self.log]
        self.here_wrong = self.wrong.copy()
        self._steer()
        self._try_step()
        warm_at = WARM_UP * self.book.tokens.sum()
        warm = (0.0, 0)
        while self.next_trace < len(self.book.tokens):
            self.now, _, happen = heapq.heappop(self._events)
            happen()
            if warm == (0.0, 0) and self._tokens >= warm_at:
                warm = (self.now, self._tokens)
        return Result(
            goodput=(self._tokens - warm[1]) / (self.now - warm[0]),
            verified_per_token=self._verified / self._tokens,
            drafted_per_token=self._drafted / self._tokens,
            waited=self._waited / self.now,
            messages_per_token=self._messages / self._tokens,
            error_of_calibration=self._error_of_calibration(),
            price=self.policy.price,
        )

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, happen))

    # The verifier.

    def room(self) -> Ints:
        """Returns the most draft tokens that can still be of use: the last token of an answer is the target's
        own."""
        return np.asarray(self.book.tokens[self.trace] - self.log - 1)

    def usable(self) -> Ints:
        """Returns how many draft tokens continue the log and may be verified."""
        return np.asarray(np.minimum(np.minimum(self.standing(), self.room()), self.k))

    def standing(self) -> Ints:
        """Returns how many draft tokens continue the log."""
        return np.where(self.here_wrong >= self.log, np.maximum(self.here_end - self.log, 0), 0)

    def chances(self, usable: Ints) -> Floats:
        """Returns [sessions, MOST_DRAFTS] P(accepted | all before it are), as promised; 0 behind the usable
        ones."""
        depth = np.arange(MOST_DRAFTS)
        chance = self.here_chance[self.rows[:, None], self.log[:, None] + depth]
        return np.where(depth < usable[:, None], chance, 0.0)

    def confidence(self) -> Floats:
        """Returns [sessions, MOST_DRAFTS] of the guesses that would follow the log."""
        at = self.log[:, None] + np.arange(MOST_DRAFTS)
        return np.asarray(self.book.confidence[self.trace[:, None], at])

    def step_seconds(self, tokens: int) -> float:
        noise = max(0.8, 1 + STEP_NOISE * self.rng.normal())
        return self.costs.step(tokens, self.sessions) * noise

    def _try_step(self) -> None:
        """Starts a step if it is time. Asked when the engine becomes free, at every arrival, and when a wait
        is over."""
        if self._stepping:
            return
        usable = self.usable()
        start = self.policy.start_at(self.now, self._free_since, usable)
        if start > self.now:
            if start < float("inf"):
                self._after(start - self.now, self._try_step)
            return
        waited = self.now - self._free_since
        self._waited += waited
        self._stepping = True
        admitted, beside = self.policy.admit(usable), self.policy.beside()
        self._beside = 0 if beside is None else int(beside.sum())
        seconds = self.step_seconds(self.sessions + int(admitted.sum()) + self._beside)
        self._after(seconds, lambda: self._finish(seconds, waited, admitted, beside))

    def _finish(self, seconds: float, waited: float, admitted: Ints, beside: Bools | None) -> None:
        accepted = np.minimum(self.book.first_wrong[self.trace, self.log] - self.log, admitted)
        self.branched = self._branched(accepted, beside)
        committed = accepted + 1 + self.branched
        self.judged = np.minimum(self.standing(), admitted + 1)
        self.true = np.minimum(self.book.first_wrong[self.trace, self.log] - self.log, self.judged)
        self._judge(admitted, accepted)
        self.log = self.log + committed
        self._tokens += int(committed.sum())
        self._verified += int(admitted.sum()) + self._beside
        self.policy.stepped(seconds, waited, admitted, accepted, committed)
        over = np.flatnonzero(self.log >= self.book.tokens[self.trace])
        for session in over:
            self._replace(int(session))
        news = self.trace.copy(), self.answer.copy(), self.log.copy()
        self._after(self.round_trip / 2, lambda: self._hear(lambda: self._commit(*news)))
        self._steer()
        self._stepping, self._free_since = False, self.now
        self._try_step()

    def _branched(self, accepted: Ints, beside: Bools | None) -> Ints:
        """Returns for each session 1 if the token behind the accepted ones was verified beside the path."""
        if beside is None:
            return np.zeros_like(accepted)
        place = np.minimum(accepted, MOST_DRAFTS - 1)
        other = self.book.others[self.trace, self.log + accepted]
        taken = beside[self.rows, place, np.maximum(other - 1, 0)] & (other > 0) & (accepted < MOST_DRAFTS)
        return np.asarray(taken.astype(np.int64))

    @property
    def beside(self) -> int:
        """Returns how many tokens the last step verified beside the paths."""
        return self._beside

    def _replace(self, session: int) -> None:
        if self.next_trace < len(self.book.tokens):
            self.trace[session] = self.next_trace
            self.next_trace += 1
        self.log[session] = 0
        self.here_end[session] = 0
        self.here_wrong[session] = self.book.first_wrong[self.trace[session], 0]
        self.answer[session] += 1
        self.policy.opened(session)

    def _judge(self, admitted: Ints, accepted: Ints) -> None:
        """Holds promises against what came true, as far as it was seen."""
        depth = np.arange(MOST_DRAFTS)
        seen = depth < np.minimum(accepted + 1, admitted)[:, None]
        promised = self.chances(admitted)[seen]
        true = np.broadcast_to(depth < accepted[:, None], seen.shape)[seen]
        judged = np.stack([np.ones(len(promised)), promised, true], axis=1)
        np.add.at(self._promises, np.minimum((promised * BINS).astype(int), BINS - 1), judged)

    def _error_of_calibration(self) -> float:
        count, promised, true = self._promises.T
        return float(np.abs(promised - true).sum() / max(count.sum(), 1))

    # The router.

    def _steer(self) -> None:
        """Sends k and windows where the policy has changed them."""
        k = self.policy.k()
        window = self.policy.windows(k)
        self._messages += int((k != self._sent_k).sum() + (window != self._sent_window).sum())
        if not np.array_equal(k, self._sent_k):
            self._after(ROUTER_SECONDS, lambda: self._set_k(k))
        if not np.array_equal(window, self._sent_window):
            self._after(
                ROUTER_SECONDS + self.round_trip / 2, lambda: self._hear(lambda: self._set_window(window))
            )
        self._sent_k, self._sent_window = k, window

    def _set_k(self, k: Ints) -> None:
        self.k = k
        self._try_step()

    def _set_window(self, window: Ints) -> None:
        self.window = window

    # The drafters.

    def _hear(self, news: Callable[[], None]) -> None:
        """Notes news, which is applied between two draft steps."""
        self._news.append(news)
        if not self._drafting:
            self._draft()

    def _commit(self, trace: Ints, answer: Ints, log: Ints) -> None:
        """Keeps what the commit confirms and drops the rest; every position that was committed is scored."""
        begun = answer != self._answer_drafted
        self.known[begun] = self.end[begun] = 0
        for session in np.flatnonzero(log > self.known):
            new = np.s_[trace[session], self.known[session] : log[session]]
            self.policy.scored(int(session), self.book.confidence[new], self.book.accepted[new])
        stands = (self.wrong >= log) & ~begun
        self.end = np.where(stands, np.maximum(self.end, log), log)
        self.wrong = self.book.first_wrong[trace, log]
        self.known, self._answer_drafted, self._trace_drafted = log, answer, trace

    def _draft(self) -> None:
        """Starts a draft step for every session that wants a token; without one the drafters idle."""
        for news in self._news:
            news()
        self._news.clear()
        room = self.book.tokens[self._trace_drafted] - self.end - 1
        wanting = np.flatnonzero((self.end - self.known < self.window) & (room > 0))
        self._drafting = len(wanting) > 0
        if self._drafting:
            seconds = self.costs.draft_token(min(len(wanting), self.costs.drafter_sessions))
            self.draft_seconds += (0.1 if self.draft_seconds else 1.0) * (seconds - self.draft_seconds)
            self._after(seconds, lambda: self._drafted_one(wanting))

    def _drafted_one(self, wanting: Ints) -> None:
        """Adds one more guess for each; they are sent at once."""
        position, trace = self.end[wanting], self._trace_drafted[wanting]
        chance = self.policy.probabilities(
            wanting, position - self.known[wanting], self.book.confidence[trace, position]
        )
        self.end[wanting] += 1
        self._drafted += len(wanting)
        wrong, answer = self.wrong[wanting], self._answer_drafted[wanting]
        self._after(self.round_trip / 2, lambda: self._arrive(wanting, answer, position, wrong, chance))
        self._draft()

    def _arrive(self, sessions: Ints, answer: Ints, position: Ints, wrong: Ints, chance: Floats) -> None:
        late = (self.answer[sessions] != answer) | (wrong < self.log[sessions])
        taken = sessions[~late]
        self.here_end[taken], self.here_wrong[taken] = position[~late] + 1, wrong[~late]
        self.here_chance[taken, position[~late]] = chance[~late]
        self.policy.arrived(taken)
        self._try_step()
