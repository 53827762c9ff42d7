"""The attention backend that runs by native_attention.cpp, on a CPU in float32: keys are read where they lie,
and no row's bits depend on the rows beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from outrider.engine import indexer
from outrider.engine.attention import LayerAttention
from outrider.engine.branching import LayOut, lay_out_in_order
from outrider.engine.flat_inputs import Shape
from outrider.engine.gathered_attention import BLOCK_SIZE, GatheredAttention
from outrider.engine.kv_pools import KvPools
from outrider.engine.native import library, loaded, pointers
from outrider.engine.recurrent_state import RecurrentStates
from outrider.engine.step_inputs import StepInputs, Work, build_step

LANES = 16  # tokens of a block, and numbers at a time, as in native.h
TRIAL = ((200,), (33, 1, 5, 31, 130), (1, 64, 130, 2, 3))  # tokens of steps that must give the same
ON_A_BRANCH = (187, 13)  # the same, of which the last step's are on a branch
LINE = 3  # tokens that are not the text's, beside which a branch goes on


class _Step(ctypes.Structure):
    """`Step` of native_attention.cpp."""

    _fields_ = (
        *pointers("blocks", "first", "slots", "positions", "ends", "branches", "seen"),
        ("tokens", ctypes.c_int64),
    )
    numbers: np.ndarray[Any, Any]  # that it points to
    end: int  # behind the last position

    @classmethod
    def of(cls, inputs: StepInputs) -> _Step:
        positions, own = inputs.position_ids.numpy()[0], inputs.slots.numpy()
        ends, branches = positions + 1, np.zeros(len(positions) + 1, dtype=np.int64)
        parts = [inputs.tables.blocks, inputs.tables.first, own, positions, ends, branches]
        end = int(ends.max())
        if inputs.on_branches:
            for token, branch in sorted(inputs.on_branches.items()):
                ends[token], branches[token + 1] = branch.line, len(branch.seen)
                parts.append(own[branch.seen[::-1]])
            branches.cumsum(out=branches)
        numbers = np.concatenate(parts)
        at, places = numbers.ctypes.data, list[int]()
        for part in parts[:6]:
            places.append(at)
            at += part.nbytes
        found = cls(*places, at, len(positions))
        found.numbers, found.end = numbers, end
        return found


class Heads(ctypes.Structure):
    """`Heads` of native_calls.h: how a layer attends, and its pool."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("queries", "keys", "width", "value_width", "window", "chunk")),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        *pointers("sinks", "key_pool", "value_pool"),
        ("blocks", ctypes.c_int64),
    )


class Moves(ctypes.Structure):
    """`Moves` of native_calls.h."""

    _fields_ = (*pointers("source", "target"), ("count", ctypes.c_int64))

    @classmethod
    def of(cls, moves: tuple[torch.Tensor, torch.Tensor] | None) -> Moves:
        """`moves`: slots [n] from and to, which the caller keeps."""
        return (
            cls(None, None, 0) if moves is None else cls(*(each.data_ptr() for each in moves), len(moves[0]))
        )


class _Given(ctypes.Structure):
    """`Given` of native_attention.cpp: a tensor [H, T, W] whose rows are contiguous."""

    _fields_ = (*pointers("start"), ("token", ctypes.c_int64), ("head", ctypes.c_int64))

    @classmethod
    def of(cls, heads: torch.Tensor) -> _Given:
        if heads.dtype != torch.float32 or heads.stride(2) != 1:
            raise TypeError(f"a row of heads is contiguous and in float32, not in {heads.dtype}")
        return cls(heads.data_ptr(), heads.stride(1), heads.stride(0))


class NativePools(KvPools):
    """Keys [H, num_blocks + 1, D, LANES] and values [H, num_blocks + 1, LANES, filled Dv]."""

    def made(self, layer: int, how: LayerAttention) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the pools of a layer that attends so."""
        if layer not in self._layers:
            like = torch.empty(0, dtype=torch.float32)
            keys = self._zeros(like, (how.key_heads, self.num_blocks + 1, how.width, LANES))
            filled = how.value_width + -how.value_width % LANES
            values = self._zeros(like, (how.key_heads, self.num_blocks + 1, LANES, filled))
            self._layers[layer] = keys, values
        return self.of(layer)

    def copy_slots(self, layer: int, copies: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        pools = self._layers.get(layer, ())
        if copies is None or len(pools) != 2:
            super().copy_slots(layer, copies)
            return
        keys, values = pools
        heads = Heads(
            keys=keys.shape[0], width=keys.shape[2], value_width=values.shape[3], blocks=keys.shape[1]
        )
        heads.key_pool, heads.value_pool = keys.data_ptr(), values.data_ptr()
        loaded().move_slots(ctypes.byref(heads), ctypes.byref(Moves.of(copies)))

    def _like(self, pool: torch.Tensor) -> torch.Tensor:
        return self._zeros(pool, (pool.shape[0], self.num_blocks + 1, *pool.shape[2:]))


class NativeAttention(GatheredAttention):
    """Implements AttentionBackend."""

    name = "native"
    pools: NativePools

    def __init__(
        self, pools: NativePools, states: RecurrentStates | None = None, takes_trees: bool = True
    ) -> None:
        super().__init__(pools, torch.device("cpu"), torch.float32, states=states)
        self._takes_trees = takes_trees
        self._heads: dict[int, tuple[LayerAttention, Heads]] = {}
        self._all: tuple[Mapping[int, LayerAttention], ctypes.Array[Heads]] | None = None  # as last asked

    @classmethod
    def on(cls, model: Any, num_blocks: int) -> NativeAttention:
        return cls(NativePools(num_blocks, BLOCK_SIZE), RecurrentStates.of(model, num_blocks, BLOCK_SIZE))

    @property
    def lay_out(self) -> LayOut | None:
        return lay_out_in_order if self.states is None and self._takes_trees else None

    def prepare(self, works: Sequence[Work], shapes: Sequence[Shape] = ()) -> StepInputs:
        inputs = build_step(
            works,
            block_size=BLOCK_SIZE,
            scratch_block=self.pools.scratch_block,
            device=self._device,
            mask_dtype=self._dtype,
            views=None,
        )
        inputs.native = _Step.of(inputs)
        return self._begun(works, inputs)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [Hq, T, D]
        key: torch.Tensor,  # [Hkv, T, D]
        value: torch.Tensor,  # [Hkv, T, Dv]
        inputs: StepInputs,
        how: LayerAttention,
        sinks: torch.Tensor | None = None,  # [Hq]
        picked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert picked is None  # see keeping_bits
        self.pools.copy_slots(layer, inputs.moves)
        given = [each if each.stride(2) == 1 else each.contiguous() for each in (query, key, value)]
        heads = self._heads_of(layer, how)
        kept = None if sinks is None else sinks.float().contiguous()
        heads.sinks = None if kept is None else kept.data_ptr()
        # The default type is another while a model is loaded beside this one, in other numbers.
        out = torch.empty((query.shape[1], how.query_heads, how.value_width), dtype=torch.float32)
        ours = (ctypes.byref(each) for each in (inputs.native, heads, *map(_Given.of, given)))
        loaded().attend(*ours, None, out.data_ptr(), torch.get_num_threads())
        return out

    def heads(self, hows: Mapping[int, LayerAttention]) -> ctypes.Array[Heads]:
        """Returns the heads of layers, by their index, in their order."""
        if self._all is None or self._all[0] is not hows:
            heads = [self._heads_of(layer, how) for layer, how in hows.items()]
            self._all = hows, (Heads * len(heads))(*heads)
        return self._all[1]

    def batch_rows(self) -> None:
        """Nothing is to be done: rows attend together."""

    def keeps_bits(self) -> bool:
        ways = {replace(how, window=how.window and min(how.window, 40)) for how in self.layers.values()}
        of_texts = [(how, [_tried(how, chunks) for chunks in TRIAL]) for how in ways]
        self._takes_trees = all(
            torch.equal(whole, _tried(how, ON_A_BRANCH, LINE)) for how, (whole, *_) in of_texts
        )
        return all(torch.equal(whole, found) for _, (whole, *others) in of_texts for found in others)

    def resized(self, num_blocks: int, num_states: int = 0) -> NativeAttention:
        states = None if self.states is None else self.states.resized(num_states, num_blocks)
        return NativeAttention(self.pools.resized(num_blocks), states, self._takes_trees)

    def _heads_of(self, layer: int, how: LayerAttention) -> Heads:
        found = self._heads.get(layer)
        if found is None or found[0] != how:
            keys, values = self.pools.made(layer, how)
            heads = Heads(
                how.query_heads,
                how.key_heads,
                how.width,
                how.value_width,
                how.window or 0,
                how.chunk or 0,
                how.scale,
                how.softcap or 0,
                None,
                keys.data_ptr(),
                values.data_ptr(),
                keys.shape[1],
            )
            found = self._heads[layer] = how, heads
        return found[1]


def keeping_bits(model: Any, num_blocks: int, native: bool) -> GatheredAttention:
    """Returns the backend for numbers that keep their bits, with so many blocks. `native`: this one, if there
    is a library."""
    parameter = next(model.parameters())
    suits = parameter.device.type == "cpu" and parameter.dtype == torch.float32
    suits = suits and not indexer.are_in(model)
    kind = NativeAttention if native and suits and library() is not None else GatheredAttention
    return kind.on(model, num_blocks)


def _tried(how: LayerAttention, chunks: Sequence[int], line: int = 0) -> torch.Tensor:
    """Returns what a session's random tokens get, read in these steps: [T, Hq, Dv]. `line`: the last step's
    are on a branch beside so many others, at most LINE; 0 = they are not."""
    text, generator = sum(chunks), torch.Generator().manual_seed(2)
    total = text + LINE
    query = torch.randn(how.query_heads, total, how.width, generator=generator, dtype=torch.float32)
    key = torch.randn(how.key_heads, total, how.width, generator=generator, dtype=torch.float32)
    value = torch.randn(how.key_heads, total, how.value_width, generator=generator, dtype=torch.float32)
    sinks = torch.randn(how.query_heads, generator=generator, dtype=torch.float32) if how.sinks else None
    blocks = list(reversed(range(-(-total // BLOCK_SIZE))))
    attention, found, start = NativeAttention(NativePools(len(blocks), BLOCK_SIZE)), [], 0
    for count in chunks:
        others = line if start + count == text else 0
        run = [*range(text, text + others), *range(start, start + count)]
        parents = [*range(-1, others - 1), -1, *range(others, others + count - 1)] if others else []
        places = range(start, start + len(parents))
        inputs = attention.prepare([Work(blocks, start, [0] * len(run), 0, parents, places)])
        rows = attention.attend(0, query[:, run], key[:, run], value[:, run], inputs, how, sinks)
        found.append(rows[others:])
        start += count
    return torch.cat(found)
