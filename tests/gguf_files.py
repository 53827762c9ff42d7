"""Writes a tiny Llama checkpoint as a GGUF file, as llama.cpp's converter does."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
)
from safetensors.torch import load_file

END = ".weight"


def write_gguf(
    folder: Path,
    file: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    tensors: Mapping[str, torch.Tensor] | None = None,
    scaling: str | None = None,
    scales: Sequence[float] = (),
) -> Path:
    """Writes the Llama checkpoint of a folder, its tokenizer and chat template included, and returns the
    file. `kind` is the format of the matrices: F32, Q8_0, Q4_0 or Q4_1; `tensors` are written beside them,
    `scaling` is the rotary scaling that the file tells of, `scales` an attention scale that makes no
    sense."""
    config = json.loads((folder / "config.json").read_text())
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_file_type(LlamaFileType[f"MOSTLY_{kind.name}" if kind.name.startswith("Q") else "ALL_F32"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if scaling is not None:
        writer.add_rope_scaling_type(RopeScalingType(scaling))
    if scales:
        writer.add_array("llama.attention.scale", list(scales))
    _add_tokenizer(writer, folder)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            weight = _rotated(weight, heads if "q_proj" in name else key_heads)
        found = names.get_name(name.removesuffix(END))
        matrix = weight.dim() == 2
        if matrix and kind is not GGMLQuantizationType.F32:
            _add_rounded(writer, f"{found}{END}", weight, kind)
        else:
            writer.add_tensor(f"{found}{END}", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _rotated(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Returns the rows in the order of llama.cpp's rotary embedding: pairs, not halves."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, half, -1).swapaxes(1, 2).reshape(weight.shape).contiguous()


def _add_rounded(writer: GGUFWriter, name: str, weight: torch.Tensor, kind: GGMLQuantizationType) -> None:
    from gguf import quants

    writer.add_tensor(name, quants.quantize(weight.numpy(), kind), raw_dtype=kind)


def _add_tokenizer(writer: GGUFWriter, folder: Path) -> None:
    known = json.loads((folder / "tokenizer.json").read_text())
    about = json.loads((folder / "tokenizer_config.json").read_text())
    table = sorted(known["model"]["vocab"].items(), key=lambda entry: entry[1])
    special = {token["content"] for token in known["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([token for token, _ in table])
    writer.add_token_types(
        [TokenType.CONTROL if token in special else TokenType.NORMAL for token, _ in table]
    )
    writer.add_token_merges([" ".join(pair) for pair in known["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    template = folder / "chat_template.jinja"
    writer.add_chat_template(template.read_text() if template.is_file() else about["chat_template"])
