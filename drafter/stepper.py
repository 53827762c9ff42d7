"""Runs the draft model in steps: each drafts one token for every session that wants one.

All on the event loop's thread, but for the forward pass. Commits are applied between two steps, and what they
left to catch up on rides in the next forward. No transport: commands are method calls, and `on_change` hears
which sessions' logs or drafts changed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from drafter.session import DraftSession, LogConflict
from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.scheduler import Candidate, Limits, plan
from outrider.errors import PeerLost
from outrider.sampling.sampler import Row, TokenCounts

log = logging.getLogger(__name__)

STEP_SMOOTHING = 0.1


@dataclass(slots=True, eq=False)
class Drafting:
    """A session with what the steps need beside its tokens."""

    session: DraftSession
    counts: TokenCounts | None  # of the log; kept only where the request has penalties
    table: BlockTable = field(default_factory=BlockTable)

    @property
    def id(self) -> bytes:
        return self.session.spec.session_id


@dataclass(frozen=True, slots=True)
class Part:
    drafting: Drafting
    start: int  # tokens in the cache before
    tokens: tuple[int, ...]  # that run
    final: bool  # whether a token is drawn after them


@dataclass(frozen=True, slots=True)
class DraftLoad:
    sessions: int = 0
    token_seconds: float = 0.0  # moving average of a step
    busy_seconds: float = 0.0  # spent in steps since start
    kv_usage: float = 0.0


class DraftStepper:
    """Owns the sessions, their KV blocks and the engine thread."""

    def __init__(
        self,
        engine: Engine,
        limits: Limits,
        on_change: Callable[[Sequence[Drafting]], None],
        on_failed: Callable[[Drafting, str], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._limits = replace(limits, block_size=engine.pool.block_size)
        self._on_change = on_change
        self._on_failed = on_failed
        self._clock = clock
        self._sessions: dict[bytes, Drafting] = {}
        self._commits: list[tuple[Drafting, int, Sequence[int]]] = []  # not applied yet
        self._changed = asyncio.Event()
        self._token_seconds = 0.0
        self._busy_seconds = 0.0

    @property
    def load(self) -> DraftLoad:
        return DraftLoad(
            len(self._sessions), self._token_seconds, self._busy_seconds, self._engine.pool.usage
        )

    def get(self, session_id: bytes) -> Drafting | None:
        return self._sessions.get(session_id)

    def probe(self) -> None:
        """A one-token forward, from any thread."""
        self._engine.probe()

    def open(self, session: DraftSession) -> Drafting:
        """Starts drafting; an id that is open already is started anew."""
        self.close(session.spec.session_id)
        spec = session.spec
        counts = TokenCounts(spec.prompt, spec.output) if spec.sampling.penalized else None
        drafting = self._sessions[spec.session_id] = Drafting(session, counts)
        self._changed.set()
        return drafting

    def close(self, session_id: bytes) -> None:
        drafting = self._sessions.pop(session_id, None)
        if drafting is not None:
            self._engine.pool.close(drafting.table)

    def set_window(self, session_id: bytes, window: int) -> None:
        drafting = self._sessions.get(session_id)
        if drafting is not None:
            drafting.session.window = window
            self._changed.set()

    def commit(self, drafting: Drafting, base: int, tokens: Sequence[int]) -> None:
        """Takes a commit in, to be applied before the next step."""
        self._commits.append((drafting, base, tokens))
        self._changed.set()

    async def run(self) -> None:
        """Drafts until the engine cannot any more; raises why."""
        await self._engine.serve(self._steps())

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as engine_thread:
            while True:
                self._apply_commits()
                parts = self._next_step()
                if not parts:
                    self._changed.clear()
                    await self._changed.wait()
                    continue
                inputs = self._engine.prepare([_work(part) for part in parts])
                rows = [_row(part) for part in parts if part.final]
                vocab_size = min(part.drafting.session.spec.target_vocab_size for part in parts)
                began = self._clock()
                try:
                    chosen = await loop.run_in_executor(
                        engine_thread, self._engine.choose, inputs, rows, vocab_size
                    )
                except PeerLost:
                    raise
                except Exception:
                    log.exception("a draft step failed; its sessions go on without drafts")
                    for part in parts:
                        self._fail(
                            part.drafting, "the drafter failed on this session; its log has the details"
                        )
                    continue
                self._finish(parts, chosen, self._clock() - began)

    def _apply_commits(self) -> None:
        commits, self._commits = self._commits, []
        changed: dict[Drafting, None] = {}
        for drafting, base, tokens in commits:
            if self._sessions.get(drafting.id) is not drafting:
                continue  # closed since
            session, before = drafting.session, len(drafting.session.log)
            if any(token >= self._engine.info.vocab_size for token in tokens):
                self._fail(drafting, "the target chose a token id that the draft model does not have")
                continue
            try:
                standing = session.apply(base, tokens)
            except LogConflict as conflict:
                self._fail(drafting, str(conflict))
                continue
            if drafting.table.length > standing:
                self._engine.pool.truncate(drafting.table, standing)
            if drafting.counts is not None:
                drafting.counts.extend(session.log[before:])
            changed[drafting] = None
        if changed:
            self._on_change([drafting for drafting in changed if drafting.id in self._sessions])

    def _fail(self, drafting: Drafting, reason: str) -> None:
        if self._sessions.get(drafting.id) is drafting:  # not closed since, nor opened anew
            self.close(drafting.id)
            self._on_failed(drafting, reason)

    def _next_step(self) -> list[Part]:
        pool = self._engine.pool
        while True:
            wanting = [drafting for drafting in self._sessions.values() if drafting.session.wants_token]
            candidates = [
                Candidate(
                    drafting.session.length - drafting.table.length,
                    0,
                    drafting.table.length,
                    len(drafting.table.blocks),
                )
                for drafting in wanting
            ]
            chosen = plan(candidates, pool.available, self._limits)
            if chosen.preempt is not None:
                pool.close(wanting[chosen.preempt].table)
            elif chosen.grants or not self._make_room(wanting):
                return [self._start(wanting[grant.index], grant.tokens) for grant in chosen.grants]

    def _make_room(self, wanting: Sequence[Drafting]) -> bool:
        """Takes the blocks of a session that wants no token now, where those that do cannot run."""
        if wanting:
            for drafting in self._sessions.values():
                if drafting.table.blocks and not drafting.session.wants_token:
                    self._engine.pool.close(drafting.table)
                    return True
        return False

    def _start(self, drafting: Drafting, count: int) -> Part:
        pool, session = self._engine.pool, drafting.session
        if not drafting.table.blocks:
            drafting.table = pool.open(session.log)
        start = drafting.table.length
        tokens = session.uncached(start)[:count]
        pool.extend(drafting.table, len(tokens))
        return Part(drafting, start, tuple(tokens), start + len(tokens) == session.length)

    def _finish(self, parts: Sequence[Part], chosen: list[int], seconds: float) -> None:
        """Adds the guesses; sessions closed while the step ran are passed over."""
        self._busy_seconds += seconds
        if all(len(part.tokens) <= 2 for part in parts):
            self._token_seconds += (seconds - self._token_seconds) * (
                STEP_SMOOTHING if self._token_seconds else 1
            )
        guesses = iter(chosen)
        grown = []
        for part in parts:
            guess, drafting = next(guesses) if part.final else None, part.drafting
            if self._sessions.get(drafting.id) is not drafting:
                continue
            if guess is not None:
                drafting.session.extend(guess)
                grown.append(drafting)
            self._engine.pool.seal(drafting.table, drafting.session.log)
        self._on_change(grown)


def _work(part: Part) -> Work:
    return Work(part.drafting.table.blocks, part.start, part.tokens, 1 if part.final else 0)


def _row(part: Part) -> Row:
    session = part.drafting.session
    return Row(session.spec.sampling, session.length, part.drafting.counts, tuple(session.drafted))
