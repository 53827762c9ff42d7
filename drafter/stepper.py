"""The draft model as a proposer: each of its steps drafts one token for every session that wants one.

All on the event loop's thread, but for the forward pass. Commits are applied between two steps, and what they
left to catch up on rides in the next forward, which also shows what would have been drafted there. Likely
trunk tokens come first; the time that they leave goes to whatever is likeliest, branches included, and then
to sessions that only follow their log. No transport: commands are method calls, and `on_change` hears which
sessions have news for their verifier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from drafter.acceptance_model import ALTERNATIVES, AcceptanceModel
from drafter.branches import MOST_BRANCHES, Growth, growths
from drafter.cascade import with_lookups
from drafter.drafting import Drafting, Part, take
from drafter.masks import with_masks
from drafter.proposer import OnChange, OnFailed
from drafter.session import Branch, CannotFollow, DraftSession, Guess
from outrider.engine.engine import Engine
from outrider.engine.kv_blocks import Cached
from outrider.engine.scheduler import Limits, schedule
from outrider.errors import PeerLost
from outrider.grammar import Grammars
from outrider.options.engine import StepLimits
from outrider.sampling.ranked import Ranked
from outrider.sampling.token_counts import TokenCounts
from outrider.wire.load import DrafterLoad
from outrider.worker.stepwatch import StepUnderWay, under_way

log = logging.getLogger(__name__)

STEP_SMOOTHING = 0.1
LIKELY = 0.1  # survival of a trunk whose next token comes before everything that is not a trunk
SPARE_ROWS = 8  # tokens of a step that has no likely one
FOLLOWED_AT_ONCE = 8  # tokens of a log that is only followed
SHORT_SECONDS = 0.01  # a step below it runs on the event loop's own thread
SHORT_TOKENS = 32
LOOP_ROUNDS = 3  # of the event loop after it: from what has arrived to whom it is for, and what it found sent
MOST_SCORED = 16  # rows of a session in a step


class DraftStepper:
    """Owns the sessions, their KV blocks and the engine thread."""

    def __init__(
        self,
        engine: Engine,
        limits: StepLimits,
        on_change: OnChange,
        on_failed: OnFailed,
        clock: Callable[[], float],
        branches: bool = True,
        grammars: Grammars | None = None,
        vocab_size: int | None = None,
        mask: int | None = None,
        cascade: bool = True,
    ) -> None:
        """If `branches`, it drafts on from likely corrections, too. `grammars`: those of the model's
        tokenizer. `vocab_size`: above the target's ids, where the model's are others. `mask`: token
        behind which the model guesses, too. If `cascade`, it checks what look-ups expect."""
        self._engine = engine
        self._limits = Limits(limits.max_batch_tokens, limits.prefill_chunk, engine.pool.block_size)
        states = engine.pool.states  # of a model that keeps recurrent ones, each of one path
        if states is not None:
            self._limits = replace(self._limits, sessions=states.most_sessions)
        self._on_change = on_change
        self._on_failed = on_failed
        self._clock = clock
        self._branches = branches and not engine.divided and states is None
        self._grammars = grammars
        self._mask = mask
        self._cascade = cascade
        self._vocab_size = vocab_size or engine.info.vocab_size
        self._sessions: dict[bytes, Drafting] = {}
        self._commits: list[tuple[DraftSession, int, Sequence[int]]] = []  # not applied yet
        self._changed = asyncio.Event()
        self._token_seconds = 0.0
        self.busy_seconds = 0.0
        self.under_way: StepUnderWay | None = None  # the step that the engine runs now
        # Greedy or drawn: how sure a draft is means one thing without noise and another with it.
        self.acceptance_models = {True: AcceptanceModel(), False: AcceptanceModel()}

    @property
    def load(self) -> DrafterLoad:
        models = self.acceptance_models.values()
        return DrafterLoad(
            len(self._sessions),
            self._token_seconds,
            kv_usage=self._engine.pool.usage,
            rejections=sum(model.rejections for model in models),
            rejections_covered=sum(model.covered for model in models),
        )

    def get(self, session_id: bytes) -> Drafting | None:
        return self._sessions.get(session_id)

    async def probe(self) -> None:
        """Runs a one-token forward."""
        await self._engine.run(self._engine.probe)

    def open(self, session: DraftSession) -> Drafting:
        """Starts drafting; an id that is open already is started anew."""
        self.close(session.spec.session_id)
        spec = session.spec
        counts = TokenCounts(spec.params.prompt, spec.output) if spec.params.sampling.penalized else None
        place = None
        if spec.params.grammar and self._grammars is not None:
            wake = partial(asyncio.get_running_loop().call_soon_threadsafe, self._changed.set)
            place = self._grammars.place(spec.params.grammar, spec.output, wake)
        drafting = self._sessions[spec.session_id] = Drafting(session, counts, place)
        self._changed.set()
        return drafting

    def close(self, session_id: bytes) -> None:
        drafting = self._sessions.pop(session_id, None)
        if drafting is not None:
            self._release(drafting)

    def set_window(self, session_id: bytes, window: int) -> None:
        drafting = self._sessions.get(session_id)
        if drafting is not None:
            drafting.session.window = window
            self._changed.set()

    def commit(self, session: DraftSession, base: int, tokens: Sequence[int]) -> None:
        """Takes a commit in, to be applied before the next step."""
        self._commits.append((session, base, tokens))
        self._changed.set()

    async def run(self) -> None:
        """Drafts until the engine cannot any more; raises why."""
        await self._engine.serve(self._steps())

    async def _steps(self) -> None:
        while True:
            self._apply_commits()
            parts = self._next_step()
            if not parts:
                self._tell(each for each in self._sessions.values() if each.session.untold_yet)
                self._changed.clear()
                await self._changed.wait()
                continue
            inputs = self._engine.prepare([part.work() for part in parts])
            rows = [row for part in parts for row in part.draws()]
            vocab_size = min(part.drafting.session.spec.target_vocab_size for part in parts)
            began = self._clock()
            self.under_way = under_way()
            try:
                run = partial(self._engine.rank, inputs, rows, 1 + ALTERNATIVES, vocab_size)
                short = self._is_short(parts)
                drawn = run() if short else await self._engine.run_step(run)
            except PeerLost:
                raise
            except Exception:
                log.exception("a draft step failed; its sessions go on without drafts")
                for part in parts:
                    self._fail(part.drafting, "the drafter failed on this session; its log has the details")
                continue
            finally:
                self.under_way = None
            self._finish(parts, drawn, self._clock() - began)
            if short:
                for _ in range(LOOP_ROUNDS):
                    await asyncio.sleep(0)

    def _is_short(self, parts: Sequence[Part]) -> bool:
        """Returns True if a step is over sooner than two threads have taken turns on a busy machine. Commits
        wait for its end anyway. While a GPU computes the loop has other work."""
        if not self._engine.on_cpu or self._engine.divided or self._engine.threads > 1:  # see Engine.run
            return False
        tokens = sum(len(part.tokens) for part in parts)
        seconds = self._token_seconds * max(1 + part.masks for part in parts)
        return tokens <= SHORT_TOKENS and 0 < seconds < SHORT_SECONDS

    def _apply_commits(self) -> None:
        commits, self._commits = self._commits, []
        changed: dict[Drafting, None] = {}
        for session, base, tokens in commits:
            drafting, before = self._sessions.get(session.id), len(session.log)
            if drafting is None or drafting.session is not session:
                continue  # closed since
            if any(token >= self._vocab_size for token in tokens):
                self._fail(drafting, "the target chose a token id that the draft model does not have")
                continue
            try:
                verdict = session.apply(base, tokens)
            except CannotFollow as reason:
                self._fail(drafting, str(reason))
                continue
            self._acceptance_model(session).learn(verdict)
            pool = self._engine.pool
            for branch in verdict.dropped:
                pool.close(branch.table)
            if verdict.adopted is not None:
                pool.close(drafting.table)
                drafting.table = verdict.adopted.table
            if verdict.standing < drafting.table.sealed:  # read anew; what still stands is found in the pool
                self._release(drafting)
            elif drafting.table.length > verdict.standing:
                pool.truncate(drafting.table, verdict.standing)
            if drafting.counts is not None:
                drafting.counts.extend(session.log[before:])
            if drafting.place is not None:
                drafting.place.follow(session.log[before:])
            changed[drafting] = None
        self._tell(drafting for drafting in changed if drafting.session.worth_telling)

    def _tell(self, changed: Iterable[Drafting]) -> None:
        """Hands on the sessions that are still open."""
        if told := [each.session for each in changed if self._sessions.get(each.id) is each]:
            self._on_change(told)

    def _fail(self, drafting: Drafting, reason: str) -> None:
        if self._sessions.get(drafting.id) is drafting:  # not closed since, nor opened anew
            self.close(drafting.id)
            self._on_failed(drafting.session, reason)

    def _release(self, drafting: Drafting) -> None:
        """Gives the blocks of trunk and branches back."""
        self._drop_branches(drafting)
        self._engine.pool.close(drafting.table)

    def _drop_branches(self, drafting: Drafting) -> None:
        for branch in drafting.session.branches:
            self._engine.pool.close(branch.table)
        drafting.session.branches.clear()

    # -- what a step runs --

    def _next_step(self) -> list[Part]:
        everyone, states = self._sessions.values(), self._engine.pool.states
        for drafting in everyone:
            if drafting.lost(states):
                self._release(drafting)
        wanting = [drafting for drafting in everyone if drafting.wants_token(states)]
        if not self._branches:
            return self._trunks(wanting) or self._following()
        likely = [drafting for drafting in wanting if drafting.session.survival >= LIKELY]
        return self._trunks(likely) or self._likeliest(wanting) or self._following()

    def _trunks(self, wanting: Sequence[Drafting]) -> list[Part]:
        """Returns parts that add one token, or read a part of what comes before it, while there is room."""
        pool = self._engine.pool
        while wanting:
            candidates = [drafting.candidate(drafting.session.length) for drafting in wanting]
            chosen = schedule(candidates, pool.available, self._limits, cached=self._cached(wanting))
            if chosen.preempt is None and (chosen.grants or not self._make_room(True)):
                parts = [self._start(wanting[grant.index], grant.tokens) for grant in chosen.grants]
                if self._cascade and self._mask is None:
                    return with_lookups(parts, pool, self._limits.max_tokens)
                return with_masks(parts, self._mask, pool, self._limits.max_tokens)
            if chosen.preempt is not None and not self._make_room(False):
                self._release(wanting[chosen.preempt])
        return []

    def _cached(self, draftings: Sequence[Drafting]) -> Callable[[int], Cached]:
        def cached(index: int) -> Cached:
            session = draftings[index].session
            return self._engine.pool.cached(session.log, session.spec.params.cache_salt)

        return cached

    def _make_room(self, idle_too: bool) -> bool:
        """Takes blocks back if trunks cannot run: those of a session's branches; or, if there are none,
        `idle_too`, those of a session that wants no token now."""
        for drafting in self._sessions.values():
            if drafting.session.branches:
                self._drop_branches(drafting)
                return True
        if idle_too:
            for drafting in self._sessions.values():
                if drafting.table.blocks and not drafting.session.wants_token:
                    self._release(drafting)
                    return True
        return False

    def _likeliest(self, wanting: Sequence[Drafting]) -> list[Part]:
        """Returns trunks and branches, by the chance that the target comes to the place of their next
        token."""
        offers: list[tuple[float, Drafting, Growth | None]] = [
            (drafting.session.survival, drafting, None) for drafting in wanting
        ]
        if self._has_room_for_branches():
            offers += [
                (growth.chance, drafting, growth)
                for drafting in self._sessions.values()
                for growth in growths(drafting.session, drafting.table.length)
            ]
        offers.sort(key=lambda offer: offer[0], reverse=True)
        del offers[SPARE_ROWS:]
        parts = self._trunks([drafting for _, drafting, growth in offers if growth is None])
        copies: list[tuple[int, int]] = []
        for _, drafting, growth in offers:
            if growth is not None and (part := self._grow(drafting, growth, copies)) is not None:
                parts.append(part)
        self._engine.copy_blocks(copies)
        return parts or self._trunks(wanting)

    def _has_room_for_branches(self) -> bool:
        """Returns True if there is room beyond what trunks may need soon."""
        return self._engine.pool.available >= len(self._sessions) + SPARE_ROWS

    def _grow(self, drafting: Drafting, growth: Growth, copies: list[tuple[int, int]]) -> Part | None:
        """Returns one more guess on a branch, which may be new; None if there is no room."""
        pool, session = self._engine.pool, drafting.session
        branch = growth.branch
        if not self._has_room_for_branches() or drafting.table.length < growth.at:
            return None
        if branch is None:
            if len(session.branches) >= MOST_BRANCHES:
                return None
            table, copy = pool.fork(drafting.table, growth.at)
            if copy is not None:
                copies.append(copy)
            guess = session.drafted[growth.at - len(session.log)]
            branch = Branch(growth.at, growth.rank, guess.alternatives[growth.rank].token, table)
            session.branches.append(branch)
        elif branch not in session.branches:
            return None
        start, tokens = branch.table.length, branch.uncached()
        pool.extend(branch.table, len(tokens))
        return Part(drafting, start, tuple(tokens), 1, branch)

    def _following(self) -> list[Part]:
        """Reads on in logs that nobody drafts for now, to see what would have been drafted there."""
        pool = self._engine.pool
        waiting = [
            drafting
            for drafting in self._sessions.values()
            if drafting.session.window == 0
            and not drafting.session.drafted
            and not drafting.session.resting
            and len(drafting.session.log) - 1 - drafting.table.length >= FOLLOWED_AT_ONCE
        ]
        candidates = [drafting.candidate(len(drafting.session.log) - 1) for drafting in waiting]
        room = pool.available if self._has_room_for_branches() else 0
        chosen = schedule(candidates, room, self._limits, cached=self._cached(waiting))
        return [self._start(waiting[grant.index], grant.tokens, True) for grant in chosen.grants]

    def _start(self, drafting: Drafting, count: int, follow: bool = False) -> Part:
        """Takes the blocks for the trunk's next `count` tokens; those that only follow leave its last out."""
        pool, session = self._engine.pool, drafting.session
        if not drafting.table.blocks:
            drafting.table = pool.open(session.log, session.spec.params.cache_salt)
        start = drafting.table.length
        tokens = session.uncached(start)[: -1 if follow else None][:count]
        pool.extend(drafting.table, len(tokens))
        end = start + len(tokens)
        rows = min(max(end + 1 - session.scored, 0), len(tokens), MOST_SCORED)
        if end == session.length:
            rows = 1 if drafting.one_row else max(rows, 1)
        elif drafting.one_row:
            rows = 0
        return Part(drafting, start, tuple(tokens), rows)

    def _finish(self, parts: Sequence[Part], drawn: Sequence[Ranked], seconds: float) -> None:
        """Adds the guesses, and compares those that come after the fact; sessions closed while the step ran
        are passed over."""
        if any(part.branch is None for part in parts):
            self.busy_seconds += seconds
        sessions = [part.drafting.session for part in parts for _ in range(part.rows)]
        positions = [part.first + index for part in parts for index in range(part.rows)]
        ahead = [max(at - len(session.log), 0) for at, session in zip(positions, sessions, strict=True)]
        guesses: dict[int, Guess] = {}  # by row
        for greedy, acceptance_model in self.acceptance_models.items():
            rows = [row for row, session in enumerate(sessions) if session.greedy is greedy]
            if rows:
                found = acceptance_model.guesses(
                    [drawn[row] for row in rows],
                    [sessions[row].recent for row in rows],
                    [ahead[row] for row in rows],
                )
                guesses.update(zip(rows, found, strict=True))
        row = drawn_tokens = 0
        for part in parts:
            mine, row = [guesses[index] for index in range(row, row + part.rows)], row + part.rows
            if self._sessions.get(part.drafting.id) is part.drafting:
                model = self._acceptance_model(part.drafting.session)
                drawn_tokens += take(part, mine, model, self._engine.pool)
        decoded = (len(part.tokens) - part.checked <= 2 + 2 * part.masks for part in parts)
        if all(decoded) and all(part.branch is None for part in parts):
            each = seconds * len(parts) / max(drawn_tokens, len(parts))
            weight = STEP_SMOOTHING if self._token_seconds else 1
            self._token_seconds += (each - self._token_seconds) * weight
        self._tell(part.drafting for part in parts if part.drafting.session.worth_telling)

    def _acceptance_model(self, session: DraftSession) -> AcceptanceModel:
        return self.acceptance_models[session.greedy]
