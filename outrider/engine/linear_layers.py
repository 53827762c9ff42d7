"""The linear layers part of an engine: what a model's products are computed by."""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import Any, Protocol

import torch
from torch import nn

from outrider.engine import packed, plain_pass
from outrider.engine.native import library
from outrider.engine.native_layers import (
    NativeBlocksInt8Linear,
    NativeEvenInt8Linear,
    NativeInt4Linear,
    NativeInt8Linear,
    NativeLinear,
    are_nibbles,
)
from outrider.engine.quantized import EvenInt8Linear, Int8Linear
from outrider.engine.turning import fold_norms, turn
from outrider.errors import StartupError, in_one_line

log = logging.getLogger(__name__)

# By whether there is native code here. The first is for rows of even numbers.
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

    def run_plainly(self, model: Any) -> None:
        """Lets a model that has them, and is not divided, run by a pass of fewer operations if it is of a
        usual kind."""
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
        """Nothing is to be done: they are there."""

    def run_plainly(self, model: Any) -> None:
        """Nothing is to be done: there is no such pass."""

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

    def run_plainly(self, model: Any) -> None:
        plain_pass.run_plainly(model)

    def make_ready(self, model: Any, most_rows: int) -> None:
        packed.make_ready(model, most_rows)


class Int8:
    """8 bits on a CPU, with rows that do not depend on one another."""

    name = "int8"
    keeps_numbers = False
    keeps_bits = True

    def put_into(self, model: Any, bare: Set[Any] = frozenset()) -> None:
        of_bytes, of_pairs = EVEN_AND_OTHERS[library() is not None]
        if even := turn(model, bare):
            others = {module for module in model.modules() if type(module) is nn.Linear} - even
            packed.pack(model, of_bytes, bare | others)
            fold_norms(model)
        packed.pack(model, of_pairs, bare)

    def run_plainly(self, model: Any) -> None:
        plain_pass.run_plainly(model)

    def make_ready(self, model: Any, most_rows: int) -> None:
        packed.make_ready(model, most_rows)


def has_nibbles(model: Any) -> bool:
    """Returns whether a model's weights but for the head's have 4 bits already: then int4 rounds none."""
    if any(packed.is_experts(module) for module in model.modules()):  # whose weights are not looked at
        return False
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if type(module) is nn.Linear and module is not head]
    return bool(layers) and all(are_nibbles(layer.weight) for layer in layers)


class Int4:
    """Weights of 4 bits on a CPU, with rows that do not depend on one another. The head's have 8: what it
    gives is the choice itself. Those of a GGUF file in Q4_0 or Q4_1 are kept."""

    name = "int4"
    keeps_numbers = False
    keeps_bits = True

    def put_into(self, model: Any, bare: Set[Any] = frozenset()) -> None:
        """Raises StartupError if there is no native code here."""
        if library() is None:
            raise StartupError(
                "--quantization int4 needs a C++ compiler, g++ or clang++, and a processor with AVX2; "
                "give int8, or leave it out"
            )
        head = model.get_output_embeddings()
        packed.pack(model, NativeInt4Linear, bare if head is None else bare | {head})
        packed.pack(model, NativeBlocksInt8Linear, bare)

    def run_plainly(self, model: Any) -> None:
        plain_pass.run_plainly(model)

    def make_ready(self, model: Any, most_rows: int) -> None:
        packed.make_ready(model, most_rows)


class Invariant:
    """A GPU's, by kernels of ours, with rows that do not depend on one another."""

    keeps_bits = True

    def __init__(self, name: str, layer: str, keeps_numbers: bool) -> None:
        """`layer` is the class of triton_layers.py."""
        self.name, self._layer, self.keeps_numbers = name, layer, keeps_numbers

    def put_into(self, model: Any, bare: Set[Any] = frozenset()) -> None:
        """Raises StartupError if they do not run here and torch's would not give their numbers."""
        try:
            from outrider.engine import triton_layers as layers  # a CPU need not have Triton

            layers.try_out(getattr(layers, self._layer), model)
        except Exception as error:  # Triton may lack a compiler, or not know the device
            if not self.keeps_numbers:
                raise StartupError(f"--quantization does not work here: {in_one_line(error)}") from None
            log.warning("torch computes products, whose rows depend on their company: %s", in_one_line(error))
            return
        layers.put_into(model, getattr(layers, self._layer), bare)

    def run_plainly(self, model: Any) -> None:
        if any(isinstance(module, packed.PackedLinear) for module in model.modules()):
            from outrider.engine.triton_pass import run_by_kernels

            run_by_kernels(model)

    def make_ready(self, model: Any, most_rows: int) -> None:
        """They need nothing."""
