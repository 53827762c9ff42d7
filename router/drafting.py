"""How a session is drafted for at the moment, and why it is not. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from outrider.wire.load import VerifierLoad


class Undrafted(StrEnum):
    """Why a session has no drafts."""

    UNWANTED = "unwanted"  # the request, or the service, wants none
    REST = "rest"  # its verifier has compared, and with drafts it is not faster
    NO_DRAFTER = "no_drafter"  # none is connected
    NONE_CHOSEN = "none_chosen"  # none of those that are fits, has room, or brought enough lately
    PRICE = "price"  # a place in a step costs more than a draft token is likely to bring


class Drafting(NamedTuple):
    verifier: str  # worker_id; empty = it has none
    drafters: tuple[str, ...]  # worker_ids
    k: int
    window: int  # the largest of theirs
    acceptance: float  # expected of its next draft token
    undrafted: Undrafted | None  # None = it may have drafts, or no verifier


def why_undrafted(
    cap: int, load: VerifierLoad | None, connected: bool, chosen: bool, k: int
) -> Undrafted | None:
    """`cap`: most draft tokens in a step; `load` of its verifier, None = it has none; `connected`: whether
    any drafter is; `chosen`: whether one drafts for it."""
    if cap == 0:
        return Undrafted.UNWANTED
    if load is None:
        return None
    if load.drafts_rest:
        return Undrafted.REST
    if not chosen:
        return Undrafted.NONE_CHOSEN if connected else Undrafted.NO_DRAFTER
    return Undrafted.PRICE if k == 0 else None
