"""Times the engine's steps at start, on the numbers of tokens that will run."""

from __future__ import annotations

from collections.abc import Callable

from outrider.engine.engine import Engine, Work
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row
from verifier.price import StepTime

TOKENS = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 3  # the fastest counts: what disturbs a step makes it slower


def profile(engine: Engine, clock: Callable[[], float], progress: Callable[[float], None]) -> StepTime:
    """Decode steps of short sessions; what longer ones add, StepTime learns as it is used.

    `clock` gives seconds; `progress` hears the share that is done, 0 to 1. Leaves the KV pool as it is."""
    row = Row(SamplingParams(temperature=0.0), 1, None, ())
    seconds: dict[int, float] = {}
    for index, tokens in enumerate(TOKENS):
        progress(index / len(TOKENS))
        works = [Work([engine.kv_pools.scratch_block], 0, [0], 1)] * tokens
        for _ in range(REPEATS):
            began = clock()
            engine.choose(engine.prepare(works), [row] * tokens)
            seconds[tokens] = min(seconds.get(tokens, float("inf")), clock() - began)
    progress(1.0)
    return StepTime.measured(seconds)
