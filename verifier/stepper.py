"""Runs the target model in steps: one ragged batch for all sessions, then the next.

A step is planned (step_plan.py), run by the engine, and settled (step_settlement.py). Before it there may be
a wait for drafts (step_wait.py). Everything here happens on the event loop's thread, but for the forward pass
itself: while the engine thread runs step n, drafts that arrive fold into the sessions' trees and the results
of step n-1 are sent. Blocks are taken only between two steps, so a session may be closed at any time. No
transport: commands are method calls, results are handed to `on_step`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from outrider.engine.engine import Engine
from outrider.errors import InvalidRequest, PeerLost, Unavailable
from outrider.grammar import Grammars, Place
from outrider.options.engine import StepLimits
from outrider.sampling.logprobs import Scores
from outrider.sampling.sampler import TokenCounts
from outrider.telemetry.spans import Tracer
from outrider.wire.load import VerifierLoad
from outrider.worker.stepwatch import StepUnderWay, under_way
from verifier.drafter_seat import DrafterSeat
from verifier.part import Part
from verifier.price import StepTime
from verifier.running import Running
from verifier.session import DraftFate, Outcome, Session, SessionSpec
from verifier.session_limits import SessionLimits
from verifier.session_trace import SessionTrace
from verifier.speculator_guesses import SpeculatorGuesses
from verifier.step_plan import StepPlanner
from verifier.step_settlement import measure, settle
from verifier.step_start import StartAt, start_at
from verifier.step_wait import StepWait
from verifier.ways import Ways

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepReport:
    outcomes: tuple[tuple[Running, Outcome], ...]
    failed: tuple[Running, ...]  # whose step raised: they are over
    load: VerifierLoad


class Stepper:
    """Owns the sessions, their KV blocks and the engine thread."""

    def __init__(
        self,
        engine: Engine,
        limits: StepLimits,
        on_step: Callable[[StepReport], None],
        clock: Callable[[], float],
        start_at: StartAt = start_at,
        step_time: StepTime | None = None,
        grammars: Grammars | None = None,
        ways: Ways | None = None,
        trees: bool = True,
        tracer: Tracer | None = None,
    ) -> None:
        """`start_at` decides when a step starts: step_start.start_at, or another function of its kind.
        `step_time`: the engine's profile, from which the price of a token follows; None = no price.
        `grammars`: those of the model's tokenizer. `ways` to run; None = drafts are always taken. `trees`:
        whether more than a path of a session's drafts may run in a step, if the engine can do that. `tracer`:
        None = sessions have no spans."""
        self._tracer = tracer
        info, pool = engine.info, engine.pool
        self._engine = engine
        self._pool = pool
        self._may_open = SessionLimits(info.vocab_size, info.max_context, pool.num_blocks * pool.block_size)
        self._on_step = on_step
        self._clock = clock
        self._sessions: dict[bytes, Running] = {}  # in order of priority and arrival
        self._changed = asyncio.Event()  # a session or a draft has come, or a session gone
        self._empty = asyncio.Event()
        self._empty.set()
        self._step_time = step_time
        self.under_way: StepUnderWay | None = None  # the step that the engine runs now
        self._ways = ways or Ways(engine, step_time)
        self._wait = StepWait(start_at)
        lay_out = engine.attention.lay_out if trees else None
        self._planner = StepPlanner(pool, limits, self.close, info.vocab_size, lay_out)
        self._grammars = grammars
        self._speculator = SpeculatorGuesses(engine, self._clock)
        self._greedy = 0  # sessions whose text is not drawn
        self._draining = False
        self._moving: list[Running] = []  # the step under way moves what they have, and runs nothing of them
        self._report: StepReport | None = None  # of the last step, not told yet

    @property
    def load(self) -> VerifierLoad:
        """Returns the load as of now, without a step behind it."""
        return self._measured(0.0, 0)

    @property
    def resting(self) -> bool:
        """Returns whether the next step takes no drafts."""
        return self._ways.resting

    @property
    def beside(self) -> float:
        """Returns the survival from which on a draft token beside a path may take part; 0 = none does."""
        return self._planner.least_beside(self._ways.meter) or 0.0

    def get(self, session_id: bytes) -> Running | None:
        return self._sessions.get(session_id)

    async def probe(self) -> None:
        """Runs a forward of one token."""
        await self._engine.run(self._engine.probe)

    def drain(self) -> None:
        """Takes no new sessions from now on; those that are open go on."""
        self._draining = True

    def open(self, spec: SessionSpec, num_speculative_tokens: int) -> Running:
        """Raises InvalidRequest, naming the field and the limit, if the session could never run, and
        Unavailable while draining."""
        if self._draining:
            raise Unavailable("this target worker is about to leave")
        if spec.session_id in self._sessions:
            raise InvalidRequest("session_id is in use; ids are never used twice", field="session_id")
        self._may_open.check(spec)
        counts = TokenCounts(spec.params.prompt, spec.output) if spec.params.sampling.penalized else None
        running = Running(Session(spec, num_speculative_tokens), counts, self._place(spec))
        if self._speculator.most and counts is None:  # penalties follow each token
            running.speculated = self._speculator.believed(spec)
        if self._tracer is not None:
            model = self._engine.info.name
            running.trace = SessionTrace(self._tracer, spec.trace, spec, model, self._clock)
        running.session.resting = self.resting
        found = self._pool.cached(running.cacheable, spec.params.cache_salt, running.digests)
        running.found_tokens = found.tokens
        hurry = next(reversed(self._sessions.values()), running).session.spec.params.priority
        self._sessions[spec.session_id] = running
        if spec.params.priority < hurry:  # it comes before others
            order = sorted(self._sessions.items(), key=lambda one: one[1].session.spec.params.priority)
            self._sessions = dict(order)
        self._greedy += spec.params.sampling.greedy
        self._changed.set()
        self._empty.clear()
        return running

    def close(self, session_id: bytes, failed: bool = False) -> Running | None:
        """Forgets a session and gives its blocks back; unknown ids are ignored. `failed`: its step did."""
        running = self._sessions.pop(session_id, None)
        if running is not None:
            self._pool.close(running.table)
            if running.trace is not None:
                running.trace.over(failed)
            self._greedy -= running.session.spec.params.sampling.greedy
            self._changed.set()
            if not self._sessions:
                self._empty.set()
        return running

    def offer(
        self, seat: DrafterSeat, base: int, tokens: list[int], parents: Sequence[int], survival: bytes
    ) -> DraftFate:
        """Folds a draft into its session's tree."""
        fate, grown = seat.offer(base, tokens, parents, survival, self._clock())
        if grown:
            self._changed.set()
        return fate

    async def until_empty(self) -> None:
        """Waits until there is no session."""
        await self._empty.wait()

    async def run(self) -> None:
        """Steps until the engine cannot any more; raises why."""
        await self._engine.serve(self._steps())

    async def _steps(self) -> None:
        free_since = self._clock()
        guessed = 0.0  # seconds of the speculator before a step, which pays for them
        known = False  # what a step takes; not of the first, which makes ready what the others find
        while True:
            free_since, began = await self._until_due(free_since)
            wanted = any(one.session.num_speculative_tokens > 0 for one in self._sessions.values())
            if self._ways.turn_to(self._greedy, len(self._sessions), wanted):
                self._rest(self.resting)
            parts = self._planner.plan(self._sessions, self._ways.meter)
            if not parts:
                self._after()
                await self._change()
                free_since = self._clock()
                continue
            works = [part.work() for part in parts]
            self._moving = [running for running in self._sessions.values() if running.moves]
            if waiting := [pair for running in self._moving for pair in running.take_moves()]:
                works[0] = works[0]._replace(moves=(*works[0].moves, *waiting))
            inputs = self._engine.prepare(works)
            rows = [row for part in parts for row in part.rows()]
            tokens = sum(part.tokens + part.drafts for part in parts)
            self.under_way = under_way(self._ways.longest_step(tokens) if known else None)
            known = self._step_time is not None
            scores = _scores(parts)
            asked = () if scores is None else (None, scores)
            self._ways.use_threads(sum(part.tokens for part in parts if part.tokens > 1))
            step = self._engine.run_step(self._engine.choose, inputs, rows, *asked)
            self._after()  # while the device runs
            chosen = await _result(step)
            self.under_way = None
            waited, free_since = began - free_since, self._clock()
            self._report = self._finish(parts, chosen, free_since - began + guessed, waited, scores)
            guessed = await self._guess(parts, self._report.outcomes) if self._speculator.most else 0.0
            free_since += guessed

    async def _guess(self, parts: Sequence[Part], outcomes: Sequence[tuple[Running, Outcome]]) -> float:
        """Has the speculator guess what follows a step. Returns the seconds."""
        began, self.under_way = self._clock(), under_way()
        if any(running.drafted for running, _ in outcomes):
            self._after()  # so that drafts come meanwhile; else the step is told while the next one runs
        await self._speculator.add(parts, outcomes, self._ways.meter)
        self.under_way = None
        return self._clock() - began

    def _place(self, spec: SessionSpec) -> Place | None:
        """Returns where a session is in its grammar, if it has one."""
        if not spec.params.grammar:
            return None
        if self._grammars is None:
            raise InvalidRequest("this target worker knows no grammars", field="grammar")
        wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self._changed.set)
        return self._grammars.place(spec.params.grammar, spec.output, wake)

    async def _until_due(self, free_since: float) -> tuple[float, float]:
        """Waits while there is no session, then while it pays to wait for drafts. Returns since when the
        engine has been free for a step, and when that begins."""
        while True:
            while not self._sessions:
                self._after()
                await self._change()
                free_since = self._clock()
            now = self._clock()
            start = self._wait.start_at(self._sessions.values(), now, free_since, self._ways.meter)
            if start <= now:
                return free_since, now
            self._after()
            try:
                async with asyncio.timeout(start - now):
                    await self._change()
            except TimeoutError:
                pass

    async def _change(self) -> None:
        """Waits until a session or a draft comes, or a session goes."""
        self._changed.clear()
        await self._changed.wait()

    def _finish(
        self,
        parts: Sequence[Part],
        chosen: list[int] | None,
        seconds: float,
        waited: float,
        scores: Scores | None,
    ) -> StepReport:
        """Settles the step, or ends its sessions if it raised, and closes who is over."""
        outcomes: list[tuple[Running, Outcome]] = []
        failed: list[Running] = []
        if chosen is None:
            ran = [*(part.running for part in parts), *self._moving]
            failed = [running for running in ran if self.get(running.id) is running]
        else:
            outcomes = settle(parts, chosen, self._sessions, self._pool, self._clock(), scores)
            failed = [
                part.running
                for part in parts
                if self.get(part.running.id) is part.running and part.running.lost
            ]
            for running in failed:
                log.warning("session %s is ended by its grammar: %.200s", running.id.hex(), running.fault)
        for running, outcome in outcomes if self._tracer is not None else ():
            if running.trace is not None:
                running.trace.committed(outcome)
        for running in failed:
            self.close(running.id, failed=True)
        for running in [each for each, outcome in outcomes if outcome.finish is not None]:
            self.close(running.id)
        self._wait.judge(waited, outcomes, self._ways.meter)
        committed = sum(len(outcome.tokens) for _, outcome in outcomes)
        tokens, seen = measure(self._ways.meter, parts, committed, seconds, waited)
        report = StepReport(tuple(outcomes), tuple(failed), self._measured(seconds, tokens))
        drafted = any(part.running.drafted or self._speculator.guesses_for(part.running) for part in parts)
        who = partial(_drafters, parts)
        if chosen is not None and seen is not None and self._ways.observe(seen, drafted, who):
            self._rest(self.resting)
        return report

    def _rest(self, resting: bool) -> None:
        """Takes drafts, or none but the verifier's own guesses, from the next step on. What drafters were
        slow in meanwhile is no fault of theirs."""
        for running in self._sessions.values():
            running.session.rest(resting)
            for seat in running.seats:
                seat.forget()

    def _measured(self, step_seconds: float, step_tokens: int) -> VerifierLoad:
        waiting = unread = 0
        meter = self._ways.meter
        for running in self._sessions.values():
            waiting += not running.table.blocks
            unread += running.unread
        return VerifierLoad(
            running=len(self._sessions) - waiting,
            waiting=waiting,
            kv_usage=max(self._pool.usage, self._planner.places_taken(len(self._sessions) - waiting)),
            step_seconds=step_seconds,
            step_tokens=step_tokens,
            price=meter.price,
            typical_step_seconds=meter.step_seconds,
            preemptions=self._planner.preemptions,
            draining=self._draining,
            draft_starvation=meter.starvation,
            unread_prompt_tokens=unread,
            prompt_token_seconds=meter.prompt_token_seconds,
            goodput=meter.goodput,
            drafts_rest=self.resting,
            draft_gain=self._ways.gain,
            draft_trials=self._ways.trials,
            draft_cost=meter.draft_cost,
        )

    def _after(self) -> None:
        """Does what is left of the last step, once: learns from it and hands its report on."""
        report, self._report = self._report, None
        if report is not None:
            for running, _ in report.outcomes:
                running.learn()
            self._on_step(report)


def _drafters(parts: Sequence[Part]) -> set[str]:
    return {seat.drafter for part in parts for seat in part.running.seats if seat.pace is not None}


def _scores(parts: Sequence[Part]) -> Scores | None:
    """Returns what the step is to tell of its rows besides tokens; None if nobody asked."""
    counts = [part.running.session.spec.params.logprobs for part in parts]
    scored = any(part.scored for part in parts)
    if not scored and counts.count(None) == len(counts):
        return None
    rows = [part.drawn for part in parts]
    by_row = [count for count, own in zip(counts, rows, strict=True) for _ in range(own)]
    if not scored:
        return Scores(by_row)
    prompts, drawn, first = [], list[int](), 0
    for part, own in zip(parts, rows, strict=True):
        if part.scored:
            prompts.append(part.prompt_rows(first))
        drawn += range(first + part.scored, first + part.scored + own)
        first += part.scored + own
    return Scores(by_row, prompts, drawn)


async def _result(step: asyncio.Future[list[int]]) -> list[int] | None:
    try:
        return await step
    except PeerLost:
        raise
    except Exception:
        log.exception("a step failed; its sessions are ended")
        return None


__all__ = ["Running", "StepReport", "Stepper"]
