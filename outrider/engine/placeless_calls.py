"""Modules that call by themselves what gives a row other bits in other company: routers and the like.

torch picks a kernel for a product by its number of rows, and rounds some functions by the place in a vector
(see activations.py). Layers that do nothing else are replaced when a model is packed. Others are found by
what they call in a trial run, and from then on run with functions that know no place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from outrider.engine import activations
from outrider.engine.packed import PackedLinear
from outrider.engine.running_modules import RunningModules


def _silu(x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    return activations.silu(x)


def _gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    return activations.gelu(x) if approximate == "none" else activations.gelu_tanh(x)


FUNCTIONS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.sigmoid: activations.sigmoid,
    torch.Tensor.sigmoid: activations.sigmoid,
    F.sigmoid: activations.sigmoid,
    F.softplus: activations.softplus,
    F.silu: _silu,
    F.gelu: _gelu,
}
PRODUCTS = {F.linear, torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm}
BATCHED = {torch.bmm, torch.Tensor.bmm}  # by a weight for each part of a batch: experts


class PlacelessCalls(TorchFunctionMode):
    """While it is entered, these functions give each row its own bits."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # by the place of a weight in memory, which stays where it is
        self._weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
        self._packed: dict[tuple[Any, ...], PackedLinear] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in FUNCTIONS:
            return FUNCTIONS[func](*args, **kwargs)
        if func is F.linear:
            return self._linear(*args, **kwargs)
        if func in PRODUCTS and not kwargs and args[1].dim() == 2 and _sums(*args):
            return self._linear(args[0], args[1].T)
        if func in BATCHED and not kwargs and self._held(args[1]):
            return torch.stack([self._linear(x, weight.T) for x, weight in zip(*args, strict=True)])
        return func(*args, **kwargs)

    def _held(self, weight: torch.Tensor) -> bool:
        """Returns whether a weight is the module's own."""
        return weight.untyped_storage().data_ptr() in self._weights

    def _linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not weight.dtype == x.dtype == torch.float32 or x.device.type != "cpu":
            return F.linear(x, weight, bias)
        key = (weight.data_ptr(), weight.shape, weight.stride())
        if key not in self._packed:
            if not self._held(weight):  # made of others in this step
                rows = x.reshape(-1, x.shape[-1])
                found = torch.cat([F.linear(row[None], weight, bias) for row in rows])
                return found.view(*x.shape[:-1], weight.shape[0])
            self._packed[key] = PackedLinear(weight, None)
        product = self._packed[key].forward(x)
        return product if bias is None else product + bias


class Recording(TorchFunctionMode):
    """Notes which modules call such functions themselves."""

    def __init__(self, modules: RunningModules) -> None:
        super().__init__()
        self._modules = modules
        self.callers: dict[nn.Module, None] = {}  # in order

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        caller = self._modules.running
        product = func in PRODUCTS or func in BATCHED
        if caller is not None and (func in FUNCTIONS or (product and _sums(*args[:2]))):
            self.callers[caller] = None
        return func(*args, **(kwargs or {}))


@contextmanager
def replacing(modules: RunningModules) -> Iterator[None]:
    """Runs a step in here, and lets the modules that call such functions in it run without them later on."""
    with Recording(modules) as recording:
        yield
    for module in recording.callers:
        _replace(module)


def _replace(module: nn.Module) -> None:
    plain, calls = module.forward, PlacelessCalls(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        with calls:
            return plain(*args, **kwargs)

    module.forward = forward


def _sums(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> bool:
    """Returns whether a product adds anything up: that of one number each does not round twice."""
    return x.shape[-1] > 1
