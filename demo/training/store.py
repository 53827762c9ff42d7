"""Writing and reading the pair's folders."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Returns a copy with bfloat16 weights, which is what the folders hold."""
    return copy.deepcopy(model).to(torch.bfloat16).eval()


def save_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write one model's folder in bfloat16; an earlier folder is replaced only once the new one is whole."""
    fresh, aside = folder.with_name(folder.name + ".new"), folder.with_name(folder.name + ".old")
    for leftover in (fresh, aside):
        shutil.rmtree(leftover, ignore_errors=True)
    small = rounded(model)
    small.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    small.save_pretrained(fresh)
    (fresh / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(fresh)
    settings = fresh / "tokenizer_config.json"
    held = json.loads(settings.read_text())
    # The name that engines on transformers 4 know as well; version 5 reads it as its own.
    held["tokenizer_class"] = "PreTrainedTokenizerFast"
    held.pop("backend", None)
    settings.write_text(json.dumps(held, indent=2) + "\n")
    if folder.exists():
        folder.rename(aside)
    fresh.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def load_model(folder: Path) -> LlamaForCausalLM:
    """Returns a saved model, computing in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def folder_bytes(folder: Path) -> int:
    """Returns the size of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
