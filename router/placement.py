"""Which workers serve a session: pure decisions over what the workers said last."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from router.load import DrafterLoad, VerifierLoad


@dataclass(frozen=True, slots=True)
class VerifierCandidate:
    worker_id: str
    model: str  # name under which it serves
    load: VerifierLoad
    placed: int  # sessions that this router has open there; newer than `load`


@dataclass(frozen=True, slots=True)
class DrafterCandidate:
    worker_id: str
    incarnation: int
    tokenizer_hash: str
    load: DrafterLoad
    placed: int  # sessions that this router has open there; newer than `load`


def choose_verifier(candidates: Iterable[VerifierCandidate], model: str) -> str | None:
    """The least busy verifier of `model`: fewest sessions waiting, then running, then least KV held.

    Ties go to the smallest worker_id. None where no verifier serves the model.
    """
    fitting = [one for one in candidates if one.model == model]
    if not fitting:
        return None
    return min(fitting, key=_verifier_order).worker_id


def _verifier_order(one: VerifierCandidate) -> tuple[int, int, float, str]:
    # A load report is up to a step old; sessions placed since then must already count.
    return one.load.waiting, max(one.load.running, one.placed), one.load.kv_usage, one.worker_id


def choose_drafter(
    candidates: Iterable[DrafterCandidate],
    tokenizer_hash: str,
    excluded: frozenset[tuple[str, int]] = frozenset(),
) -> str | None:
    """The drafter of the target's tokenizer with the fewest sessions; ties go to the smallest worker_id.

    `excluded`: (worker_id, incarnation) of those that gave this session up before. None means plain decoding.
    """
    fitting = [
        one
        for one in candidates
        if one.tokenizer_hash == tokenizer_hash and (one.worker_id, one.incarnation) not in excluded
    ]
    if not fitting:
        return None
    return min(fitting, key=lambda one: (max(one.load.sessions, one.placed), one.worker_id)).worker_id
