"""On a GPU a layer's many small operations are joined by torch's compiler: norms, rotations, activations.

Recorded steps leave Python out, but each small operation is still a kernel of its own, which takes a
microsecond or two where a single stream's whole layer takes a hundred. Layers are alike, so each part is
compiled once for all of them, for one token and for any number.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from outrider.engine.attention import NAME, paged_attention
from outrider.engine.engine import Engine
from outrider.engine.packed import PackedColumns, PackedLinear
from outrider.engine.self_check import Reference, check
from outrider.errors import PeerLost, in_one_line

log = logging.getLogger(__name__)


def fuse(model: Any, backend: str = "inductor") -> None:
    """From now on the model's layers run compiled, attention apart; the first steps take the time for it."""
    # The compiler must not look into it: it belongs to the step that is running.
    apart = torch.compiler.disable(paged_attention)  # type: ignore[no-untyped-call]
    AttentionInterface.register(NAME, apart)
    for layer in _layers(model):
        for module in _products(layer):  # which choose among kernels by the number of rows
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        layer.compile(backend=backend)


def fused(engine: Engine, expected: Reference, backend: str = "inductor") -> bool:
    """Fuses the engine's model; whether that works and gives `expected`, the logits of the model's own code,
    in every process of the group. If not, it is taken back. To be done before steps are recorded."""
    worked = True
    try:
        engine.group.keep_from_compiler()
        fuse(engine.model, backend)
        check(engine, expected, bits=False)
    except PeerLost:
        raise
    except Exception as error:  # the compiler may lack a part, or not know what a layer does
        worked = False
        log.warning("layers run without torch.compile, which is slower: %s", in_one_line(error))
    if not engine.group.agree(worked):
        unfuse(engine.model)
        return False
    return True


def unfuse(model: Any) -> None:
    """Takes it back."""
    for layer in _layers(model):
        layer._compiled_call_impl = None
        for module in _products(layer):
            vars(module).pop("forward", None)


def is_fused(model: Any) -> bool:
    return all(layer._compiled_call_impl is not None for layer in _layers(model))


def _layers(model: Any) -> Iterator[nn.Module]:
    """Yields the decoder layers."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            yield from module


def _products(layer: nn.Module) -> Iterator[nn.Module]:
    """Yields its linear layers of ours."""
    return (module for module in layer.modules() if isinstance(module, PackedLinear | PackedColumns))
