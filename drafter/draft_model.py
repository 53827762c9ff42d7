"""A draft model as a kind of draft: loaded, checked, and ready to be served."""

from __future__ import annotations

import time

from drafter.config import DrafterConfig
from drafter.proposer import OnChange, OnFailed, Source
from drafter.stepper import DraftStepper
from outrider.grammar import Grammars
from outrider.wire.hello import Role
from outrider.worker.followers import FollowerProcesses, StartFollowers
from outrider.worker.model import load


async def model_source(config: DrafterConfig, start_followers: StartFollowers | None) -> Source:
    """Returns the draft model, loaded and checked. Raises StartupError."""
    assert config.draft is not None
    engine, tokenizer, info = await load(
        Role.DRAFTER,
        config.draft,
        config.model_name,
        config.engine,
        start_followers or FollowerProcesses,
    )
    await engine.run(engine.make_ready, config.limits.max_batch_tokens)

    grammars = Grammars(tokenizer.json, info.model.eos_token_ids)

    def proposer(on_change: OnChange, on_failed: OnFailed) -> DraftStepper:
        return DraftStepper(
            engine, config.limits, on_change, on_failed, time.monotonic, config.branches, grammars
        )

    return Source(info, tokenizer, proposer)
