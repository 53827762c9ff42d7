"""The pair's figures on held-out modules: losses, and how often the draft says what the target says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from demo.heldout import heldout_prompts
from demo.training.generation import continue_one
from demo.training.progress import stage
from distillation.losses import overlap
from distillation.measuring import tokens_per_step

WINDOW = 512


@dataclass(frozen=True)
class Figures:
    """What `measure` found; rates are shares of positions between 0 and 1."""

    target_loss: float
    draft_loss: float
    greedy_acceptance: float
    tokens_per_step: float
    greedy_positions: int
    sampled_matches: float
    sampled_overlap: float
    sampled_positions: int


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, stream: Tensor) -> float:
    """Returns the mean cross-entropy in nats a token over a stream [tokens], in windows of `WINDOW`
    tokens."""
    total, count = 0.0, 0
    for begin in range(0, len(stream) - 1, WINDOW):
        ids = stream[begin : begin + WINDOW + 1].to(model.device)
        logits = model(input_ids=ids[None, :-1], use_cache=False).logits[0].float()
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
        count += len(ids) - 1
    return total / count


@torch.no_grad()
def greedy_matches(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt: Tensor, new: int, eos: int
) -> list[bool]:
    """Returns, for each token of the target's greedy continuation, True if the draft's argmax is that
    token."""
    ids = continue_one(target, prompt, new, eos)
    guesses = draft(input_ids=ids[None, :-1], use_cache=False).logits[0].argmax(dim=-1)
    matches: list[bool] = (guesses == ids[1:])[len(prompt) - 1 :].tolist()
    return matches


@torch.no_grad()
def sampled_matches(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, prompt: Tensor, noise: Tensor, eos: int
) -> tuple[int, float, int]:
    """Returns matches, summed 1-TV and positions of a text drawn at T=1 with Gumbel `noise` [new,
    vocabulary].

    A match is a position where the same noise on both models' logits gives the same argmax.
    """
    ids = continue_one(target, prompt, len(noise), eos, noise)
    last = len(prompt) - 1
    said = target(input_ids=ids[None, :-1], use_cache=False).logits[0, last:].float()
    guessed = draft(input_ids=ids[None, :-1], use_cache=False).logits[0, last:].float()
    count = len(said)
    both = noise[:count]
    matches = int(((said + both).argmax(-1) == (guessed + both).argmax(-1)).sum())
    return matches, count * overlap(said.softmax(-1), guessed.softmax(-1)), count


def gumbel(shape: tuple[int, int], seed: int) -> Tensor:
    """Returns standard Gumbel noise, the same on every device."""
    return -torch.empty(shape).exponential_(generator=torch.Generator().manual_seed(seed)).log()


def measure(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    stream: Tensor,
    prompts: int = 60,
    new: int = 128,
    k: int = 5,
) -> Figures:
    """Returns all figures: losses on the held-out `stream` [tokens], acceptance after held-out prompts."""
    eos, device = tokenizer.eos_token_id, target.device
    rows: list[list[bool]] = []
    matches, common, positions = 0, 0.0, 0
    advance = stage("figures on held-out prompts", prompts)
    for index, text in enumerate(heldout_prompts(prompts)):
        encoded = tokenizer(text, add_special_tokens=False)["input_ids"]
        prompt = torch.tensor(encoded, device=device)
        rows.append(greedy_matches(target, draft, prompt, new, eos))
        noise = gumbel((new, len(tokenizer)), index).to(device)
        hit, shared, count = sampled_matches(target, draft, prompt, noise, eos)
        matches, common, positions = matches + hit, common + shared, positions + count
        advance("")
    greedy_positions = sum(len(row) for row in rows)
    return Figures(
        target_loss=heldout_loss(target, stream),
        draft_loss=heldout_loss(draft, stream),
        greedy_acceptance=sum(sum(row) for row in rows) / greedy_positions,
        tokens_per_step=tokens_per_step(rows, k),
        greedy_positions=greedy_positions,
        sampled_matches=matches / positions,
        sampled_overlap=common / positions,
        sampled_positions=positions,
    )
