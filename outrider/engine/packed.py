"""Linear layers on CPU whose rows do not depend on how many rows run together.

torch's `F.linear` picks another kernel for 1 row, a few rows and many, and they round differently. oneDNN's
product with a weight packed once gives every row the same bits from 2 rows up (in float32 measured up to 512,
on Intel and AMD; in bfloat16 on AMD with AVX-512), and is faster for a few rows. The self-check tells
whether that holds on the machine at hand.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import cycle, islice
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.pytorch_utils import Conv1D

from outrider.engine.activations import placeless
from outrider.engine.norms import shortened

MAX_ROWS = 512  # of one product
EXPERTS_NAME = "outrider_packed"
EXACT_BITS = 5  # counts of rows are rounded up to as many significant bits
FEWEST_ROWS = (1, 2, 3, 4)  # of which the fastest is taken for a product of fewer
WORTH_FILLING = 0.95  # share of the time that a product with more rows may take to be taken
READ_BYTES = 2**28  # of weights of one shape: more than the caches next to a core hold
PRODUCTS = 24  # of a trial, at least
TRIALS = 5  # of each number of rows
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that are given one tensor

product = torch.ops.mkldnn._linear_pointwise.default


def rounded_up(count: int) -> int:
    """Returns with how many rows a product of so many runs: at most a sixteenth more.

    oneDNN makes a plan for every shape and number of rows when it comes first. That takes a fraction of a
    millisecond, and about .5 MB for as long as it is kept."""
    unit = 1 << max(0, (count - 1).bit_length() - EXACT_BITS)
    return -(-count // unit) * unit


def packs(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN takes such weights here: in bfloat16 it needs AVX-512, or AVX-NE-CONVERT."""
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedLinear(nn.Module):
    """x @ weight.T + bias with a packed weight [out, in], in float32 or bfloat16. It stays as it is where
    `packs` says that it cannot be packed.

    `parts`: of how many outputs each are the layers that are joined in it, if there are several."""

    plans = True  # oneDNN makes one for each number of rows

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[int] = ()) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.packed = weight.detach().contiguous()
        if packs(self.dtype):
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.packed, MAX_ROWS)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.fewest = 1 if self._keeps_bits_alone() else 2  # rows; fewer are filled up to it

    @property
    def weight(self) -> torch.Tensor:
        """Returns an empty tensor, whose type and device some models ask for. The numbers are packed."""
        return torch.empty(0, dtype=self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = x.numel() // self.in_features
        if count > MAX_ROWS:
            parts = torch.split(x.reshape(-1, self.in_features), MAX_ROWS)
            out = torch.cat([self.forward(part) for part in parts])
        elif (runs := max(rounded_up(count), self.fewest)) == count:
            return self._product(x)
        else:
            rows = x.reshape(-1, self.in_features)  # [n, in]
            out = self._product(F.pad(rows, (0, 0, 0, runs - count)))[:count]
        return out.view(*x.shape[:-1], self.out_features)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packed.is_mkldnn:
            return F.linear(x, self.packed, self.bias)
        found: torch.Tensor = product(x, self.packed, self.bias, "none", [], "")
        return found

    def _keeps_bits_alone(self) -> bool:
        """Returns whether a single row gets the same bits alone. It runs by a kernel of its own then, which
        sums in the others' order if the weight is not deep. If not, the row has to run with a second one."""
        with torch.inference_mode():
            x = torch.randn(2, self.in_features, generator=torch.Generator().manual_seed(3)).to(self.dtype)
            return torch.equal(self._product(x)[:1], self._product(x[:1]))


class Together:
    """Linear layers that are given the same tensor, run as one at the first one's call.

    Not a module: those take a microsecond or two for each attribute that is set, several times a layer."""

    def __init__(self, layers: Sequence[nn.Linear], kind: type[PackedLinear]) -> None:
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        sizes = [len(layer.weight) for layer in layers]
        self.linear = kind(torch.cat([layer.weight for layer in layers]), bias, sizes)
        self._count = self._left = len(layers)  # layers that have not taken their columns yet
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None

    def take(self, x: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """`count` columns from `first` on of the product with x."""
        if x is not self._input or self._output is None:
            self._input, self._output, self._left = x, self.linear(x), self._count
        columns = self._output.narrow(-1, first, count)
        self._left -= 1
        if not self._left:  # nothing is kept from step to step
            self._input = self._output = None
        return columns


class PackedColumns(nn.Module):
    """One of the layers that run together."""

    def __init__(self, together: Together, first: int, count: int) -> None:
        super().__init__()
        self.together = together
        self.linear = together.linear  # so that the model knows it; the others' is the same one
        self.first, self.out_features = first, count
        self.in_features = together.linear.in_features
        self.bias = None  # the product has it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.together.take(x, self.first, self.out_features)


def pack(model: Any, kind: type[PackedLinear] = PackedLinear, bare: Set[nn.Module] = frozenset()) -> None:
    """Makes a CPU model's rows independent of one another, linear layers, experts and activations, and
    joins what can be joined. `kind` is what linear layers and experts become; `bare` stay as they are.

    The memory of the original weights is freed as it goes."""
    pack_linears(model, kind, bare, lambda child: placeless(child) or shortened(child))
    for module in list(model.modules()):
        if is_experts(module):
            _pack_experts(module, kind)
    if any(hasattr(module, "packed_up") for module in model.modules()):
        model.set_experts_implementation(EXPERTS_NAME)
    fill_up(model)


def pack_linears(
    model: nn.Module,
    kind: type[PackedLinear],
    bare: Set[nn.Module],
    other: Callable[[nn.Module], nn.Module | None] = lambda _child: None,
) -> None:
    """The part of `pack` that is about linear layers; `other` gives what to put in the place of others."""
    for parent in list(model.modules()):
        for names in SAME_INPUT:
            _join(parent, names, kind, bare)
        for name, child in list(parent.named_children()):
            if child in bare and type(child) is nn.Linear:
                continue
            replacement = _packed(child, kind) or other(child)
            if replacement is not None:
                setattr(parent, name, replacement)


def fill_up(model: nn.Module) -> None:
    """Lets a few rows run with empty ones beside them where that is faster here.

    oneDNN has other kernels for one or two rows than for more, which read the weights slower on some machines
    and faster on others. The layers of one shape are timed in turn, so that each weight comes from memory as
    it does in a step."""
    shapes: defaultdict[tuple[int, int, torch.dtype], list[PackedLinear]] = defaultdict(list)
    for module in model.modules():
        if isinstance(module, PackedLinear) and module.plans:
            shapes[module.in_features, module.out_features, module.dtype].append(module)
    for (width, height, _), layers in shapes.items():
        fewest = max(layer.fewest for layer in layers)
        some = layers[: max(1, READ_BYTES // (4 * width * height))]
        chosen = fastest(seconds_by_rows(some, [rows for rows in FEWEST_ROWS if rows >= fewest]))
        for layer in layers:
            layer.fewest = chosen


def make_ready(model: nn.Module, most_rows: int) -> None:
    """Lets oneDNN make all the plans that products of up to `most_rows` rows need: what it keeps of them is
    not taken little by little under load, for hours, but now."""
    shapes = {
        (module.in_features, module.out_features, module.dtype): module
        for module in model.modules()
        if isinstance(module, PackedLinear) and module.plans
    }
    counts = {rounded_up(count) for count in range(1, min(most_rows, MAX_ROWS) + 1)}
    with torch.inference_mode():
        for layer in shapes.values():
            for count in sorted(counts):
                layer.forward(torch.zeros(count, layer.in_features, dtype=layer.dtype))


def seconds_by_rows(layers: Sequence[PackedLinear], counts: Sequence[int]) -> dict[int, float]:
    """Returns the seconds of one row through all the layers, by the number of rows that it runs with.

    The fastest of a few trials counts. Leaves the layers with the last number."""
    seconds = dict.fromkeys(counts, float("inf"))
    row = torch.zeros(1, layers[0].in_features, dtype=layers[0].dtype)
    with torch.inference_mode():
        for _ in range(TRIALS):
            for rows in counts:
                for layer in layers:
                    layer.fewest = rows
                began = time.perf_counter()
                for layer in islice(cycle(layers), max(len(layers), PRODUCTS)):
                    layer.forward(row)  # without what joins it to other ranks
                seconds[rows] = min(seconds[rows], time.perf_counter() - began)
    return seconds


def fastest(seconds: Mapping[int, float]) -> int:
    """Returns the number of rows to run fewer with: the smallest, unless another is clearly faster."""
    smallest, best = min(seconds), min(seconds, key=lambda rows: (seconds[rows], rows))
    return best if seconds[best] < WORTH_FILLING * seconds[smallest] else smallest


def _join(parent: nn.Module, names: Sequence[str], kind: type[PackedLinear], bare: Set[nn.Module]) -> None:
    """Lets the parent's layers of these names run together, where they can."""
    layers = [parent._modules.get(name) for name in names]
    if not all(type(layer) is nn.Linear and layer not in bare for layer in layers):
        return
    linears = cast(list[nn.Linear], layers)
    if len({(layer.weight.shape[1], layer.bias is None) for layer in linears}) > 1:
        return
    together, first = Together(linears, kind), 0
    for name, layer in zip(names, linears, strict=True):
        count = layer.weight.shape[0]  # of a divided layer, fewer than it has features
        setattr(parent, name, PackedColumns(together, first, count))
        first += count


def _packed(module: Any, kind: type[PackedLinear]) -> PackedLinear | None:
    if type(module) is nn.Linear:
        return kind(module.weight, module.bias)
    if type(module) is Conv1D:
        return kind(module.weight.T, module.bias)
    return None


def is_experts(module: nn.Module) -> bool:
    """Returns whether it is experts in transformers' fused form: [E, out, in] parameters (or [E, in, out]
    where is_transposed)."""
    return hasattr(module, "_is_expert_parallel") and isinstance(
        getattr(module, "down_proj", None), nn.Parameter
    )


def _pack_experts(module: Any, kind: type[PackedLinear]) -> None:
    for target, name in (
        ("packed_up", "gate_up_proj" if module.has_gate else "up_proj"),
        ("packed_down", "down_proj"),
    ):
        weights = getattr(module, name)
        biases = getattr(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
        packed = [
            kind(weight.T if module.is_transposed else weight, bias)
            for weight, bias in zip(weights, biases, strict=True)
        ]
        delattr(module, name)
        setattr(module, target, nn.ModuleList(packed))


def _packed_experts(
    module: Any,
    x: torch.Tensor,  # [T, H]
    top_k_index: torch.Tensor,  # [T, k]
    top_k_weights: torch.Tensor,  # [T, k]
) -> torch.Tensor:
    """Runs each expert on the tokens routed to it. Returns the sum of each token's shares, in the order of
    its choices: [T, H]."""
    tokens, choices = top_k_index.shape
    chosen = top_k_index.reshape(-1)  # [T * k]
    order = torch.argsort(chosen, stable=True)
    shares = x.new_empty(tokens * choices, x.shape[1])
    first = 0
    for expert, count in enumerate(torch.bincount(chosen, minlength=module.num_experts).tolist()):
        if count == 0:
            continue
        mine, first = order[first : first + count], first + count
        hidden = module.packed_up[expert](x[mine // choices])
        hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        hidden = module.packed_down[expert](hidden)
        shares[mine] = module.post_expert_norm(hidden) if module.has_post_expert_norm else hidden
    weighted = (shares * top_k_weights.reshape(-1, 1)).view(tokens, choices, -1)
    total = weighted[:, 0]
    for choice in range(1, choices):
        total = total + weighted[:, choice]
    return total.to(x.dtype)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, _packed_experts)
