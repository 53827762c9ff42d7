"""Whether an attention kernel gives a row the same bits whatever runs beside it. Measured, on random
numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from outrider.engine.attention import LayerAttention
from outrider.engine.attention_kernel import Kernel
from outrider.engine.flat_inputs import Shape, exact, flatten, on_device
from outrider.engine.step_inputs import Work

LENGTHS = (5005, 1, 70, 640, 5, 300)  # tokens of the sessions of a trial
CHUNKS = (4070, 20, 6, 804, 60, 1, 9, 1, 17, 2, 5, 10)  # in which the first one's are read
REACH = 100  # of windows and the like, so that keys before them are left out
WIDE = Shape(512, 128, 512)  # like a recorded one, far larger than what it holds


def kernel_keeps_bits(
    kernel: Kernel, layers: Iterable[LayerAttention], dtype: torch.dtype, device: torch.device
) -> bool:
    """Tries each way to attend: a session's tokens read in chunks and all at once, alone and in company, in
    steps of their own size and in a recorded one's."""
    return kernel.may_keep_bits and all(_alike(kernel, how, dtype, device) for how in _ways(layers))


def _ways(layers: Iterable[LayerAttention]) -> set[LayerAttention]:
    return {
        replace(how, window=how.window and min(how.window, REACH), chunk=how.chunk and min(how.chunk, REACH))
        for how in layers
    }


def _alike(kernel: Kernel, how: LayerAttention, dtype: torch.dtype, device: torch.device) -> bool:
    trial = _Trial(kernel, how, dtype, device)
    whole = trial.attended([(0, 0, LENGTHS[0])])
    return all(torch.equal(found, whole[first : first + len(found)]) for first, found in trial.parts())


class _Trial:
    """Sessions of random tokens whose keys are all there."""

    def __init__(self, kernel: Kernel, how: LayerAttention, dtype: torch.dtype, device: torch.device) -> None:
        self.kernel, self.how, self._device = kernel, how, device
        self._room: dict[Any, Any] = {}
        size = kernel.block_size
        needed = [-(-length // size) for length in LENGTHS]
        # In no order, and none of a session's beside another of its own.
        every = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(3)).tolist()
        self._blocks = [[every.pop() for _ in range(count)] for count in needed]
        self._scratch = sum(needed)

        def numbers(*shape: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(sum(shape))
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(device, dtype)

        self._keys = numbers(self._scratch + 1, size, how.key_heads, how.width)
        self._values = numbers(self._scratch + 1, size, how.key_heads, how.value_width)
        self._query = numbers(sum(LENGTHS), how.query_heads, how.width)
        self._sinks = numbers(how.query_heads) if how.sinks else None

    def attended(self, parts: Sequence[tuple[int, int, int]], shape: Shape | None = None) -> torch.Tensor:
        """Returns what the tokens of the first of some sessions get: (session, first token, their number) of
        each, in a step of this shape."""
        works = [Work(self._blocks[one], start, [0] * count, 0) for one, start, count in parts]
        shape = shape or exact(works)
        size = self.kernel.block_size
        inputs = on_device(flatten(works, shape, block_size=size, scratch_block=self._scratch), self._device)
        rows = [sum(LENGTHS[:one]) + start + token for one, start, count in parts for token in range(count)]
        rows += [0] * (shape.tokens - len(rows))
        query = self._query[torch.tensor(rows, device=self._device)]
        found = self.kernel.attend(query, self._keys, self._values, inputs, self.how, self._sinks, self._room)
        return found[: parts[0][2]]

    def parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yields the first token of a part of the first session, and what its tokens get in a step."""
        start = 0
        for step, count in enumerate(CHUNKS):
            own = 0, start, count
            few = [(one, max(0, LENGTHS[one] - 3), min(3, LENGTHS[one])) for one in range(1, len(LENGTHS))]
            all_of = [(one, 0, LENGTHS[one]) for one in range(1, len(LENGTHS))]
            yield start, self.attended([own])
            yield start, self.attended([own, *few])
            if count <= 17:
                yield start, self.attended([own, *few], WIDE)
                yield start, self.attended([own, *few * 20])
                yield start, self.attended([own, *all_of] if step % 2 else [own, (0, 0, LENGTHS[0])])
            start += count
