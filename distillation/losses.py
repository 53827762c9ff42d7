"""How far a model's distribution is from the one that it is to learn, and how much two of them agree."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def distance(logits: Tensor, wanted: Tensor, variation_weight: float = 0.0) -> Tensor:
    """Returns the mean distance [] of a model from the distribution that it is to learn, for autograd.

    logits and wanted (probabilities) are [n, vocabulary]. The distance is
    KL(wanted || model) + variation_weight * TV(wanted, model): the total variation is one minus the
    acceptance rate of rejection sampling (Leviathan et al. 2023), but its gradient is weak where the
    model is far off; the divergence's is not.
    """
    learned = logits.float().log_softmax(-1)
    found = functional.kl_div(learned, wanted, reduction="batchmean")
    if variation_weight:
        found = found + variation_weight * (learned.exp() - wanted).abs().sum(-1).mean() / 2
    return found


@torch.no_grad()
def overlap(one: Tensor, other: Tensor) -> float:
    """Returns the mean overlap 1-TV of two distributions [n, vocabulary]."""
    return float(torch.minimum(one, other).sum(-1).mean())
