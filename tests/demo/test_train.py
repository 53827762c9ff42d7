"""Every stage of the training runs, on a tiny pair and a tiny text, and leaves folders to be served."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from demo.heldout import heldout_text
from demo.training import pretrain, train
from demo.training.distil import DistilOptions
from demo.training.pretrain import PretrainOptions
from demo.training.shapes import _shape
from demo.training.store import Store


def test_the_stages_follow_one_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = partial(_shape, hidden_size=16, layers=1, intermediate_size=32, heads=2, head_dim=8)
    texts = partial(DistilOptions, rows=8, length=24, longest_prompt=12, batch_rows=4)
    monkeypatch.setattr(train, "target_config", tiny)
    monkeypatch.setattr(train, "draft_config", tiny)
    monkeypatch.setattr(train, "training_documents", lambda: [heldout_text("heapq.py")])
    monkeypatch.setattr(train, "PretrainOptions", partial(PretrainOptions, lengths=((1.0, 16),)))
    monkeypatch.setattr(train, "DistilOptions", texts)
    monkeypatch.setattr(train, "keep_freed_memory", lambda: None)  # of this process
    monkeypatch.setattr(pretrain, "TOKENS_A_STEP", 64)
    weights = []
    for stage in ("pretrain", "distil", "mutual", "refine"):
        train.main(tmp_path, stage, steps=2, rounds=1, mutual_rounds=1, last_rounds=1, seed=0, threads=0)
        target, draft = Store(tmp_path, None, torch.device("cpu")).load()
        weights.append([model.model.embed_tokens.weight.detach() for model in (target, draft)])
    for before, after, changed in zip(
        weights, weights[1:], [(False, True), (True, True), (False, True)], strict=False
    ):
        assert tuple(not torch.equal(*pair) for pair in zip(before, after, strict=True)) == changed
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "draft")
    assert tokenizer.decode(tokenizer("def f(x):\n")["input_ids"]) == "def f(x):\n"
