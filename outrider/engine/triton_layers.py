"""Linear layers on a GPU whose rows do not depend on how many rows run together."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence, Set
from itertools import islice
from typing import Any

import torch
from torch import nn

from outrider.engine import triton_products
from outrider.engine.packed import PackedLinear, pack_linears
from outrider.engine.recording import CudaGraphs, Record
from outrider.engine.triton_products import GROUP, SMALLEST, TILES, Tile, gated, parts_of, size_of, whole
from outrider.errors import in_one_line

log = logging.getLogger(__name__)

LARGEST_BYTE = 127.0
TRIED_BYTES = 2**29  # of weights of one shape in a trial: more than the cache of a GPU
TRIALS = 3


class TritonLinear(PackedLinear):
    """x @ weight.T + bias for a weight [out, in] in 16 bits or float32."""

    plans = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[int] = ()) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.packed, self.scales = self._stored(weight.detach())
        self.in_turns = False  # whether the outputs are a gate's and others', GROUP of each in turn
        self.tiles = {size: tiles[0] for size, tiles in TILES.items()}

    def _stored(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the weight as it is kept, and a scale [out] float32 for each of its rows, if they have
        any."""
        return weight.contiguous(), None

    @property
    def weight(self) -> torch.Tensor:
        """Returns an empty tensor, whose type and device some models ask for."""
        return torch.empty(0, dtype=self.dtype, device=self.packed.device)

    def tile(self, tokens: int) -> Tile:
        return self.tiles[size_of(tokens)]

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the product with x [T, in] as triton_products.parts_of does."""
        return parts_of(x, self.packed, self.scales, self.bias, self.tile(len(x)))

    def missing_bias(self, parts: torch.Tensor) -> torch.Tensor | None:
        """Returns the bias, if `parts` came without it."""
        return self.bias if parts.dtype == torch.float32 != self.dtype or len(parts) > 1 else None

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up [T, out / 2], once outputs stand in turns."""
        return gated(x, self.packed, self.scales, self.bias, self.tile(len(x)))

    def take_turns(self) -> None:
        """Puts the outputs of two layers that are joined in turns, GROUP of each; `forward` gives them as
        before."""
        half = self.out_features // 2
        order = torch.arange(self.out_features, device=self.packed.device).view(2, half // GROUP, GROUP)
        order = order.transpose(0, 1).reshape(-1)
        self.packed = self.packed[order]
        self.scales = None if self.scales is None else self.scales[order]
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias[order], requires_grad=False)
        self.in_turns = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        parts = self.parts(rows)
        found = whole(parts, self.missing_bias(parts), self.dtype)
        if self.in_turns:
            found = found.view(len(rows), -1, 2, GROUP).transpose(1, 2).reshape(len(rows), -1)
        return found.view(*x.shape[:-1], self.out_features)


class TritonInt8Linear(TritonLinear):
    """A linear layer with weights of 8 bits, each output's with a scale of its own."""

    def _stored(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        scales = _scales(weight, LARGEST_BYTE)
        return (weight.float() / scales[:, None]).round_().to(torch.int8), scales


class TritonFp8Linear(TritonLinear):
    """A linear layer with weights of 8 bits in floating point."""

    def _stored(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        kind = torch.float8_e4m3fn
        scales = _scales(weight, torch.finfo(kind).max)
        return (weight.float() / scales[:, None]).to(kind), scales


def _scales(weight: torch.Tensor, largest: float) -> torch.Tensor:
    """Returns what the largest number of each row is divided by to become `largest`."""
    return weight.abs().amax(1).float().div_(largest).clamp_min_(torch.finfo(torch.float32).tiny)


def try_out(kind: type[TritonLinear], model: Any) -> None:
    """Computes a small product where the model is. Raises whatever keeps it from that."""
    like = next(model.parameters())
    with torch.inference_mode():
        layer = kind(torch.ones(SMALLEST, SMALLEST, dtype=like.dtype, device=like.device), None)
        if not layer.forward(like.new_ones(1, SMALLEST)).isfinite().all():
            raise RuntimeError("a product of ones is not finite")


def put_into(model: Any, kind: type[TritonLinear], bare: Set[Any] = frozenset()) -> None:
    """Lets a model's linear layers run by such layers, those that are given one tensor as one, each by the
    tile that is fastest here."""
    pack_linears(model, kind, bare)
    choose_tiles(model)


def choose_tiles(model: nn.Module) -> None:
    """Times the tiles on layers of each shape in turn, so that weights come from memory as in a step. A tile
    that gives other bits than the first is left out."""
    shapes: defaultdict[tuple[object, ...], list[TritonLinear]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, TritonLinear) and module.packed.is_cuda:  # elsewhere they are interpreted
            shapes[(*module.packed.shape, module.packed.dtype, module.bias is None)].append(module)
    for layers in shapes.values():
        tried = list(islice(layers, max(1, TRIED_BYTES // layers[0].packed.nbytes)))
        rows = torch.randn(triton_products.LARGEST, layers[0].in_features, device=layers[0].packed.device)
        rows = rows.to(layers[0].dtype)
        record = CudaGraphs(rows.device)
        expected: torch.Tensor | None = None
        reason = "its bits are others than the first one's"
        for size, tiles in TILES.items():
            seconds: dict[Tile, float] = {}
            for tile in tiles:
                for layer in tried:
                    layer.tiles[size] = tile
                try:
                    found = tried[0].forward(rows[:size])[:1]
                    expected = found if expected is None else expected
                    if torch.equal(found, expected):
                        seconds[tile] = _seconds(tried, rows[:size], record)
                except Exception as error:  # a tile may be too large for this device
                    reason = in_one_line(error)
                    log.debug("%s does not run here: %s", tile, reason)
            if not seconds:
                raise RuntimeError(f"no tile works for products of {size} rows: of the last {reason}")
            best = min(seconds, key=lambda tile: seconds[tile])
            for layer in layers:
                layer.tiles[size] = best


def _seconds(layers: Sequence[TritonLinear], rows: torch.Tensor, record: Record) -> float:
    """Returns the least time of one product, of a few trials. Recorded, since the host takes longer to ask
    for a product than a GPU to compute it."""

    def products() -> None:
        for layer in layers:
            layer.parts(rows)

    repeat = record(products)
    best = float("inf")
    for _ in range(TRIALS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        repeat()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / len(layers))
    return best
