"""Writes and reads the pair's folders."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Returns a copy with bfloat16 weights, which is what the folders hold."""
    return copy.deepcopy(model).to(torch.bfloat16).eval()


@dataclass(frozen=True)
class Store:
    """The pair on disk, in `folder`/target and `folder`/draft."""

    folder: Path
    tokenizer: PreTrainedTokenizerFast
    device: torch.device

    def load(self) -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
        """Returns target and draft, which compute in float32."""
        target, draft = (
            LlamaForCausalLM.from_pretrained(self.folder / name, dtype=torch.float32).eval()
            for name in ("target", "draft")
        )
        return target.to(self.device), draft.to(self.device)

    def save(self, target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
        """Writes both in bfloat16."""
        for name, model in (("target", target), ("draft", draft)):
            self._save(model, self.folder / name)

    def _save(self, model: LlamaForCausalLM, folder: Path) -> None:
        small = rounded(model)
        small.generation_config = GenerationConfig(
            bos_token_id=self.tokenizer.bos_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )
        small.save_pretrained(folder)
        (folder / "model.safetensors").chmod(0o644)
        self.tokenizer.save_pretrained(folder)
        settings = folder / "tokenizer_config.json"
        held = json.loads(settings.read_text())
        # The name that engines on transformers 4 know as well; version 5 reads it as its own.
        held["tokenizer_class"] = "PreTrainedTokenizerFast"
        held.pop("backend", None)
        settings.write_text(json.dumps(held, indent=2) + "\n")
