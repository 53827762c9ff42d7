"""What an attention kernel is: it reads a paged pool in place. Each stands in a file of its own; parts.py
says which there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from outrider.engine.attention import LayerAttention
from outrider.engine.flat_inputs import FlatInputs

WIDEST = 256  # head that the kernels of a GPU take


class Attend(Protocol):
    """What a kernel computes."""

    def __call__(
        self,
        query: torch.Tensor,  # [T, Hq, D]
        keys: torch.Tensor,  # [num_blocks + 1, block_size, Hkv, D]
        values: torch.Tensor,  # [num_blocks + 1, block_size, Hkv, Dv]
        inputs: FlatInputs,
        how: LayerAttention,
        sinks: torch.Tensor | None,  # [Hq]
        room: dict[Any, Any],
        /,
    ) -> torch.Tensor:
        """Lets every token see its session's keys up to its own position: [T, Hq, Dv]. `room` is the
        backend's, for memory that the kernel uses again."""
        ...


class Store(Protocol):
    """How a step's keys and values get into a pool."""

    def __call__(
        self,
        key: torch.Tensor,  # [Hkv, T, D]
        value: torch.Tensor,  # [Hkv, T, Dv]
        keys: torch.Tensor,  # [num_blocks + 1, block_size, Hkv, D]
        values: torch.Tensor,  # [num_blocks + 1, block_size, Hkv, Dv]
        inputs: FlatInputs,
        /,
    ) -> None:
        """Stores each token's at its slot, and at those where they go once more."""
        ...


def bare(how: LayerAttention, dtype: torch.dtype) -> str | None:
    """Returns why a kernel cannot do what a layer asks for, as a phrase, if it knows nothing but windows and
    computes on a GPU alone."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"they compute in 16 bits, not in {str(dtype).removeprefix('torch.')}"
    if how.softcap is not None:
        return "they cap no scores"
    if how.sinks:
        return "they know no attention sinks"
    if how.chunk is not None:
        return "they know no chunked attention"
    if how.width != how.value_width:
        return "keys and values differ in width"
    if how.width > WIDEST or how.width % 8:
        return f"they take no heads of width {how.width}"
    return None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to attend to a paged pool [num_blocks + 1, block_size, Hkv, D]."""

    name: str
    block_size: int  # tokens; the pool is cut into such blocks
    attend: Attend
    # Returns why it cannot do what a layer asks for, as a phrase; None where it can.
    refusal: Callable[[LayerAttention, torch.dtype], str | None] = bare
    may_keep_bits: bool = True  # whether it is worth measuring
    store: Store | None = None  # None = each token's at its slot alone: so it takes no trees
