"""The linear layers part of an engine: what a model's products are computed by."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, Protocol

import torch
from torch import nn

from outrider.engine import packed
from outrider.engine.native import library, multiplies_bytes
from outrider.engine.native_layers import NativeEvenInt8Linear, NativeInt8Linear, NativeLinear
from outrider.engine.quantized import EvenInt8Linear, Int8Linear
from outrider.engine.turning import fold_norms, turn

# By whether native.cpp has products in 8 bits here. The first is for rows of even numbers.
EVEN_AND_OTHERS: dict[bool, tuple[type[packed.PackedLinear], type[packed.PackedLinear]]] = {
    True: (NativeEvenInt8Linear, NativeInt8Linear),
    False: (EvenInt8Linear, Int8Linear),
}


class LinearLayers(Protocol):
    """A way to compute the linear layers of a model, which puts its own into the model's place."""

    @property
    def name(self) -> str: ...

    @property
    def keeps_numbers(self) -> bool:
        """Returns whether they give the model's own numbers, and so are put in before these are checked."""
        ...

    @property
    def keeps_bits(self) -> bool:
        """Returns whether a row may get the same bits in any company, so that it is worth measuring."""
        ...

    def put_into(self, model: Any, bare: Set[Any] = frozenset()) -> None:
        """`bare`: layers whose weights others take, which stay."""
        ...

    def make_ready(self, model: Any, most_rows: int) -> None:
        """Takes what memory products of up to so many rows need."""
        ...


class Ordinary:
    """The model's own."""

    name = "ordinary"
    keeps_numbers = True
    keeps_bits = False

    def put_into(self, model: Any, bare: Set[Any] = frozenset()) -> None:
        """They are there."""

    def make_ready(self, model: Any, most_rows: int) -> None:
        """They need nothing."""


class Packed:
    """float32 or bfloat16 on a CPU, with rows that do not depend on one another."""

    name = "packed"
    keeps_numbers = True
    keeps_bits = True

    def put_into(self, model: Any, bare: Set[Any] = frozenset()) -> None:
        floats = next(model.parameters()).dtype == torch.float32
        packed.pack(model, NativeLinear if floats and library() else packed.PackedLinear, bare)

    def make_ready(self, model: Any, most_rows: int) -> None:
        packed.make_ready(model, most_rows)


class Int8:
    """8 bits on a CPU, with rows that do not depend on one another."""

    name = "int8"
    keeps_numbers = False
    keeps_bits = True

    def put_into(self, model: Any, bare: Set[Any] = frozenset()) -> None:
        of_bytes, of_pairs = EVEN_AND_OTHERS[multiplies_bytes()]
        if even := turn(model, bare):
            others = {module for module in model.modules() if type(module) is nn.Linear} - even
            packed.pack(model, of_bytes, bare | others)
            fold_norms(model)
        packed.pack(model, of_pairs, bare)

    def make_ready(self, model: Any, most_rows: int) -> None:
        packed.make_ready(model, most_rows)
