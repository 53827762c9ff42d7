"""Mutual learning: target and draft train on the same text, each drawn towards the other.

After pretraining the target knows its corpus better than a draft of a tenth of the compute can, and part
of that is memory that does not help on new text. In deep mutual learning (Zhang et al. 2018) two models
are each taught by the other's present prediction. Here the larger one's teacher is a mixture of what it
said before this stage and what the draft says now: the mixture keeps the target's knowledge, and its
total variation from the draft is smaller by the draft's share. At the end the target's weights are
averaged with those it began with, which mends what short training has roughened (Wortsman et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from demo.training.corpus import Windows
from demo.training.distil import DistilOptions, write_round
from demo.training.pretrain import logits_of
from demo.training.progress import stage
from demo.training.store import rounded
from distillation.losses import distance, overlap
from distillation.schedule import Schedule, optimisers


@dataclass(frozen=True)
class MutualOptions:
    """How much text is read, and how far the target is drawn towards the draft."""

    text: DistilOptions  # the rounds of the target's own text; each is read once
    kept: float  # share of the target's first weights in the average at the end
    share: float = 0.4  # the draft's share of the target's teacher
    target_rate: float = 1e-3
    draft_rate: float = 3e-3


def mutual_step(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    anchor: LlamaForCausalLM,
    inputs: Tensor,
    options: MutualOptions,
) -> float:
    """Adds up both models' gradients on inputs [rows, length]. Returns the mean overlap 1-TV."""
    target_logits = logits_of(target, inputs).flatten(0, 1)  # [rows * length, vocabulary], as the others
    draft_logits = logits_of(draft, inputs).flatten(0, 1)
    with torch.no_grad():
        said, guessed = (logits.float().softmax(-1) for logits in (target_logits, draft_logits))
        known = logits_of(anchor, inputs).flatten(0, 1).float().softmax(-1)
        teacher = known.lerp_(guessed, options.share)
    learned = distance(draft_logits, said, options.text.variation_weight)
    torch.autograd.backward([distance(target_logits, teacher), learned])
    return overlap(said, guessed)


def mutual(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: Windows, options: MutualOptions, seed: int
) -> None:
    """Trains both in place, half of each batch on the corpus and half on the target's own text."""
    generator = torch.Generator(device=target.device).manual_seed(seed)
    anchor = rounded(target)
    first = [parameter.detach().clone() for parameter in target.parameters()]
    half = options.text.batch_rows // 2
    steps = options.text.rounds * (options.text.rows // half)
    target_schedule = Schedule(
        optimisers(target, options.target_rate, options.target_rate), target, steps, 10
    )
    draft_schedule = Schedule(
        optimisers(draft, options.draft_rate, options.draft_rate), draft, steps, 10, 0.3
    )
    target.train()
    draft.train()
    advance = stage("target and draft on each other", options.text.rounds)
    for _ in range(options.text.rounds):
        text = write_round(rounded(target), windows, options.text, generator)
        shared = 0.0
        order = torch.randperm(options.text.rows, generator=generator, device=target.device)
        for rows in order.view(-1, half):
            corpus = windows.take(half, options.text.length).to(target.device)
            inputs = torch.cat([corpus, text.ids[rows]])[:, :-1]  # [batch_rows, length - 1]
            shared = mutual_step(target, draft, anchor, inputs, options)
            target_schedule.step()
            draft_schedule.step()
        advance(f"1-TV {shared:.3f}")
    with torch.no_grad():
        for parameter, before in zip(target.parameters(), first, strict=True):
            parameter.lerp_(before, options.kept)
