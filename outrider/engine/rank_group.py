"""The group of a model that is divided among ranks: every rank runs the same step on its part of the model.

The leader's engine is used as any other: once it leads, it tells the others of each step before it runs its
own part. The others run `follow` until the leader is gone.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from outrider.engine.engine import Engine
from outrider.engine.leading import Leading
from outrider.engine.ranks import Ranks
from outrider.engine.step_inputs import Work
from outrider.engine.step_message import Kind, Words, decode, encode, encode_works
from outrider.sampling.how import How
from outrider.sampling.sampler import draw
from outrider.sampling.vocab_parallel import Draws, choose_vocab_parallel, greatest, likeliest
from outrider.uploading import uploaded


class RankGroup:
    """Implements Group for one of the ranks."""

    def __init__(self, ranks: Ranks, vocab_size: int) -> None:
        self.ranks = ranks
        self.size = ranks.group.size
        self.ids = ranks.slice_of(vocab_size)
        self.leading: Leading | None = None  # from `lead` on
        self._vocab_size = vocab_size

    def lead(self) -> None:
        """From now on the others `follow`, and this one tells them of each step."""
        self.leading = Leading(self.ranks)

    def part(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, self.ids] if logits.shape[1] == self._vocab_size else logits

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        undivided = logits.shape[1] == self._vocab_size  # an output embedding need not be divided
        return logits if undivided else self.ranks.concat(logits, self._vocab_size)

    def greatest(self, logits: torch.Tensor) -> torch.Tensor:
        return greatest(logits, self.ranks.gather)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        return likeliest(logits, self.ids.start, self.ranks.gather)

    def everyones(self, numbers: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.ranks.gather(numbers), 1)

    def choose(self, logits: torch.Tensor, draws: Draws) -> list[int]:
        if not draws.numbers:
            return []
        logits = self.part(logits)
        allowed = logits[:, : max(draws.vocab_size - self.ids.start, 0)]
        chosen: list[int] = choose_vocab_parallel(
            allowed, draws.numbers, self.ids.start, self.ranks.gather
        ).tolist()
        if whole := draws.which(How.WHOLE):
            some = self.whole(logits[uploaded(np.array(whole), logits.device)])
            if draws.rows:
                drawn = draw(some, [draws.rows[index] for index in whole], draws.vocab_size).tolist()
                for index, token in zip(whole, drawn, strict=True):
                    chosen[index] = token
        return chosen

    def keep_from_compiler(self) -> None:
        self.ranks.keep_from_compiler()

    def agree(self, flag: bool) -> bool:
        return self.ranks.agree(flag)

    def least(self, number: int) -> int:
        return self.ranks.least(number)

    def encode(self, works: Sequence[Work]) -> Words | None:
        return encode_works(works) if self.leading is not None else None

    def step(
        self, kind: Kind, works: Words | None, draws: Draws | None = None
    ) -> AbstractContextManager[object]:
        if self.leading is None:
            return nullcontext()
        numbers, vocab_size = (draws.numbers, draws.vocab_size) if draws is not None else ((), 0)
        return self.leading.step(encode(kind, works, numbers, vocab_size))

    async def serve(self, steps: Coroutine[Any, Any, None]) -> None:
        await (steps if self.leading is None else self.leading.serve(steps))

    def close(self) -> None:
        if self.leading is not None:
            self.leading.close()


def follow(engine: Engine, ranks: Ranks) -> None:
    """Runs the leader's steps until it stops. Raises PeerLost where it is gone otherwise."""
    while True:
        message = decode(ranks.receive().numpy())
        match message.kind:
            case Kind.STOP:
                return
            case Kind.ANSWER:
                ranks.answer()
            case Kind.WARM:
                engine.runner.stop_compiling()
            case Kind.LOGITS:
                engine.forward(engine.prepare(message.works))
            case Kind.CHOOSE:
                draws = Draws.told(message.rows, message.vocab_size)
                engine.draw(engine.prepare(message.works), draws)
