"""The workers that are registered now, the models that they serve, and who is told when that changes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from outrider.wire.load import DrafterLoad, VerifierLoad
from outrider.wire.session import SessionId
from router.metrics import Metrics
from router.placement import DrafterCandidate, VerifierCandidate, choose_drafter, choose_verifier
from router.requests import ServedModel
from router.transcript import Transcript
from router.workers import Drafter, Verifier

log = logging.getLogger(__name__)

DISTRUST_SECONDS = 600.0
SILENCE_SECONDS = 60.0  # for which a drafter is not preferred whose drafts never came
CANCEL_SECONDS = 60.0  # as long as a session waits for a verifier
MOST_CANCELLED = 4096  # that are remembered; the oldest go first

Acceptance = Callable[[str, str], float]
"""Returns the share of draft tokens that a (target fingerprint, draft fingerprint) pair has accepted."""


class Fleet:
    """Live workers by role and worker_id. `clock` gives seconds."""

    def __init__(
        self, metrics: Metrics, clock: Callable[[], float], unix_time: Callable[[], float] = time.time
    ) -> None:
        """`unix_time` is for what people are told: since when a model is served."""
        self.metrics = metrics
        self._clock = clock
        self._unix_time = unix_time
        self.verifiers: dict[str, Verifier] = {}
        self.drafters: dict[str, Drafter] = {}
        self.on_verifier_joined: list[Callable[[], None]] = []
        self.on_drafter_joined: list[Callable[[], None]] = []
        self.on_verifier_load: list[Callable[[Verifier], None]] = []
        self._served: dict[str, ServedModel] = {}
        self._distrusted_until: dict[str, float] = {}  # drafters, by worker_id
        self._cancelled: dict[SessionId, float] = {}  # until when verifiers that join are told of it

    def add_verifier(self, verifier: Verifier) -> None:
        self.verifiers[verifier.identity.worker_id] = verifier
        self.metrics.worker_joined(verifier.identity.key, verifier.registration.info.model.name)
        for session_id, until in self._cancelled.items():
            if until > self._clock():
                verifier.cancel(session_id)
        verifier.on_load = self._observe_load
        verifier.on_dropped = self._observe_dropped
        self._count()
        model = verifier.registration.info.model
        if len(found := self._numerics(model.name)) > 1:
            log.warning(
                "the verifiers of %r do not compute alike (%s): a session that moves among them may choose "
                "another token where two are nearly equal; see --same-numerics",
                *(model.name, ", ".join(sorted(found))),
            )
        if model.name not in self._served:
            assert verifier.registration.tokenizer is not None, "a verifier brings one"
            self._served[model.name] = ServedModel(
                name=model.name,
                fingerprint=model.fingerprint,
                vocab_size=model.vocab_size,
                max_context=model.max_context,
                eos_token_ids=frozenset(model.eos_token_ids),
                tokenizer=verifier.registration.tokenizer,
                created=int(self._unix_time()),
            )
        for joined in self.on_verifier_joined:
            joined()

    def add_drafter(self, drafter: Drafter) -> None:
        self.drafters[drafter.identity.worker_id] = drafter
        self.metrics.worker_joined(drafter.identity.key, drafter.registration.info.model.name)
        drafter.on_load = self._observe_drafter
        self._count()
        for joined in self.on_drafter_joined:
            joined()

    def remove(self, worker: Verifier | Drafter) -> bool:
        """Takes a worker out and tells its sessions. Returns False if it was not in."""
        worker_id = worker.identity.worker_id
        alike = self.drafters if isinstance(worker, Drafter) else self.verifiers
        if alike.get(worker_id) is not worker:
            return False
        name = worker.registration.info.model.name
        self.metrics.worker_left(worker.identity.key, name)
        if isinstance(worker, Drafter):
            del self.drafters[worker_id]
            self._count()
            for session in worker.take_listeners():
                session.drafter_lost()
            return True
        del self.verifiers[worker_id]
        self._count()
        if all(other.registration.info.model.name != name for other in self.verifiers.values()):
            del self._served[name]
        for listener in worker.take_listeners():
            listener.verifier_lost()
        return True

    def cancel(self, session_id: SessionId) -> None:
        """Ends a session that another router may have, wherever it is or comes within CANCEL_SECONDS."""
        self._cancelled.pop(session_id, None)
        self._cancelled[session_id] = self._clock() + CANCEL_SECONDS
        if len(self._cancelled) > MOST_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        for verifier in self.verifiers.values():
            verifier.cancel(session_id)

    def models(self) -> list[ServedModel]:
        return [
            replace(model, numerics=tuple(sorted(self._numerics(model.name))))
            for model in sorted(self._served.values(), key=lambda model: model.name)
        ]

    def _numerics(self, model: str) -> set[str]:
        """Returns those of all verifiers of a model, as far as they tell."""
        return {
            one.numerics
            for one in self.verifiers.values()
            if one.registration.info.model.name == model and one.numerics
        }

    def verifier_for(
        self,
        transcript: Transcript,
        same_numerics: bool = False,
        lost: frozenset[tuple[str, int]] = frozenset(),
    ) -> Verifier | None:
        """Returns the verifier that a session goes on at: if `same_numerics`, one with those of its text.
        `lost`: (worker_id, incarnation) of those that have lost it."""
        request, tokens = transcript.request, transcript.log
        chosen = choose_verifier(
            self.candidates(tokens, request.params.cache_salt, lost),
            request.model,
            len(tokens),
            request.params.most_tokens,
            transcript.numerics,
            same_numerics,
        )
        return None if chosen is None else self.verifiers[chosen]

    def numerics_changed(self, session_id: SessionId, transcript: Transcript, here: str) -> None:
        """Tells that a text goes on at a verifier with other numerics."""
        self.metrics.numerics_changed(transcript.request.model)
        log.warning(
            "session %s: after %d tokens with the numerics %s it goes on with %s, as no target worker has "
            "the former: where two tokens are nearly equal it may choose another one",
            *(session_id.hex(), transcript.output_tokens, transcript.numerics, here),
        )

    def candidates(
        self, tokens: Sequence[int], cache_salt: bytes = b"", lost: frozenset[tuple[str, int]] = frozenset()
    ) -> list[VerifierCandidate]:
        """Returns all verifiers, as they are for a session whose log is `tokens` and that some have lost."""
        return [
            VerifierCandidate(
                worker_id,
                one.registration.info.model.name,
                one.load,
                one.placed,
                kv_tokens=one.registration.info.kv_blocks * one.registration.info.kv_block_size,
                cached_tokens=one.prefixes.match(tokens, cache_salt),
                lost=(worker_id, one.identity.incarnation) in lost,
                numerics=one.numerics,
            )
            for worker_id, one in self.verifiers.items()
        ]

    def distrust(self, drafter: Drafter, reason: str) -> None:
        """Prefers others for a while, because a verifier cut the drafter off for what no drafter may send."""
        if self._prefer_others(drafter, DISTRUST_SECONDS):
            worker_id = drafter.identity.worker_id
            log.warning("drafter %s was cut off by a verifier (%s): others are preferred", worker_id, reason)
            self.metrics.drafter_cut_off()

    def passed_over(
        self, silent: Drafter, verifier: Verifier, gave_up: frozenset[tuple[str, int]], acceptance: Acceptance
    ) -> bool:
        """Returns whether another could draft for a session in the place of one of which nothing is verified;
        if so, others are preferred to it for a while."""
        if self.drafter_for(verifier, gave_up | {silent.instance}, acceptance) is None:
            return False
        if self._prefer_others(silent, SILENCE_SECONDS):
            worker_id = silent.identity.worker_id
            log.warning("nothing that drafter %s sends is verified: others are preferred", worker_id)
            self.metrics.drafter_silent()
        return True

    def _prefer_others(self, drafter: Drafter, seconds: float) -> bool:
        """Returns whether they were not yet."""
        worker_id, now = drafter.identity.worker_id, self._clock()
        new = self._distrusted_until.get(worker_id, 0.0) <= now
        self._distrusted_until = {key: at for key, at in self._distrusted_until.items() if at > now}
        self._distrusted_until[worker_id] = max(now + seconds, self._distrusted_until.get(worker_id, 0.0))
        return new

    def drafter_for(
        self, verifier: Verifier, excluded: frozenset[tuple[str, int]], acceptance: Acceptance
    ) -> Drafter | None:
        """Returns a drafter for a session at the verifier."""
        target = verifier.identity
        chosen = choose_drafter(
            (
                DrafterCandidate(
                    worker_id,
                    one.identity.incarnation,
                    one.identity.tokenizer_hash,
                    one.registration.address,
                    one.load,
                    one.placed,
                    acceptance(target.model_fingerprint, one.identity.model_fingerprint),
                    distrusted=self._distrusted_until.get(worker_id, 0.0) > self._clock(),
                )
                for worker_id, one in self.drafters.items()
            ),
            target.tokenizer_hash,
            verifier.registration.address,
            excluded,
        )
        return None if chosen is None else self.drafters[chosen]

    def _count(self) -> None:
        self.metrics.workers("verifier", len(self.verifiers))
        self.metrics.workers("drafter", len(self.drafters))

    def _observe_dropped(self, verifier: Verifier, counts: Mapping[str, int]) -> None:
        model = verifier.registration.info.model.name
        self.metrics.observe_dropped(verifier.identity.worker_id, model, counts)

    def _observe_drafter(self, drafter: Drafter, load: DrafterLoad) -> None:
        model = drafter.registration.info.model.name
        self.metrics.observe_rejections(
            drafter.identity.worker_id, model, load.rejections, load.rejections_covered
        )

    def _observe_load(self, verifier: Verifier, load: VerifierLoad) -> None:
        self.metrics.observe_load(
            verifier.identity.worker_id,
            verifier.registration.info.model.name,
            running=load.running,
            waiting=load.waiting,
            kv_usage=load.kv_usage,
            step_seconds=load.step_seconds,
            step_tokens=load.step_tokens,
            preemptions=load.preemptions,
        )
        for reported in self.on_verifier_load:
            reported(verifier)
