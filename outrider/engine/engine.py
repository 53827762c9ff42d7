"""The model engine: any Hugging Face causal LM on a ragged batch with a paged KV cache.

Drafter and verifier use it alike. It knows tokens, positions and blocks; it knows no sessions, no sampling,
no transport. Who may hold which block is the BlockPool's business; callers keep it, between steps.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from outrider.engine.attention import AttentionBackend, Inputs, run_model
from outrider.engine.kv_blocks import BlockPool
from outrider.engine.packed import make_ready
from outrider.engine.step_inputs import StepInputs, Work
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Ranked, Row, draw, rank
from outrider.wire.description import ModelInfo

__all__ = ["Engine", "StepInputs", "Work"]

T = TypeVar("T")


class Engine:
    """Runs steps one at a time. `prepare` may run in another thread while a step runs."""

    divided = False  # among processes: then blocks cannot be copied, and a rank is a token alone

    def __init__(self, model: Any, info: ModelInfo, attention: AttentionBackend) -> None:
        """`model` attends through outrider.engine.attention."""
        self.info = info
        self.attention = attention
        self.pool = BlockPool(attention.pools.num_blocks, attention.pools.block_size)
        self.model = model
        self._device = next(model.parameters()).device
        self.threads = torch.get_num_threads() if self._device.type == "cpu" else 1  # in a step
        self._stepping = threading.Lock()  # a probe may come while a step runs
        self._thread: ThreadPoolExecutor | None = None  # from the first run to close

    def prepare(self, works: Sequence[Work]) -> Any:
        """Builds the step's index tensors; reads the works, changes nothing. At least one work."""
        return self.attention.prepare(works)

    def forward(self, inputs: Any) -> torch.Tensor:
        """Runs the step: [sum of rows, vocab_size] float32 logits, in the order of the works and their
        rows."""
        found: torch.Tensor = self._model_logits(self.attention.on_device(inputs))[: inputs.rows].float()
        return found

    def _model_logits(self, inputs: Inputs) -> torch.Tensor:
        """[n, V] of the tokens to keep, in the model's own number format."""
        return run_model(self.model, self.attention, inputs)

    def choose(self, inputs: Any, rows: Sequence[Row], vocab_size: int | None = None) -> list[int]:
        """Runs the step and draws a token for each of its rows; only ids below `vocab_size`, where given."""
        with self._stepping:
            logits = self.forward(inputs)  # [rows, V]
            return draw(logits, rows, vocab_size).tolist() if rows else []

    def rank(
        self, inputs: Any, rows: Sequence[Row], count: int, vocab_size: int | None = None
    ) -> list[Ranked]:
        """Like `choose`, with the `count` best tokens of each row and how clearly they won."""
        with self._stepping:
            logits = self.forward(inputs)  # [rows, V]
            return rank(logits, rows, count, vocab_size) if rows else []

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies KV blocks, (from, to) each, between two steps."""
        self.attention.pools.copy(pairs)

    def run(self, call: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Runs a call on the engine's thread, after those before it, with the engine's number of threads.

        Every thread that does arithmetic with several has helpers of its own (OpenMP's), which sleep between
        two products as soon as there are more of them than cores: a step takes a third longer then. So the
        engine's thread is the only one that has them; this one, which builds inputs, gets none."""
        if self._thread is None:
            torch.get_num_threads()  # the first call in a thread sets torch's default
            torch.set_num_threads(1)
            self._thread = ThreadPoolExecutor(
                1, thread_name_prefix="engine", initializer=torch.set_num_threads, initargs=(self.threads,)
            )
        return asyncio.get_running_loop().run_in_executor(self._thread, call, *arguments)

    def make_ready(self, most_tokens: int) -> None:
        """Takes what memory steps need for each number of tokens, up to so many, before the first of them."""
        make_ready(self.model, most_tokens)

    def probe(self) -> None:
        """Runs one token, between two steps, in the block that nobody's tokens are in: shows that the engine
        works. Raises what a step would."""
        inputs = self.prepare([Work([self.attention.pools.scratch_block], 0, [0], 1)])
        self.choose(inputs, [Row(SamplingParams(temperature=0.0), 1, None, ())])

    async def serve(self, steps: Coroutine[Any, Any, None]) -> None:
        """Runs a loop of steps until it, or the engine, fails, and raises why; closes the engine then."""
        try:
            await steps
        finally:
            self.close()

    def close(self) -> None:
        """Gives up what the engine has beside its memory; nothing may be run after it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False)  # a step that is under way may hang

    def step(self, works: Sequence[Work]) -> torch.Tensor:
        """`prepare` and `forward` in one."""
        return self.forward(self.prepare(works))
