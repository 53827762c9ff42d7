"""A draft that guesses several tokens a pass, behind masks: the same texts, in fewer passes of the draft."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.engine.engine import Engine
from outrider.sampling.params import SamplingParams
from tests.in_process import Answer, Cluster
from tests.tiny_models import build, with_other_tokens

MASK = 198
PHRASE = random.Random(4).sample(range(40, 100), 30)  # that all texts repeat
LENGTH, MASKS, BATCH = 48, 7, 16
VARIANTS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=0.8, presence_penalty=0.1, seed=2),
]


def trained(folder: Path, masked: bool, steps: int) -> Path:
    """Saves a model that has learned the phrase; if `masked`, what comes in the place of each of some masks,
    too."""
    build("llama", folder, initializer_range=0.05, num_hidden_layers=2)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(5)
    phrase = torch.tensor(PHRASE)
    for _ in range(steps):
        starts = torch.randint(len(PHRASE), (BATCH, 1), generator=generator)
        tokens = phrase[(starts + torch.arange(LENGTH + 1)) % len(PHRASE)]
        read, said = tokens[:, :-1].clone(), tokens[:, 1:]
        if masked:
            known = int(torch.randint(6, LENGTH - MASKS, (), generator=generator))
            read[:, known:] = MASK
            read, said = read[:, : known + MASKS], said[:, : known + MASKS]
        logits = model(input_ids=read).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), said.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.config.pard_token = MASK
    model.save_pretrained(folder)
    return folder


def without_mask(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    config = json.loads((model / "config.json").read_text())
    del config["pard_token"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target = trained(folder / "target", masked=False, steps=60)
    return target, trained(folder / "draft", masked=True, steps=220)


async def ask_all(cluster: Cluster) -> list[Answer]:
    return [await cluster.ask(PHRASE[:8], variant, 24) for variant in VARIANTS]


@pytest.mark.parametrize("way", ["same tokens", "token by token"])
async def test_the_texts_are_the_targets_and_passes_are_fewer(
    way: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = pair
    if way != "same tokens":
        draft = with_other_tokens(draft, tmp_path / "draft")
        renumbered(draft)
    passes, rank = [0], Engine.rank

    def counted(self: Engine, *arguments: Any) -> Any:
        passes[0] += 1
        return rank(self, *arguments)

    monkeypatch.setattr(Engine, "rank", counted)
    async with Cluster(target, k=8) as cluster:
        alone = await ask_all(cluster)
        drafter = await cluster.add_foreign_drafter(draft, branches=False)
        masked = await ask_all(cluster)
        with_masks = passes[0]
        await drafter.kill()
        if way == "same tokens":
            one_by_one = without_mask(draft, tmp_path / "single")
            plain = await cluster.add_foreign_drafter(one_by_one, branches=False)
            plain.stepper._cascade = False
            single = await ask_all(cluster)
            assert [one.tokens for one in single] == [one.tokens for one in alone]
            assert with_masks < 0.6 * (passes[0] - with_masks)
    assert [one.tokens for one in masked] == [one.tokens for one in alone]
    assert sum(one.accepted for one in masked) > 0.5 * sum(one.verified for one in masked) > 0
    assert sum(one.steps for one in masked) < 0.5 * sum(one.steps for one in alone)


def renumbered(draft: Path) -> None:
    """Sets the mask to its new id."""
    config = json.loads((draft / "config.json").read_text())
    config["pard_token"] = (MASK - 7) % 199
    (draft / "config.json").write_text(json.dumps(config))
