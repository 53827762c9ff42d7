"""Verifiers that were here a moment ago: requests wait for them, as sessions that lost theirs do. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from router import losses
from router.placement import VerifierCandidate
from router.requests import ServedModel

MOST_TOKENIZERS = 2**27  # characters of them together: of models that come and go; beyond that the last one's


@dataclass(frozen=True, slots=True)
class _Gone:
    verifier: VerifierCandidate
    model: ServedModel  # as it served it by itself
    until: float


class Absent:
    """Each is known for RESUME_SECONDS, as long as a session waits for another verifier."""

    def __init__(self) -> None:
        self._gone: dict[str, _Gone] = {}  # by worker_id, the one that went last at the end

    def went(self, verifier: VerifierCandidate, model: ServedModel, now: float) -> None:
        self._forget_old(now)
        self._gone.pop(verifier.worker_id, None)
        self._gone[verifier.worker_id] = _Gone(verifier, model, now + losses.RESUME_SECONDS)
        while len(self._gone) > 1 and self._tokenizers() > MOST_TOKENIZERS:
            del self._gone[next(iter(self._gone))]

    def came(self, worker_id: str) -> None:
        self._gone.pop(worker_id, None)

    def replaced(self, name: str, fingerprint: str) -> None:
        """Another checkpoint may be served under that name now: those that served the former do not count."""
        self._gone = {
            worker_id: one
            for worker_id, one in self._gone.items()
            if one.model.name != name or one.model.fingerprint == fingerprint
        }

    def models(self, now: float) -> list[ServedModel]:
        """Returns what they served, each with the longest context that one of them held."""
        self._forget_old(now)
        by_name: dict[str, list[ServedModel]] = {}
        for one in self._gone.values():
            by_name.setdefault(one.model.name, []).append(one.model)
        return [
            replace(
                alike[-1],
                max_context=max(model.max_context for model in alike),
                numerics=tuple(sorted({name for model in alike for name in model.numerics})),
            )
            for _, alike in sorted(by_name.items())
        ]

    def of(self, model: str, now: float) -> list[VerifierCandidate]:
        """Returns those that served the model of that name, the one that went last at the end."""
        self._forget_old(now)
        return [one.verifier for one in self._gone.values() if one.model.name == model]

    def _tokenizers(self) -> int:
        """Returns the characters that their tokenizers have."""
        by_hash = {one.model.tokenizer.hash: one.model.tokenizer for one in self._gone.values()}
        return sum(len(each.json) for each in by_hash.values())

    def _forget_old(self, now: float) -> None:
        while self._gone:
            worker_id, oldest = next(iter(self._gone.items()))
            if oldest.until > now:
                return
            del self._gone[worker_id]


def come_back(gone: list[VerifierCandidate], waiting: int) -> list[VerifierCandidate]:
    """Returns them as they will be: empty, and `waiting` sessions are shared out among them at once."""
    share = waiting // len(gone) if gone else 0
    return [
        replace(
            one,
            load=replace(
                one.load, running=0, waiting=0, kv_usage=0.0, unread_prompt_tokens=0, draining=False
            ),
            placed=share,
            unreported=share,
            cached_tokens=0,
        )
        for one in gone
    ]
