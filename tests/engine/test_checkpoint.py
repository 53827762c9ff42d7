"""Checkpoints in the forms that people have: GGUF, several files, tied, quantised, from the hub."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from huggingface_hub import errors
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.engine import hub, quantized_checkpoint
from outrider.engine.checkpoint import Checkpoint, locate
from outrider.engine.engine import Engine
from outrider.engine.kv_blocks import BlockTable
from outrider.engine.loading import load_engine, load_tokenizer, tokenizer_of
from outrider.engine.step_inputs import Work
from outrider.errors import StartupError
from outrider.options.model_id import HubId, checkpoint_name, parse_hub_id
from tests.gguf_files import write_gguf

PROMPT = [(7 * i) % 198 + 1 for i in range(20)]


def logits(engine: Engine) -> torch.Tensor:
    table = BlockTable()
    engine.pool.extend(table, len(PROMPT))
    return engine.step([Work(table.blocks, 0, PROMPT, len(PROMPT))]).clone()


def loaded(model: Path) -> Engine:
    return load_engine(str(model), kv_memory_bytes=2**22)


def refusal(model: str | Path) -> str:
    with pytest.raises(StartupError) as refused:
        load_engine(str(model))
    assert "\n" not in refused.value.message
    return refused.value.message


def copied(folder: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(folder, to)
    told = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**told, **config}))
    return to


def test_a_gguf_file_is_the_checkpoint_that_it_was_made_of(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint("llama", vocab_size=300)
    file = write_gguf(folder, tmp_path / "Tiny.F32.gguf")
    engine, other = loaded(file), loaded(tmp_path)  # by its name, and as the only one of its folder
    assert torch.equal(logits(engine), logits(loaded(folder)))
    assert engine.info.name == "Tiny.F32" and engine.info.eos_token_ids == (0,) and engine.info.bit_exact
    assert engine.info.fingerprint == other.info.fingerprint != loaded(folder).info.fingerprint
    found, expected = load_tokenizer(file), load_tokenizer(folder)
    assert (found.hash, found.chat_template) == (expected.hash, expected.chat_template)
    text = "def f(x):\n\treturn the other thing 12 é"
    assert (
        Tokenizer.from_str(found.json).encode(text).ids == Tokenizer.from_str(expected.json).encode(text).ids
    )


def test_a_rounded_gguf_file_is_nearly_that(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("llama", vocab_size=300)
    file = write_gguf(folder, tmp_path / "tiny.gguf", GGMLQuantizationType.Q8_0)
    engine = loaded(file)
    expected = logits(loaded(folder))
    assert 1e-4 < (logits(engine) - expected).norm() / expected.norm() < 0.3
    assert engine.info.bit_exact


def test_a_gguf_file_of_llama_3_has_its_rotary_scaling(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """llama.cpp writes it as a tensor, which transformers does not read."""
    plain = checkpoint("llama", vocab_size=300)
    told = json.loads((plain / "config.json").read_text())["rope_parameters"]
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    folder = copied(plain, tmp_path / "scaled", rope_parameters={**told, **scaling, "rope_type": "llama3"})
    rotary = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(folder))
    unscaled = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(plain))
    factors = {"rope_freqs.weight": unscaled.inv_freq / rotary.inv_freq}
    assert factors["rope_freqs.weight"].max() == 32
    expected = logits(loaded(folder))
    assert not torch.equal(logits(loaded(plain)), expected)
    assert torch.equal(logits(loaded(write_gguf(folder, tmp_path / "a.gguf", tensors=factors))), expected)
    for other in (factors["rope_freqs.weight"].flip(0), torch.zeros(8), torch.full((8,), torch.inf)):
        refused = refusal(write_gguf(folder, tmp_path / "b.gguf", tensors={"rope_freqs.weight": other}))
        assert "scales its rotary frequencies (rope_freqs.weight) in a way that is not Llama 3's" in refused


def test_what_transformers_passes_by_in_a_gguf_file_is_refused_by_name(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = checkpoint("llama", vocab_size=300)
    bias = {"blk.0.attn_q.bias": torch.ones(64)}
    assert "has no place for blk.0.attn_q.bias" in refusal(
        write_gguf(folder, tmp_path / "a.gguf", tensors=bias)
    )
    odd = write_gguf(folder, tmp_path / "d.gguf", scales=[2.0, 3.0])
    assert "has llama.attention.scale = [2.0, 3.0], which transformers does not read" in refusal(odd)
    longer = write_gguf(folder, tmp_path / "b.gguf", scaling="yarn")
    assert "has llama.rope.scaling.type = yarn, which transformers does not read" in refusal(longer)
    loaded(write_gguf(folder, tmp_path / "c.gguf", scaling="none"))


def test_a_gguf_file_is_parsed_once_as_an_array(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    class Counted(gguf.GGUFReader):
        def __init__(self, path: str) -> None:
            parsed.append(path)
            super().__init__(path)
            assert type(self.data) is np.ndarray, "parts of a memmap take longer"

    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    file = write_gguf(checkpoint("llama", vocab_size=300), tmp_path / "a.gguf")
    loaded(file)
    assert parsed == [str(file)] and gguf.GGUFReader is Counted


def test_gguf_files_that_cannot_be_read(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    whole = write_gguf(checkpoint("llama", vocab_size=300), tmp_path / "a.gguf")
    shutil.copy(whole, tmp_path / "b.gguf")
    assert "several GGUF files (a.gguf, b.gguf); name one" in refusal(tmp_path)
    part = tmp_path / "big-00001-of-00003.gguf"
    part.write_bytes(whole.read_bytes())
    assert "one part of a model; join" in refusal(part)
    (tmp_path / "b.gguf").write_bytes(b"<html>")
    assert "is damaged, or no GGUF file" in refusal(tmp_path / "b.gguf")
    (tmp_path / "b.gguf").write_bytes(whole.read_bytes()[:3000])
    assert "b.gguf is damaged" in refusal(tmp_path / "b.gguf")
    (tmp_path / "b.gguf").write_bytes(whole.read_bytes()[:-40])
    assert "it is cut short: a tensor reaches beyond its end" in refusal(tmp_path / "b.gguf")


def header(tensors: int = 0, fields: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, fields) + rest


def field(kind: int, value: bytes) -> bytes:
    return struct.pack("<Q1sI", 1, b"a", kind) + value


def tensor(elements: int, dimensions: int = 1, kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack("<Q", elements) * min(dimensions, 9)
    return struct.pack("<Q1sI", 1, b"a", dimensions) + sizes + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (header(version=1), "its version is 1, not 2 or 3"),
        (header(tensors=2**60), "tells of 0 fields and 1152921504606846976 tensors"),
        (header(fields=2**60), "tells of 1152921504606846976 fields"),
        (header(fields=9), "it ends amid its header"),
        (header(fields=1, rest=field(8, struct.pack("<Q", 2**40))), "a text has 1099511627776 bytes"),
        (header(fields=1, rest=field(8, struct.pack("<Q", 100))), "it ends amid its header"),
        (header(fields=1, rest=field(9, struct.pack("<IQ", 4, 2**50))), "its lists have more than"),
        (header(fields=1, rest=field(9, struct.pack("<IQ", 4, 2**20))), "it ends amid its header"),
        (header(fields=1, rest=field(9, struct.pack("<IQ", 8, 2**20))), "it ends amid its header"),
        (header(fields=1, rest=field(9, struct.pack("<IQ", 9, 1)) * 9), "a list is of elements of type 9"),
        (
            header(fields=1, rest=struct.pack("<Q12sII", 12, b".block_count", 4, 10**9)),
            "more than 4096 layers",
        ),
        (header(fields=1, rest=field(99, b"")), "a field is of an unknown type, 99"),
        (header(tensors=1, rest=tensor(4, kind=999)), "the tensor a is of an unknown type, 999"),
        (header(tensors=1, rest=tensor(1, dimensions=2**31)), "the tensor a has 2147483648 dimensions"),
        (header(tensors=1, rest=tensor(2**63, dimensions=4)), "a tensor reaches beyond its end"),
        (header(tensors=1, rest=tensor(1, offset=2**63)), "a tensor reaches beyond its end"),
        (header(tensors=1, rest=tensor(2**61)), "a tensor reaches beyond its end"),  # bytes: 2**63
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_gguf_file_that_tells_of_what_it_does_not_hold_is_refused_at_once(
    content: bytes, why: str, tmp_path: Path
) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    assert why in refusal(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("part", "sentence"),
    [("adapter", "an adapter, not a model: give the model"), ("mmproj", "what reads images for a model")],
)
def test_a_gguf_file_that_is_not_a_whole_model_is_called_what_it_is(
    part: str, sentence: str, tmp_path: Path
) -> None:
    writer = GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_type(part)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert f"a.gguf holds {sentence}" in refusal(tmp_path / "a.gguf")


def test_a_gguf_file_of_a_model_that_transformers_cannot_read(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """It is not the tokenizer that is missing, though it is what is read first."""
    file = write_gguf(checkpoint("llama", vocab_size=300), tmp_path / "a.gguf")
    file.write_bytes(file.read_bytes().replace(b"llama", b"llamb"))
    with pytest.raises(StartupError, match=r"transformers cannot read .*a.gguf \(.*architecture llamb"):
        tokenizer_of(str(file))


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q8_K, GGMLQuantizationType.Q1_0])
def test_a_gguf_file_in_a_type_that_is_not_read_is_refused_at_once(
    kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    whole = header(tensors=1, rest=tensor(256, kind=kind)) + bytes(2**12)
    (tmp_path / "a.gguf").write_bytes(whole)
    assert f"a.gguf holds a in {kind.name}, a type that is not read here" in refusal(tmp_path / "a.gguf")


def test_weights_in_several_files(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = copied(checkpoint("llama"), tmp_path / "sharded")
    (folder / "model.safetensors").unlink()
    weights = load_file(checkpoint("llama") / "model.safetensors")
    names = sorted(weights)
    where = {name: f"model-{1 + (i % 2)}-of-2.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        part = {name: weights[name] for name in names if where[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert torch.equal(logits(loaded(folder)), logits(loaded(checkpoint("llama"))))


def test_tied_embeddings(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("llama", tie_word_embeddings=True, vocab_size=300)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    expected = logits(loaded(folder))
    assert torch.equal(logits(loaded(write_gguf(folder, tmp_path / "tied.gguf"))), expected)


def test_fp8_weights_are_plain_numbers_on_a_cpu(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("llama", intermediate_size=128)
    quantized = copied(
        folder,
        tmp_path / "fp8",
        quantization_config={
            "quant_method": "fp8",
            "weight_block_size": [32, 32],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": ["lm_head"],
        },
    )
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if "_proj" in name]:
        rows, columns = weights[name].shape
        blocks = weights[name].reshape(rows // 32, 32, columns // 32, 32)
        scales = blocks.abs().amax((1, 3)) / 448
        rounded = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        weights[name], weights[f"{name}_scale_inv"] = rounded.reshape(rows, columns), scales
    save_file(weights, quantized / "model.safetensors", metadata={"format": "pt"})
    engine, expected = loaded(quantized), logits(loaded(folder))
    assert 1e-3 < (logits(engine) - expected).norm() / expected.norm() < 0.8
    assert (engine.info.dtype, engine.info.quantization, engine.info.bit_exact) == ("float32", "", True)


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            "by gptq, which needs optimum and gptqmodel: pip install 'outrider[gptq]', or give",
        ),
        (
            {"quant_method": "awq", "bits": 4},
            "by awq, which needs gptqmodel: pip install 'outrider[awq]', or give",
        ),
        ({"quant_method": "compressed-tensors"}, "which needs compressed-tensors: pip install"),
        ({"load_in_4bit": True}, "by bitsandbytes, which needs bitsandbytes: pip install"),
        ({"quant_method": "exl2"}, "by exl2, which transformers does not know; give it in another"),
        ({"quant_method": "modelopt"}, "by modelopt, which transformers does not know"),
        ({}, "by unknown, which transformers does not know"),
    ],
)
def test_a_missing_package_is_named(
    told: dict[str, Any],
    sentence: str,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized_checkpoint, "_installed", lambda _: False)
    folder = copied(checkpoint("llama"), tmp_path / "quantized", quantization_config=told)
    assert sentence in refusal(folder)


def test_a_quantisation_that_is_told_beside_the_configuration_is_refused(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copied(checkpoint("llama"), tmp_path / "quantized")
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert "by modelopt (hf_quant_config.json), which transformers does not know" in refusal(folder)


def test_a_tensor_that_the_model_has_no_place_for_is_refused_by_name(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = copied(checkpoint("llama"), tmp_path / "scaled")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight_scale"] = torch.ones(())
    save_file(weights, folder / "scaled.safetensors", metadata={"format": "pt"})
    (folder / "scaled.safetensors").replace(folder / "model.safetensors")
    assert "no place for model.layers.1.mlp.up_proj.weight_scale" in refusal(folder)


@pytest.mark.parametrize(
    ("model", "hub_id", "name"),
    [
        ("owner/name", HubId("owner/name"), "name"),
        ("name", HubId("name"), "name"),
        ("owner/name@v1.0", HubId("owner/name", None, "v1.0"), "name"),
        ("owner/name:Q4_K_M@refs/pr/1", HubId("owner/name", "Q4_K_M", "refs/pr/1"), "name"),
        ("./a@b", None, "a@b"),
        ("/models/x/Tiny.Q8_0.gguf", None, "Tiny.Q8_0"),
        ("a/b/c/", None, "c"),
    ],
)
def test_names(model: str, hub_id: HubId | None, name: str) -> None:
    assert parse_hub_id(model) == hub_id
    assert checkpoint_name(model) == name


def test_the_hub_is_asked_for_what_the_id_says(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None, bool]] = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str], **_: Any) -> str:
        asked.append((name, revision, "*.safetensors" in allow_patterns))
        return str(checkpoint("llama") if name == "owner/plain" else tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    for name in ("x.Q4_0.gguf", "x.Q8_0.gguf"):
        (tmp_path / name).write_bytes(header())
    assert locate("owner/plain@v2") == Checkpoint(checkpoint("llama"))
    assert locate("owner/many:Q8_0") == Checkpoint(tmp_path, "x.Q8_0.gguf")
    assert asked == [("owner/plain", "v2", True), ("owner/many", None, False)]
    assert "no GGUF file with Q5 in its name" in refusal("owner/many:Q5")
    assert "if it is a repository of GGUF files, say which: owner/many:Q8_0" in refusal("owner/many")
    (tmp_path / "config.json").write_text("{}")
    assert locate("owner/many:Q8_0") == Checkpoint(tmp_path, "x.Q8_0.gguf")  # it is what is asked for
    (tmp_path / "x.Q4_0.gguf").rename(tmp_path / "mmproj.gguf")
    assert locate(str(tmp_path)) == Checkpoint(tmp_path, "x.Q8_0.gguf")  # and all that there is
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert locate(str(tmp_path)) == Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "owner/many has no safetensors, and pickles (.bin)" in refusal("owner/many")
    (tmp_path / "config.json").rename(tmp_path / "adapter_config.json")
    assert "owner/many holds an adapter, not a model" in refusal("owner/many")


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (errors.RevisionNotFoundError, "owner/name has no revision v9"),
        (errors.RepositoryNotFoundError, "the Hugging Face hub has no model owner/name for you"),
        (errors.GatedRepoError, "accepted its terms"),
    ],
)
def test_what_the_hub_refuses(
    kind: type[errors.HfHubHTTPError], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(*_: Any, **__: Any) -> str:
        raise kind("no\nnot at all", response=httpx.Response(404, request=httpx.Request("GET", "http://x")))

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert sentence in refusal("owner/name@v9")


def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    said = refusal("nobody/has-this-model")
    assert "HF_HUB_OFFLINE is set" in said and "hf download nobody/has-this-model" in said
