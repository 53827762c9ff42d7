"""A speculator's guesses by native_speculator.cpp: one call for all of a step's, in place of forty operations
of torch for each of them, which take longer than their arithmetic."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from outrider.engine.native import loaded, pointers
from outrider.engine.native_layers import Embeddings, Layer, NativeLinear
from outrider.engine.packed import PackedColumns
from outrider.sampling.ranked import Ranked
from outrider.sampling.shaping import Row

LAYERS = ("state", "own", "token", "both", "down", "head")


class _Speculator(ctypes.Structure):
    """`Speculator` of native_calls.h."""

    _fields_ = (
        *((name, ctypes.POINTER(Layer)) for name in LAYERS),
        ("embeddings", Embeddings),
        *pointers("vocabulary"),
        ("ranked", ctypes.c_int64),
    )


class _Draw(ctypes.Structure):
    """`Draw` of native_calls.h."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        ("top_k", ctypes.c_int64),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_int64),
    )

    @classmethod
    def of(cls, row: Row) -> _Draw:
        params = row.params
        return cls(params.temperature, params.top_p, params.min_p, params.top_k, params.seed, row.position)


class NativeSpeculator:
    """A speculator whose linear layers are native ones, at a target on a CPU."""

    def __init__(
        self, network: Any, embeddings: torch.Tensor, vocabulary: torch.Tensor, ranked: int, eps: float
    ) -> None:
        """`embeddings` [V, H]: the target's. `ranked`: tokens of each row that are told."""
        linears = _linears(network)
        normed = [Layer.from_buffer_copy(each.layer) for each in linears]
        for layer in normed[1:]:
            layer.eps = eps
        normed[LAYERS.index("down")] = linears[LAYERS.index("down")].layer
        self._held = linears, normed, embeddings, vocabulary  # what is pointed to
        self._ranked = ranked
        self._struct = _Speculator(
            *map(ctypes.pointer, normed),
            Embeddings.of(embeddings),
            vocabulary.data_ptr(),
            ranked,
        )

    @staticmethod
    def fits(network: Any, embeddings: torch.Tensor) -> bool:
        """Returns whether the layers are such, and the embeddings lie in a way that is known here."""
        native = all(isinstance(layer, NativeLinear) for layer in _linears(network))
        return native and Embeddings.fit(embeddings)

    def guess(
        self, states: torch.Tensor, tokens: Sequence[int], rows: Sequence[Sequence[Row]], least: float
    ) -> list[list[Ranked]]:
        """Does what Speculating.guess does, for states [R, H]; rows have neither biases nor penalties."""
        states, count, most = states.float().contiguous(), len(tokens), len(rows)
        draws, last = (_Draw * count)(*map(_Draw.of, rows[0])), np.array(tokens, np.int64)
        ids = np.empty((most, count, self._ranked), np.int64)
        shares = np.empty((most, count, self._ranked), np.float32)
        made = loaded().guess(
            ctypes.byref(self._struct),
            states.data_ptr(),
            last.ctypes.data,
            count,
            ctypes.byref(draws),
            most,
            least,
            ids.ctypes.data,
            shares.ctypes.data,
            torch.get_num_threads(),
        )
        if not made:
            raise IndexError("the speculator is asked what follows a token that the model does not know")
        told, chances = ids[:made].tolist(), shares[:made].tolist()
        return [
            [Ranked(tuple(told[at][row]), tuple(chances[at][row])) for at in range(made)]
            for row in range(count)
        ]


def _linears(network: Any) -> list[Any]:
    """Returns its layers, in the order of LAYERS; gate and up are one."""
    gate = network.gate_proj
    both = gate.together.linear if isinstance(gate, PackedColumns) else gate
    return [network.state, network.own, network.token, both, network.down_proj, network.head]
