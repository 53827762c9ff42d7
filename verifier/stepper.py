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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.scheduler import Candidate, Grant, Limits, plan
from outrider.errors import InvalidRequest, PeerLost, Unavailable
from outrider.sampling.sampler import Row, TokenCounts
from verifier.meter import Meter
from verifier.pace import Arrivals, Awaited, Pace, acceptance_after, start_at
from verifier.price import StepTime
from verifier.session import DraftFate, Finish, Outcome, Session, SessionSpec

log = logging.getLogger(__name__)

FIRST_ACCEPTANCE = 0.5  # of a session whose drafts have not been verified yet

StartAt = Callable[[float, float, float, float, Iterable[Awaited]], float]


@dataclass(slots=True, eq=False)
class Running:
    """A session with what the steps need beside its log."""

    session: Session
    counts: TokenCounts | None  # kept only where the request has penalties
    arrivals: Arrivals = field(default_factory=Arrivals)
    table: BlockTable = field(default_factory=BlockTable)
    pace: Pace | None = None  # of its drafter; None = nobody drafts
    acceptance: float = FIRST_ACCEPTANCE
    cached_prompt_tokens: int | None = None  # at its first start

    @property
    def id(self) -> bytes:
        return self.session.spec.session_id

    @property
    def pending(self) -> int:
        return len(self.session.log) - self.table.length

    def path(self) -> list[int]:
        return self.session.path() if self.pace else []


@dataclass(frozen=True, slots=True)
class Part:
    """A session's share of a step."""

    running: Running
    start: int  # tokens in the cache before
    tokens: int  # committed tokens that run
    path: tuple[int, ...]  # draft tokens that follow them
    final: bool  # whether the log's last token is among them, so that a token is drawn


@dataclass(frozen=True, slots=True)
class Load:
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    step_seconds: float = 0.0
    step_tokens: int = 0
    price: float = 0.0
    typical_step_seconds: float = 0.0
    preemptions: int = 0
    draining: bool = False
    draft_starvation: float = 0.0


@dataclass(frozen=True, slots=True)
class StepReport:
    outcomes: tuple[tuple[Running, Outcome], ...]
    failed: tuple[Running, ...]  # whose step raised: they are over
    load: Load


class Stepper:
    """Owns the sessions, their KV blocks and the engine thread."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        on_step: Callable[[StepReport], None],
        clock: Callable[[], float],
        start_at: StartAt = start_at,
        step_time: StepTime | None = None,
    ) -> None:
        """`start_at` decides when a step starts: verifier.pace.start_at, or another function of its kind.
        `step_time`: the engine's profile, from which the price of a token follows; None = no price."""
        self._engine = engine
        self._limits = replace(limits, block_size=engine.pool.block_size)
        self._on_step = on_step
        self._clock = clock
        self._decide = start_at
        self._sessions: dict[bytes, Running] = {}  # in order of arrival
        self._changed = asyncio.Event()  # a session or a draft has come, or a session gone
        self._empty = asyncio.Event()
        self._empty.set()
        self._meter = Meter(step_time)
        self._preemptions = 0
        self._draining = False
        self._report: StepReport | None = None  # of the last step, not told yet

    @property
    def load(self) -> Load:
        """As of now, without a step behind it."""
        return self._measured(0.0, 0)

    def get(self, session_id: bytes) -> Running | None:
        return self._sessions.get(session_id)

    def probe(self) -> None:
        """A one-token forward, from any thread."""
        self._engine.probe()

    def drain(self) -> None:
        """Takes no new sessions from now on; those that are open go on."""
        self._draining = True

    def open(self, spec: SessionSpec, num_speculative_tokens: int) -> Running:
        """Raises InvalidRequest, naming the field and the limit, where the session could never run, and
        Unavailable while draining."""
        if self._draining:
            raise Unavailable("this target worker is about to leave")
        self._check(spec)
        counts = TokenCounts(spec.prompt, spec.output) if spec.sampling.penalized else None
        running = Running(Session(spec, num_speculative_tokens), counts)
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
        self, running: Running, base: int, tokens: Sequence[int], parents: Sequence[int], survival: bytes
    ) -> DraftFate:
        """Folds a draft into its session's tree."""
        session = running.session
        before = session.tree.size
        fate = session.offer(base, tokens, parents, survival)
        if fate is DraftFate.TAKEN and running.pace is not None:
            running.arrivals.arrived(self._clock(), session.tree.size - before, running.pace)
            self._changed.set()
        return fate

    async def until_empty(self) -> None:
        """Until there is no session."""
        await self._empty.wait()

    async def run(self) -> None:
        """Steps until the engine cannot any more; raises why."""
        await self._engine.serve(self._steps())

    async def _steps(self) -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as engine_thread:
            while True:
                if self._must_wait():
                    self._tell()
                    await self._until_due()
                parts = self._next_step()
                if not parts:
                    self._tell()
                    await self._change()
                    continue
                inputs = self._engine.prepare([_work(part) for part in parts])
                rows = [row for part in parts for row in _rows(part)]
                began = self._clock()
                step = asyncio.get_running_loop().run_in_executor(
                    engine_thread, self._engine.choose, inputs, rows
                )
                self._tell()  # while the device runs
                self._report = self._finish(parts, await _result(step), began)

    def _check(self, spec: SessionSpec) -> None:
        info = self._engine.info
        total = len(spec.prompt) + spec.max_tokens
        if spec.session_id in self._sessions:
            raise InvalidRequest("session_id is in use; ids are never used twice", field="session_id")
        if not spec.prompt:
            raise InvalidRequest("prompt must hold at least one token", field="prompt")
        if any(token >= info.vocab_size for token in (*spec.prompt, *spec.output)):
            raise InvalidRequest(f"prompt: token ids go from 0 to {info.vocab_size - 1}", field="prompt")
        if not len(spec.output) < spec.max_tokens:
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
        spec.sampling.validate(info.vocab_size)

    def _without_draft(self) -> list[Running]:
        return [
            running
            for running in self._sessions.values()
            if running.pace is not None
            and running.pending == 1
            and not running.arrivals.silent
            and not running.path()
        ]

    def _must_wait(self) -> bool:
        now = self._clock()
        return not self._sessions or self._start_at(now, now, self._without_draft()) > now

    def _start_at(self, now: float, free_since: float, empty: Iterable[Running]) -> float:
        awaited = [_awaited(running) for running in empty if running.session.num_speculative_tokens > 0]
        return self._decide(now, free_since, self._meter.step_seconds, self._meter.goodput, awaited)

    async def _until_due(self) -> None:
        """Waits while there is no session, then while it pays to wait for drafts."""
        while not self._sessions:
            await self._change()
        free_since = self._clock()
        empty = self._without_draft()
        while (seconds := self._start_at(now := self._clock(), free_since, empty) - now) > 0:
            try:
                async with asyncio.timeout(seconds):
                    await self._change()
            except TimeoutError:
                return

    async def _change(self) -> None:
        """Waits until a session or a draft comes, or a session goes."""
        self._changed.clear()
        await self._changed.wait()

    def _next_step(self) -> list[Part]:
        """Chooses who runs and takes the blocks for it."""
        pool = self._engine.pool
        while True:
            everyone = list(self._sessions.values())
            paths = [running.path() if running.pending == 1 else [] for running in everyone]
            candidates = [
                Candidate(running.pending, len(path), running.table.length, len(running.table.blocks))
                for running, path in zip(everyone, paths, strict=True)
            ]
            chosen = plan(candidates, pool.available, self._limits)
            if chosen.preempt is None:
                return [
                    self._start(everyone[grant.index], grant, paths[grant.index]) for grant in chosen.grants
                ]
            pool.close(everyone[chosen.preempt].table)
            self._preemptions += 1

    def _start(self, running: Running, grant: Grant, path: list[int]) -> Part:
        pool = self._engine.pool
        if not running.table.blocks:
            running.table = pool.open(running.session.log)
            if running.cached_prompt_tokens is None:
                running.cached_prompt_tokens = running.table.length
        start = running.table.length
        tokens = min(grant.tokens, len(running.session.log) - start)
        pool.extend(running.table, tokens + grant.drafts)
        final = start + tokens == len(running.session.log)
        return Part(running, start, tokens, tuple(path[: grant.drafts]), final)

    def _finish(self, parts: Sequence[Part], chosen: list[int] | None, began: float) -> StepReport:
        """Commits what the step chose and gives back the slots of rejected drafts."""
        seconds = self._clock() - began
        if chosen is None:
            failed = tuple(
                part.running for part in parts if self._sessions.get(part.running.id) is part.running
            )
            for running in failed:
                self.close(running.id)
            return StepReport((), failed, self._measure(seconds, parts, 0))
        outcomes = []
        offset = 0
        for part in parts:
            rows = len(part.path) + 1 if part.final else 0
            picked, offset = chosen[offset : offset + rows], offset + rows
            running = part.running
            if self._sessions.get(running.id) is not running:
                continue  # closed while the step ran
            if part.final:
                outcome = running.session.resolve(part.path, picked)
                outcomes.append((running, outcome))
                self._engine.pool.truncate(
                    running.table, outcome.base + min(outcome.accepted, len(outcome.tokens) - 1)
                )
                running.arrivals = running.arrivals.committed(self._clock(), outcome.verified)
                running.acceptance = acceptance_after(running.acceptance, outcome.accepted, outcome.verified)
                if running.counts is not None:
                    running.counts.extend(outcome.tokens)
            self._engine.pool.seal(running.table, running.session.log)
            if part.final and outcome.finish is not None:
                self.close(running.id)
        committed = sum(len(outcome.tokens) for _, outcome in outcomes)
        return StepReport(tuple(outcomes), (), self._measure(seconds, parts, committed))

    def _measure(self, seconds: float, parts: Sequence[Part], committed: int) -> Load:
        tokens = sum(part.tokens + len(part.path) for part in parts)
        if all(part.tokens == 1 for part in parts):
            wanting = [part for part in parts if part.running.session.num_speculative_tokens > 0]
            starved = sum(not part.path for part in wanting) / len(wanting) if wanting else None
            self._meter.observe(seconds, tokens, committed, starved)
        return self._measured(seconds, tokens)

    def _measured(self, step_seconds: float, step_tokens: int) -> Load:
        waiting = sum(not running.table.blocks for running in self._sessions.values())
        return Load(
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


def _work(part: Part) -> Work:
    log = part.running.session.log
    tokens = [*log[part.start : part.start + part.tokens], *part.path]
    return Work(part.running.table.blocks, part.start, tokens, len(part.path) + 1 if part.final else 0)


def _rows(part: Part) -> list[Row]:
    if not part.final:
        return []
    running = part.running
    params, position = running.session.spec.sampling, len(running.session.log)
    return [Row(params, position + j, running.counts, part.path[:j]) for j in range(len(part.path) + 1)]


def _awaited(running: Running) -> Awaited:
    pace, arrivals = running.pace, running.arrivals
    assert pace is not None
    wanted = min(running.session.num_speculative_tokens, running.session.room - 1)
    return Awaited(
        committed_at=arrivals.committed_at,
        last_at=arrivals.last_at,
        tokens=len(running.path()),
        wanted=wanted,
        acceptance=running.acceptance,
        lead=pace.lead,
        token=pace.token,
    )


__all__ = ["Finish", "Load", "Running", "StepReport", "Stepper"]
