"""A checkpoint's draft vocabulary: a drafter's engine computes its logits alone, a target's all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.engine.draft_vocabulary import FILE, write
from outrider.engine.engine import Engine, Work
from outrider.engine.loading import load_engine
from outrider.errors import StartupError
from tests.tiny_models import build

IDS = [0, 2, 5, 30, 31, 100, 198]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("draft"))


def loaded(model: Path, drafts: bool) -> Engine:
    return load_engine(str(model), name="m", kv_memory_bytes=4 * 2**20, threads=1, drafts=drafts)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_the_logits_are_those_of_its_tokens(arch: str, tmp_path: Path) -> None:
    model = build(arch, tmp_path, tie_word_embeddings=arch == "gpt2")
    write(model, IDS)
    work = Work([0], 0, [7, 150, 9], 3)
    some, whole = (loaded(model, drafts).step([work]).clone() for drafts in (True, False))
    assert some.shape == (3, len(IDS)) and whole.shape == (3, 199)
    assert torch.allclose(some, whole[:, IDS], atol=1e-5)


@pytest.mark.parametrize(
    "said", ["[3, 2]", "[1, 1]", "[]", "[-1, 4]", "[0, 199]", "{}", "[true]", "[1.0]", "[1"]
)
def test_a_damaged_list_is_refused_in_one_sentence(model: Path, said: str) -> None:
    (model / FILE).write_text(said)
    with pytest.raises(
        StartupError, match="must be a list of token ids that rise and are below 199"
    ) as error:
        loaded(model, True)
    assert "\n" not in error.value.message
