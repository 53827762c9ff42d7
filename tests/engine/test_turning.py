"""A turned model computes the same, of activations in which no channel stands out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from outrider.engine.packed import pack
from outrider.engine.quantized import EvenInt8Linear, Int8Linear
from outrider.engine.turning import Turn, turn
from tests.tiny_models import build

IDS = torch.arange(40)[None] * 7 % 199


def model_of(arch: str, folder: Path) -> Any:
    """Returns a model with one channel far above the others, and norms and biases of all sizes."""
    model = AutoModelForCausalLM.from_pretrained(build(arch, folder), dtype=torch.float32).eval()
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for tensor in model.state_dict().values():
        if tensor.dim() == 1:
            tensor += torch.randn(tensor.shape, generator=generator) * 0.3
    model.get_input_embeddings().weight[:, 3] *= 200
    return model


def read_by(model: Any, linears: list[Any]) -> list[torch.Tensor]:
    """Returns what some layers are given."""
    found: list[torch.Tensor] = []
    hooks = [each.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0][0])) for each in linears]
    model(IDS)
    for hook in hooks:
        hook.remove()
    return found


def peaks(rows: torch.Tensor) -> float:
    """Returns how far the largest number of a row is above its others' size, at most."""
    return float((rows.abs().amax(1) / rows.square().mean(1).sqrt()).max())


@pytest.mark.parametrize("width", [1, 7, 64, 96, 576])
def test_a_turn_keeps_lengths_and_angles_and_can_be_taken_back(width: int) -> None:
    found = Turn(width).rows(torch.eye(width, dtype=torch.float64))
    assert torch.allclose(found @ found.T, torch.eye(width, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(Turn(width).back(found), torch.eye(width, dtype=torch.float64), atol=1e-12)
    assert float(found.abs().max()) * width**0.5 < 2.0 + 1e-9  # no channel gets more of another than that


@pytest.mark.parametrize("arch", ["llama", "qwen2", "mistral"])
def test_a_turned_model_computes_the_same_of_even_numbers(arch: str, tmp_path: Path) -> None:
    model = model_of(arch, tmp_path)
    own = model(IDS).logits
    layer = model.model.layers[0]
    readers = [layer.self_attn.q_proj, layer.mlp.gate_proj]
    before = read_by(model, readers)
    even = turn(model)
    assert even == {
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.endswith(("o_proj", "down_proj", "lm_head"))
    }
    found = model(IDS).logits
    assert float((found - own).norm() / own.norm()) < 1e-4
    assert min(map(peaks, before)) > 5 > 4 > max(map(peaks, read_by(model, readers)))


@pytest.mark.parametrize("arch", ["gpt2", "olmo2", "mixtral"])
def test_other_models_stay(arch: str, tmp_path: Path) -> None:
    model = model_of(arch, tmp_path)
    own = model(IDS).logits
    assert not turn(model) and torch.equal(model(IDS).logits, own)


def test_layers_whose_weights_others_take_stay(tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    assert not turn(model, frozenset({model.model.layers[1].mlp.down_proj}))


def test_a_layer_norms_its_rows(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = (torch.randn(size, generator=generator) for size in ((96, 64), (40, 64)))
    x *= torch.logspace(-6, 4, 40)[:, None]  # eps counts in the small ones
    x[5] = 0.0
    layer = EvenInt8Linear(weight, torch.ones(96))
    layer.norm(1e-6)
    found = layer(x)
    expected = nn.functional.rms_norm(x, (64,), eps=1e-6) @ weight.T + 1.0
    assert ((found - expected).norm(dim=1) < 0.02 * expected.norm(dim=1)).all()
    for rows in (slice(0, 1), slice(5, 6), slice(3, 40), slice(7, 12)):
        assert torch.equal(layer(x[rows]), found[rows])


def test_layers_inside_are_of_their_kinds(tmp_path: Path) -> None:
    model = model_of("llama", tmp_path)
    even = turn(model)
    others = {each for each in model.modules() if isinstance(each, nn.Linear)} - even
    pack(model, EvenInt8Linear, others)
    pack(model, Int8Linear)
    layer = model.model.layers[1]
    for linear, kind in (
        (layer.self_attn.q_proj.linear, EvenInt8Linear),
        (layer.mlp.up_proj.linear, EvenInt8Linear),
        (layer.self_attn.o_proj, Int8Linear),
        (layer.mlp.down_proj, Int8Linear),
        (model.lm_head, Int8Linear),
    ):
        assert type(linear) is kind
