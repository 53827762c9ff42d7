"""Runs the target model in steps: one ragged batch for all sessions, then the next.

Everything here happens on the event loop's thread, but for the forward pass itself: while the engine thread
runs step n, drafts that arrive fold into the sessions' trees and the results of step n-1 are sent. Blocks
are taken only between two steps, so a session may be closed at any time. No transport: commands are method
calls, results are handed to `on_step`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.engine.engine import Engine
from outrider.engine.kv_blocks import Cached
from outrider.engine.scheduler import Candidate, Grant, Limits, schedule
from outrider.errors import InvalidRequest, PeerLost, Unavailable
from outrider.options.engine import StepLimits
from outrider.sampling.sampler import TokenCounts
from outrider.wire.load import VerifierLoad
from outrider.worker.stepwatch import StepUnderWay, under_way
from verifier.admission import admit
from verifier.drafter_seat import DrafterSeat
from verifier.meter import Meter
from verifier.orphans import dispensable
from verifier.price import StepTime
from verifier.running import Part, Path, Running
from verifier.session import DraftFate, Outcome, Session, SessionSpec
from verifier.step_start import StartAt, Waits, start_at

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
    ) -> None:
        """`start_at` decides when a step starts: step_start.start_at, or another function of its kind.
        `step_time`: the engine's profile, from which the price of a token follows; None = no price."""
        self._engine = engine
        self._limits = Limits(limits.max_batch_tokens, limits.prefill_chunk, engine.pool.block_size)
        self._on_step = on_step
        self._clock = clock
        self._decide = start_at
        self._sessions: dict[bytes, Running] = {}  # in order of arrival
        self._changed = asyncio.Event()  # a session or a draft has come, or a session gone
        self._empty = asyncio.Event()
        self._empty.set()
        self._step_time = step_time
        self.under_way: StepUnderWay | None = None  # the step that the engine runs now
        self._meter = Meter(step_time) if step_time is not None else Meter()
        self._waits = Waits()
        self._at_hand: dict[bytes, int] | None = None  # drafts of each session when a wait began, if one did
        self._preemptions = 0
        self._draining = False
        self._report: StepReport | None = None  # of the last step, not told yet

    @property
    def load(self) -> VerifierLoad:
        """As of now, without a step behind it."""
        return self._measured(0.0, 0)

    def get(self, session_id: bytes) -> Running | None:
        return self._sessions.get(session_id)

    async def probe(self) -> None:
        """A one-token forward."""
        await self._engine.run(self._engine.probe)

    def drain(self) -> None:
        """Takes no new sessions from now on; those that are open go on."""
        self._draining = True

    def open(self, spec: SessionSpec, num_speculative_tokens: int) -> Running:
        """Raises InvalidRequest, naming the field and the limit, where the session could never run, and
        Unavailable while draining."""
        if self._draining:
            raise Unavailable("this target worker is about to leave")
        self._check(spec)
        counts = TokenCounts(spec.params.prompt, spec.output) if spec.params.sampling.penalized else None
        running = Running(Session(spec, num_speculative_tokens), counts)
        running.found_tokens = self._engine.pool.cached(running.session.log).tokens
        self._sessions[spec.session_id] = running
        self._changed.set()
        self._empty.clear()
        return running

    def close(self, session_id: bytes) -> Running | None:
        """Forgets a session and gives its blocks back; unknown ids are ignored."""
        running = self._sessions.pop(session_id, None)
        if running is not None:
            self._engine.pool.close(running.table)
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
        """Until there is no session."""
        await self._empty.wait()

    async def run(self) -> None:
        """Steps until the engine cannot any more; raises why."""
        await self._engine.serve(self._steps())

    async def _steps(self) -> None:
        free_since = self._clock()
        expected: StepTime | None = None  # of the first step: it makes ready what the others find
        while True:
            free_since, began = await self._until_due(free_since)
            parts = self._next_step()
            if not parts:
                self._tell()
                await self._change()
                free_since = self._clock()
                continue
            inputs = self._engine.prepare([part.work() for part in parts])
            rows = [row for part in parts for row in part.rows()]
            tokens = sum(part.tokens + len(part.path) for part in parts)
            self.under_way = under_way(expected.at(tokens) if expected else None)
            expected = self._step_time
            step = self._engine.run(self._engine.choose, inputs, rows)
            self._tell()  # while the device runs
            chosen = await _result(step)
            self.under_way = None
            waited, free_since = began - free_since, self._clock()
            self._report = self._finish(parts, chosen, free_since - began, waited)

    def _check(self, spec: SessionSpec) -> None:
        info = self._engine.info
        params, total = spec.params, spec.params.most_tokens
        if spec.session_id in self._sessions:
            raise InvalidRequest("session_id is in use; ids are never used twice", field="session_id")
        if not params.prompt:
            raise InvalidRequest("prompt must hold at least one token", field="prompt")
        if any(token >= info.vocab_size for token in (*params.prompt, *spec.output)):
            raise InvalidRequest(f"prompt: token ids go from 0 to {info.vocab_size - 1}", field="prompt")
        if not len(spec.output) < params.max_tokens:
            raise InvalidRequest(
                f"max_tokens must be more than the {len(spec.output)} tokens of output so far",
                field="max_tokens",
            )
        if total > info.max_context:
            raise InvalidRequest(
                f"prompt and max_tokens come to {total} tokens; the context has {info.max_context}",
                field="max_tokens",
            )
        slots = self._engine.pool.num_blocks * self._limits.block_size
        if total > slots:
            raise InvalidRequest(
                f"prompt and max_tokens come to {total} tokens; the KV pool holds {slots} (see --kv-memory)",
                field="max_tokens",
            )
        params.sampling.validate(info.vocab_size)

    async def _until_due(self, free_since: float) -> tuple[float, float]:
        """Waits while there is no session, then while it pays to wait for drafts. Since when the engine has
        been free for a step, and when that begins."""
        while True:
            while not self._sessions:
                self._tell()
                await self._change()
                free_since = self._clock()
            now = self._clock()
            start = self._start_at(now, free_since)
            if start <= now:
                return free_since, now
            self._tell()
            if self._at_hand is None:
                self._at_hand = {each.id: len(each.session.tree.path) for each in self._sessions.values()}
            try:
                async with asyncio.timeout(start - now):
                    await self._change()
            except TimeoutError:
                pass

    def _start_at(self, now: float, free_since: float) -> float:
        believed = self._waits.factor
        awaited = [found for each in self._sessions.values() for found in each.awaited(believed)]
        if not awaited:
            return now
        meter = self._meter
        return self._decide(now, free_since, meter.step_seconds, meter.goodput, awaited, meter.price)

    async def _change(self) -> None:
        """Waits until a session or a draft comes, or a session goes."""
        self._changed.clear()
        await self._changed.wait()

    def _next_step(self) -> list[Part]:
        """Chooses who runs and takes the blocks for it."""
        pool = self._engine.pool
        while True:
            everyone = list(self._sessions.values())
            paths = [running.path() for running in everyone]
            decoding = sum(running.decoding for running in everyone)
            drafts = self._admit(everyone, paths, decoding)
            candidates = [
                Candidate(
                    running.pending,
                    count,
                    running.table.length,
                    len(running.table.blocks),
                    running.preemptions,
                )
                for running, count in zip(everyone, drafts, strict=True)
            ]

            def lost(index: int, everyone: Sequence[Running] = everyone) -> int:
                return pool.own_tokens(everyone[index].table)

            def cached(index: int, everyone: Sequence[Running] = everyone) -> Cached:
                return pool.cached(everyone[index].session.log)

            reading = self._meter.reading(decoding + sum(drafts))
            chosen = schedule(candidates, pool.available, self._limits, reading, lost, cached)
            in_the_way = dispensable(everyone, chosen, pool)
            if in_the_way is not None:
                self.close(in_the_way.id)
                continue
            if chosen.preempt is None:
                return [
                    self._start(everyone[grant.index], grant, paths[grant.index]) for grant in chosen.grants
                ]
            victim = everyone[chosen.preempt]
            pool.close(victim.table)
            victim.preemptions += 1
            self._preemptions += 1

    def _admit(self, everyone: Sequence[Running], paths: Sequence[Path], decoding: int) -> list[int]:
        """How many draft tokens of each session take part, by what they bring and what they cost. A prompt
        that is read beside them is left out of the sum: it is paid for by what it brings itself."""
        if not any(tokens for tokens, _ in paths):
            return [0] * len(paths)
        survival = [running.survival(chances) for running, (_, chances) in zip(everyone, paths, strict=True)]
        budget = self._limits.max_tokens - decoding
        return admit(survival, decoding, decoding, self._meter.step_time, budget).counts

    def _start(self, running: Running, grant: Grant, path: Path) -> Part:
        pool = self._engine.pool
        if not running.table.blocks:
            running.table = pool.open(running.session.log)
            if running.cached_prompt_tokens is None:
                running.cached_prompt_tokens = running.table.length
        start = running.table.length
        tokens = min(grant.tokens, len(running.session.log) - start)
        pool.extend(running.table, tokens + grant.drafts)
        final = start + tokens == len(running.session.log)
        return Part(running, start, tokens, path[0][: grant.drafts], path[1][: grant.drafts], final)

    def _finish(
        self, parts: Sequence[Part], chosen: list[int] | None, seconds: float, waited: float
    ) -> StepReport:
        """Commits what the step chose and gives back the slots of rejected drafts."""
        now = self._clock()
        if chosen is None:
            self._at_hand = None
            failed = tuple(
                part.running for part in parts if self._sessions.get(part.running.id) is part.running
            )
            for running in failed:
                self.close(running.id)
            return StepReport((), failed, self._measure(seconds, waited, parts, 0))
        outcomes = []
        offset = committed = 0
        pool = self._engine.pool
        for part in parts:
            rows = len(part.path) + 1 if part.final else 0
            picked, offset = chosen[offset : offset + rows], offset + rows
            running = part.running
            if self._sessions.get(running.id) is not running:
                continue  # closed while the step ran
            if not part.final:
                pool.seal(running.table, running.session.log)
                continue
            outcome = running.settle(part, picked, now)
            outcomes.append((running, outcome))
            committed += len(outcome.tokens)
            pool.truncate(running.table, outcome.base + min(outcome.accepted, len(outcome.tokens) - 1))
            pool.seal(running.table, running.session.log)
            if outcome.finish is not None:
                self.close(running.id)
        return StepReport(tuple(outcomes), (), self._measure(seconds, waited, parts, committed))

    def _judge_wait(self, waited: float, outcomes: Iterable[tuple[Running, Outcome]]) -> None:
        """Learns from what came of the wait before the step, if there was one."""
        at_hand, self._at_hand = self._at_hand, None
        if at_hand is None:
            self._waits.observe(0.0, 0)
            return
        came = sum(
            max(0, outcome.accepted - at_hand.get(running.id, outcome.accepted))
            for running, outcome in outcomes
        )
        self._waits.observe(self._meter.goodput * waited, came)

    def _measure(self, seconds: float, waited: float, parts: Sequence[Part], committed: int) -> VerifierLoad:
        tokens = decoding = wanting = starved = 0
        for part in parts:
            drafts = len(part.path)
            tokens += part.tokens + drafts
            decoding += 1 + drafts if part.tokens == 1 else 0
            if part.running.session.num_speculative_tokens > 0:
                wanting += 1
                starved += not drafts
        if decoding == tokens:
            starvation = starved / wanting if wanting else None
            self._meter.observe(seconds, tokens, committed, starvation, waited)
        else:
            self._meter.observe_reading(seconds, decoding, tokens - decoding)
        return self._measured(seconds, tokens)

    def _measured(self, step_seconds: float, step_tokens: int) -> VerifierLoad:
        waiting = unread = 0
        for running in self._sessions.values():
            waiting += not running.table.blocks
            unread += running.unread
        return VerifierLoad(
            running=len(self._sessions) - waiting,
            waiting=waiting,
            kv_usage=self._engine.pool.usage,
            step_seconds=step_seconds,
            step_tokens=step_tokens,
            price=self._meter.price,
            typical_step_seconds=self._meter.step_seconds,
            preemptions=self._preemptions,
            draining=self._draining,
            draft_starvation=self._meter.starvation,
            unread_prompt_tokens=unread,
            prompt_token_seconds=self._meter.prompt_token_seconds,
        )

    def _tell(self) -> None:
        """Hands the last step's report on, once."""
        report, self._report = self._report, None
        if report is not None:
            self._on_step(report)


async def _result(step: asyncio.Future[list[int]]) -> list[int] | None:
    try:
        return await step
    except PeerLost:
        raise
    except Exception:
        log.exception("a step failed; its sessions are ended")
        return None


__all__ = ["Running", "StepReport", "Stepper"]
