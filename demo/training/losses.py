"""Losses with their gradients in closed form.

Autograd would keep several [tokens, vocabulary] tensors for each loss; with a vocabulary of thousands
that traffic costs as much as the small models themselves. Gradients are with respect to the logits,
ready for `torch.autograd.backward(logits, gradient)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 512  # rows worked on at a time: [512, 4096] floats stay in cache


def cross_entropy(probabilities: Tensor, labels: Tensor) -> tuple[float, Tensor]:
    """Returns the summed cross-entropy of `labels` [n] under `probabilities` [n, vocabulary], and p - onehot.

    The gradient takes the place of `probabilities`.
    """
    rows = torch.arange(len(labels), device=labels.device)
    chosen = probabilities[rows, labels]
    loss = float(-chosen.clamp_min(1e-30).log().sum())
    probabilities[rows, labels] -= 1.0
    return loss, probabilities


def distillation(draft_logits: Tensor, target: Tensor, variation_weight: float) -> Tensor:
    """Returns the gradient [n, vocabulary] of the summed distance between the draft and the target's
    distribution.

    draft_logits and target (probabilities) are [n, vocabulary]. The loss is
    KL(target || draft) + variation_weight * TV(target, draft): the total variation is one minus the
    acceptance rate of rejection sampling (Leviathan et al. 2023), but its gradient is weak where the
    draft is far off; the divergence's is not.
    """
    draft = torch.softmax(draft_logits.float(), dim=-1)
    gradient = draft - target
    if variation_weight:
        # d TV / d z_j = q_j * (s_j - sum_i q_i s_i) with s = sign(q - p) / 2.
        weighted = torch.sign(gradient).mul_(draft).mul_(0.5 * variation_weight)
        gradient.add_(weighted).sub_(draft * weighted.sum(dim=-1, keepdim=True))
    return gradient


def pair_gradients(
    target_logits: Tensor, draft_logits: Tensor, labels: Tensor
) -> tuple[float, Tensor, Tensor]:
    """One batch of training both: the target on `labels` [n], the draft on the target.

    Logits are [n, vocabulary]. Returns the target's mean cross-entropy and the gradients of its mean
    and of the draft's mean KL divergence, each in the logits' own precision.
    """
    count = len(labels)
    target_gradient, draft_gradient = torch.empty_like(target_logits), torch.empty_like(draft_logits)
    loss = 0.0
    for begin in range(0, count, CHUNK):
        rows = slice(begin, min(begin + CHUNK, count))
        said = torch.softmax(target_logits[rows].float(), dim=-1)
        draft_gradient[rows] = distillation(draft_logits[rows], said, 0.0) / count
        part, gradient = cross_entropy(said, labels[rows])
        loss += part
        target_gradient[rows] = gradient / count
    return loss / count, target_gradient, draft_gradient


def mutual_gradients(
    target_logits: Tensor, draft_logits: Tensor, anchor_logits: Tensor, share: float, variation_weight: float
) -> tuple[float, Tensor, Tensor]:
    """One batch of mutual learning; all logits are [n, vocabulary].

    The target's mean KL divergence is taken from the mixture of the anchor's distribution and `share` of
    the draft's, the draft's mean distance from the target as in `distillation`; teachers are constants.
    Returns the mean overlap 1-TV of the two, and their gradients, each in the logits' own precision.
    """
    count = len(target_logits)
    target_gradient, draft_gradient = torch.empty_like(target_logits), torch.empty_like(draft_logits)
    overlap = 0.0
    for begin in range(0, count, CHUNK):
        rows = slice(begin, min(begin + CHUNK, count))
        said = torch.softmax(target_logits[rows].float(), dim=-1)
        guessed = torch.softmax(draft_logits[rows].float(), dim=-1)
        overlap += float(torch.minimum(said, guessed).sum())
        draft_gradient[rows] = distillation(draft_logits[rows], said, variation_weight) / count
        teacher = torch.softmax(anchor_logits[rows].float(), dim=-1).lerp_(guessed, share)
        target_gradient[rows] = said.sub_(teacher).div_(count)
    return overlap / count, target_gradient, draft_gradient
