"""A draft that reads and guesses another tokenizer's tokens gives, for those that it has, its own logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.engine.engine import Engine, Work
from outrider.engine.loading import load_engine, load_tokenizer
from outrider.errors import ModelRefused
from outrider.vocabulary import Reading, Vocabulary, reading
from tests.tiny_models import build, with_other_tokens


def loaded(model: Path, how: Reading | None = None) -> Engine:
    return load_engine(str(model), name="m", kv_memory_bytes=4 * 2**20, threads=1, drafts=True, reading=how)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_its_logits_are_by_the_targets_ids(arch: str, tmp_path: Path) -> None:
    target = build(arch, tmp_path / "target", vocab_size=300, tie_word_embeddings=arch == "gpt2")
    draft = with_other_tokens(target, tmp_path / "draft", fewer=5, more=9)
    found = reading(*(Vocabulary(load_tokenizer(each)) for each in (draft, target)))
    assert list(found.common) == list(range(295))  # it lacks the last five
    engine, own = loaded(draft, found), loaded(target)
    assert engine.info.vocab_size == 300 and engine.vocabulary is not None
    assert engine.vocabulary.tolist() == list(range(295))
    work = Work([0], 0, [7, 150, 260], 3)
    assert torch.allclose(engine.step([work]), own.step([work])[:, :295], atol=1e-5)
    assert found.read_as[299] == tuple(found.common[id] for id in found_letters(target, 299))


def found_letters(target: Path, id: int) -> list[int]:
    vocabulary = Vocabulary(load_tokenizer(target))
    return [vocabulary.ids[bytes([byte])] for byte in vocabulary.piece(id)]


def test_what_has_no_token_in_common_is_refused(tmp_path: Path) -> None:
    model = build("llama", tmp_path)
    with pytest.raises(ModelRefused, match="no token in common"):
        loaded(model, Reading(((0,),), {}, 0.0))
