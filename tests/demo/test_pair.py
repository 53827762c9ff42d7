"""The committed pair: its tokenizer, its sizes, and that the draft still predicts the target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo.heldout import HELD_OUT, heldout_prompts, heldout_text
from demo.training.measure import greedy_matches
from demo.training.shapes import matmul_parameters, parameter_count
from distillation.measuring import tokens_per_step

ACCEPTANCE_FLOOR = 0.91  # 0.944 was measured on these 768 positions
MESSAGES = [
    {"role": "system", "content": "Python 3.\nNo comments."},
    {"role": "user", "content": "Reverse a list."},
]


def test_tokenizers_are_identical(models: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (models / "target" / name).read_bytes() == (models / "draft" / name).read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n    return x\n",
        "\t\r\n \x00 trailing spaces   ",
        "Grüße, 日本語, русский, 👩‍👩‍👧, e\u0301, \u202e, \ufeff",
        "<|endoftext|> in the middle <|endoftext|>",
        "",
    ],
)
def test_any_text_round_trips(models: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    assert tokenizer.is_fast
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_eos_is_one_token_and_agreed_on(models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    assert tokenizer.eos_token == "<|endoftext|>"
    assert tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.eos_token_id]
    for name in ("target", "draft"):
        for file in ("config.json", "generation_config.json"):
            assert json.loads((models / name / file).read_text())["eos_token_id"] == tokenizer.eos_token_id


def test_chat_template(models: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models / "target")

    def render(messages: list[dict[str, str]], prompt: bool) -> str:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        assert isinstance(text, str)
        return text

    opened = '<|endoftext|># Python 3.\n# No comments.\n"""Reverse a list."""'
    assert render(MESSAGES, False) == opened
    assert render(MESSAGES, True) == opened + "\n"
    answered = [
        *MESSAGES,
        {"role": "assistant", "content": "a[::-1]\n"},
        {"role": "user", "content": "Sort it."},
    ]
    assert render(answered, True) == opened + '\n\na[::-1]\n\n\n"""Sort it."""\n'


def test_sizes(models: Path) -> None:
    files = [path for path in models.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 24_000_000
    target, draft = (
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32)
        for name in ("target", "draft")
    )
    assert 5_000_000 <= parameter_count(target) <= 10_000_000
    assert matmul_parameters(draft) <= matmul_parameters(target) / 10
    for model in (target, draft):
        assert model.config.num_key_value_heads % 2 == 0
        assert model.config.max_position_embeddings == 8192


def test_heldout_prompts_are_deterministic_and_held_out() -> None:
    assert heldout_prompts(30) == heldout_prompts(30)
    assert heldout_prompts(20, skip=10) == heldout_prompts(30)[10:]
    assert heldout_text("heapq.py").startswith(heldout_prompts(len(HELD_OUT))[HELD_OUT.index("heapq.py")])
    with pytest.raises(ValueError, match="not one of the held-out modules"):
        heldout_text("os.py")
    with pytest.raises(ValueError, match="give only"):
        heldout_prompts(10**6)


def test_tokens_per_step_counts_runs_and_the_targets_own_token() -> None:
    yes, no = True, False
    # Steps: two matches and the correction; a full run of three and the bonus; one cut short.
    assert tokens_per_step([[yes, yes, no, yes, yes, yes, yes, yes]], k=3) == 3.5
    assert tokens_per_step([[no, no, no]], k=5) == 1.0


def test_draft_predicts_the_targets_greedy_text(models: Path) -> None:
    target, draft = (
        AutoModelForCausalLM.from_pretrained(models / name, dtype=torch.float32).eval()
        for name in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    rows = []
    for text in heldout_prompts(12):
        prompt = torch.tensor(tokenizer(text)["input_ids"])
        rows.append(greedy_matches(target, draft, prompt, 64, tokenizer.eos_token_id))
    acceptance = sum(map(sum, rows)) / sum(map(len, rows))
    assert acceptance >= ACCEPTANCE_FLOOR, (
        f"greedy acceptance {acceptance:.3f} on {sum(map(len, rows))} positions"
    )
