"""Linear layers that run by native_products.cpp: in float32, and in 8 bits as quantized.py describes them."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from outrider.engine.native import loaded, pointers
from outrider.engine.norms import ShortNorm
from outrider.engine.packed import PackedLinear

FOUR, LINE = 4, 64  # as in native_sums.h: bytes multiplied at once, and those of a tile's row
# Kinds of activations: as they are, a byte each, two bytes each, two with a scale for each block, where
# weights have 4 bits or 8.
FLOATS, BYTES, PAIRS, NIBBLES, OCTETS = 0, 1, 2, 3, 4
BLOCK, NIBBLE = 32, 15  # as in native_blocks.h: inputs that share a scale, and the largest weight of 4 bits
LANES, EIGHT = 16, 8  # as there: outputs of which a block holds weights, and half of them
BELOW = 8  # steps below 0 of those that GGUF's Q4_0 has
USUAL, ANY = (-8,), (-8, -7, -6, -5, -4, -3, -2, -1, 1, 2, 3, 4, 5, 6, 7)  # steps to the farthest weight
TRIED = 16  # rows: of weights that have 4 bits already, these tell
LARGEST_EXPONENT, MOST_EXPONENT = 15, 100  # of the largest weight in float16; of what one of a layer is worth
TINY = 1e-30  # instead of 0, by which nothing can be divided
LARGEST = 127  # whole weight
ROWS = 4096  # of weights that are rounded at a time: what that takes stays small
MIDDLE = 128  # what is added to bytes of activations


class Layer(ctypes.Structure):
    """`Linear` of native_calls.h."""

    _fields_ = (
        *pointers("weight", "scales", "sums", "bias", "norm", "columns", "counts"),
        *((name, ctypes.c_int64) for name in ("groups", "width", "depth", "out", "kind")),
        ("eps", ctypes.c_double),
    )


class DecoderLayer(ctypes.Structure):
    """DecoderLayer of native_calls.h: one layer of a decoder."""

    _fields_ = (
        *((name, ctypes.POINTER(Layer)) for name in ("inner", "output", "both", "down")),
        *pointers("query_norm", "key_norm"),
        ("eps", ctypes.c_double),
    )

    @classmethod
    def of(cls, layers: Sequence[Layer], head_norms: Sequence[ShortNorm]) -> DecoderLayer:
        """`layers`: inner, output, both and down, which are kept; `head_norms`: of queries and of keys, which
        the caller keeps, or none."""
        found = cls(*map(ctypes.pointer, layers))
        if head_norms:
            found.query_norm, found.key_norm = (norm.weight.data_ptr() for norm in head_norms)
            found.eps = head_norms[0].eps
        return found


class Embeddings(ctypes.Structure):
    """`Embeddings` of native_calls.h: a model's input embeddings."""

    _fields_ = (
        *pointers("rows"),
        *((name, ctypes.c_int64) for name in ("count", "width", "halves")),
    )

    @classmethod
    def of(cls, weight: torch.Tensor) -> Embeddings:
        """`weight` [V, H] is kept by who calls."""
        return cls(weight.data_ptr(), *weight.shape, weight.dtype == torch.bfloat16)

    @staticmethod
    def fit(weight: torch.Tensor) -> bool:
        """Returns whether they lie in a way that native code reads."""
        known = weight.dtype in (torch.float32, torch.bfloat16)
        return known and weight.is_contiguous() and weight.device.type == "cpu"


class NativeLinear(PackedLinear):
    """x @ weight.T + bias for a weight [out, in], float32 in and out."""

    kind = FLOATS
    plans = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[int] = ()) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.dtype = torch.float32
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.layer = Layer(width=self.in_features, out=self.out_features, kind=self.kind, eps=-1.0)
        self._held: dict[str, torch.Tensor] = {}  # what the layer points to
        firsts, counts = _groups(parts or [self.out_features])
        self._point(columns=torch.tensor(firsts), counts=torch.tensor(counts))
        # Outputs that fill groups up are the last one's again; nobody gets them.
        rows = torch.tensor(firsts)[:, None] + torch.arange(loaded().group_size())
        self._rows = rows.clamp_(max=self.out_features - 1)
        self.layer.groups = len(firsts)
        if bias is not None:
            self._point(bias=bias.detach()[self._rows])
        self.layer.depth = self._put_in(weight.detach())
        self.packed = self._held["weight"]
        del self._rows

    def _put_in(self, weight: torch.Tensor) -> int:
        """Lays the weight out; returns its depth, which is that of its inputs, filled up."""
        self._point(weight=weight[self._rows].transpose(1, 2))
        return self.in_features

    def _point(self, **tensors: torch.Tensor) -> None:
        for name, tensor in tensors.items():
            self._held[name] = tensor.contiguous()
            setattr(self.layer, name, self._held[name].data_ptr())

    def may_stand_behind(self, norm: nn.Module) -> bool:
        """Returns whether it can do the work of a norm before it."""
        return isinstance(norm, ShortNorm)

    def after(self, norm: ShortNorm) -> Layer:
        """Returns the layer behind a norm, for as long as both are there."""
        found = Layer.from_buffer_copy(self.layer)
        found.eps = norm.eps
        if self.kind == FLOATS or not bool((norm.weight == 1).all()):
            found.norm = norm.weight.data_ptr()
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run(self.layer, x.contiguous())


class NativeInt8Linear(NativeLinear):
    """A linear layer with weights of 8 bits and activations of 16: see quantized.Int8Linear."""

    kind = PAIRS

    def _put_in(self, weight: torch.Tensor) -> int:
        depth = self.in_features + -self.in_features % LINE
        whole = torch.zeros(self.out_features, depth, dtype=torch.int8)
        scales = torch.empty(self.out_features)
        for begin in range(0, self.out_features, ROWS):
            some = slice(begin, begin + ROWS)
            torch.amax(weight[some].abs(), 1, out=scales[some])
            scales[some].div_(LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
            whole[some, : self.in_features] = (weight[some] / scales[some, None]).round_()
        sums = whole.sum(1, dtype=torch.int32) * MIDDLE
        self._point(scales=scales[self._rows], sums=sums[self._rows])
        size = loaded().group_size()
        self._point(weight=whole[self._rows].view(-1, size, depth // FOUR, FOUR).transpose(1, 2))
        return depth


class NativeEvenInt8Linear(NativeInt8Linear):
    """A linear layer with weights and activations of 8 bits: see quantized.EvenInt8Linear."""

    kind = BYTES

    def norm(self, eps: float) -> None:
        """As EvenInt8Linear has it."""
        self.layer.eps = eps


class NativeBlocksLinear(NativeLinear):
    """A linear layer of which each BLOCK inputs' weights have a scale of their own, and activations, which
    have 16 bits."""

    def _put_in(self, weight: torch.Tensor) -> int:
        # A power of 2 changes no weight's digits, and float16 holds the scales then, however small they were.
        _, exponent = math.frexp(float(weight.abs().amax()))
        worth = math.ldexp(1.0, max(-MOST_EXPONENT, min(exponent - LARGEST_EXPONENT, MOST_EXPONENT)))
        some = max(1, ROWS // self._rows.shape[1])
        laid = torch.cat(
            [self.blocks_of(weight[rows.flatten()] / worth) for rows in torch.split(self._rows, some)]
        )
        self._point(weight=laid.view(len(self._rows), -1, *laid.shape[1:]), scales=torch.tensor([worth]))
        return laid.shape[1] * BLOCK

    @staticmethod
    def blocks_of(weight: torch.Tensor) -> torch.Tensor:
        """Returns what lies in memory of weights [16 n, in]: bytes [n, blocks, one's]."""
        raise NotImplementedError


class NativeInt4Linear(NativeBlocksLinear):
    """With weights of 4 bits. Those of GGUF's Q4_0 and Q4_1 are rounded to themselves."""

    kind = NIBBLES

    @staticmethod
    def blocks_of(weight: torch.Tensor) -> torch.Tensor:
        whole, steps, zeros, _ = rounded_to_nibbles(weight)
        pairs = whole.view(*whole.shape[:2], -1, 2, 2)
        return _lying(pairs[..., 0, :] | pairs[..., 1, :] << 4, steps, zeros)


class NativeBlocksInt8Linear(NativeBlocksLinear):
    """With weights of 8 bits. Those of GGUF's Q8_0 are rounded to themselves."""

    kind = OCTETS

    @staticmethod
    def blocks_of(weight: torch.Tensor) -> torch.Tensor:
        whole, steps = rounded_to_octets(weight)
        return _lying(whole.view(torch.uint8), steps)


def _lying(whole: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
    """Returns blocks as native_blocks.h has them, of bytes of weights [16 n, blocks, ...] and of what is
    given for each [16 n, blocks]."""
    count, blocks = tables[0].shape
    # By sixteen outputs: vector, output, block, word, byte of a half, half.
    each = whole.reshape(count // LANES, LANES // EIGHT, EIGHT, blocks, -1, 2, 2).permute(0, 3, 1, 4, 2, 6, 5)
    parts = [one.view(-1, LANES, blocks).transpose(1, 2).contiguous().view(torch.uint8) for one in tables]
    return torch.cat([each.reshape(count // LANES, blocks, -1), *parts], -1)


def are_nibbles(weight: torch.Tensor) -> bool:
    """Returns whether weights [out, in] have 4 bits already, as far as the first rows tell."""
    return weight.dtype == torch.float32 and rounded_to_nibbles(weight.detach()[:TRIED]).kept()


class Nibbles(NamedTuple):
    """Blocks of weights, rounded to 4 bits."""

    whole: torch.Tensor  # [out, blocks, BLOCK] from 0 to NIBBLE
    steps: torch.Tensor  # [out, blocks] what one is worth, in float16
    zeros: torch.Tensor  # [out, blocks] what stands for 0, in float16
    error: torch.Tensor  # [out, blocks] how far the weights are off, squared

    def kept(self) -> bool:
        """Returns whether nothing was rounded."""
        return not bool(self.error.any())


def rounded_to_nibbles(weight: torch.Tensor) -> Nibbles:
    """Returns the blocks of a weight [out, in] in float32, filled up with 0.

    Whole weights count from a block's least to its largest, as GGUF's Q4_1 has it; or, where that is nearer,
    from 8 steps below 0, of which the weight farthest from 0 is so many, as Q4_0 has it: -8 as a rule."""
    own = _in_blocks(weight)
    keeping = (many for many in ((), USUAL, ANY) if _nibbles(own[:TRIED], many).kept())
    return _nibbles(own, next(keeping, USUAL))


def _nibbles(own: torch.Tensor, many: Sequence[int]) -> Nibbles:
    """`many`: how many steps from 0 the farthest weight may be."""
    least, most = own.aminmax(dim=-1)
    farthest = torch.where(least.abs() > most, least, most)
    low = least.half()
    found = _counted(own, ((most - low) / NIBBLE).half(), low)
    for count in many:
        left = found.error > 0
        steps = (farthest[left] / count).half()
        others = _counted(own[left], steps, steps * -BELOW)
        nearer = others.error < found.error[left]
        left[left.clone()] = nearer
        for old, new in zip(found, others, strict=True):
            old[left] = new[nearer]
    return found


def _counted(own: torch.Tensor, steps: torch.Tensor, zeros: torch.Tensor) -> Nibbles:
    """Returns blocks with these steps, counted from what stands for 0."""
    step, zero = steps.float()[..., None], zeros.float()[..., None]
    whole = ((own - zero) / torch.where(step == 0, TINY, step)).round_().clamp_(0, NIBBLE)
    error = (whole * step + zero - own).square_().sum(-1)
    return Nibbles(whole.to(torch.uint8), steps, zeros, error)


def rounded_to_octets(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns whole weights from -LARGEST to LARGEST [out, blocks, BLOCK], and what one is worth
    [out, blocks], in float16: of a weight [out, in] in float32."""
    own = _in_blocks(weight)
    steps = (own.abs().amax(-1) / LARGEST).half()
    whole = own / steps.float().clamp_min(TINY)[..., None]
    return whole.round_().clamp_(-LARGEST, LARGEST).to(torch.int8), steps


def _in_blocks(weight: torch.Tensor) -> torch.Tensor:
    """Returns weights [out, in] as [out, blocks, BLOCK]. What fills the last one up widens it in nothing; its
    activations are 0."""
    outputs, inputs = weight.shape
    own = nn.functional.pad(weight, (0, -inputs % BLOCK), mode="constant").view(outputs, -1, BLOCK)
    last = own[:, -1, inputs % BLOCK or BLOCK :]
    last.copy_(own[:, -1, :1].expand_as(last))
    return own


def run(layer: Layer, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the product with x [..., in] and, if given, something [..., out] added to it. Both are
    contiguous."""
    check(x, added)
    if x.shape[-1] != layer.width:
        raise TypeError(f"rows have {layer.width} numbers, not {x.shape[-1]}")
    found = torch.empty(*x.shape[:-1], layer.out, dtype=torch.float32)
    count = x.numel() // layer.width
    other = None if added is None else added.data_ptr()
    loaded().linear(
        ctypes.byref(layer), x.data_ptr(), count, other, found.data_ptr(), torch.get_num_threads()
    )
    return found


def run_gated(both: Layer, down: Layer, x: torch.Tensor) -> torch.Tensor:
    """Returns x + down(silu(gate(x)) * up(x)) for x [T, H], where `both` is gate and up behind a norm."""
    check(x)
    found = torch.empty_like(x)
    loaded().gated(
        ctypes.byref(both),
        ctypes.byref(down),
        x.data_ptr(),
        len(x),
        found.data_ptr(),
        torch.get_num_threads(),
    )
    return found


def check(*tensors: torch.Tensor | None) -> None:
    """Raises TypeError unless native code can read these rows."""
    for tensor in tensors:
        if tensor is not None and (tensor.dtype != torch.float32 or not tensor.is_contiguous()):
            raise TypeError(f"rows are contiguous and in float32, not in {tensor.dtype}")


def _groups(parts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the first output of each group and how many it has, for layers of so many outputs that are
    joined: a group belongs to one of them."""
    firsts: list[int] = []
    counts: list[int] = []
    begin, size = 0, loaded().group_size()
    for part in parts:
        firsts += range(begin, begin + part, size)
        counts += [min(size, part - first) for first in range(0, part, size)]
        begin += part
    return firsts, counts
