"""Code that is compiled when a step first comes to it is compiled before the first of them.

A step that is not recorded runs code that torch's compiler and Triton make when they first come to it, which
may take a minute: a step that takes so long would count as hung. So such steps run once before the engine
serves, on the engine's own thread, and after that the compiler makes nothing: what it has not compiled by
then runs as it is.
"""

from __future__ import annotations

from outrider.engine.engine import Engine
from outrider.engine.flat_inputs import DRAFTED, READING_SESSIONS, SIZES
from outrider.engine.step_inputs import Work
from outrider.engine.step_message import Kind
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Row, TokenCounts

WAYS = (  # in which tokens are drawn
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, seed=1, top_k=5, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.8, seed=1, repetition_penalty=1.1, presence_penalty=0.1),
)


def warm_up(engine: Engine, most_tokens: int, ranked: int = 0) -> None:
    """Runs steps of up to so many tokens, if any code of theirs is compiled; from then on none is.

    To be called on the engine's thread, before the first step. `ranked`: of a row, if it ranks tokens."""
    if engine.on_cpu and not engine.runner.compiled:
        return
    scratch, size = engine.attention.pools.scratch_block, engine.pool.block_size
    for counts in _steps(engine, most_tokens):
        works = [Work([scratch] * -(-count // size), 0, [0] * count, 1) for count in counts]
        rows = [Row(WAYS[index % len(WAYS)], 1, TokenCounts([0]), ()) for index in range(len(works))]
        engine.choose(engine.prepare(works), rows)
        if ranked:
            engine.rank(engine.prepare(works), rows, ranked)
    with engine.group.step(Kind.WARM, None):
        engine.runner.stop_compiling()


def _steps(engine: Engine, most_tokens: int) -> list[list[int]]:
    """Returns the tokens of each session in each of the steps to run."""
    steps = [[1], [1] * min(len(WAYS), most_tokens)]
    if engine.attention.fills_shapes:
        # More sessions than a recorded step with a prompt takes, and more tokens of a session than others do.
        steps += [[DRAFTED + 1] + [1] * READING_SESSIONS, [most_tokens]]
        # And for each doubling of sessions, which branches of drafts are, too, the kernels of attention anew.
        steps += [[1] * (SIZES[-1] * 2**doubling + 1) for doubling in range(most_tokens.bit_length())]
    return [counts for counts in steps if sum(counts) <= most_tokens]
