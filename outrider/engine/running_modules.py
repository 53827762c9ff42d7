"""Which module of a model runs at a moment, and what each gives for each token: so that a failure is told by
the module's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

ODD = 0x9E3779B97F4A7C15 - 2**64  # as a signed number; its multiples are spread over all bits


class RunningModules:
    """Follows the forward passes of a model while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        """Nothing is followed in a model with compiled layers, which would be compiled anew for that."""
        self._names = {module: name for name, module in model.named_modules()}
        self._stack: list[nn.Module] = []
        self._hooks: list[Any] = []
        self.ran: set[nn.Module] = set()
        self.listener: Callable[[str, Any], None] | None = None  # is told each module's name and output

    def __enter__(self) -> RunningModules:
        self._stack.clear()
        compiled = any(module._compiled_call_impl is not None for module in self._names)
        for module in () if compiled else self._names:
            self._hooks.append(module.register_forward_pre_hook(self._begin))
            self._hooks.append(module.register_forward_hook(self._end))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def running(self) -> nn.Module | None:
        """Returns the innermost module that runs; after a failure, the one that failed."""
        return self._stack[-1] if self._stack else None

    def named(self, module: nn.Module | None) -> str:
        """Returns its name and kind."""
        if module is None:
            return "the model"
        return f"{self._names[module] or 'the model'} ({type(module).__name__})"

    def _begin(self, module: nn.Module, _: Any) -> None:
        self._stack.append(module)
        self.ran.add(module)

    def _end(self, module: nn.Module, _: Any, output: Any) -> None:
        self._stack.pop()
        if self.listener is not None:
            self.listener(self.named(module), output)


class RowPrints:
    """What modules gave for each token, as a number that other bits would change.

    The first pass of `whole` tokens shows which tensors have a row for each token."""

    def __init__(self, modules: RunningModules, whole: int, head: nn.Module) -> None:
        """`head` gives logits, whose rows are in another order."""
        self._modules, self._whole, self._head = modules, whole, modules.named(head)
        self._dims: dict[
            tuple[str, int, int], int
        ] = {}  # of a module, its call in a pass, its output's place
        self._prints: dict[tuple[str, int, int], torch.Tensor] = {}  # [whole]
        self._compared = False  # whether the first pass is over
        self.differing: str | None = None  # the first module that gave other bits

    @contextmanager
    def comparing(self, total: int, parts: list[tuple[torch.Tensor, int]]) -> Iterator[None]:
        """Listens to a pass of `total` tokens. Parts of it are tokens of the text: where they are in the pass
        [n], and the first one's place in the text."""
        calls: dict[str, int] = {}

        def listen(name: str, output: Any) -> None:
            call = calls[name] = calls.get(name, -1) + 1
            for place, tensor in enumerate(output if isinstance(output, tuple) else [output]):
                if isinstance(tensor, torch.Tensor) and self.differing is None and name != self._head:
                    self._compare((name, call, place), tensor, total, parts)

        self._modules.listener = listen
        try:
            yield
        finally:
            self._modules.listener = None
            self._compared = True

    def _compare(
        self,
        key: tuple[str, int, int],
        tensor: torch.Tensor,
        total: int,
        parts: list[tuple[torch.Tensor, int]],
    ) -> None:
        if key not in self._prints:
            dims = [dim for dim, size in enumerate(tensor.shape[:2]) if size == total == self._whole]
            if dims and not self._compared:
                self._dims[key] = dims[-1]
                self._prints[key] = _prints(tensor, dims[-1])
            return
        dim = self._dims[key]
        if tensor.dim() <= dim or tensor.shape[dim] != total:
            return
        found = _prints(tensor, dim)
        for tokens, start in parts:
            count = len(tokens)
            if not torch.equal(found[tokens], self._prints[key][start : start + count]):
                self.differing = f"{key[0]} gives {count} of {total} tokens other bits than {self._whole}"


def _prints(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns a whole number for each row along a dimension."""
    rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1)
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(1)
    if rows.is_floating_point():
        rows = (rows.float() + 0.0).view(torch.int32)  # + 0.0: both zeros are one
    weights = torch.arange(1, 2 * rows.shape[1], 2, dtype=torch.int64) * ODD
    return (rows.long() * weights).sum(1)
