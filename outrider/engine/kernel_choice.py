"""Which attention kernel an engine gets: the first that gives, here, what the model's own code gave."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from outrider.engine.attention_kernel import Kernel
from outrider.engine.engine import Engine
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.self_check import Reference, check
from outrider.errors import PeerLost, in_one_line

log = logging.getLogger(__name__)

PROBE_TOKENS = 1024  # that the pool of a check holds


def with_kernel(engine: Engine, expected: Reference, kernels: Iterable[Kernel]) -> Engine:
    """Returns an engine of a few blocks with the first kernel that gives `expected`, the logits of the
    model's own code, in every process of the group; or, with the reasons logged, the engine itself, which has
    run."""
    dtype = next(engine.model.parameters()).dtype
    layers = engine.attention.layers.values()
    reasons: set[str] = set()
    for kernel in kernels:
        refusals = {refusal for how in layers if (refusal := kernel.refusal(how, dtype)) is not None}
        if refusals:
            reasons |= {f"attention kernels cannot be used: {refusal}" for refusal in refusals}
            continue
        attention = PagedAttention.on(engine.model, PROBE_TOKENS // kernel.block_size, kernel)
        found = Engine(engine.model, engine.info, attention, engine.group, engine.linears)
        worked = True
        try:
            check(found, expected, bits=False)
        except PeerLost:
            raise
        except Exception as error:  # a kernel may not have been built for this device
            worked = False
            log.warning("the %s attention kernel is not used: %s", kernel.name, in_one_line(error))
        if engine.group.agree(worked):
            return found
    for reason in reasons or ["this installation has no attention kernel that works here"]:
        log.warning("attention gathers keys, which is slower: %s", reason)
    return engine
