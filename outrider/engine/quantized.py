"""Linear layers on CPU in 8 bits whose rows do not depend on how many rows run together.

Weights are rounded once, by output channel, activations at each call, each row by its own largest number. The
product of two such numbers is whole, and a sum of whole numbers is the same in any order: so it is exact for
any number of rows and threads, where the processor's instructions do not overflow.

A row of activations often has a few numbers far above the rest, which 8 bits of one scale would all but
erase. So it has 16, the two bytes of which, a fine and a coarse part, go through one product as two rows. The
weights are read once for both, and reading them is what takes the time of a step with few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

from outrider.engine.packed import PackedLinear
from outrider.errors import StartupError

LARGEST = 127  # of a row's coarse numbers
PARTS = 256  # fine steps make a coarse one, so that both are bytes of one number
# Numbers in tensors: an operation with a number of Python's own makes it one, which takes as long again.
STEPS = torch.tensor(float(LARGEST * PARTS + LARGEST))  # fine steps in a row's largest number
STEPS_OF_BYTES = torch.tensor(float(LARGEST))
BITS = torch.tensor(8, dtype=torch.int32)  # of a part
MIDDLE = 128  # is added to both: oneDNN has kernels for unsigned activations on more processors
# A float32 of this size counts in ones: what is added to it is rounded to a whole number, in its lower bits.
WHOLE = torch.tensor(2.0**23 + 2.0**22 + MIDDLE * PARTS + MIDDLE)
WHOLE_BYTE = torch.tensor(2.0**23 + 2.0**22 + MIDDLE)
FEWEST = 4  # rows of a product: two take longer than four, and one alone a hundred times as long
WEIGHTS = (127, 63)  # largest rounded weight: where sums of two products have 16 bits, a bit less fits
PROBED = (64, 256)  # outputs and inputs of the trial: its sums are whole numbers that a float32 holds

REFUSAL = "--quantization int8: this torch cannot multiply exactly in 8 bits on this machine; leave it out"

product = torch.ops.onednn.qlinear_pointwise.default
prepack = torch.ops.onednn.qlinear_prepack


class Int8Linear(PackedLinear):
    """x @ weight.T + bias for a weight [out, in], float32 in and out."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[int] = ()) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.dtype = torch.float32
        largest = largest_weight()
        scales = weight.detach().abs().amax(1).div_(largest).clamp_min_(torch.finfo(torch.float32).tiny)
        rounded = (weight.detach() / scales[:, None]).round_().to(torch.int8).contiguous()
        self.packed = prepack(rounded, [1, self.in_features])
        self.scales = scales  # [out]
        self.zeros = torch.zeros(self.out_features, dtype=torch.int64)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.fewest = 1  # row, whose parts are FEWEST
        self._check(rounded)

    def _check(self, rounded: torch.Tensor) -> None:
        """Raises StartupError if the product is not that of these whole weights."""
        generator = torch.Generator().manual_seed(4)
        rows = torch.randint(-LARGEST, LARGEST + 1, (2, self.in_features), generator=generator)
        expected = F.linear(rows.float(), rounded.float()) * self.scales
        found = _multiply((rows + MIDDLE).to(torch.uint8), self.packed, self.scales, self.zeros)
        if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())):
            raise StartupError(REFUSAL)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)  # [n, in]
        count = rows.shape[0]
        # A row of zeros has steps of 0. What it is divided by them is nothing, but so is what is multiplied.
        step = rows.abs().amax(-1, keepdim=True).div_(STEPS)  # [n, 1]; vector_norm takes ten times as long
        whole = (rows / step).add_(WHOLE).view(torch.int32)
        parts = torch.empty(max(2 * count, FEWEST), self.in_features, dtype=torch.uint8)
        parts[:count].copy_(whole)  # of which a byte takes the lowest
        parts[count : 2 * count].copy_(whole.bitwise_right_shift_(BITS))
        product = _multiply(parts, self.packed, self.scales, self.zeros)
        return self._finished(torch.add(product[:count], product[count : 2 * count], alpha=PARTS), step, x)

    def _finished(self, product: torch.Tensor, step: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Returns a product of whole numbers [n, out] as that of x."""
        found = product.mul_(step)
        if self.bias is not None:
            found.add_(self.bias)
        return found if x.dim() == 2 else found.view(*x.shape[:-1], self.out_features)


class EvenInt8Linear(Int8Linear):
    """A linear layer for rows whose numbers are all of about one size: 8 bits of one scale are enough.

    It may do the work of an RMS norm before it, too, whose weights are all one: that multiplies a row by a
    number, which changes none of its bytes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[int] = ()) -> None:
        super().__init__(weight, bias, parts)
        self._eps: torch.Tensor | None = None  # of the norm

    def norm(self, eps: float) -> None:
        """From now on rows are normed first: divided by the root of the mean of their squares and eps."""
        self._eps = torch.tensor(eps)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)  # [n, in]
        count = rows.shape[0]
        step = rows.abs().amax(-1, keepdim=True).div_(STEPS_OF_BYTES)  # [n, 1]
        whole = torch.empty(max(count, FEWEST), self.in_features, dtype=torch.uint8)
        whole[:count].copy_((rows / step).add_(WHOLE_BYTE).view(torch.int32))  # of which it takes the lowest
        if self._eps is not None:
            step.mul_(rows.square().mean(-1, keepdim=True).add_(self._eps).rsqrt_())
        return self._finished(_multiply(whole, self.packed, self.scales, self.zeros)[:count], step, x)


def _multiply(
    whole: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """Returns (whole - MIDDLE) @ weight.T * scales in float32: [n, out]."""
    found: torch.Tensor = product(
        whole, 1.0, MIDDLE, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return found


@cache
def largest_weight() -> int:
    """Returns the largest whole weight whose products are exact here, as the hardest numbers show it.

    Processors with VNNI or AMX add in 32 bits; others add pairs of products in 16, which a full byte
    overflows. Raises StartupError if nothing is exact."""
    outputs, inputs = PROBED
    generator = torch.Generator().manual_seed(6)
    rows = torch.randint(-LARGEST, LARGEST + 1, (17, inputs), generator=generator)
    rows[0], rows[1], rows[2, ::2] = LARGEST, -LARGEST, -LARGEST
    for largest in WEIGHTS:
        weight = torch.randint(-largest, largest + 1, (outputs, inputs), generator=generator)
        weight[0], weight[1], weight[2, ::2] = largest, -largest, -largest
        expected = (rows.double() @ weight.double().T).float()
        try:
            packed = prepack(weight.to(torch.int8), [1, inputs])
            one, zeros = torch.ones(outputs), torch.zeros(outputs, dtype=torch.int64)
            whole = (rows + MIDDLE).to(torch.uint8)
            found = [_multiply(whole[:count], packed, one, zeros) for count in (2, len(rows))]
        except (RuntimeError, AttributeError):  # another torch, without these operators
            break
        if all(torch.equal(each, expected[: len(each)]) for each in found):
            return largest
    raise StartupError(REFUSAL)


def exact_here() -> bool:
    """Returns whether this processor and torch multiply exactly in 8 bits."""
    try:
        return bool(largest_weight())
    except StartupError:
        return False
