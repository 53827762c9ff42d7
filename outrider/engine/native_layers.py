"""Linear layers that run by native_products.cpp: in float32, and in 8 bits as quantized.py describes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import nn

from outrider.engine.native import loaded, pointers
from outrider.engine.norms import ShortNorm
from outrider.engine.packed import PackedLinear

FOUR, LINE = 4, 64  # as in native_sums.h: bytes multiplied at once, and those of a tile's row
FLOATS, BYTES, PAIRS = 0, 1, 2  # kinds of activations: as they are, a byte each, two bytes each
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
        """Returns whether it can do the work of a norm before it: in 8 bits, of one whose weights are one."""
        return isinstance(norm, ShortNorm) and (self.kind == FLOATS or bool((norm.weight == 1).all()))

    def after(self, norm: ShortNorm) -> Layer:
        """Returns the layer behind a norm, for as long as both are there."""
        found = Layer.from_buffer_copy(self.layer)
        found.norm, found.eps = norm.weight.data_ptr(), norm.eps
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
