"""The closed-form gradients against autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from demo.training.losses import distillation, mutual_gradients, pair_gradients


@pytest.mark.parametrize("variation_weight", [0.0, 0.7])
def test_distillation_gradient(variation_weight: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 11, generator=generator, requires_grad=True)
    target = torch.randn(6, 11, generator=generator).softmax(-1)
    draft = logits.softmax(-1)
    divergence = (target * (target.log() - draft.log())).sum()
    variation = 0.5 * (target - draft).abs().sum()
    (divergence + variation_weight * variation).backward()
    assert torch.allclose(distillation(logits.detach(), target, variation_weight), logits.grad, atol=1e-6)


def test_pair_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.training.losses.CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(9, 7, generator=generator, requires_grad=True)
    draft = torch.randn(9, 7, generator=generator, requires_grad=True)
    labels = torch.randint(0, 7, (9,), generator=generator)
    loss, target_gradient, draft_gradient = pair_gradients(target.detach(), draft.detach(), labels)
    expected = functional.cross_entropy(target, labels)
    said = target.detach().softmax(-1)
    divergence = functional.kl_div(draft.log_softmax(-1), said, reduction="batchmean")
    torch.autograd.backward([expected, divergence])
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
    assert torch.allclose(target_gradient, target.grad, atol=1e-6)
    assert torch.allclose(draft_gradient, draft.grad, atol=1e-6)


def test_mutual_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.training.losses.CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(9, 7, generator=generator, requires_grad=True)
    draft = torch.randn(9, 7, generator=generator, requires_grad=True)
    anchor = torch.randn(9, 7, generator=generator)
    overlap, target_gradient, draft_gradient = mutual_gradients(
        target.detach(), draft.detach(), anchor, share=0.3, variation_weight=0.7
    )
    said, guessed = target.detach().softmax(-1), draft.detach().softmax(-1)
    teacher = 0.7 * anchor.softmax(-1) + 0.3 * guessed
    pulled = functional.kl_div(target.log_softmax(-1), teacher, reduction="batchmean")
    divergence = functional.kl_div(draft.log_softmax(-1), said, reduction="batchmean")
    variation = 0.5 * (said - draft.softmax(-1)).abs().sum() / 9
    torch.autograd.backward([pulled, divergence + 0.7 * variation])
    assert overlap == pytest.approx(float(torch.minimum(said, guessed).sum(-1).mean()), rel=1e-5)
    assert torch.allclose(target_gradient, target.grad, atol=1e-6)
    assert torch.allclose(draft_gradient, draft.grad, atol=1e-6)
