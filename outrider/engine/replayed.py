"""The runner that repeats recorded steps: what a GPU does between two of them no longer waits for Python.

Tokens are drawn on the device and come back together, once a step. What was not recorded (steps with more
tokens than any that was, and draws by penalties, top-k and the like) runs call by call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.engine.flat_inputs import SIZES, FlatStep, Shape, recorded_shapes
from outrider.engine.fusing import is_fused
from outrider.engine.recording import Record
from outrider.engine.runner import CallByCall, Runner
from outrider.engine.step_graphs import StepGraphs
from outrider.engine.step_inputs import Work
from outrider.errors import PeerLost, in_one_line
from outrider.sampling.how import How
from outrider.sampling.ranked import MOST_RANKED, Ranked
from outrider.sampling.sampler import Row
from outrider.sampling.vocab_parallel import Draws, vocab_parallel
from outrider.wire.description import ModelInfo

log = logging.getLogger(__name__)


class Replayed:
    """Implements Runner."""

    name = "replayed"

    def __init__(self, calls: CallByCall, graphs: StepGraphs, vocab_size: int) -> None:
        """`calls` runs what is not among the recorded `graphs`."""
        self.calls = calls
        self.graphs = graphs
        self._vocab_size = vocab_size

    @property
    def compiled(self) -> bool:
        return self.calls.compiled

    def stop_compiling(self) -> None:
        self.calls.stop_compiling()

    @property
    def shapes(self) -> Sequence[Shape]:
        """Returns those of the recorded steps."""
        return self.graphs.shapes

    def prepare(self, works: Sequence[Work]) -> Any:
        return self.calls.attention.prepare(works, self.graphs.shapes)

    def logits(self, prepared: FlatStep) -> torch.Tensor:
        if prepared.shape not in self.graphs.shapes:
            return self.calls.logits(prepared)
        self.graphs.allow(self._vocab_size)
        return self._run(prepared)

    def _run(self, prepared: FlatStep) -> torch.Tensor:
        self.calls.attention.arrange(prepared)
        return self.graphs.run(prepared)

    def choose(self, prepared: FlatStep, draws: Draws) -> list[int]:
        if prepared.shape not in self.graphs.shapes:
            return self.calls.choose(prepared, draws)
        self.graphs.allow(draws.vocab_size)
        self._run(prepared)
        if noisy := draws.which(How.NOISY):
            self.graphs.draw_noisy(noisy, [draws.numbers[index] for index in noisy])
        if whole := draws.which(How.WHOLE):
            rows = [draws.rows[index] for index in whole] if draws.rows else []
            self.graphs.draw_whole(rows, whole, draws.vocab_size)
        draws.asked()
        if not draws.numbers:
            self.calls.wait()
        return self.graphs.tokens(len(draws.numbers))

    def rank(
        self,
        prepared: FlatStep,
        rows: Sequence[Row],
        count: int,
        vocab_size: int,
        vocabulary: torch.Tensor | None,
    ) -> list[Ranked]:
        if prepared.shape not in self.graphs.shapes:
            return self.calls.rank(prepared, rows, count, vocab_size, vocabulary)
        self.graphs.allow(vocab_size)
        self._run(prepared)
        numbers = [vocab_parallel(row) for row in rows]
        if count > MOST_RANKED or any(one.how is How.WHOLE for one in numbers):
            return self.graphs.rank_whole(rows, count, vocab_size)
        return self.graphs.rank(numbers, count)


def recorded(
    calls: CallByCall,
    info: ModelInfo,
    record: Record,
    progress: Callable[[float], None],
    most_tokens: int | None = None,
    vocabulary: torch.Tensor | None = None,
) -> Runner:
    """Returns a runner that repeats the steps of up to so many tokens, which it records; or, with the reason
    logged, `calls`, where a process of the group cannot record them. The KV pool keeps what it holds.

    Compiled layers have code of their own for one token, which may sum in another order: it never runs alone.
    `vocabulary` [K]: ids that logits are of, rising; None: of all."""
    pools, group = calls.attention.pools, calls.group
    found: Replayed | None = None
    try:
        graphs = StepGraphs(
            calls.run,
            group,
            recorded_shapes(most_tokens or SIZES[-1], 2 if is_fused(calls.model) else 1),
            most_pages=min(-(-info.max_context // pools.block_size), pools.num_blocks),
            block_size=pools.block_size,
            scratch_block=pools.scratch_block,
            device=calls.device,
            vocabulary=vocabulary,
        )
        graphs.record(record, progress)
        found = Replayed(calls, graphs, info.vocab_size)
    except PeerLost:
        raise
    except Exception as error:  # a model's code may do what cannot be recorded
        reason = in_one_line(error)
        log.warning("steps run call by call, which is slower: recording them failed: %s", reason)
    return found if group.agree(found is not None) and found is not None else calls
