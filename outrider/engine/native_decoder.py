"""A usual decoder's forward pass in one call of native_decoder.cpp.

Each operation between the products of a layer costs microseconds in which the weights wait, more than its
arithmetic: caches are cold by then, and threads fall asleep. With thirty small layers that was a third of a
step, or more.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outrider.engine.attention import LayerAttention
from outrider.engine.native import loaded, pointers
from outrider.engine.native_attention import Moves, NativeAttention
from outrider.engine.native_layers import DecoderLayer, Embeddings, Layer

AT_ONCE = 1024  # positions


class _Decoder(ctypes.Structure):
    """`Decoder` of native_calls.h."""

    _fields_ = (
        ("embeddings", Embeddings),
        ("layers", ctypes.POINTER(DecoderLayer)),
        ("count", ctypes.c_int64),
        *pointers("head"),
    )


class Rotations:
    """Cosines, and sines with the sign of each half, by position: [N, D] each."""

    def __init__(self, rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]], width: int) -> None:
        self._rotary = rotary
        self._signs = torch.ones(width, dtype=torch.float32)
        self._signs[: width // 2] = -1
        self._tables = (torch.empty(0, width), torch.empty(0, width))

    @staticmethod
    def fit(rotary: Any) -> bool:
        """Returns whether what a position gives does not depend on how long the text is."""
        kind = getattr(rotary, "rope_type", None)
        return isinstance(kind, str) and "dynamic" not in kind and kind != "longrope"

    def up_to(self, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tables, of at least the positions before `end`."""
        if end > len(self._tables[0]):
            total = max(end, 2 * len(self._tables[0]))
            found = [self._of(first) for first in range(0, total, AT_ONCE)]
            cosines, sines = (torch.cat(tables) for tables in zip(*found, strict=True))
            self._tables = cosines, sines
        return self._tables

    def _of(self, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(first, first + AT_ONCE)[None]
        cosines, sines = self._rotary(torch.empty(0, dtype=torch.float32), places)
        return cosines[0].float(), sines[0].float() * self._signs


class NativeDecoder:
    """A decoder whose layers and head are native ones."""

    def __init__(
        self,
        embedding: nn.Embedding,
        rotations: Rotations,
        layers: Sequence[DecoderLayer],
        hows: Mapping[int, LayerAttention],
        head: Layer | None,
    ) -> None:
        """`hows`: of the layers, by their index, in their order. `head`: behind the last norm; None: another
        one follows."""
        self.hows, self._rotations = hows, rotations
        array = (DecoderLayer * len(layers))(*layers)
        self._held = embedding.weight, layers, array, head  # what is pointed to
        self._embeddings = Embeddings.of(embedding.weight)
        self._vocabulary = head.out if head is not None else 0
        pointer = ctypes.addressof(head) if head is not None else None
        self._struct = _Decoder(self._embeddings, array, len(layers), pointer)

    @staticmethod
    def fits(embedding: nn.Module, rotary: nn.Module) -> bool:
        """Returns whether a model's first modules are such as are known here."""
        return type(embedding) is nn.Embedding and Embeddings.fit(embedding.weight) and Rotations.fit(rotary)

    def run(self, attention: NativeAttention, inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns of the n tokens to keep what goes into the last norm [n, H], and their logits [n, V]; these
        are of no width if another head follows."""
        heads = attention.heads(self.hows)
        tables = self._rotations.up_to(inputs.native.end)
        kept = len(inputs.keep)
        states = torch.empty((kept, self._embeddings.width), dtype=torch.float32)
        logits = torch.empty((kept, self._vocabulary), dtype=torch.float32)
        ran = loaded().decode(
            ctypes.byref(self._struct),
            heads,
            ctypes.byref(inputs.native),
            ctypes.byref(Moves.of(inputs.moves)),
            inputs.input_ids.data_ptr(),
            *(table.data_ptr() for table in tables),
            inputs.keep.data_ptr(),
            kept,
            states.data_ptr(),
            logits.data_ptr(),
            torch.get_num_threads(),
        )
        if not ran:
            raise IndexError("a step holds a token that the model has no embedding of")
        return states, logits
