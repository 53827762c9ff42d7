"""A LoRA adapter is merged as its file says, and what cannot be merged is refused by name."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from outrider.engine import lora as lora_module
from outrider.engine.engine import Engine, Work
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine
from outrider.errors import StartupError
from tests.zoo.verdict import build

PROMPT = [(7 * i) % 198 + 1 for i in range(20)]
Tensors = dict[str, torch.Tensor]
QUERY, DOWN, HEAD = "model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj", "lm_head"


def adapter(folder: Path, changed: Tensors | None = None, **config: Any) -> Path:
    """Saves an adapter for a tiny Llama as peft does; `changed`: tensors that are other ones."""
    folder.mkdir()
    rng = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng) * 0.3

    tensors = {
        f"base_model.model.{QUERY}.lora_A.weight": some(4, 64),
        f"base_model.model.{QUERY}.lora_B.weight": some(64, 4),
        f"base_model.model.{DOWN}.lora_A.weight": some(2, 96),
        f"base_model.model.{DOWN}.lora_B.weight": some(64, 2),
        f"base_model.model.{HEAD}.weight": some(199, 64),  # saved whole
        **(changed or {}),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    told = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "alpha_pattern": {"mlp.down_proj": 5}, **config}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    return folder


def logits(engine: Engine) -> torch.Tensor:
    table = BlockTable()
    engine.pool.extend(table, len(PROMPT))
    return engine.step([Work(table.blocks, 0, PROMPT, len(PROMPT))]).clone()


def refusal(model: Path, lora: Path) -> str:
    with pytest.raises(StartupError) as refused:
        load_engine(str(model), lora=str(lora))
    assert "\n" not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize("rslora", [False, True])
def test_an_adapter_is_merged(rslora: bool, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = checkpoint("llama")
    lora = adapter(tmp_path / "lora", use_rslora=rslora)
    parts = {
        name.removeprefix("base_model.model."): one
        for name, one in load_file(lora / "adapter_model.safetensors").items()
    }
    by_hand = shutil.copytree(model, tmp_path / "merged")
    weights = load_file(model / "model.safetensors")
    for name, alpha, rank in ((QUERY, 6, 4), (DOWN, 5, 2)):
        scale = alpha / (math.sqrt(rank) if rslora else rank)
        weights[f"{name}.weight"] += parts[f"{name}.lora_B.weight"] @ parts[f"{name}.lora_A.weight"] * scale
    weights[f"{HEAD}.weight"] = parts[f"{HEAD}.weight"]
    save_file(weights, by_hand / "model.safetensors", metadata={"format": "pt"})
    merged, expected, plain = (
        load_engine(str(folder), kv_memory_bytes=2**22, lora=told)
        for folder, told in ((model, str(lora)), (by_hand, None), (model, None))
    )
    assert torch.allclose(logits(merged), logits(expected), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(merged), logits(plain), rtol=1e-1)
    assert merged.info.bit_exact and merged.info.fingerprint != plain.info.fingerprint


@pytest.mark.parametrize(
    ("changed", "config", "sentence"),
    [
        ({}, {"peft_type": "IA3"}, "holds an adapter of type IA3, not LORA"),
        ({}, {"use_dora": True}, "cannot be merged: it has use_dora in adapter_config.json"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, "it began as pissa_niter_4, and is for what that left"),
        ({}, {"init_lora_weights": "olora"}, "it began as olora, and is for what that left"),
        (
            {"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(1, 64)},
            {},
            "is for another model: LlamaForCausalLM here has no model.layers.9.mlp.up_proj",
        ),
        ({f"base_model.model.{QUERY}.lora_B.weight": torch.ones(32, 4)}, {}, "[64, 64] here, and [32, 64]"),
        ({f"base_model.model.{QUERY}.lora_B.weight": torch.ones(64, 3)}, {}, "is damaged: the two parts for"),
        ({f"base_model.model.{HEAD}.lora_B.weight": torch.ones(199, 3)}, {}, "is damaged: the two parts for"),
        ({f"base_model.model.{QUERY}.lora_magnitude_vector": torch.ones(64)}, {}, "has no model.layers.0"),
        ({"base_model.model.lm_head.weight": torch.ones(200, 64)}, {}, "[199, 64] here, and [200, 64] there"),
        (
            {"base_model.model.model.norm.lora_A.weight": torch.ones(1, 1)},
            {},
            "cannot be merged: model.norm of the model is a LlamaRMSNorm",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused_by_name(
    changed: Tensors,
    config: dict[str, Any],
    sentence: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
) -> None:
    assert sentence in refusal(checkpoint("llama"), adapter(tmp_path / "lora", changed, **config))


def test_a_folder_without_an_adapter_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model, lora = checkpoint("llama"), adapter(tmp_path / "lora")
    assert "there is no such folder; give one that holds an" in refusal(model, tmp_path / "nowhere")
    (lora / "adapter_model.safetensors").write_bytes(b"half")
    assert "is damaged or cut short" in refusal(model, lora)
    (lora / "adapter_config.json").write_text("[]")
    assert "it holds no JSON object" in refusal(model, lora)
    (lora / "adapter_model.safetensors").unlink()
    assert "no folder of a LoRA adapter: adapter_model.safetensors is missing" in refusal(model, lora)
    (lora / "adapter_model.bin").write_bytes(b"pickle")
    assert "as a pickle (adapter_model.bin), which is not read: load it with peft" in refusal(model, lora)


@pytest.mark.parametrize(("call", "swap"), [("merge", "written again"), ("fingerprint_with", "gone")])
def test_an_adapter_that_changes_while_it_is_merged_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, swap: str
) -> None:
    """As a training run does it that saves its adapter again: the fingerprint would be of one, the weights of
    the other, and texts would go on with them elsewhere."""
    lora = adapter(tmp_path / "lora")
    file, plain = lora / "adapter_model.safetensors", getattr(lora_module, call)

    def overtaken(*arguments: object) -> object:
        if swap == "gone":
            file.unlink()
        else:
            file.write_bytes(file.read_bytes())
        return plain(*arguments)

    monkeypatch.setattr(f"outrider.engine.loading.{call}", overtaken)
    assert f"{lora} was changed while it was read" in refusal(checkpoint("llama"), lora)


def test_a_tied_weight_is_not_changed(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The adapter is for one of the two layers that have it."""
    model = checkpoint("llama", tie_word_embeddings=True)
    parts = {
        f"base_model.model.{HEAD}.lora_A.weight": torch.ones(1, 64),
        f"base_model.model.{HEAD}.lora_B.weight": torch.ones(199, 1),
    }
    whole = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    same = {f"base_model.model.{HEAD}.weight": whole}
    for changed in ({}, {**same, **parts}):
        said = refusal(model, adapter(tmp_path / f"lora-{len(changed)}", changed))
        assert "lm_head.weight of the model is tied to another layer's" in said
    load_engine(str(model), kv_memory_bytes=2**22, lora=str(adapter(tmp_path / "lora-same", same)))


def test_an_adapter_of_the_embedding_is_merged(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """peft saves the embedding itself beside it."""
    model, name = checkpoint("llama"), "model.embed_tokens"
    down, up = torch.randn(4, 199), torch.randn(64, 4)
    weights = load_file(model / "model.safetensors")
    changed = {
        f"base_model.model.{name}.base_layer.weight": weights[f"{name}.weight"].clone(),
        f"base_model.model.{name}.lora_embedding_A": down,
        f"base_model.model.{name}.lora_embedding_B": up,
    }
    merged = load_engine(
        str(model), kv_memory_bytes=2**22, lora=str(adapter(tmp_path / "lora", changed))
    ).model.get_input_embeddings()
    expected = weights[f"{name}.weight"] + (up @ down).T * 6 / 4
    assert torch.allclose(merged.weight, expected, rtol=1e-4, atol=1e-5)


def test_what_an_adapter_has_for_images_is_left_out_with_what_reads_them(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    build("llava", folder)
    model = AutoModelForMultimodalLM.from_pretrained(folder)
    image, text = (name for name, _ in model.named_modules() if name.endswith("layers.0.self_attn.q_proj"))
    assert "vision" in image and "language" in text
    found = [logits(load_engine(str(folder), kv_memory_bytes=2**22))]
    for names in ([text], [text, image]):
        lora = tmp_path / f"lora-{len(names)}"
        lora.mkdir()
        tensors = {
            f"base_model.model.{name}.lora_{part}.weight": torch.full(shape, 0.5)
            for name in names
            for part, shape in (("A", (1, 64)), ("B", (64, 1)))
        }
        save_file(tensors, lora / "adapter_model.safetensors")
        (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 2}))
        found.append(logits(load_engine(str(folder), kv_memory_bytes=2**22, lora=str(lora))))
    assert torch.equal(found[1], found[2]) and not torch.allclose(found[0], found[1], rtol=1e-1)
