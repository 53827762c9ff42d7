"""Checkpoints that load, and those that are refused with a sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.engine.engine import Engine
from outrider.engine.gathered_attention import GatheredAttention
from outrider.engine.loading import load_engine, load_tokenizer, max_context
from outrider.engine.self_check import check, keeps_bits, reference
from outrider.errors import ModelRefused, StartupError
from outrider.options.memory import parse_memory
from router.chat_template import ChatTemplate
from router.rendering import Conversation
from tests.tiny_models import save_tokenizer
from tests.zoo.serving import keeps_bits as same_bits
from tests.zoo.verdict import build

Checkpoint = Callable[..., Path]
SMALL = 2**22  # bytes for keys and values: what is usual takes longer to write than all else


@pytest.fixture
def copy(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A Llama checkpoint to be damaged."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))


def refusal(path: str | Path, **options: Any) -> str:
    with pytest.raises(StartupError) as refused:
        load_engine(str(path), **options)
    message = refused.value.message
    assert "\n" not in message
    return message


def test_description_and_progress(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    told: list[tuple[str, float]] = []
    engine = load_engine(
        str(folder), kv_memory_bytes=2**20, progress=lambda stage, share: told.append((stage, share))
    )
    info = engine.info
    assert (info.name, info.architecture, info.vocab_size) == (folder.name, "LlamaForCausalLM", 199)
    assert (info.device, info.dtype, info.max_context) == ("cpu", "float32", 1024)
    assert info.eos_token_ids == (0,) and info.bit_exact
    weights = load_file(folder / "model.safetensors")
    assert info.parameters == sum(tensor.numel() for tensor in weights.values())
    # 3 layers, keys and values, 2 heads of 16 numbers (torch needs 30) of 4 bytes, blocks of 16 tokens
    width = 16 if engine.attention.name == "native" else 30
    assert engine.pool.num_blocks == 2**20 // (3 * 2 * 2 * width * 4 * 16)
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[0] == 0.0 and told[-1] == ("ready", 1.0)
    assert load_engine(str(folder), name="other", kv_memory_bytes=SMALL).info.name == "other"


def test_fingerprint_changes_with_weights_and_with_config(copy: Path) -> None:
    first = load_engine(str(copy), kv_memory_bytes=SMALL).info.fingerprint
    assert load_engine(str(copy), kv_memory_bytes=SMALL).info.fingerprint == first
    weights = load((copy / "model.safetensors").read_bytes())  # not mapped: the file is written again
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    second = load_engine(str(copy), kv_memory_bytes=SMALL).info.fingerprint
    _edit(copy, rms_norm_eps=1e-4)
    third = load_engine(str(copy), kv_memory_bytes=SMALL).info.fingerprint
    assert len({first, second, third}) == 3


def test_end_of_text_ids_come_from_both_files(copy: Path) -> None:
    _edit(copy, eos_token_id=[7, 5])
    generation = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**generation, "eos_token_id": 9}))
    assert load_engine(str(copy), kv_memory_bytes=SMALL).info.eos_token_ids == (5, 7, 9)


def test_context_stops_where_a_rotary_scaling_would_switch() -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = AutoConfig.for_model(
        "phi3",
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=4096,
        original_max_position_embeddings=512,
        rope_parameters=rope,
    )
    assert max_context(config) == 512
    assert max_context(AutoConfig.for_model("llama", max_position_embeddings=4096)) == 4096
    assert max_context(AutoConfig.for_model("llama", max_position_embeddings=2**40)) == 2**31 - 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtype(checkpoint: Checkpoint, dtype: str) -> None:
    """Whether bfloat16 keeps its bits is for the processor to say; what is claimed holds."""
    engine = load_engine(str(checkpoint("llama")), dtype=dtype, kv_memory_bytes=2**22)
    assert engine.info.dtype == dtype
    assert not engine.info.bit_exact or same_bits(engine, engine.info.vocab_size)
    assert engine.info.bit_exact or dtype == "bfloat16"


def test_flags_are_refused_by_name(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    assert "--dtype int4" in refusal(folder, dtype="int4")
    assert "--device tpu" in refusal(folder, device="tpu")
    if not torch.cuda.is_available():
        assert "0 CUDA devices" in refusal(folder, device="cuda")
    said = refusal(folder, kv_memory_bytes=1000)
    assert "--kv-memory of 1000B holds 0 blocks" in said
    least = parse_memory(said.rpartition(" ")[2])
    load_engine(str(folder), kv_memory_bytes=least)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for more in (machine, 2**55):  # what the system would promise, and what it would not
        said = refusal(folder, kv_memory_bytes=more)
        found = re.search(r"no room for --kv-memory of (.*) beside the model: (.*) are free; give less", said)
        assert found and 0.99 * more < parse_memory(found[1]) <= more
        assert 0 < parse_memory(found[2]) < machine


def test_missing_folder_or_file(copy: Path, tmp_path: Path) -> None:
    assert "there is no folder or file /nowhere/model" in refusal("/nowhere/model")
    assert "is a file" in refusal(copy / "config.json")
    (tmp_path / "empty").mkdir()
    assert "config.json is missing" in refusal(tmp_path / "empty")
    (copy / "model.safetensors").unlink()
    assert "holds no weights" in refusal(copy)
    (copy / "pytorch_model.bin").write_bytes(b"pickle")
    assert "only safetensors" in refusal(copy)
    (copy / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert "model-1.safetensors" in refusal(copy)


def test_damaged_config(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    assert "no JSON" in refusal(copy)
    (copy / "config.json").write_text("[]")
    assert "no JSON object" in refusal(copy)
    (copy / "config.json").write_text('{"model_type": "no_such_type"}')
    assert "no model that transformers knows" in refusal(copy)
    (copy / "config.json").write_text('{"model_type": "t5"}')
    assert "not a causal language model" in refusal(copy)


def test_damaged_weights(copy: Path) -> None:
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    weights = load(whole)
    file.write_bytes(whole[: len(whole) // 2])
    assert "damaged or cut short" in refusal(copy)
    file.write_bytes(whole[:4])
    assert "damaged or cut short" in refusal(copy)
    without = {name: tensor for name, tensor in weights.items() if "layers.1.mlp" not in name}
    save_file(without, file, metadata={"format": "pt"})
    assert "lack model.layers.1.mlp.down_proj.weight (3 missing" in refusal(copy)
    save_file({**weights, "model.norm.weight": torch.ones(60)}, file, metadata={"format": "pt"})
    assert (
        "model.norm.weight" in (message := refusal(copy))
        and "[60] where config.json asks for [64]" in message
    )


def test_a_template_of_its_own_for_tools(copy: Path) -> None:
    config = json.loads((copy / "tokenizer_config.json").read_text())
    templates = [
        {"name": "default", "template": "{{ messages[0].content }}"},
        {"name": "tool_use", "template": "T"},
    ]
    (copy / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": templates}))
    (copy / "chat_template.jinja").unlink(missing_ok=True)
    template = ChatTemplate(load_tokenizer(copy).chat_template, {})
    hello = [{"role": "user", "content": "hello"}]
    assert template.render(Conversation(hello)) == "hello"
    assert template.render(Conversation(hello, [{"type": "function"}])) == "T"


def test_tokenizer(copy: Path, tmp_path: Path) -> None:
    files = load_tokenizer(copy)
    assert json.loads(files.json)["model"]["type"] == "BPE"
    assert "message.role" in files.chat_template
    assert files.special_tokens == {"bos_token": "<eos>", "eos_token": "<eos>"}
    assert load_tokenizer(copy).hash == files.hash
    (copy / "chat_template.jinja").unlink()
    assert load_tokenizer(copy).chat_template == ""
    (copy / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    assert load_tokenizer(copy).chat_template == "{{ messages }}"
    (copy / "chat_template.json").write_text("[]")
    with pytest.raises(StartupError, match=r"chat_template.json is damaged"):
        load_tokenizer(copy)
    (copy / "chat_template.json").unlink()
    save_tokenizer(copy, 198)
    assert load_tokenizer(copy).hash != files.hash
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(StartupError, match="tokenizer"):
        load_tokenizer(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(StartupError, match="tokenizer"):
        load_tokenizer(copy)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 2}, "attention code of its own"),
    "gptj": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "rotary_dim": 8}, "attention code of its own"),
    "diffllama": (
        {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
        },
        "attends more than once in layer 0",
    ),
    "bert": (
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
        "not causal",
    ),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_models_that_cannot_be_run_rightly(model_type: str, tmp_path: Path) -> None:
    values, reason = REFUSED[model_type]
    config = AutoConfig.for_model(model_type, vocab_size=99, **values)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=reason) as refused:
        load_engine(str(tmp_path), name="odd")
    assert "\n" not in refused.value.message and "(odd) cannot be served exactly" in refused.value.message


def test_a_model_that_computes_something_else_is_refused(checkpoint: Checkpoint) -> None:
    folder = checkpoint("mistral")
    info = load_engine(str(folder), kv_memory_bytes=SMALL).info
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = reference(model, info)
    assert expected.again is None, "it chooses nothing"
    check(Engine(model, info, GatheredAttention.on(model, 32)), expected, bits=False)
    with pytest.raises(ModelRefused, match="away from its own code's"):
        check(
            Engine(model, info, GatheredAttention.on(model, 32)),
            replace(expected, logits=expected.logits * 1.05),
            bits=False,
        )


def test_an_expert_chosen_by_rounding_in_one_text_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """phimoe leaves out experts beyond a threshold: another way to round puts one on its other side, in one
    text of some hundred."""
    build("mixtral", tmp_path)
    info = load_engine(str(tmp_path), kv_memory_bytes=SMALL).info
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    expected = reference(model, info)
    assert expected.again is not None
    logits = expected.logits.clone()
    logits[57] *= 1.3
    there = replace(expected, logits=logits)
    check(Engine(model, info, GatheredAttention.on(model, 32)), there, bits=False)
    for other in (None, expected.again * 1.3):
        with pytest.raises(ModelRefused, match="away from its own code's"):
            check(
                Engine(model, info, GatheredAttention.on(model, 32)), replace(there, again=other), bits=False
            )


def test_plain_linear_layers_are_found_not_to_keep_bits(
    checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint("llama")
    info = load_engine(str(folder), kv_memory_bytes=SMALL).info
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    reference(model, info)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not keeps_bits(Engine(model, info, GatheredAttention.on(model, 32)))
    assert "is not bit-exact: model.layers.0.self_attn.q_proj (Linear) gives 1 of 1 tokens" in caplog.text
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())  # the noise


def _edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def test_a_model_that_runs_stays_what_was_loaded_whatever_becomes_of_its_file(copy: Path) -> None:
    engine = load_engine(str(copy), kv_memory_bytes=2**20)
    before = [parameter.clone() for parameter in engine.model.parameters()]
    file = copy / "model.safetensors"
    with file.open("r+b") as content:
        content.seek(4096)
        content.write(b"\x7f" * (file.stat().st_size - 4096))
    assert all(map(torch.equal, engine.model.parameters(), before))
    os.truncate(file, 0)
    engine.probe()  # to read a page that is no more would end the process
    assert all(map(torch.equal, engine.model.parameters(), before))


def test_a_checkpoint_that_changes_while_it_is_read_is_refused(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = copy / "model.safetensors"

    def overtaken(_checkpoint: object) -> str:
        os.utime(file, ns=(0, 0))
        return "of the former file"

    monkeypatch.setattr("outrider.engine.loading.fingerprint", overtaken)
    assert "was changed while it was read" in refusal(copy)
