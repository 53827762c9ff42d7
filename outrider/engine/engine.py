"""The model engine: any Hugging Face causal LM on a ragged batch with a paged KV cache.

Drafter and verifier use it alike. It knows tokens, positions and blocks; it knows no sessions, no sampling,
no transport. Who may hold which block is the BlockPool's business; callers keep it, between steps. How a step
is computed is up to the engine's parts: attention, runner, linear layers and group, each behind a Protocol in
a file of that name; parts.py has the names of those that there are.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from outrider.engine.attention import AttentionBackend
from outrider.engine.group import Alone, Group
from outrider.engine.kv_blocks import BlockPool
from outrider.engine.linear_layers import LinearLayers, Ordinary
from outrider.engine.runner import CallByCall, Runner
from outrider.engine.speculator import Speculating
from outrider.engine.step_inputs import Work
from outrider.engine.step_message import Kind, Words
from outrider.sampling.logprobs import Scores
from outrider.sampling.params import SamplingParams
from outrider.sampling.sampler import Ranked, Row, draw
from outrider.sampling.vocab_parallel import Draws
from outrider.wire.description import ModelInfo

__all__ = ["Engine", "Step", "Work"]

T = TypeVar("T")

ASKED_SECONDS = 0.002  # that are waited for until the device has been asked for a step


@dataclass(frozen=True, slots=True)
class Step:
    """A step as prepared."""

    prepared: Any  # by the runner
    works: Words | None  # for the other processes of the group, if any


class Engine:
    """Runs steps one at a time. `prepare` may run in another thread while a step runs."""

    speculating: Speculating | None = None  # by what the model guesses its own tokens; None = nothing
    _asked: threading.Event | None = None  # set once the device has been asked for the step

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        attention: AttentionBackend,
        group: Group | None = None,
        linears: LinearLayers | None = None,
        runner: Runner | None = None,
        vocabulary: torch.Tensor | None = None,
    ) -> None:
        """`model` attends through outrider.engine.attention, and is this process's part of it. The plainest
        parts stand where none is given. `vocabulary` [K]: ids that logits are of, rising; None: of all."""
        self.info = info
        self.vocabulary = vocabulary
        self.model = model
        self.attention = attention
        self.group = group or Alone(info.vocab_size)
        self.linears = linears or Ordinary()
        self.runner = runner or CallByCall(model, attention, self.group)
        states = attention.states.slots if attention.states is not None else None
        self.pool = BlockPool(attention.pools.num_blocks, attention.pools.block_size, states)
        self.divided = self.group.size > 1  # then blocks cannot be copied, and a rank is a token alone
        self.on_cpu = next(model.parameters()).device.type == "cpu"
        self.threads = torch.get_num_threads() if self.on_cpu else 1  # in a step
        self.resting_threads = self.threads  # another number of them that gives the same bits
        self._thread: ThreadPoolExecutor | None = None  # from the first run to close

    def prepare(self, works: Sequence[Work]) -> Step:
        """Builds the step's index tensors. At least one work.

        Where the model keeps recurrent states, the works get their turns, by which states count as kept from
        then on: what is prepared has to run, in this order. Who leads gave followers theirs: its book-keeper
        is the one that knows which blocks were given up."""
        if self.pool.states is not None and works[0].turn is None:
            turns = self.pool.states.begin(works)
            works = [work._replace(turn=turn) for work, turn in zip(works, turns, strict=True)]
        return Step(self.runner.prepare(works), self.group.encode(works))

    def forward(self, step: Step) -> torch.Tensor:
        """Runs the step: [sum of rows, vocab_size] float32 logits, in the order of the works and their rows;
        valid until the next step."""
        with self.group.step(Kind.LOGITS, step.works):
            return self.group.whole(self.runner.logits(step.prepared))

    def choose(
        self,
        step: Step,
        rows: Sequence[Row],
        vocab_size: int | None = None,
        scores: Scores | None = None,
    ) -> list[int]:
        """Runs the step and draws a token for each of its rows; only ids below `vocab_size`, where given.
        `scores`: for rows that ask how likely their tokens were, and rows of prompts that only do; then all
        logits are brought here."""
        limit = min(vocab_size or self.info.vocab_size, self.info.vocab_size)
        if scores is not None:
            with self.group.step(Kind.LOGITS, step.works):
                self._tell_asked()
                logits = scores.read(self.group.whole(self.runner.logits(step.prepared)))
                chosen: list[int] = draw(logits, rows, limit).tolist() if rows else []
                scores.find(logits, rows, chosen)
                return chosen
        return self.draw(step, Draws(rows, limit, self._tell_asked))

    def draw(self, step: Step, draws: Draws) -> list[int]:
        """`choose`, as every process of the group does it."""
        with self.group.step(Kind.CHOOSE, step.works, draws):
            return self.runner.choose(step.prepared, draws)

    def rank(
        self, step: Step, rows: Sequence[Row], count: int, vocab_size: int | None = None
    ) -> list[Ranked]:
        """Like `choose`, with the `count` best tokens of each row and how clearly they won; of a divided
        model the tokens alone, since how clearly is not known in one place."""
        if self.divided:
            return [Ranked((token,), (0.5,)) for token in self.choose(step, rows, vocab_size)]
        with self.group.step(Kind.LOGITS, step.works):
            self._tell_asked()
            if not rows:
                self.runner.logits(step.prepared)
                return []
            limit = min(vocab_size or self.info.vocab_size, self.info.vocab_size)
            return self.runner.rank(step.prepared, rows, count, limit, self.vocabulary)

    def guess(
        self, places: Sequence[int], tokens: Sequence[int], rows: Sequence[Sequence[Row]], least: float
    ) -> list[list[Ranked]]:
        """Returns the speculator's guesses behind `tokens`, which the last step has drawn at these of its
        rows: see Speculating.guess."""
        assert self.speculating is not None, "asked of an engine that has one"
        return self.speculating.guess(places, tokens, rows, least)

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

    def run_step(self, call: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Runs a step as `run` does. Returns once the device has been asked for it, or after ASKED_SECONDS.

        One thread at a time runs Python, and one that waits for its turn gets it when the other waits, or
        after milliseconds: while this thread worked on, the device would have nothing to do."""
        asked = self._asked = threading.Event()
        step = self.run(call, *arguments)
        asked.wait(ASKED_SECONDS)
        return step

    def _tell_asked(self) -> None:
        if self._asked is not None:
            self._asked.set()

    def use_threads(self, count: int) -> None:
        """Steps have so many threads from the next on."""
        if count != self.threads:
            self.threads = count
            self.run(torch.set_num_threads, count)

    def make_ready(self, most_tokens: int) -> None:
        """Takes what memory steps need for each number of tokens, up to so many, before the first of them."""
        self.linears.make_ready(self.model, most_tokens)

    def probe(self) -> None:
        """Runs one token, between two steps, in the block that nobody's tokens are in: shows that the engine
        works. Raises what a step would."""
        step = self.prepare([Work([self.attention.pools.scratch_block], 0, [0], 1)])
        self.choose(step, [Row(SamplingParams(temperature=0.0), 1, None, ())])

    async def serve(self, steps: Coroutine[Any, Any, None]) -> None:
        """Runs a loop of steps until it, the engine or its group fails, and raises why; closes the engine
        then."""
        try:
            await self.group.serve(steps)
        finally:
            self.close()

    def close(self) -> None:
        """Gives up what the engine has beside its memory; nothing may be run after it."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False)  # a step that is under way may hang
        self.group.close()

    def step(self, works: Sequence[Work]) -> torch.Tensor:
        """`prepare` and `forward` in one."""
        return self.forward(self.prepare(works))
