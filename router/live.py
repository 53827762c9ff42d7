"""The service as it is at a moment: its workers, who drafts for whom, and what becomes of drafts.

Of the workers everybody who may use the API is told what /metrics tells all. Of sessions each API key's owner
is told those of its own; of the others there are counts only. Nothing here knows any text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice

from outrider.wire.load import VerifierLoad
from outrider.wire.session import SessionId
from router.drafting import Drafting
from router.fleet import Fleet
from router.session import Session
from router.workers import Drafter, Verifier

MOST_WORKERS = 64  # of each role that are told of; of the others there is a count
MOST_SESSIONS = 32  # that an owner is told of: the newest
MOST_LOOKED_AT = 4096  # sessions, the newest first
MOST_LINKS = 64  # round trips and pairs of workers that are told
MOST_POSITIONS = 16  # in a draft, whose acceptance is told

Json = dict[str, object]


def service(fleet: Fleet, sessions: dict[SessionId, Session]) -> Json:
    """Returns what everybody is told."""
    verifiers = list(islice(fleet.verifiers.values(), MOST_WORKERS))
    drafters = list(islice(fleet.drafters.values(), MOST_WORKERS))
    places = ((one.registration, one.identity.worker_id) for one in verifiers)
    names = {at: name for there, name in places for at in (there.join_address, there.address)}
    return {
        "counts": {
            "verifiers": len(fleet.verifiers),
            "drafters": len(fleet.drafters),
            "sessions": len(sessions),
        },
        "verifiers": [_verifier(one) for one in verifiers],
        "drafters": [_drafter(one, names) for one in drafters],
        "pairs": _pairs(sessions.values()),
        "sources": [
            {"source": source, "verified": verified, "accepted": accepted}
            for source, verified, accepted in fleet.metrics.guesses.by_source
        ],
        "positions": positions(fleet.metrics.verified_in_steps, fleet.metrics.accepted_in_steps),
    }


def sessions_of(owner: str, sessions: dict[SessionId, Session]) -> list[Json]:
    """Returns what an owner is told of its sessions, the newest first."""
    looked_at = islice(reversed(sessions.values()), MOST_LOOKED_AT)
    own = (one for one in looked_at if one.transcript.request.owner == owner)
    return [_session(one) for one in islice(own, MOST_SESSIONS)]


def _verifier(verifier: Verifier) -> Json:
    load, model = verifier.load, verifier.registration.info.model
    return {
        "id": verifier.identity.worker_id,
        "model": model.name,
        "device": model.device,
        "numerics": model.numerics,
        "sessions": verifier.placed,
        **_load(load),
    }


def _load(load: VerifierLoad) -> Json:
    return {
        "running": load.running,
        "waiting": load.waiting,
        "kv_usage": load.kv_usage,
        "step_seconds": load.step_seconds,
        "step_tokens": load.step_tokens,
        "price": load.price,
        "goodput": load.goodput,
        "starvation": load.draft_starvation,
        "draining": load.draining,
        "drafts_rest": load.drafts_rest,
        "draft_gain": load.draft_gain,
    }


def _drafter(drafter: Drafter, names: Mapping[str, str]) -> Json:
    load = drafter.load
    known = [(names[at], seconds) for at, seconds in load.round_trips.items() if at in names]
    return {
        "id": drafter.identity.worker_id,
        "model": drafter.registration.info.model.name,
        "sessions": drafter.placed,
        "token_seconds": load.token_seconds,
        "busy": load.busy,
        "kv_usage": load.kv_usage,
        "round_trips": [{"verifier": name, "seconds": seconds} for name, seconds in known[:MOST_LINKS]],
    }


def _pairs(sessions: Iterable[Session]) -> list[Json]:
    """Returns how many sessions each drafter drafts for at each verifier; without a drafter it is empty."""
    count = Counter(
        (told.verifier, drafter)
        for told in (one.draft.seen() for one in islice(sessions, MOST_LOOKED_AT))
        if told.verifier
        for drafter in told.drafters or ("",)
    )
    return [
        {"verifier": verifier, "drafter": drafter, "sessions": number}
        for (verifier, drafter), number in count.most_common(MOST_LINKS)
    ]


def _session(session: Session) -> Json:
    told: Drafting = session.draft.seen()
    return {
        "id": session.id.hex(),
        "verifier": told.verifier,
        "drafters": told.drafters,
        "k": told.k,
        "window": told.window,
        "acceptance": told.acceptance,
        "undrafted": told.undrafted or "",
        "tokens": session.transcript.output_tokens,
    }


def positions(verified: Mapping[int, int], accepted: Mapping[int, int]) -> list[Json]:
    """Returns for each position in a draft how many tokens there were verified, and accepted. The arguments
    count steps, by how many tokens they verified and accepted."""
    most = min(max(verified, default=0), MOST_POSITIONS)
    return [{"verified": _above(verified, at), "accepted": _above(accepted, at)} for at in range(most)]


def _above(steps: Mapping[int, int], position: int) -> int:
    return sum(count for tokens, count in steps.items() if tokens > position)
