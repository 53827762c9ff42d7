"""Plans a step: which sessions run, with how many tokens and drafts each, and the KV blocks for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from outrider.engine.branching import LayOut
from outrider.engine.kv_blocks import BlockPool, Cached
from outrider.engine.scheduler import Candidate, Grant, Limits, schedule
from outrider.engine.state_slots import MOST_DRAFTS
from outrider.options.engine import StepLimits
from verifier.admission import admit
from verifier.meter import Meter
from verifier.nodes import NO_NODES, Nodes
from verifier.orphans import dispensable
from verifier.part import Part
from verifier.running import Running
from verifier.session import NO_BRANCH

SCORED_BYTES = 64 * 2**20  # of logits of prompts in a step, whose log-probabilities were asked for
LEAST_SCORED = 16  # tokens
MOST_PASSED = 16  # sessions that may begin before one that came earlier and does not fit yet
LEAST_BESIDE = 0.01  # survival of a draft token beside a path
BESIDE_PRICE = 0.7  # of the last price: what survives with less is no candidate, as the price moves slowly


class StepPlanner:
    """Chooses who runs by what the meter has measured, and changes the sessions' block tables for it."""

    def __init__(
        self,
        pool: BlockPool,
        limits: StepLimits,
        close: Callable[[bytes], object],
        vocab_size: int,
        lay_out: LayOut | None = None,
    ) -> None:
        """`close` ends a session that is in the way of others: an orphan. `lay_out`: as AttentionBackend's,
        for steps that verify trees; None = a step verifies one path of a session's drafts."""
        scored = max(LEAST_SCORED, SCORED_BYTES // (4 * vocab_size))
        self.limits = Limits(limits.max_batch_tokens, limits.prefill_chunk, pool.block_size, scored)
        self._most_drafts: int | None = None  # of a session
        if pool.states is not None:
            self.limits = replace(self.limits, sessions=pool.states.most_sessions)
            self._most_drafts = MOST_DRAFTS
        self.preemptions = 0  # since the start
        self._pool = pool
        self._close = close
        self._lay_out = lay_out

    def plan(self, sessions: Mapping[bytes, Running], meter: Meter) -> list[Part]:
        """Returns the parts of the next step, with their blocks taken. It is empty if nobody can run.

        `sessions` stand in order of priority and arrival. Those that a grammar holds up take no part, and may
        be preempted as any other. If blocks run out, an orphan is closed or a session preempted, and the step
        is planned anew."""
        pool = self._pool
        self._preempt_stateless(sessions.values())
        while True:
            everyone = list(sessions.values())
            ready = [running for running in everyone if running.ready]
            least = self.least_beside(meter) or NO_BRANCH
            found = {running.id: self._nodes(running, least) for running in ready}
            nodes = [found.get(running.id, NO_NODES) for running in everyone]
            decoding = sum(running.decoding for running in ready)
            usual = [
                running.usual if running.decoding and running.id in found else math.inf
                for running in everyone
            ]
            drafts = self._admit(nodes, decoding, meter, usual)
            taking_part = found.keys() - self._waiting(ready)
            candidates = [
                Candidate(
                    running.pending,
                    count,
                    running.table.length,
                    len(running.table.blocks),
                    running.preemptions,
                    running.passed < MOST_PASSED,
                    running.id not in taking_part,
                    running.session.spec.params.priority,
                    running.prompt is not None and running.unscored is not None,
                    running.session.spec.params.tenant,
                )
                for running, count in zip(everyone, drafts, strict=True)
            ]

            def lost(index: int, everyone: Sequence[Running] = everyone) -> int:
                return pool.own_tokens(everyone[index].table)

            def cached(index: int, everyone: Sequence[Running] = everyone) -> Cached:
                running = everyone[index]
                salt = running.session.spec.params.cache_salt
                return pool.cached(running.cacheable, salt, running.digests)

            reading = meter.reading(decoding + sum(drafts))
            alone = meter.reading_alone()
            chosen = schedule(candidates, pool.available, self.limits, reading, alone, lost, cached)
            in_the_way = dispensable(everyone, chosen, pool)
            if in_the_way is not None:
                self._close(in_the_way.id)
            elif chosen.preempt is not None:
                self._preempt(everyone[chosen.preempt])
            else:
                _note_passed(everyone, {grant.index for grant in chosen.grants})
                parts = [
                    self._start(everyone[grant.index], grant, nodes[grant.index]) for grant in chosen.grants
                ]
                for part in parts:
                    self._spread(part)
                return parts

    def places_taken(self, sessions: int) -> float:
        """Returns which share of the places for sessions so many take, 0 to 1."""
        return min(sessions / self.limits.sessions, 1.0)

    def least_beside(self, meter: Meter) -> float | None:
        """Returns the survival with which a draft token beside a path may take part; None = none does."""
        return max(LEAST_BESIDE, BESIDE_PRICE * meter.price) if self._lay_out else None

    def _nodes(self, running: Running, least: float) -> Nodes:
        nodes = running.nodes(least)
        return nodes if self._most_drafts is None else nodes.first(self._most_drafts)

    def _preempt_stateless(self, everyone: Iterable[Running]) -> None:
        """Lets sessions whose recurrent state was forgotten, as others needed its slot, be read again."""
        states = self._pool.states
        if states is not None:
            for running in everyone:
                if states.lost(running.table.blocks, running.table.length):
                    self._preempt(running)

    def _waiting(self, everyone: Sequence[Running]) -> set[bytes]:
        """Returns the ids of those that have not begun and whose prompt an earlier one reads: once it is read
        it is cached, and all but the end of it is there for them too."""
        readers, waiting, found = set(), set(), dict[bytes, bool]()
        digests: dict[bytes, list[bytes]] = {}  # that all who wait for one prompt have in common
        for running in everyone:
            if running.decoding:
                continue
            alone = running.begun or running.prompt is not None
            prompt = running.prompt_hash
            if not alone and prompt in readers and prompt not in found:
                found[prompt] = self._finds_prompt(running)
            if alone or prompt not in readers or found[prompt]:
                readers.add(prompt)
            else:
                waiting.add(running.id)
                if not running.session.spec.output:
                    running.digests = digests.setdefault(prompt, running.digests)
        return waiting

    def _finds_prompt(self, running: Running) -> bool:
        """Returns whether all full blocks of its prompt are cached, but for its last token."""
        params, block_size = running.session.spec.params, self._pool.block_size
        full = (len(params.prompt) - 1) // block_size * block_size
        return self._pool.cached(params.prompt, params.cache_salt, running.digests).tokens >= full

    def _admit(
        self, nodes: Sequence[Nodes], decoding: int, meter: Meter, usual: Sequence[float]
    ) -> list[int]:
        """Returns how many draft tokens of each session take part, by what they bring and what they cost. A
        prompt that is read beside them is left out of the sum: it is paid for by what it brings itself."""
        if not any(each.tokens for each in nodes):
            return [0] * len(nodes)
        survival = [each.survival for each in nodes]
        budget = self.limits.max_tokens - decoding
        return admit(survival, decoding, decoding, meter.step_time, budget, usual).counts

    def _preempt(self, victim: Running) -> None:
        self._pool.close(victim.table)
        victim.moves = ()
        if victim.trace is not None:
            victim.trace.preempted()
        victim.preemptions += 1
        self.preemptions += 1

    def _start(self, running: Running, grant: Grant, nodes: Nodes) -> Part:
        pool = self._pool
        if not running.table.blocks:
            salt = running.session.spec.params.cache_salt
            running.table = pool.open(running.cacheable, salt, running.digests)
            running.digests = []
            if running.cached_prompt_tokens is None:
                running.cached_prompt_tokens = running.table.length
                if running.trace is not None:
                    running.trace.begun(running.table.length)
        start = running.table.length
        tokens = min(grant.tokens, len(running.session.log) - start)
        pool.extend(running.table, tokens + grant.drafts)
        final = start + tokens == len(running.session.log)
        part = Part(running, start, tokens, nodes.first(grant.drafts).in_chains(), final)
        unscored = running.unscored
        if unscored is not None:
            part.scored = max(0, start + tokens - final - unscored)
        return part

    def _spread(self, part: Part) -> None:
        """Gives the nodes of a tree their places in the cache; those for which there is none do not run."""
        if part.nodes.is_path or self._lay_out is None:
            return
        position, table = len(part.running.session.log), part.running.table
        found = self._lay_out(part.start, position, part.nodes.parents)
        nodes = part.nodes.only([node for node, place in enumerate(found) if place is not None])
        found = self._lay_out(part.start, position, nodes.parents)
        places = tuple(place for place in found if place is not None)
        end = max(places, default=-1) + 1
        if not nodes.is_path and -(-end // self._pool.block_size) - len(table.blocks) > self._pool.available:
            (_, line), *_ = nodes.chains
            nodes = nodes.first(line)
        part.nodes = nodes
        if not nodes.is_path:
            part.places = places
            self._pool.extend(table, max(0, end - table.length))


def _note_passed(everyone: Sequence[Running], granted: Container[int]) -> None:
    """Counts for each that waits who begins before it and came later."""
    beginning = 0
    for index in reversed(range(len(everyone))):
        running = everyone[index]
        if not running.table.blocks and not running.preemptions and running.ready:
            if index in granted:
                beginning += 1
            else:
                running.passed += beginning
