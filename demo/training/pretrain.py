"""Training of the target on the corpus, with the draft learning from it on the same batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from demo.training.corpus import Windows
from demo.training.progress import stage
from distillation.losses import distance
from distillation.schedule import Schedule, optimisers

TOKENS_A_STEP = 8192


@dataclass(frozen=True)
class PretrainOptions:
    """How long the training is, and on windows of which length: (share of the steps, length) in order."""

    steps: int
    lengths: tuple[tuple[float, int], ...] = ((0.70, 256), (0.20, 512), (0.10, 1024))

    def length(self, step: int) -> int:
        """Returns the window length of one step."""
        done = 0.0
        for share, length in self.lengths:
            done += share
            if step < done * self.steps:
                return length
        return self.lengths[-1][1]


def logits_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Returns logits [batch, length, vocabulary] in bfloat16 arithmetic."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def pretrain(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: Windows, options: PretrainOptions
) -> None:
    """Trains both in place.

    The target minimises cross-entropy; the draft minimises the KL divergence to what the target says at
    that moment, which costs no pass of the target beyond the one it makes for itself.
    """
    device = target.device
    warmup = min(30, options.steps // 5)
    target_schedule = Schedule(optimisers(target, 4e-3, 3e-3), target, options.steps, warmup)
    draft_schedule = Schedule(optimisers(draft, 5e-3, 4e-3), draft, options.steps, warmup, final=0.3)
    target.train()
    draft.train()
    advance = stage("target and draft on the corpus", options.steps)
    for step in range(options.steps):
        length = options.length(step)
        ids = windows.take(TOKENS_A_STEP // length, length + 1).to(device)
        inputs, labels = ids[:, :-1], ids[:, 1:].reshape(-1)
        logits = logits_of(target, inputs).flatten(0, 1).float()
        loss = functional.cross_entropy(logits, labels)
        said = logits.detach().softmax(-1)
        learned = distance(logits_of(draft, inputs).flatten(0, 1), said)
        torch.autograd.backward([loss, learned])
        target_schedule.step()
        draft_schedule.step()
        advance(f"loss {loss.item():.3f}")
