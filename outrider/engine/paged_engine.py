"""The engine on a GPU: attention by a kernel that reads the paged pool in place, steps as recorded graphs.

Tokens are drawn on the device and come back together, once a step. What no graph was recorded for (steps with
more tokens than any of them, penalties, top-k and the like) runs call by call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.engine.attention import AttentionBackend
from outrider.engine.engine import Engine, Work
from outrider.engine.flat_inputs import FlatStep, recorded_shapes
from outrider.engine.fusing import fuse, unfuse
from outrider.engine.paged_attention import Kernel, PagedAttention
from outrider.engine.self_check import check
from outrider.engine.step_graphs import Record, StepGraphs
from outrider.errors import ModelRefused
from outrider.sampling.sampler import Row, draw
from outrider.sampling.vocab_parallel import How, vocab_parallel
from outrider.wire.description import ModelInfo

log = logging.getLogger(__name__)

PROBE_TOKENS = 1024  # that the pool of a check holds


@dataclass(frozen=True, slots=True)
class Paging:
    """What to try on a device."""

    kernels: Sequence[Kernel]  # in this order
    record: Record  # how steps are recorded
    fused: bool  # whether layers are compiled


class PagedEngine(Engine):
    """An Engine whose steps are FlatSteps."""

    def __init__(self, model: Any, info: ModelInfo, attention: AttentionBackend) -> None:
        super().__init__(model, info, attention)
        self.graphs: StepGraphs | None = None

    def fuse(self, expected: torch.Tensor, backend: str = "inductor") -> bool:
        """Joins the layers' small operations; whether that works and gives `expected`, the logits of the
        model's own code. To be done before steps are recorded."""
        try:
            fuse(self.model, backend)
            check(self, expected, bits=False)
        except Exception as error:  # the compiler may lack a part, or not know what a layer does
            unfuse(self.model)
            log.warning("layers run without torch.compile, which is slower: %s", _reason(error))
            return False
        return True

    def record(
        self, record: Record, progress: Callable[[float], None], most_tokens: int | None = None
    ) -> bool:
        """Records the steps of up to so many tokens; whether it could. The KV pool keeps what it holds."""
        shapes = recorded_shapes() if most_tokens is None else recorded_shapes(most_tokens)
        pages = min(-(-self.info.max_context // self.pool.block_size), self.pool.num_blocks)
        try:
            graphs = StepGraphs(
                self._model_logits,
                shapes,
                most_pages=pages,
                block_size=self.pool.block_size,
                scratch_block=self.attention.pools.scratch_block,
                vocab_size=self.info.vocab_size,
                device=self._device,
            )
            graphs.record(record, progress)
        except Exception as error:  # a model's code may do what cannot be recorded
            log.warning("steps run call by call, which is slower: recording them failed: %s", _reason(error))
            return False
        self.graphs = graphs
        return True

    def prepare(self, works: Sequence[Work]) -> Any:
        """A FlatStep, in a shape that was recorded where one holds the works."""
        return self.attention.prepare(works, self.graphs.shapes if self.graphs is not None else ())

    def forward(self, inputs: Any) -> torch.Tensor:
        """[rows, V] float32, of a recorded step valid until the next one."""
        step: FlatStep = inputs
        graphs = self._recorded(step)
        if graphs is not None:
            graphs.allow(self.info.vocab_size)
            return graphs.run(step)
        return super().forward(step)

    def choose(self, inputs: Any, rows: Sequence[Row], vocab_size: int | None = None) -> list[int]:
        graphs = self._recorded(inputs)
        if graphs is None or not rows:
            chosen = super().choose(inputs, rows, vocab_size)
            if not rows and self._device.type == "cuda":  # so that the step is over when this returns
                torch.cuda.current_stream(self._device).synchronize()
            return chosen
        limit = min(vocab_size or self.info.vocab_size, self.info.vocab_size)
        drawn = [vocab_parallel(row) for row in rows]
        noisy = [index for index, row in enumerate(drawn) if row.how is How.NOISY]
        whole = [index for index, row in enumerate(drawn) if row.how is How.WHOLE]
        with self._stepping:
            graphs.allow(limit)
            logits = graphs.run(inputs)
            if noisy:
                graphs.draw_noisy(noisy, [drawn[index] for index in noisy])
            if whole:
                index = torch.tensor(whole, device=logits.device)
                some = draw(logits[index], [rows[row] for row in whole], limit)
                graphs.replace(whole, some)
            return graphs.tokens(len(rows))

    def _recorded(self, step: FlatStep) -> StepGraphs | None:
        return self.graphs if self.graphs is not None and step.shape in self.graphs.shapes else None


def with_kernel(engine: Engine, expected: torch.Tensor, kernels: Iterable[Kernel]) -> Engine:
    """An engine of a few blocks with the first kernel that gives what the model's own code gave, `expected`;
    or, with the reasons logged, the engine itself, which attends by gathering keys."""
    dtype = next(engine.model.parameters()).dtype
    reasons: set[str] = set()
    for kernel in kernels:
        refused = {kernel.refusal(how, dtype) for how in engine.attention.layers.values()} - {None}
        if refused:
            reasons |= {f"attention kernels cannot be used: {reason}" for reason in refused}
            continue
        blocks = PROBE_TOKENS // kernel.block_size
        found = PagedEngine(engine.model, engine.info, PagedAttention.on(engine.model, blocks, kernel))
        try:
            check(found, expected, bits=False)
        except Exception as error:  # a kernel may not have been built for this device
            log.warning("the %s attention kernel is not used: %s", kernel.name, _reason(error))
        else:
            return found
    for reason in reasons or ["this installation has no attention kernel that works here"]:
        log.warning("attention gathers keys, which is slower: %s", reason)
    return engine


def _reason(error: Exception) -> str:
    """In one line."""
    if isinstance(error, ModelRefused):
        return error.message
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
