"""Linear layers that run by native_products.cpp: in float32, and in 8 bits as quantized.py describes them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from outrider.engine.native import library, pointers
from outrider.engine.norms import ShortNorm
from outrider.engine.packed import PackedLinear

GROUP, FOUR = (
    64,
    4,
)  # outputs that lie together, and bytes that are multiplied at once, as in native_products.cpp
FLOATS, BYTES, PAIRS = 0, 1, 2  # kinds of activations: as they are, a byte each, two bytes each
LARGEST = 127  # whole weight
MIDDLE = 128  # what is added to bytes of activations


class Layer(ctypes.Structure):
    """`Linear` of native_products.cpp."""

    _fields_ = (
        *pointers("weight", "scales", "sums", "bias", "norm", "columns", "counts"),
        *((name, ctypes.c_int64) for name in ("groups", "width", "depth", "out", "kind")),
        ("eps", ctypes.c_double),
    )


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
        self._rows = (torch.tensor(firsts)[:, None] + torch.arange(GROUP)).clamp_(max=self.out_features - 1)
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

    def after(self, norm: ShortNorm) -> Layer:
        """Returns the layer behind a norm, for as long as both are there."""
        found = Layer.from_buffer_copy(self.layer)
        found.norm, found.eps = norm.weight.data_ptr(), norm.eps
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run(self.layer, x.contiguous())


class NativeInt8Linear(NativeLinear):
    """The same with weights of 8 bits and activations of 16: see quantized.Int8Linear."""

    kind = PAIRS

    def _put_in(self, weight: torch.Tensor) -> int:
        scales = weight.abs().amax(1).div_(LARGEST).clamp_min_(torch.finfo(torch.float32).tiny)
        whole = F.pad((weight / scales[:, None]).round_().to(torch.int8), (0, -self.in_features % FOUR))
        depth = whole.shape[1]
        sums = whole.sum(1, dtype=torch.int32) * MIDDLE
        self._point(scales=scales[self._rows], sums=sums[self._rows])
        self._point(weight=whole[self._rows].view(-1, GROUP, depth // FOUR, FOUR).transpose(1, 2))
        return depth


class NativeEvenInt8Linear(NativeInt8Linear):
    """The same with activations of 8 bits: see quantized.EvenInt8Linear."""

    kind = BYTES

    def norm(self, eps: float) -> None:
        """As EvenInt8Linear has it."""
        self.layer.eps = eps


def run(layer: Layer, x: torch.Tensor, added: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the product with x [..., in] and, if given, something [..., out] added to it. Both are
    contiguous."""
    _check(x, added)
    found = torch.empty(*x.shape[:-1], layer.out, dtype=torch.float32)
    count = x.numel() // layer.width
    other = None if added is None else added.data_ptr()
    _library().linear(
        ctypes.byref(layer), x.data_ptr(), count, other, found.data_ptr(), torch.get_num_threads()
    )
    return found


def run_gated(both: Layer, down: Layer, x: torch.Tensor) -> torch.Tensor:
    """Returns x + down(silu(gate(x)) * up(x)) for x [T, H], where `both` is gate and up behind a norm."""
    _check(x)
    found = torch.empty_like(x)
    _library().gated(
        ctypes.byref(both),
        ctypes.byref(down),
        x.data_ptr(),
        len(x),
        found.data_ptr(),
        torch.get_num_threads(),
    )
    return found


def _check(*tensors: torch.Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and (tensor.dtype != torch.float32 or not tensor.is_contiguous()):
            raise TypeError(f"rows are contiguous and in float32, not in {tensor.dtype}")


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None, "a layer of it has been made"
    return found


def _groups(parts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Returns the first output of each group and how many it has, for layers of so many outputs that are
    joined: a group belongs to one of them."""
    firsts: list[int] = []
    counts: list[int] = []
    begin = 0
    for part in parts:
        firsts += range(begin, begin + part, GROUP)
        counts += [min(GROUP, part - first) for first in range(0, part, GROUP)]
        begin += part
    return firsts, counts
