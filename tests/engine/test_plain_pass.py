"""Usual decoders run by a pass of ours: with the bits of their own code, or by that."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer as Llama

from outrider.engine.attention import NAME, run_model
from outrider.engine.gathered_attention import GatheredAttention
from outrider.engine.loading import load_engine
from outrider.engine.packed import PackedLinear, pack
from outrider.engine.plain_pass import PlainLayer, run_plainly
from outrider.engine.quantized import Int8Linear
from outrider.engine.step_inputs import Work
from tests.tiny_models import build


def packed(arch: str, folder: Path, kind: type[PackedLinear] = PackedLinear) -> Any:
    model = AutoModelForCausalLM.from_pretrained(build(arch, folder), dtype=torch.float32).eval()
    pack(model, kind)
    model.set_attn_implementation(NAME)
    return model


def logits(model: Any) -> list[torch.Tensor]:
    """Returns those of two sessions that run side by side, in steps of different lengths."""
    attention, found = GatheredAttention.on(model, 16), []
    for start, count in ((0, 40), (40, 1), (41, 5)):
        tokens = [(7 * place) % 199 for place in range(start, start + count)]
        works = [Work(range(first, first + 8), start, tokens, count) for first in (0, 8)]
        found.append(run_model(model, attention, attention.prepare(works)).clone())
    return found


@pytest.mark.parametrize("kind", [PackedLinear, Int8Linear])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_the_same_bits_as_by_their_own_code(arch: str, kind: type[PackedLinear], tmp_path: Path) -> None:
    model = packed(arch, tmp_path, kind)
    assert run_plainly(model)
    found = logits(model)
    del model.forward
    assert all(map(torch.equal, logits(model), found))


def test_an_engine_has_it(tmp_path: Path) -> None:
    engine = load_engine(str(build("llama", tmp_path)), kv_memory_bytes=2**24)
    assert engine.info.bit_exact and "forward" in vars(engine.model)
    assert all(isinstance(layer, PlainLayer) for layer in engine.model.forward.layers)


class LlamaDecoderLayer(Llama):
    """One that a new version of transformers could have."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().forward(hidden_states, *args, **kwargs) * 1.0001


def changed_layer(model: Any) -> None:
    model.model.layers[1].__class__ = LlamaDecoderLayer


def unchanged(model: Any) -> None: ...


def one_more_module(model: Any) -> None:
    model.model.projection = torch.nn.Identity()


OTHERS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "other bits": ("llama", changed_layer),
    "a window": ("mistral", unchanged),
    "another module": ("llama", one_more_module),
    "other layers": ("olmo2", unchanged),
}


@pytest.mark.parametrize(("arch", "change"), OTHERS.values(), ids=OTHERS)
def test_others_keep_their_own_code(arch: str, change: Callable[[Any], None], tmp_path: Path) -> None:
    model = packed(arch, tmp_path)
    change(model)
    own = logits(model)
    assert not run_plainly(model)
    assert "forward" not in vars(model)
    assert all(map(torch.equal, logits(model), own))
