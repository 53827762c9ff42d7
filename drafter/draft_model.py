"""A draft model as a kind of draft: loaded, checked, and ready to be served."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from drafter.acceptance_model import ALTERNATIVES
from drafter.config import DrafterConfig
from drafter.masks import MOST_GUESSES, mask_token
from drafter.proposer import OnChange, OnFailed, Source
from drafter.retokenized import Retokenizing
from drafter.stepper import DraftStepper
from drafter.target_tokenizer import ADDRESS, target_tokenizer
from outrider.engine.engine import Engine
from outrider.engine.in_use import in_use
from outrider.engine.warm_up import warm_up
from outrider.grammar import Grammars
from outrider.net.tls import opened
from outrider.vocabulary import Reading, Vocabulary, reading
from outrider.wire.description import TokenizerFiles, WorkerInfo
from outrider.wire.hello import Role
from outrider.worker.followers import FollowerProcesses, StartFollowers
from outrider.worker.model import load

LEAST_COMMON = 0.9  # share of a text's tokens; below it drafting as text brings more


@dataclass(frozen=True, slots=True)
class Foreign:
    """A target's tokenizer that is not the draft model's."""

    tokenizer: TokenizerFiles
    draft: Vocabulary
    target: Vocabulary
    reading: Reading
    by_token: bool  # whether the model is made to guess the target's tokens; else what it drafts is text

    @property
    def note(self) -> str:
        how = "token by token" if self.by_token else "as text"
        return f"drafts {how} for another tokenizer, {self.reading.share:.0%} of whose tokens it has"


def foreign(draft: TokenizerFiles, target: TokenizerFiles, divided: bool = False) -> Foreign | None:
    """Returns how a draft model drafts for a target that has another tokenizer; None if it is the same.
    Raises StartupError."""
    if draft.hash == target.hash:
        return None
    ours, theirs = Vocabulary(draft), Vocabulary(target)
    compared = reading(ours, theirs)
    return Foreign(target, ours, theirs, compared, compared.share >= LEAST_COMMON and not divided)


async def model_source(config: DrafterConfig, start_followers: StartFollowers | None) -> Source:
    """Returns the draft model, loaded and checked. Raises StartupError."""
    assert config.draft is not None
    other, theirs, lender = None, None, None
    if config.target is not None:
        theirs = await target_tokenizer(config.target, opened(config.protection.tls))
        if ADDRESS.fullmatch(config.target) is None:
            lender = config.target, theirs

    def read_by(tokenizer: TokenizerFiles) -> Reading | None:
        nonlocal other
        if theirs is not None:
            other = foreign(tokenizer, theirs, config.engine.tensor_parallel_size > 1)
        return other.reading if other is not None and other.by_token else None

    engine, tokenizer, info = await load(
        Role.DRAFTER,
        config.draft,
        config.model_name,
        config.engine,
        start_followers or FollowerProcesses,
        read_by=read_by,
        lender=lender,
    )
    await engine.run(engine.make_ready, config.limits.max_batch_tokens)
    await engine.run(warm_up, engine, config.limits.max_batch_tokens, 1 + ALTERNATIVES)
    if other is not None:
        return foreign_source(config, engine, info, other)
    grammars = Grammars(tokenizer.json, info.model.eos_token_ids, info.model.vocab_size)

    def proposer(on_change: OnChange, on_failed: OnFailed) -> DraftStepper:
        return _stepper(config, engine, on_change, on_failed, grammars=grammars)

    return Source(info, tokenizer, proposer, _note(engine))


def foreign_source(config: DrafterConfig, engine: Engine, info: WorkerInfo, other: Foreign) -> Source:
    """Returns a draft model for a target that has another tokenizer. It is known by the target's."""
    context = info.max_context
    identity = replace(info.identity, tokenizer_hash=other.tokenizer.hash)
    model = replace(info.model, vocab_size=other.target.size, eos_token_ids=other.target.ends)
    info = replace(info, identity=identity, model=model)
    grammars = Grammars(other.tokenizer.json, other.target.ends, other.target.size)

    def by_token(on_change: OnChange, on_failed: OnFailed) -> DraftStepper:
        return _stepper(config, engine, on_change, on_failed, grammars=grammars)

    def as_text(on_change: OnChange, on_failed: OnFailed) -> Retokenizing:
        def stepper(on_change: OnChange, on_failed: OnFailed) -> DraftStepper:
            size = other.target.size
            return _stepper(config, engine, on_change, on_failed, branches=False, vocab_size=size)

        return Retokenizing(stepper, other.draft, other.target, context, on_change, on_failed)

    proposer = by_token if other.by_token else as_text
    return Source(info, other.tokenizer, proposer, f"{other.note}, {_note(engine)}")


def _note(engine: Engine) -> str:
    mask = mask_token(engine.model.config)
    guesses = "" if mask is None else f"guesses up to {MOST_GUESSES} tokens a pass, "
    return guesses + in_use(engine)


def _stepper(
    config: DrafterConfig,
    engine: Engine,
    on_change: OnChange,
    on_failed: OnFailed,
    branches: bool = True,
    grammars: Grammars | None = None,
    vocab_size: int | None = None,
) -> DraftStepper:
    return DraftStepper(
        engine,
        config.limits,
        on_change,
        on_failed,
        time.monotonic,
        branches and config.branches,
        grammars,
        vocab_size,
        mask_token(engine.model.config),
        config.cascade,
    )
