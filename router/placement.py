"""Decides which workers serve a session: pure decisions over what the workers said last.

What workers report may be anything, infinite and NaN included: it is bounded before it counts.

Several routers decide by the same reports, and none hears of what the others place until the next one. So
each adds its own placements, looks at a few workers that were drawn at random, and draws among those that are
nearly as good as the best: else all would send all to the one that the last report called emptiest
(Mitzenmacher, "How useful is old information?", 2000).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from outrider.wire.load import DrafterLoad, VerifierLoad
from router.compatibility import tokenizer_fits
from router.pool import Below

AFFINITY_TOKENS = 256  # cached prompt tokens that make up for one session more in the batch
MAX_AFFINITY = 4.0  # sessions that a cached prefix makes up for at most: beyond, it is computed elsewhere

NEAR_SESSIONS = 0.5  # that a verifier may be dearer than the cheapest and count as good as it
MOST_CLAIMED = 4.0  # times what most drafters promise, that one is believed to
NEAR_SHARE = 0.05  # of what the best drafter promises, that one may promise less and count as good

SAME_HOST_SECONDS = 0.0002  # round trips that are assumed if none is measured
OTHER_HOST_SECONDS = 0.002
LEAST_TOKEN_SECONDS = 1e-5
MAX_SECONDS = 60.0

Rank = tuple[bool, int]
"""Whether a verifier has lost the session, and how many would wait."""
UNTROUBLED: Rank = (False, 0)


@dataclass(slots=True)  # not frozen: making one is most of what a placement costs
class VerifierCandidate:
    worker_id: str
    model: str  # name under which it serves
    load: VerifierLoad
    placed: int  # sessions that this router has open there; newer than `load`
    kv_tokens: int  # that its KV pool has room for
    cached_tokens: int = 0  # of the prompt's beginning, that were placed there before
    lost: bool = False  # the session was lost there before
    numerics: str = ""  # the same for verifiers that give the same logits to the bit
    unreported: int = 0  # sessions that this router has opened there since `load` came
    context: int = 2**63  # most tokens of a session, whatever its KV pool has room for

    def holds(self, most_tokens: int) -> bool:
        return most_tokens <= self.kv_tokens and most_tokens <= self.context


@dataclass(slots=True)
class DrafterCandidate:
    worker_id: str
    incarnation: int
    tokenizer_hash: str
    address: str  # host:port of its server
    load: DrafterLoad
    placed: int  # sessions that this router has open there; newer than `load`
    acceptance: float  # share of its model's draft tokens that this target accepts, 0..1
    distrusted: bool = False  # a verifier cut it off lately
    unreported: int = 0  # sessions that this router has opened there since `load` came
    merit: float | None = None  # tokens that it gains a session a step, as verifiers told; None = not known
    due: bool = True  # for a trial
    way: str = ""  # by which it reaches the verifier, if not by the address that the others know


def first(count: int) -> int:
    """Draws nothing: of those that are as good, the one with the smallest worker_id."""
    return 0


def choose_verifier(
    candidates: Iterable[VerifierCandidate],
    model: str,
    prompt_tokens: int,
    most_tokens: int,
    numerics: str = "",
    same_numerics: bool = False,
    below: Below = first,
) -> VerifierCandidate | None:
    """Returns the verifier of `model` for a prompt of that length, which with its output may come to
    `most_tokens`.

    Those that cannot hold them all are left out: they would refuse, and another may come. First come those
    that have not lost the session before: one that loses whatever it gets looks idle, and would get it again.
    Then those where nothing has to wait for KV blocks: fewest sessions waiting, the new one included if it
    does not fit into what is free. Among these the cheapest, counted in sessions: those running, one each for
    a full KV pool and for a price of 1, less what the prompt's cached beginning is worth. Of those that are
    nearly as cheap, those that hold most of the prompt, and of them one that is drawn by `below`. Draining
    ones are left out. None if no verifier is left.

    Where the session has text that a verifier of some `numerics` gave, others come after all of these, and
    with `same_numerics` not at all.
    """
    fitting = [
        one for one in candidates if one.model == model and one.holds(most_tokens) and not one.load.draining
    ]
    if numerics:
        alike = [one for one in fitting if one.numerics == numerics]
        fitting = alike if alike or same_numerics else fitting
    if not fitting:
        return None
    costs = [_verifier_cost(one, prompt_tokens) for one in fitting]
    rank, least = min(costs)
    near = [
        one
        for one, (its_rank, cost) in zip(fitting, costs, strict=True)
        if its_rank == rank and cost <= least + NEAR_SESSIONS
    ]
    most_cached = max(one.cached_tokens for one in near)
    best = [one for one in near if one.cached_tokens == most_cached]
    best.sort(key=attrgetter("worker_id"))
    return best[below(len(best))]


def well_placed(one: VerifierCandidate, prompt_tokens: int, numerics: str = "") -> bool:
    """Returns whether a session is so well off there that nobody need look at more verifiers than the few
    that it was chosen of: nothing is worse than that others have fewer sessions."""
    rank, _ = _verifier_cost(one, prompt_tokens)
    return rank == UNTROUBLED and numerics in ("", one.numerics)


def _verifier_cost(one: VerifierCandidate, prompt_tokens: int) -> tuple[Rank, float]:
    """Returns what matters first, and then the cost in sessions; less is better."""
    load = one.load
    kv_usage = bounded(load.kv_usage, 0.0, 1.0)
    needed = prompt_tokens - one.cached_tokens
    waiting = load.waiting + (needed > (1 - kv_usage) * one.kv_tokens)
    # A report is up to a step old: what was placed since then counts, whosever the sessions in it are.
    sessions = max(load.running + one.unreported, one.placed - load.waiting)
    affinity = min(one.cached_tokens / AFFINITY_TOKENS, MAX_AFFINITY)
    return (one.lost, waiting), sessions + kv_usage + bounded(load.price, 0.0, 1.0) - affinity


def choose_drafter(
    candidates: Iterable[DrafterCandidate],
    tokenizer_hash: str,
    verifier_address: str,
    excluded: frozenset[tuple[str, int]] = frozenset(),
    below: Below = first,
) -> str | None:
    """Returns the drafter of the target's tokenizer that promises the session most, its share of it
    considered. Who promises far more than most do is not believed: what they are worth is known by what
    verifiers told of them (drafter_merits.py).

    That is goodput / (sessions + 1). One that is distrusted comes after all others. Of those that promise
    nearly as much, one is drawn by `below`. `excluded`: (worker_id, incarnation) of those that gave this
    session up before. None means plain decoding.
    """
    trusted = usable(candidates, tokenizer_hash, excluded)
    if not trusted:
        return None
    # A pace that is not measured yet is taken for the best that is: so it gets measured.
    measured = [one.load.token_seconds for one in trusted if one.load.token_seconds > 0]
    assumed = min(measured, default=LEAST_TOKEN_SECONDS)

    def promise(one: DrafterCandidate) -> float:
        pace = one.load.token_seconds if one.load.token_seconds > 0 else assumed
        return goodput(one.acceptance, pace, round_trip(one, verifier_address))

    promised = [promise(one) for one in trusted]
    most = MOST_CLAIMED * sorted(promised)[(len(promised) - 1) // 2]  # pace and distance are their own words
    shares = [
        min(alone, most) / (max(one.load.sessions + one.unreported, one.placed, 0) + 1)
        for one, alone in zip(trusted, promised, strict=True)
    ]
    enough = max(shares) * (1 - NEAR_SHARE)
    best = sorted(one.worker_id for one, share in zip(trusted, shares, strict=True) if share >= enough)
    return best[below(len(best))]


def usable(
    candidates: Iterable[DrafterCandidate],
    tokenizer_hash: str,
    excluded: frozenset[tuple[str, int]] = frozenset(),
) -> list[DrafterCandidate]:
    """Returns those that could draft for a session; if some of them are not distrusted, only these."""
    fitting = [
        one
        for one in candidates
        if tokenizer_fits(one.tokenizer_hash, tokenizer_hash)
        and (one.worker_id, one.incarnation) not in excluded
    ]
    return [one for one in fitting if not one.distrusted] or fitting


def goodput(acceptance: float, token_seconds: float, round_trip_seconds: float) -> float:
    """Returns the draft tokens a second that a drafter gets accepted, alone and with a target that never
    makes it wait.

    Drafts stream ahead, so a round trip costs only after a rejection. Between two rejections m = a / (1 - a)
    tokens are accepted on average, and m + 1 are drafted: m / ((m + 1) * t_draft + RTT).
    """
    acceptance = bounded(acceptance, 0.01, 0.99)
    accepted = acceptance / (1 - acceptance)
    token_seconds = bounded(token_seconds, LEAST_TOKEN_SECONDS, MAX_SECONDS)
    return accepted / ((accepted + 1) * token_seconds + bounded(round_trip_seconds, 0.0, MAX_SECONDS))


def round_trip(drafter: DrafterCandidate, verifier_address: str) -> float:
    """Returns the seconds between the two and back: measured, or assumed by their hosts."""
    measured = drafter.load.round_trips.get(drafter.way or verifier_address)
    if measured is not None:
        return measured
    return SAME_HOST_SECONDS if host_of(drafter.address) == host_of(verifier_address) else OTHER_HOST_SECONDS


def host_of(address: str) -> str:
    """Returns the host of host:port."""
    return address.rpartition(":")[0]


def bounded(value: float, least: float, most: float) -> float:
    """Returns the value within its bounds. NaN counts as the most: nothing is gained by reporting it."""
    return least if value < least else value if value <= most else most
