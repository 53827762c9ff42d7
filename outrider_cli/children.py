"""Which processes `outrider serve` consists of: pure functions from configurations to command lines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from drafter.config import DrafterConfig
from outrider.options.engine import EngineOptions
from outrider.options.memory import Share
from outrider.options.option import words
from outrider.options.protection import Protection
from outrider.options.telemetry import Export, Logging
from outrider.options.worker import Listen, Registration
from outrider_cli.supervisor import ChildSpec
from router.config import RouterConfig
from verifier.config import VerifierConfig

BESIDE_DRAFTS = Share(70)  # of a GPU's free memory, for a target with whose draft model it is shared
LEFT_FOR_DRAFTS = Share(50)


@dataclass(frozen=True, slots=True)
class Models:
    """What is served."""

    target: str  # folder or hub id
    draft: str | None  # None = no draft model
    name: str  # by which clients ask for it; several with commas between
    propose: str | None = None  # where guesses come from without a draft model, or beside it
    chat: bool = False  # whether it is the model of the first command, which answers questions
    speculator: str | None = None  # folder of that by which the target guesses itself

    @property
    def alone(self) -> Models:
        """Returns the target without anything that guesses."""
        return replace(self, draft=None, propose=None, speculator=None)

    @property
    def drafts(self) -> bool:
        """Returns whether a draft model guesses, and nothing else."""
        return self.draft is not None and (self.propose or self.speculator) is None

    @property
    def both(self) -> bool:
        """Returns whether a draft model guesses, and something else beside it."""
        return self.draft is not None and self.propose is not None


@dataclass(frozen=True, slots=True)
class Workers:
    """How the workers are run."""

    verifiers: int
    drafters: int
    engine: EngineOptions = field(default=EngineOptions())  # of each; only verifiers are divided
    draft_quantization: str | None = None  # of the drafters; None = as the engine
    remember_answers: str | None = None  # memory of drafters without a model for finished answers
    branches: bool = True  # whether drafters draft on from likely corrections, too
    lock_step: bool = False
    compare: bool = True
    trees: bool = True  # whether a step may verify more than a path of a session's drafts
    resting_threads: int | None = None  # of each verifier
    max_model_len: int | None = None  # None = the target's own
    protection: Protection = field(default=Protection())
    joined: Listen | None = None  # where verifiers listen for drafters that join; None = none do
    logging: Logging = field(default=Logging())
    export: Export = field(default=Export())


def router_child(models: Models, config: RouterConfig, logging: Logging) -> ChildSpec:
    """Returns the router. Where two guess, each session may have both."""
    if models.both:
        most = max(2, config.sessions.drafters_per_session)
        config = replace(config, sessions=replace(config.sessions, drafters_per_session=most))
    return ChildSpec("router", "router", _outrider("router", config, logging), restart=False)


def worker_children(models: Models, workers: Workers, router: str) -> list[ChildSpec]:
    """Returns the verifiers and drafters that register with the router at host:port."""
    registration = Registration(router=router)
    for_verifiers, for_drafters = kv_memory(workers, models.draft is not None)
    # They are on this machine: without an authority for their certificates they speak in the clear.
    told = replace(workers.protection, insecure=False)
    protection = told if told.tls_ca is not None else Protection()
    verifier = VerifierConfig(
        models.target,
        registration,
        protection=protection,
        name=models.name,
        engine=replace(workers.engine, kv_memory=for_verifiers),
        lock_step=workers.lock_step,
        compare=workers.compare,
        trees=workers.trees,
        speculator=models.speculator,
        resting_threads=workers.resting_threads,
        max_model_len=workers.max_model_len,
        export=workers.export,
    )
    if workers.joined is not None:
        verifier = replace(
            verifier,
            listen=workers.joined,
            join_port=None if protection.tls is None else 0,
            protection=replace(protection, insecure=workers.protection.insecure),
        )
    command = _outrider("verifier", verifier, workers.logging)
    specs = [
        ChildSpec("verifier", name, command, restart=True, drain_seconds=verifier.drain_seconds)
        for name in _names("verifier", workers.verifiers)
    ]
    drafters: list[tuple[Sequence[str], DrafterConfig]] = []
    if models.draft is not None:
        with_model = DrafterConfig(
            models.draft,
            None,
            registration,
            protection=protection,
            engine=replace(
                workers.engine,
                kv_memory=for_drafters,
                tensor_parallel_size=1,
                lora=None,
                quantization=workers.draft_quantization or workers.engine.quantization,
            ),
            branches=workers.branches and not workers.lock_step,
            target=models.target,
            export=workers.export,
        )
        drafters.append((_names("drafter", workers.drafters), with_model))
    if models.propose is not None:
        without = DrafterConfig(
            None,
            models.propose,
            registration,
            protection=protection,
            remember_answers=workers.remember_answers,
            export=workers.export,
        )
        names = [f"drafter-{models.propose}"] if models.both else _names("drafter", workers.drafters)
        drafters.append((names, without))
    for names, drafter in drafters:
        command = _outrider("drafter", drafter, workers.logging)
        last = drafter.draft is not None and isinstance(workers.engine.memory_for_kv, Share)
        specs += [ChildSpec("drafter", name, command, True, last=last) for name in names]
    return specs


def kv_memory(workers: Workers, drafting: bool) -> tuple[str | None, str | None]:
    """Returns the --kv-memory of each verifier and of each drafter with a model, if any is `drafting`.

    A size is for each. A share is the verifiers', which divide it: drafters start after them, for there is no
    telling before what they leave, and divide a half of that."""
    told = workers.engine.kv_memory
    share = workers.engine.memory_for_kv
    if not isinstance(share, Share) or (not drafting and workers.verifiers == 1):
        return told, told
    if told is None and drafting:
        share = BESIDE_DRAFTS
    for_verifiers = str(Share(share.percent / workers.verifiers))
    for_drafters = str(Share(LEFT_FOR_DRAFTS.percent / max(workers.drafters, 1)))
    return for_verifiers, for_drafters if drafting else told


def threads_each(cores: int, workers: int) -> int:
    """Returns the cores divided among the workers, at least one for each."""
    return max(1, cores // workers)


def _names(role: str, count: int) -> Sequence[str]:
    return [role] if count == 1 else [f"{role}-{i + 1}" for i in range(count)]


def _outrider(role: str, config: object, logging: Logging) -> tuple[str, ...]:
    return (sys.executable, "-m", "outrider_cli", role, *words(config), *words(logging))
