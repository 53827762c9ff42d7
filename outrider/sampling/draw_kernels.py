"""Whether tokens are drawn by kernels: on a GPU, where they give what is drawn without."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import torch

from outrider.errors import in_one_line
from outrider.sampling.ranked import Ranked
from outrider.sampling.shaping import Row

log = logging.getLogger(__name__)


class Kernels(Protocol):
    """Draws from logits [R, V] float32, which stay as they are, on their device; see sampler.py."""

    def draw(self, logits: torch.Tensor, rows: Sequence[Row], vocab_size: int) -> torch.Tensor: ...

    def rank(
        self,
        logits: torch.Tensor,
        rows: Sequence[Row],
        count: int,
        vocab_size: int,
        vocabulary: torch.Tensor | None,
    ) -> list[Ranked]: ...


def draw_kernels(device: torch.device, width: int, named: bool = False) -> Kernels | None:
    """Returns what draws on a device from logits [R, width], of ids that have names (see sampler.rank) or of
    all; None, with the reason logged, where torch's own operations do. The first call of each compiles all
    kernels."""
    return _found(device, width, named) if device.type == "cuda" else None


@cache
def _found(device: torch.device, width: int, named: bool) -> Kernels | None:
    try:
        from outrider.sampling import kernel_check, kernel_draws  # they need Triton

        kernel_check.check(device, width, named)
    except Exception as error:  # no Triton, no C compiler, a device that it does not know
        log.warning("tokens are drawn without kernels, which is slower: %s", in_one_line(error))
        return None
    return kernel_draws
