"""Which sessions take part in the next step, with how many tokens: a pure function over counts.

A session has `pending` committed tokens that are not in the KV cache yet: one while it decodes, many while
its prompt is read in (or read in again after a preemption). Drafts ride on top of the last pending token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider.engine.kv_blocks import Cached

SPARED_AFTER = 3  # preemptions after which a session is left alone while others had fewer


class Candidate(NamedTuple):
    """A session that could run, as counts."""

    pending: int  # committed tokens not in the cache, >= 1
    drafts: int  # draft tokens that may follow them
    cached: int  # tokens in the cache
    blocks: int  # KV blocks held; 0 = not started, or preempted
    preempted: int = 0  # times so far, here or at another worker
    yields: bool = False  # while it does not fit, newcomers after it may start
    waits: bool = False  # it takes no part now: a grammar holds it up, or another reads the same prompt
    priority: int = 0  # one of less comes first
    scored: bool = False  # the logits of what it reads are asked for
    tenant: bytes = b""  # whose it is; of two that are read, that of who has fewer comes first

    @property
    def decoding(self) -> bool:
        return self.pending == 1 and self.blocks > 0


@dataclass(slots=True)
class Grant:
    index: int  # of the candidate
    tokens: int  # of its pending tokens, the first so many
    drafts: int  # > 0 only where all pending tokens run


@dataclass(frozen=True, slots=True)
class Limits:
    max_tokens: int  # most tokens in a step
    prefill_chunk: int  # most tokens of prompts in a step that others decode in
    block_size: int
    scored: int = 2**31  # most tokens of prompts in a step whose logits are asked for
    sessions: int = 2**31  # most that have blocks at a time, and that are in a step


@dataclass(frozen=True, slots=True)
class Schedule:
    grants: tuple[Grant, ...] = ()
    preempt: int | None = None  # release this candidate's blocks, then plan again


def schedule(
    candidates: Sequence[Candidate],
    available: int,
    limits: Limits,
    reading: int | None = None,
    alone: int | None = None,
    lost: Callable[[int], int] | None = None,
    cached: Callable[[int], Cached] | None = None,
) -> Schedule:
    """Plans one step. `candidates` stand in order of priority and arrival; `available` blocks can be taken.
    Where others decode, at most `reading` tokens of prompts take part, and where nobody does, `alone`; None =
    as the limits say. `lost`: of a candidate by index, the tokens that would have to be computed again if it
    were preempted; None = all that it has. `cached`: of a newcomer by index, what it will find in the cache,
    and need not read; None = nothing.

    Every decoding session gets its token first, then prompts are read in by chunks, as they would be without
    any drafts, those of sessions that were interrupted before those that have not begun, and tenants by
    turns; while a long prompt is read, shorter ones of other tenants get up to half of the tokens. Drafts get
    what is left of tokens and blocks. Where blocks run out, the session that loses least gives its own up, so
    that the one that has most always goes on: one of the tenant that has most, if that keeps as many as the
    tenant that wants more, and none of a tenant that has fewer. Where places run out, a tenant that has two
    more of them than the next prompt's tenant gives one up.
    """
    granted: dict[int, int] = {}  # candidate -> pending tokens to run
    blocks = _blocks_of_tenants(candidates)
    budget = limits.max_tokens
    decoding: dict[int, int] = {}  # candidate -> blocks that its token takes
    read: list[int] = []  # those that may be read
    for index, candidate in enumerate(candidates):
        if candidate.waits:
            continue
        if not candidate.decoding:
            read.append(index)
        elif budget > 0 and len(granted) < limits.sessions:
            need = _blocks_needed(candidate, 1, limits)
            if need > available:
                return Schedule(preempt=_makes_room(candidates, lost, blocks, candidate, need))
            granted[index], available, budget = 1, available - need, budget - 1
            decoding[index] = need

    growing = Counter(candidates[index].tenant for index in decoding)
    chunk = limits.prefill_chunk if reading is None else min(reading, limits.prefill_chunk)
    reading = min(budget, chunk if decoding else budget if alone is None else alone)
    scored = limits.scored
    held = Counter(candidate.tenant for candidate in candidates if candidate.blocks > 0)
    places = limits.sessions - held.total()
    turns = _turns(candidates, read, decoding, held)
    beside_own = set[bytes]()  # tenants whose next prompt does not fit beside what they have themselves
    shorter = _shorter(candidates, turns)
    half = reading // 2  # of which they have their part at once, if it leaves the first its room
    room = _blocks_needed(candidates[turns[0]], candidates[turns[0]].pending + 1, limits) if shorter else 0
    for turn, index in enumerate((*shorter, *turns)):
        candidate = candidates[index]
        if reading <= 0:
            break
        if index in granted:
            continue
        at_once = turn < len(shorter)
        most = min(reading, scored) if candidate.scored else reading
        if at_once:
            most = min(most, half)
        if most == 0:
            continue
        count = min(candidate.pending, most)
        if candidate.blocks == 0:
            if candidate.tenant in beside_own:
                continue
            giving = _giving_place(candidates, candidate, held) if places <= 0 else []
            if places <= 0 and not giving:
                continue
            # Newcomers start in order of arrival, where their whole prompt fits: what they find cached comes
            # out of the available blocks, too, where nobody else holds it. One that yields lets those pass
            # that fit where it does not.
            found = cached(index) if cached is not None else Cached()
            count = min(candidate.pending - found.tokens, most)
            need = _blocks_needed(candidate, candidate.pending + 1, limits) - found.held
            then = blocks[candidate.tenant] + need
            # A block of growth for each session that decodes, but of who has more: it takes from its own.
            reserve = sum(n for tenant, n in growing.items() if blocks[tenant] <= then)
            if at_once and need + reserve + room > available:
                continue
            if need + reserve > available:
                victims = _giving_way(candidates, candidate.priority)
                if need + reserve <= available + sum(candidates[each].blocks for each in victims):
                    return Schedule(preempt=_loses_least(candidates, lost, victims))
                victims = _sharing(candidates, blocks, candidate, need)
                if victims and need + reserve <= available + sum(max(0, n - then) for n in blocks.values()):
                    return Schedule(preempt=_loses_least(candidates, lost, victims))
                if candidate.yields and not candidate.preempted:
                    continue
                if not held[candidate.tenant]:
                    break
                beside_own.add(candidate.tenant)
                continue
            if count == 0:
                continue
            if giving:
                return Schedule(preempt=_loses_least(candidates, lost, giving))
            places -= 1
            held[candidate.tenant] += 1
        else:
            need = _blocks_needed(candidate, count, limits)
            if len(granted) >= limits.sessions:
                continue
            if at_once and need + room > available:
                continue
            if need > available:
                return Schedule(preempt=_makes_room(candidates, lost, blocks, candidate, need))
        granted[index], available = count, available - need
        reading, budget = reading - count, budget - count
        half -= count if at_once else 0
        scored -= count if candidate.scored else 0

    drafts: dict[int, int] = {}
    for index, taken in decoding.items():
        candidate = candidates[index]
        slots = (candidate.blocks + taken + available) * limits.block_size - candidate.cached - 1
        count = min(candidate.drafts, budget, slots)
        available -= _blocks_needed(candidate, 1 + count, limits) - taken
        drafts[index], budget = count, budget - count
    return Schedule(tuple(Grant(index, count, drafts.get(index, 0)) for index, count in granted.items()))


def _blocks_needed(candidate: Candidate, tokens: int, limits: Limits) -> int:
    """Returns how many blocks are to be taken so that `tokens` more tokens have a slot."""
    return max(0, -(-(candidate.cached + tokens) // limits.block_size) - candidate.blocks)


def _blocks_of_tenants(candidates: Iterable[Candidate]) -> Counter[bytes]:
    blocks = Counter[bytes]()
    for candidate in candidates:
        blocks[candidate.tenant] += candidate.blocks
    return blocks


def _turns(
    candidates: Sequence[Candidate], read: Sequence[int], decoding: Iterable[int], held: Counter[bytes]
) -> list[int]:
    """Returns `read` in the order of their turns: by priority, then of who has fewer sessions before it, so
    that a tenant's many prompts do not stand before another's first. Of one tenant those that were
    interrupted come first. `held`: sessions of each tenant that have blocks; newcomers stand behind them."""
    has = Counter(candidates[index].tenant for index in decoding)
    turns = []
    for index in sorted(
        read, key=lambda index: (candidates[index].priority, candidates[index].preempted == 0)
    ):
        candidate = candidates[index]
        before = has[candidate.tenant]
        if candidate.blocks == 0:
            before = max(before, held[candidate.tenant])
        turns.append((candidate.priority, before, index))
        has[candidate.tenant] = before + 1
    return [index for _, _, index in sorted(turns, key=lambda turn: turn[:2])]


def _shorter(candidates: Sequence[Candidate], turns: Sequence[int]) -> list[int]:
    """Returns those that need not wait until the first of `turns` is read: of other tenants and the same
    priority the first prompts that are shorter; the shortest first."""
    if not turns:
        return []
    front, firsts = candidates[turns[0]], dict[bytes, int]()
    for index in turns:
        firsts.setdefault(candidates[index].tenant, index)
    return sorted(
        (
            index
            for index in firsts.values()
            if candidates[index].priority == front.priority and candidates[index].pending < front.pending
        ),
        key=lambda index: candidates[index].pending,
    )


def _giving_way(candidates: Sequence[Candidate], priority: int) -> list[int]:
    """Returns the holders of blocks that give way to one of that priority."""
    return [index for index, other in enumerate(candidates) if other.blocks > 0 and other.priority > priority]


def _sharing(candidates: Sequence[Candidate], blocks: Counter[bytes], one: Candidate, need: int) -> list[int]:
    """Returns those of other tenants of which one gives its blocks to a candidate that needs so many: their
    tenant still has as many then as the candidate's. Of such tenants it is the one that has most."""
    then = blocks[one.tenant] + need
    having = [
        index
        for index, other in enumerate(candidates)
        if other.blocks > 0
        and other.tenant != one.tenant
        and other.priority == one.priority
        and blocks[other.tenant] - other.blocks >= then
    ]
    most = max((blocks[candidates[index].tenant] for index in having), default=0)
    return [index for index in having if blocks[candidates[index].tenant] == most]


def _makes_room(
    candidates: Sequence[Candidate],
    lost: Callable[[int], int] | None,
    blocks: Counter[bytes],
    one: Candidate,
    need: int,
) -> int:
    """Returns the holder of blocks that gives them up so that one that has some goes on. No tenant that has
    fewer gives any."""
    others = [
        index
        for index, other in enumerate(candidates)
        if other.blocks > 0 and other.priority == one.priority and blocks[other.tenant] >= blocks[one.tenant]
    ]
    victims = _giving_way(candidates, one.priority) or _sharing(candidates, blocks, one, need) or others
    return _loses_least(candidates, lost, victims)


def _giving_place(candidates: Sequence[Candidate], newcomer: Candidate, held: Counter[bytes]) -> list[int]:
    """Returns those of which one gives its place to a newcomer: that give way to it, or else those of the
    tenant that has most of them, and still has one more if one goes."""
    most = max(held.values(), default=0)
    has = most if most >= held[newcomer.tenant] + 2 else None
    return _giving_way(candidates, newcomer.priority) or [
        index
        for index, other in enumerate(candidates)
        if other.blocks > 0 and other.priority == newcomer.priority and held[other.tenant] == has
    ]


def _loses_least(
    candidates: Sequence[Candidate],
    lost: Callable[[int], int] | None,
    victims: Sequence[int],
) -> int:
    """Returns the one of the victims that is to give its blocks up. It has the greatest priority, then the
    least to compute again; of equals it is the youngest. One that was preempted often is spared, so that
    nobody is held up for ever by others that grow faster."""

    def order(index: int) -> tuple[int, int, int, int]:
        candidate = candidates[index]
        again = candidate.cached if lost is None else lost(index)
        return -candidate.priority, candidate.preempted // SPARED_AFTER, again, -index

    return min(victims, key=order)
