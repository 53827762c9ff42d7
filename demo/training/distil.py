"""Distils the draft on text that the target writes itself.

In service the draft reads the target's own text, greedy or sampled, after a user's prompt. Each round
therefore lets the target continue corpus prompts, half of the rows greedily and half at temperature 1,
and teaches the draft the target's distribution at every position of the result, prompts included.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from demo.training.corpus import Windows
from demo.training.generation import continue_rows
from demo.training.pretrain import logits_of
from demo.training.progress import stage
from distillation.losses import distance, overlap
from distillation.schedule import Schedule, optimisers


@dataclass(frozen=True)
class DistilOptions:
    """How much text the target writes, and how the draft learns from it."""

    rounds: int
    rows: int = 128
    length: int = 256
    shortest_prompt: int = 8
    longest_prompt: int = 96
    batch_rows: int = 32
    readings: int = 3  # times a round is read: once fresh, then at random among the rounds held
    kept_rounds: int = 10
    variation_weight: float = 1.0
    rate: float = 5e-3


@dataclass(frozen=True)
class Round:
    """Text of the target: ids [rows, length] and the logits [rows, length - 1, vocabulary] behind it."""

    ids: Tensor
    logits: Tensor


def write_round(
    target: LlamaForCausalLM, windows: Windows, options: DistilOptions, generator: torch.Generator
) -> Round:
    """Returns one round of the target's own text, after corpus prompts of one random length."""
    span = options.longest_prompt + 1 - options.shortest_prompt
    draw = torch.rand((), generator=generator, device=target.device)
    prompt = options.shortest_prompt + int(draw * span)
    prompts = windows.take(options.rows, options.longest_prompt)[:, :prompt].to(target.device)
    sampled = torch.arange(options.rows, device=target.device) % 2 == 1
    ids, logits = continue_rows(target, prompts, options.length, sampled, generator)
    return Round(ids, logits)


def learn(draft: LlamaForCausalLM, text: Round, rows: Tensor, options: DistilOptions) -> float:
    """Adds up the draft's gradients on some rows of a round. Returns the mean overlap 1-TV."""
    logits = logits_of(draft, text.ids[rows, :-1]).flatten(0, 1)
    wanted = text.logits[rows].flatten(0, 1).float().softmax(-1)
    torch.autograd.backward([distance(logits, wanted, options.variation_weight)])
    return overlap(logits.detach().float().softmax(-1), wanted)


def distil(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: Windows, options: DistilOptions, seed: int
) -> None:
    """Trains the draft in place on `options.rounds` rounds; each is read when fresh and again later."""
    generator = torch.Generator(device=target.device).manual_seed(seed)
    chooser = random.Random(seed)
    batches = options.rows // options.batch_rows
    steps = options.readings * batches * options.rounds
    schedule = Schedule(optimisers(draft, options.rate, options.rate), draft, steps, warmup=20, final=0.01)
    earlier: deque[Round] = deque(maxlen=options.kept_rounds)
    draft.train()
    advance = stage("draft on the target's own text", options.rounds)
    for _ in range(options.rounds):
        fresh = write_round(target, windows, options, generator)
        earlier.append(fresh)
        shared = 0.0
        for text in (fresh, *chooser.choices(earlier, k=options.readings - 1)):
            order = torch.randperm(
                options.rows, generator=torch.Generator().manual_seed(chooser.randrange(2**31))
            )
            for rows in order.to(target.device).view(-1, options.batch_rows):
                shared = learn(draft, text, rows, options)
                schedule.step()
        advance(f"1-TV {shared:.3f}")
