"""What a draft is as it is cut from its target, and as it is written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType

from distillation.cut import cut, save
from outrider.engine.lent_embeddings import check_undivided
from outrider.engine.loading import load_engine, load_model, tokenizer_of
from outrider.errors import StartupError
from tests.gguf_files import write_gguf
from tests.tiny_models import build


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A GGUF file in 8 bits."""
    folder = build("llama", tmp_path / "target", vocab_size=300)
    return write_gguf(folder, tmp_path / "target.gguf", GGMLQuantizationType.Q8_0)


@pytest.mark.parametrize("slim", [False, True])
def test_a_draft_cut_from_a_gguf_file_is_an_ordinary_checkpoint(
    slim: bool, target: Path, tmp_path: Path
) -> None:
    model, _ = load_model(str(target))
    draft = cut(model, [0])
    out = tmp_path / "draft"
    save(draft, SimpleNamespace(save_pretrained=lambda _: None), range(300), out, slim)
    told = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in told and told["num_hidden_layers"] == 1
    assert told.get("embeddings_of_target", False) is slim
    engine = load_engine(str(out), drafts=True, lender=str(target))
    expected = model.get_input_embeddings().weight
    found = engine.model.get_input_embeddings().weight
    assert torch.equal(found, expected if slim else expected.to(torch.bfloat16).float())


def test_a_draft_whose_embeddings_are_lent_says_what_it_needs(target: Path, tmp_path: Path) -> None:
    model, _ = load_model(str(target))
    out = tmp_path / "draft"
    save(cut(model, [0]), None, range(300), out, True)
    with pytest.raises(StartupError, match="leaves its embeddings and tokenizer to its target: name it by"):
        tokenizer_of(str(out))
    with pytest.raises(StartupError, match="leaves its embeddings and tokenizer to its target: name it by"):
        load_engine(str(out), drafts=True)
    other = build("llama", tmp_path / "other", vocab_size=200)
    with pytest.raises(StartupError, match="name the target that the draft was made for"):
        load_engine(str(out), drafts=True, lender=str(other))
    with pytest.raises(StartupError, match="cannot be divided: leave out --tensor-parallel-size"):
        check_undivided(SimpleNamespace(embeddings_of_target=True), out)
