"""The workers that are registered now, the models that they serve, and who is told when that changes."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from outrider.wire.load import DrafterLoad, VerifierLoad
from outrider.wire.session import SessionId
from router.absent import Absent, come_back
from router.compatibility import Registration, tokenizer_fits
from router.drafter_choice import DrafterChoice
from router.drafter_doubts import DrafterDoubts
from router.losses import RESUME_SECONDS
from router.metrics import Metrics
from router.placement import VerifierCandidate, choose_verifier, well_placed
from router.pool import Below, Pools, drawn
from router.prefixes import MOST_SIZES, PrefixHolders, PromptBlocks
from router.requests import ServedModel
from router.standings import Standings
from router.transcript import Transcript
from router.turns import Turns
from router.workers import Drafter, Verifier

log = logging.getLogger(__name__)

CANCEL_SECONDS = RESUME_SECONDS  # as long as a session waits for a verifier
AGAIN_SECONDS = 1.0  # after which one that is cancelled again is told again
MOST_CANCELLED = 4096  # that are remembered; the oldest go first
FEW = 8  # verifiers that are drawn to be looked at


class Fleet:
    """Live workers by role and worker_id. `clock` gives seconds."""

    def __init__(
        self,
        metrics: Metrics,
        clock: Callable[[], float],
        unix_time: Callable[[], float] = time.time,
        below: Below | None = None,
    ) -> None:
        """`unix_time` is for what people are told: since when a model is served. `below` draws those that are
        looked at, and one of those that are as good."""
        self.metrics = metrics
        self._clock = clock
        self._unix_time = unix_time
        self._below = below = below or drawn()
        self.verifiers: dict[str, Verifier] = {}
        self.drafters: dict[str, Drafter] = {}
        self.on_verifier_joined: list[Callable[[], None]] = []
        self.on_drafter_joined: list[Callable[[], None]] = []
        self.on_verifier_load: list[Callable[[Verifier], None]] = []
        self.waiting: dict[Verifier, None] = {}  # those that have sessions that wait for KV blocks
        self.standings = Standings(metrics, clock)
        self._of_model: Pools[str, Verifier] = Pools()
        self._numerics: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by model, where they are told
        # By model, how many verifiers can hold a session of so many tokens.
        self._contexts: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._block_sizes: defaultdict[str, Counter[int]] = defaultdict(Counter)  # by model, of its verifiers
        self._holders = PrefixHolders()
        self._served: dict[str, ServedModel] = {}
        self._models: list[ServedModel] | None = None  # what `models` says, until a verifier comes or goes
        self._absent = Absent()
        self.doubts = DrafterDoubts(metrics, clock)
        self.choice = DrafterChoice(self.drafters, self.doubts, below)
        self.turns = Turns()  # of sessions that seek a verifier
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
        self._of_model.add(model.name, verifier)
        self._note_waiting(verifier)
        self._block_sizes[model.name][verifier.prefixes.block_size] += 1
        if verifier.numerics:
            self._numerics[model.name][verifier.numerics] += 1
        if len(found := self._numerics[model.name]) > 1:
            log.warning(
                "the verifiers of %r do not compute alike (%s): a session that moves among them may choose "
                "another token where two are nearly equal; see --same-numerics",
                *(model.name, ", ".join(sorted(found))),
            )
        self._contexts[model.name][verifier.registration.info.max_context] += 1
        self._absent.came(verifier.identity.worker_id)
        self._models = None
        if model.name not in self._served:
            self._absent.replaced(model.name, model.fingerprint)
            assert verifier.registration.tokenizer is not None, "a verifier brings one"
            self._served[model.name] = ServedModel(
                name=model.name,
                fingerprint=model.fingerprint,
                vocab_size=model.vocab_size,
                max_context=verifier.registration.info.max_context,
                eos_token_ids=frozenset(model.eos_token_ids),
                tokenizer=verifier.registration.tokenizer,
                created=int(self._unix_time()),
                aliases=model.aliases,
            )
        for joined in self.on_verifier_joined:
            joined()

    def add_drafter(self, drafter: Drafter) -> None:
        self.drafters[drafter.identity.worker_id] = drafter
        self.metrics.worker_joined(drafter.identity.key, drafter.registration.info.model.name)
        drafter.on_load = self._observe_drafter
        self.choice.add(drafter)
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
            self.choice.remove(worker)
            self._count()
            for session in worker.take_listeners():
                session.drafter_lost()
            return True
        del self.verifiers[worker_id]
        self._models = None
        (as_it_was,), served = self.candidates([worker]), self._served[name]
        alone = replace(served, max_context=worker.registration.info.max_context, numerics=_told(worker))
        self._absent.went(as_it_was, alone, self._clock())
        self.waiting.pop(worker, None)
        self._of_model.remove(name, worker)
        self._block_sizes[name] -= Counter([worker.prefixes.block_size])
        self._numerics[name] -= Counter([worker.numerics])
        self._contexts[name] -= Counter([worker.registration.info.max_context])
        self._count()
        if not self._of_model[name]:
            del self._served[name], self._numerics[name], self._contexts[name], self._block_sizes[name]
        for listener in worker.take_listeners():
            listener.verifier_lost()
        return True

    def was_told(self, session_id: SessionId) -> bool:
        """Returns whether verifiers were told of it less than AGAIN_SECONDS ago."""
        return self._cancelled.get(session_id, 0.0) > self._clock() + CANCEL_SECONDS - AGAIN_SECONDS

    def cancel(self, session_id: SessionId) -> None:
        """Ends a session that another router may have, wherever it is or comes within CANCEL_SECONDS."""
        self._cancelled.pop(session_id, None)
        self._cancelled[session_id] = self._clock() + CANCEL_SECONDS
        if len(self._cancelled) > MOST_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]
        for verifier in self.verifiers.values():
            verifier.cancel(session_id)

    def models(self) -> list[ServedModel]:
        """Returns each with the longest context that one of its verifiers holds: placement knows which."""
        if self._models is None:
            self._models = self._told_models()
        return self._models

    def _told_models(self) -> list[ServedModel]:
        return [
            replace(
                model,
                max_context=max(self._contexts[model.name]),
                numerics=tuple(sorted(self._numerics[model.name])),
            )
            for model in sorted(self._served.values(), key=lambda model: model.name)
        ]

    def absent_models(self) -> list[ServedModel]:
        """Returns those that nobody serves now, and somebody did within RESUME_SECONDS."""
        return [model for model in self._absent.models(self._clock()) if model.name not in self._served]

    def absent_context(self, model: str) -> int:
        """Returns how many tokens those held at most that served the model within RESUME_SECONDS."""
        return max((one.context for one in self._absent.of(model, self._clock())), default=0)

    def awaited(self, model: str, waiting: int) -> list[VerifierCandidate]:
        """Returns the verifiers that may come back to sessions of the model, of which so many have none, as
        they will be then; none while one is here. One that leaves is as good as away."""
        here = self._of_model[model]
        if any(not one.load.draining for one in here):
            return []
        return come_back([*self._absent.of(model, self._clock()), *self.candidates(here)], waiting)

    def served(self) -> list[Registration]:
        """Returns a verifier of each model that is served, which all others of it are like."""
        return [next(iter(self._of_model[name])).registration for name in self._served]

    def verifier_of(self, drafter: Drafter) -> Verifier | None:
        """Returns one at random of those whose sessions the drafter may get, if it is told a way to it."""
        for name in self._served:
            (verifier,) = self._of_model[name].draw(1, self._below)
            theirs = verifier.registration.info.identity.tokenizer_hash
            if tokenizer_fits(drafter.identity.tokenizer_hash, theirs) and drafter.way_to(verifier):
                return verifier
        return None

    def verifier_for(
        self,
        transcript: Transcript,
        same_numerics: bool = False,
        lost: frozenset[tuple[str, int]] = frozenset(),
    ) -> Verifier | None:
        """Returns the verifier that a session goes on at: if `same_numerics`, one with those of its text.
        `lost`: (worker_id, incarnation) of those that have lost it."""
        request, tokens = transcript.request, transcript.log
        blocks, most = PromptBlocks(tokens, request.params.cache_salt), request.params.most_tokens
        verifier = None
        for candidates in self._looks(request.model, blocks, request.owner, lost):
            chosen = choose_verifier(
                candidates,
                request.model,
                len(tokens),
                most,
                transcript.numerics,
                same_numerics,
                self._below,
            )
            if chosen is not None:
                verifier = self.verifiers[chosen.worker_id]
                if well_placed(chosen, len(tokens), transcript.numerics):
                    break
        if verifier is not None:
            placed = blocks.of(verifier.prefixes.block_size)
            verifier.prefixes.place(placed)
            self._holders.place(placed, verifier.identity.worker_id)
        return verifier

    def numerics_changed(self, session_id: SessionId, transcript: Transcript, here: str) -> None:
        """Tells that a text goes on at a verifier with other numerics."""
        self.metrics.numerics_changed(transcript.request.model)
        log.warning(
            "session %s: after %d tokens with the numerics %s it goes on with %s, as no target worker has "
            "the former: where two tokens are nearly equal it may choose another one",
            *(session_id.hex(), transcript.output_tokens, transcript.numerics, here),
        )

    def looks(
        self, model: str, tokens: Sequence[int], cache_salt: bytes = b"", owner: str = ""
    ) -> Iterator[Iterable[VerifierCandidate]]:
        """Yields a few verifiers of the model, drawn at random, with those that may hold the beginning of
        `tokens`; then, for who finds none there that suits, all of them. `owner`: whose tokens they are."""
        return self._looks(model, PromptBlocks(tokens, cache_salt), owner)

    def _looks(
        self, model: str, blocks: PromptBlocks, owner: str, lost: frozenset[tuple[str, int]] = frozenset()
    ) -> Iterator[Iterator[VerifierCandidate]]:
        pool, may_place = self._of_model[model], partial(self.standings.may_place, owner=owner)
        few = dict.fromkeys(pool.draw(FEW, self._below))
        if len(few) < len(pool):
            for size, _ in self._block_sizes[model].most_common(MOST_SIZES):
                for worker_id in self._holders.find(blocks.of(size)):
                    holder = self.verifiers.get(worker_id)
                    if holder is not None and holder.registration.info.model.name == model:
                        few[holder] = None
            yield self._candidates(filter(may_place, few), blocks, lost)
        yield self._candidates(filter(may_place, pool), blocks, lost)

    def candidates(self, verifiers: Iterable[Verifier]) -> list[VerifierCandidate]:
        """Returns them as they are, whatever a session's prompt."""
        return list(self._candidates(verifiers, PromptBlocks(())))

    def _candidates(
        self,
        verifiers: Iterable[Verifier],
        blocks: PromptBlocks,
        lost: frozenset[tuple[str, int]] = frozenset(),
    ) -> Iterator[VerifierCandidate]:
        for one in verifiers:
            yield VerifierCandidate(
                one.identity.worker_id,
                one.registration.info.model.name,
                one.load,
                one.placed,
                kv_tokens=one.kv_tokens,
                cached_tokens=one.prefixes.match(blocks.of(one.prefixes.block_size)),
                lost=one.instance in lost,
                numerics=one.numerics,
                unreported=one.unreported,
                context=one.registration.info.max_context,
            )

    def _note_waiting(self, verifier: Verifier) -> None:
        if verifier.load.waiting:
            self.waiting[verifier] = None
        else:
            self.waiting.pop(verifier, None)

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
        model = verifier.registration.info.model.name
        self.metrics.observe_load(verifier.identity.worker_id, model, load)
        if self.verifiers.get(verifier.identity.worker_id) is not verifier:
            return
        self._note_waiting(verifier)
        for reported in self.on_verifier_load:
            reported(verifier)


def _told(verifier: Verifier) -> tuple[str, ...]:
    return (verifier.numerics,) if verifier.numerics else ()
