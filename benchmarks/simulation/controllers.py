"""Outrider's own controllers, taken from the three rooms as they are and put to work in a World."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.traces import OTHERS
from benchmarks.simulation.world import MOST_DRAFTS, Bools, Floats, Ints, World
from drafter.acceptance_model import FIRST_RATES
from drafter.survival import FIRST_RECENT, Calibration, recent_after
from router.speculation import Estimator, PairAcceptance, choose_k, settled, window, worth_sending
from verifier.admission import admit
from verifier.disputes import DEPTHS
from verifier.meter import Meter
from verifier.price import StepTime
from verifier.running import USUAL_SMOOTHING
from verifier.session import LEAST_SURVIVAL
from verifier.step_plan import BESIDE_PRICE, LEAST_BESIDE
from verifier.step_start import FIRST_ACCEPTANCE, Arrivals, Awaited, Pace, Waits, acceptance_after, start_at
from verifier.survival_calibration import DOUBTED, SurvivalCalibration

PROFILED = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)  # tokens of the steps that are timed at start
BUDGET = 4096  # most tokens in a step

Node = tuple[float, int, int]
"""(survival, depth, which of OTHERS it is, from 1 on; 0 = the path's)."""


class Verifier:
    """What a verifier measures and decides."""

    def __init__(self, world: World) -> None:
        self._world = world
        profile = {tokens: world.costs.step(tokens, 0) for tokens in PROFILED}  # of short sessions
        self.meter = Meter(StepTime.measured(profile))
        self._pace = Pace()
        self._waits = Waits()
        self._at_hand: Ints | None = None  # drafts of each session when a wait began, if one did
        self._arrivals = [Arrivals() for _ in range(world.sessions)]
        self._calibrations = [SurvivalCalibration() for _ in range(world.sessions)]
        self._acceptance = [FIRST_ACCEPTANCE] * world.sessions
        self._usual = np.ones(world.sessions)

    def opened(self, session: int) -> None:
        self._arrivals[session] = Arrivals()
        self._calibrations[session] = SurvivalCalibration()
        self._acceptance[session] = FIRST_ACCEPTANCE
        self._usual[session] = 1.0

    def arrived(self, sessions: Ints) -> None:
        for session in sessions:
            self._arrivals[session].arrived(self._world.now, 1, self._pace)

    def survival(self, usable: Ints) -> Floats:
        """Returns [sessions, MOST_DRAFTS] P(this and all before it are accepted), as far as drafters are
        believed; 0 of what hardly survives of who is doubted."""
        by_depth = np.array([calibration.factors for calibration in self._calibrations])
        factors = np.pad(by_depth, ((0, 0), (0, MOST_DRAFTS - DEPTHS)), mode="edge")
        survival = np.cumprod(self._world.chances(usable) * factors, axis=1)
        left_out = np.logical_or.accumulate((survival < LEAST_SURVIVAL) & (factors < DOUBTED), axis=1)
        return np.where(left_out, 0.0, survival)

    def start_at(self, now: float, free_since: float, usable: Ints) -> float:
        wanted = np.minimum(self._world.k, self._world.room())
        lacking = [s for s in np.flatnonzero(usable < wanted) if not self._arrivals[s].silent]
        survival = self.survival(usable)
        awaited = [
            Awaited(
                self._arrivals[session].committed_at,
                self._arrivals[session].last_at,
                int(usable[session]),
                int(wanted[session]),
                self._acceptance[session],
                self._pace.lead,
                self._pace.token,
                self._waits.factor
                * self._pace.punctual
                * (float(survival[session, usable[session] - 1]) if usable[session] else 1.0),
            )
            for session in lacking
        ]
        if not awaited:
            return now
        meter = self.meter
        start = start_at(now, free_since, meter.step_seconds, meter.goodput, awaited, meter.price)
        if start > now and self._at_hand is None:
            self._at_hand = usable.copy()
        return start

    def admit(self, usable: Ints) -> Ints:
        sessions = self._world.sessions
        survival = self.survival(usable).tolist()
        paths = [path[:count] for path, count in zip(survival, usable.tolist(), strict=True)]
        usual = self._usual.tolist()
        return np.array(admit(paths, sessions, sessions, self.meter.step_time, BUDGET, usual).counts)

    def admit_trees(self, usable: Ints) -> tuple[Ints, Bools]:
        """Returns how much of each path enters, and what beside it: [sessions, MOST_DRAFTS, OTHERS]."""
        sessions = self._world.sessions
        chances, survival = self._world.chances(usable), self.survival(usable)
        least = max(LEAST_BESIDE, BESIDE_PRICE * self.meter.price)
        nodes = [
            self._nodes(session, chances[session].tolist(), survival[session].tolist()[:count], least)
            for session, count in enumerate(usable.tolist())
        ]
        survivals = [[survives for survives, _, _ in each] for each in nodes]
        usual = self._usual.tolist()
        counts = admit(survivals, sessions, sessions, self.meter.step_time, BUDGET, usual).counts
        paths, beside = np.zeros(sessions, np.int64), np.zeros((sessions, MOST_DRAFTS, OTHERS), bool)
        for session, (each, count) in enumerate(zip(nodes, counts, strict=True)):
            for _, depth, other in each[:count]:
                if other:
                    beside[session, depth, other - 1] = True
                else:
                    paths[session] += 1
        return paths, beside

    def _nodes(self, session: int, chances: list[float], survival: list[float], least: float) -> list[Node]:
        found = [(survives, depth, 0) for depth, survives in enumerate(survival)]
        for depth, before in enumerate([1.0, *survival][: len(survival)]):
            left = 1 - survival[depth] / before if before > 0 else 0.0
            for other, rate in enumerate(FIRST_RATES, 1):
                chance = min((1 - chances[depth]) * rate, 1 - left, left)
                if before * chance >= least:
                    found.append((before * chance, depth, other))
        return sorted(found, key=lambda node: -node[0])

    def judged(self, usable: Ints, admitted: Ints) -> None:
        """Notes what the drafts of a step promise, as it begins."""
        chances = self._world.chances(usable).tolist()
        self._promised = [path[:count] for path, count in zip(chances, admitted.tolist(), strict=True)]

    def stepped(self, seconds: float, waited: float, admitted: Ints, accepted: Ints, committed: Ints) -> None:
        left, k = self._world.standing().tolist(), self._world.k
        judged, true = self._world.judged.tolist(), self._world.true.tolist()
        self._usual += USUAL_SMOOTHING * (committed - self._usual)
        for session, (verified, right) in enumerate(zip(admitted.tolist(), accepted.tolist(), strict=True)):
            self._calibrations[session].observe(self._promised[session], right)
            # What followed the accepted ones is judged, too, by the token that the target chose there.
            self._acceptance[session] = acceptance_after(
                self._acceptance[session], true[session], judged[session]
            )
            arrivals = self._arrivals[session].committed(self._world.now, verified, left[session])
            self._arrivals[session] = arrivals
            if arrivals.missed and k[session] > 0:
                self._pace.missed()
        if self._at_hand is None:
            self._waits.observe(0.0, 0)
        else:
            came = int(np.maximum(accepted - self._at_hand, 0).sum())
            self._waits.observe(self.meter.goodput * waited, came)
        self._at_hand = None
        tokens = self._world.sessions + int(admitted.sum()) + self._world.beside
        self.meter.observe(seconds, tokens, int(committed.sum()), None, waited)


class Ours:
    """Outrider's way. If `router`, the router chooses k, otherwise it leaves it at the most."""

    def __init__(self, name: str, *, router: bool = True, trees: bool = False) -> None:
        """`trees`: whether more than a path is verified in a step."""
        self.name = name
        self._routed = router
        self._trees = trees
        self._beside: Bools | None = None

    @property
    def price(self) -> float:
        return self.verifier.meter.price

    def begin(self, world: World) -> None:
        self.world = world
        self.verifier = Verifier(world)
        self.calibrations = {True: Calibration(), False: Calibration()}  # greedy, drawn
        self._recent = [FIRST_RECENT] * world.sessions
        self._pair = PairAcceptance()
        self._estimators = [Estimator(self._pair.mean) for _ in range(world.sessions)]
        self._k = np.full(world.sessions, MOST_DRAFTS)
        self._windows = np.zeros(world.sessions, np.int64)
        if self._routed:
            self._choose(range(world.sessions))

    def opened(self, session: int) -> None:
        self.verifier.opened(session)
        self._recent[session] = FIRST_RECENT
        estimator = self._estimators[session]
        self._pair.absorb(estimator.accepted, estimator.observed)
        self._estimators[session] = Estimator(self._pair.mean)
        if self._routed:
            self._choose([session])

    def _choose(self, sessions: range | list[int]) -> None:
        price = self.verifier.meter.price
        for session in sessions:
            wanted = choose_k(self._estimators[session], price, MOST_DRAFTS)
            self._k[session] = settled(int(self._k[session]), wanted)

    def k(self) -> Ints:
        return self._k.copy()

    def windows(self, k: Ints) -> Ints:
        measured = (self.verifier.meter.step_seconds, self.world.round_trip, self.world.draft_seconds)
        by_k = [window(each, *measured) for each in range(MOST_DRAFTS + 1)]
        for session, each in enumerate(k):
            if worth_sending(int(self._windows[session]), by_k[each]):
                self._windows[session] = by_k[each]
        return self._windows.copy()

    def probabilities(self, sessions: Ints, depth: Ints, confidence: Floats) -> Floats:
        recent = np.array([self._recent[session] for session in sessions])
        drawn_greedily = self.world.book.greedy[self.world.trace[sessions]]
        found = np.empty(len(sessions))
        for greedy, calibration in self.calibrations.items():
            these = drawn_greedily == greedy
            told = zip(confidence[these].tolist(), recent[these].tolist(), depth[these].tolist(), strict=True)
            found[these] = [calibration.probability(*each) for each in told]
        return found

    def scored(self, session: int, confidence: Floats, accepted: NDArray[np.bool_]) -> None:
        calibration = self.calibrations[bool(self.world.book.greedy[self.world.trace[session]])]
        for depth, (sure, right) in enumerate(zip(confidence.tolist(), accepted.tolist(), strict=True)):
            calibration.observe(sure, self._recent[session], depth, right)
            self._recent[session] = recent_after(self._recent[session], right)

    def arrived(self, sessions: Ints) -> None:
        self.verifier.arrived(sessions)

    def start_at(self, now: float, free_since: float, usable: Ints) -> float:
        return self.verifier.start_at(now, free_since, usable)

    def admit(self, usable: Ints) -> Ints:
        if self._trees:
            admitted, self._beside = self.verifier.admit_trees(usable)
        else:
            admitted = self.verifier.admit(usable)
        self.verifier.judged(usable, admitted)
        return admitted

    def beside(self) -> Bools | None:
        return self._beside

    def stepped(self, seconds: float, waited: float, admitted: Ints, accepted: Ints, committed: Ints) -> None:
        self.verifier.stepped(seconds, waited, admitted, accepted, committed)
        if not self._routed:
            return
        branched = self.world.branched
        for session, seen in enumerate(
            zip(
                (accepted + branched).tolist(),
                np.where(branched > 0, accepted + 1, admitted).tolist(),  # behind a branch nothing stood
                committed.tolist(),
                strict=True,
            )
        ):
            self._estimators[session].observe(*seen)
        self._choose(range(self.world.sessions))
