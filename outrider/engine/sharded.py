"""The engine of a model that is divided among processes.

Every rank runs the same step on its part of the model. The leader's engine is used as any other: it tells the
others of each step before it runs its own part. The others run `follow` until the leader is gone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any

import torch

from outrider.engine.attention import AttentionBackend
from outrider.engine.engine import Engine
from outrider.engine.ranks import Ranks
from outrider.engine.step_inputs import StepInputs, Work
from outrider.engine.step_message import Kind, StepMessage, decode, encode, encode_works
from outrider.errors import OutriderError, PeerLost
from outrider.sampling.sampler import Ranked, Row, draw
from outrider.sampling.vocab_parallel import How, choose_vocab_parallel, vocab_parallel
from outrider.wire.description import ModelInfo

log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0  # between two signs of life from an idle leader


class ShardedEngine(Engine):
    """One rank's part: all ranks call the same methods with the same arguments."""

    divided = True

    def __init__(self, model: Any, info: ModelInfo, attention: AttentionBackend, ranks: Ranks) -> None:
        """`model` holds this rank's weights, joined to the others' by outrider.engine.sharding."""
        super().__init__(model, info, attention)
        self.ranks = ranks

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        logits = super().forward(inputs)  # [R, V], or this rank's slice of it
        vocab = self.info.vocab_size
        return logits if logits.shape[1] == vocab else self.ranks.concat(logits, vocab)

    def follow(self) -> None:
        """Runs the leader's steps until it stops. Raises PeerLost where it is gone otherwise."""
        while True:
            message = decode(self.ranks.receive().numpy())
            match message.kind:
                case Kind.STOP:
                    return
                case Kind.ANSWER:
                    self._answer()
                case Kind.LOGITS:
                    ShardedEngine.forward(self, self.prepare(message.works))
                case Kind.CHOOSE:
                    self._choose(self.prepare(message.works), message)

    def _answer(self) -> None:
        """Shows every rank that all are there."""
        self.ranks.gather(torch.zeros(1))

    def _choose(self, inputs: StepInputs, message: StepMessage) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [R] of the plan's rows, meaningless where a row is WHOLE; and those rows' logits [n, V]."""
        logits = Engine.forward(self, inputs)
        vocab = self.info.vocab_size
        own = self.ranks.slice_of(vocab)
        if logits.shape[1] == vocab:  # the output embedding is not divided
            logits = logits[:, own]
        if not message.rows:
            return logits.new_empty(0, dtype=torch.int64), logits
        whole = [index for index, row in enumerate(message.rows) if row.how is How.WHOLE]
        some = logits[torch.tensor(whole, dtype=torch.int64, device=logits.device)]
        if whole:
            some = self.ranks.concat(some, vocab)
        allowed = logits[:, : max(message.vocab_size - own.start, 0)]
        return choose_vocab_parallel(allowed, message.rows, own.start, self.ranks.gather), some


class LeadingEngine(ShardedEngine):
    """The leader's. Any failure in a step is final, since the ranks are out of step after it: every call from
    then on raises PeerLost."""

    def __init__(self, model: Any, info: ModelInfo, attention: AttentionBackend, ranks: Ranks) -> None:
        super().__init__(model, info, attention, ranks)
        self._lost: Future[None] = Future()  # raises what broke the group
        self._lost.set_running_or_notify_cancel()  # who waits for it cannot cancel it
        self._closed = threading.Event()
        self._beating = threading.Thread(target=self._beat, name="tensor-parallel", daemon=True)
        self._beating.start()

    def prepare(self, works: Sequence[Work]) -> StepInputs:
        inputs: StepInputs = super().prepare(works)
        inputs.message = encode_works(works)
        return inputs

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        with self._step(encode(Kind.LOGITS, inputs.message)):
            return super().forward(inputs)

    def choose(self, inputs: StepInputs, rows: Sequence[Row], vocab_size: int | None = None) -> list[int]:
        limit = min(vocab_size or self.info.vocab_size, self.info.vocab_size)
        message = StepMessage(Kind.CHOOSE, rows=tuple(vocab_parallel(row) for row in rows), vocab_size=limit)
        with self._step(encode(message.kind, inputs.message, message.rows, limit)):
            tokens, logits = self._choose(inputs, message)
            chosen: list[int] = tokens.tolist()
        whole = [index for index, row in enumerate(message.rows) if row.how is How.WHOLE]
        if whole:
            drawn = draw(logits, [rows[index] for index in whole], limit).tolist()
            for index, token in zip(whole, drawn, strict=True):
                chosen[index] = token
        return chosen

    def rank(
        self, inputs: StepInputs, rows: Sequence[Row], count: int, vocab_size: int | None = None
    ) -> list[Ranked]:
        """The tokens alone: how clearly they won is not known in one place."""
        return [Ranked((token,), (0.5,)) for token in self.choose(inputs, rows, vocab_size)]

    async def serve(self, steps: Coroutine[Any, Any, None]) -> None:
        running, lost = asyncio.ensure_future(steps), asyncio.wrap_future(self._lost)
        try:
            await asyncio.wait([running, lost], return_when=asyncio.FIRST_COMPLETED)
            await (lost if lost.done() else running)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            lost.cancel()
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        super().close()
        self._closed.set()
        self._beating.join()
        with suppress(OutriderError), self._step(encode(Kind.STOP)):  # a probe may come after it
            self._lost.set_exception(PeerLost("the tensor-parallel group has been left"))
        self.ranks.close()

    @contextmanager
    def _step(self, message: Any) -> Iterator[None]:
        """Tells the others of a step, to be run in here."""
        with self._stepping:
            if self._lost.done():
                self._lost.result()
            try:
                self.ranks.send(torch.from_numpy(message))
                yield
            except PeerLost as error:
                self._fail(self.ranks.explain(error))
            except Exception as error:
                log.exception("a step failed at the leader of a tensor-parallel group")
                self._fail(PeerLost(f"a step failed at the leader ({type(error).__name__})"))

    def _fail(self, error: OutriderError) -> None:
        """Makes the failure known, and raises it."""
        with suppress(InvalidStateError):  # another thread has said it first
            self._lost.set_exception(error)
        raise error

    def _beat(self) -> None:
        """Notices a lost rank while nothing runs, and shows the others that the leader is there."""
        while not self._closed.wait(BEAT_SECONDS):
            try:
                self.ranks.check()
                if not self._stepping.locked():
                    with self._step(encode(Kind.ANSWER)):
                        self._answer()
            except OutriderError as error:
                with suppress(OutriderError):
                    self._fail(error)
                return
