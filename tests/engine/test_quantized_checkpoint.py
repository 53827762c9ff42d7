"""Checkpoints that packages of others quantised, as far as a CPU runs them: they load, and give nearly the
numbers of the model that they were made of. Each is tried where its package is installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from outrider.engine.engine import Engine
from outrider.engine.loading import load_engine
from outrider.errors import StartupError
from tests.engine.test_checkpoint import loaded, logits
from tests.zoo.serving import keeps_bits

GROUP = 32  # inputs that share a scale
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs in the order in which they are packed
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def apart(engine: Engine, other: Engine) -> float:
    """Returns how far the logits lie from the other's, as a share of their length."""
    expected = logits(other)
    return float((logits(engine) - expected).norm() / expected.norm())


def quantised(model: Path, to: Path, config: Any) -> Path:
    """Saves what transformers makes of a model with this configuration."""
    AutoModelForCausalLM.from_pretrained(
        model, quantization_config=config, dtype=torch.float32, device_map={"": "cpu"}
    ).save_pretrained(to)
    return to


@pytest.fixture
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama", hidden_size=128, intermediate_size=128, initializer_range=0.1)


def held(engine: Engine, plain: Engine, method: str, most: float) -> None:
    """What is said of the engine holds: which package quantised it, and whether it is exact."""
    assert engine.info.quantization == method
    assert not engine.info.bit_exact or keeps_bits(engine, engine.info.vocab_size)
    assert 1e-4 < apart(engine, plain) < most


@pytest.mark.parametrize(("told", "most"), [({"load_in_8bit": True}, 0.1), (NF4, 0.8)])
def test_bitsandbytes(told: dict[str, Any], most: float, model: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    engine = loaded(quantised(model, tmp_path, BitsAndBytesConfig(**told)))
    held(engine, loaded(model), "bitsandbytes", most)
    with pytest.raises(StartupError, match=r"is of no use with .*, which bitsandbytes quantised"):
        load_engine(str(tmp_path), quantization="int8")


def test_torchao(model: Path, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    engine = loaded(quantised(model, tmp_path, TorchAoConfig(quantization.Int8WeightOnlyConfig())))
    held(engine, loaded(model), "torchao", 0.1)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_gptqmodel(method: str, model: Path, tmp_path: Path) -> None:
    """It compiles for minutes when it is first used."""
    pytest.importorskip("gptqmodel")
    folder = Path(shutil.copytree(model, tmp_path / method))
    weights = load_file(model / "model.safetensors")
    for name in [name for name in weights if "_proj" in name]:
        of = weights.pop(name).T.unflatten(0, (-1, GROUP))  # [groups, GROUP, out]
        low, high = of.amin(1, keepdim=True), of.amax(1, keepdim=True)
        scales = ((high - low) / 15).half()
        zeros = (-low / scales).round().clamp(0, 15)
        whole = (of / scales + zeros).round().clamp(0, 15).flatten(0, 1)
        zeros, layer = zeros[:, 0], name.removesuffix("weight")
        weights[layer + "scales"] = scales[:, 0].contiguous()
        if method == "gptq":
            weights[layer + "qweight"] = packed(whole.T).T.contiguous()
            weights[layer + "qzeros"] = packed(zeros - 1)
            weights[layer + "g_idx"] = torch.arange(len(whole), dtype=torch.int32) // GROUP
        else:
            weights[layer + "qweight"], weights[layer + "qzeros"] = packed(whole, AWQ), packed(zeros, AWQ)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    told = {"quant_method": method, "bits": 4, "group_size": GROUP}
    told |= {"desc_act": False, "sym": False} if method == "gptq" else {"version": "gemm"}
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": told}))
    held(loaded(folder), loaded(model), method, 0.8)


def packed(whole: torch.Tensor, order: Sequence[int] = range(8)) -> torch.Tensor:
    """Returns numbers of 4 bits [n, m] as integers of 32 bits [n, m / 8], the lowest bits first."""
    parts = whole.long().bitwise_and(15).view(len(whole), -1, 8)[:, :, list(order)]
    found = (parts << torch.arange(0, 32, 4)).sum(2)
    return torch.where(found < 2**31, found, found - 2**32).int()


def test_compressed_tensors_are_plain_numbers_on_a_cpu(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    folder = Path(shutil.copytree(model, tmp_path / "rounded"))
    weights = load_file(model / "model.safetensors")
    for name in [name for name in weights if "_proj" in name]:
        scales = weights[name].abs().amax(1, keepdim=True) / 127
        weights[name] = (weights[name] / scales).round().to(torch.int8)
        weights[f"{name}_scale"] = scales
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rounded = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    told = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": rounded}},
        "ignore": ["lm_head"],
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": told}))
    engine = loaded(folder)
    assert (engine.info.quantization, engine.info.bit_exact) == ("", True)
    assert 1e-4 < apart(engine, loaded(model)) < 0.1
