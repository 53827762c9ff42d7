"""Training of the target on the corpus, with the draft learning from it on the same batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from demo.training.corpus import Windows
from demo.training.losses import pair_gradients
from demo.training.progress import steps_bar
from demo.training.schedule import Schedule, optimisers

TOKENS_A_STEP = 8192


@dataclass(frozen=True)
class PretrainOptions:
    """How long to train, and on windows of which length: (share of the steps, length) in order."""

    steps: int
    lengths: tuple[tuple[float, int], ...] = ((0.70, 256), (0.20, 512), (0.10, 1024))
    rows: int = 32  # windows of the shortest length that fit one pass

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
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    windows: Windows,
    options: PretrainOptions,
    keep: Callable[[int], None] = lambda step: None,
) -> None:
    """Train both in place; `keep(step)` is called after each step and may save checkpoints.

    The target minimises cross-entropy; the draft minimises the KL divergence to what the target says at
    that moment, which costs no pass of the target beyond the one it makes for itself.
    """
    device = target.device
    warmup = min(30, options.steps // 5)
    target_schedule = Schedule(optimisers(target, 4e-3, 3e-3), target, options.steps, warmup)
    draft_schedule = Schedule(optimisers(draft, 5e-3, 4e-3), draft, options.steps, warmup, final=0.3)
    target.train()
    draft.train()
    with steps_bar("target and draft on the corpus", options.steps) as advance:
        for step in range(options.steps):
            length = options.length(step)
            ids = windows.take(TOKENS_A_STEP // length, length + 1).to(device)
            inputs, labels = ids[:, :-1], ids[:, 1:].reshape(-1)
            target_logits = logits_of(target, inputs).flatten(0, 1)
            draft_logits = logits_of(draft, inputs).flatten(0, 1)
            with torch.no_grad():
                loss, target_gradient, draft_gradient = pair_gradients(target_logits, draft_logits, labels)
            torch.autograd.backward([target_logits, draft_logits], [target_gradient, draft_gradient])
            target_schedule.step()
            draft_schedule.step()
            advance(f"loss {loss:.3f}")
            keep(step + 1)
