"""By what recorded steps draw tokens: by kernels where these work, else by torch's own operations."""

from __future__ import annotations

import logging

import torch

from outrider.engine.drawing import Drawing, width_of
from outrider.engine.group import Group
from outrider.engine.torch_drawing import TorchDrawing
from outrider.errors import in_one_line
from outrider.sampling.draw_kernels import draw_kernels

log = logging.getLogger(__name__)


def drawing_for(
    group: Group, rows: int, device: torch.device, vocabulary: torch.Tensor | None = None
) -> Drawing:
    """Returns the quickest that works on the device, in all processes of the group."""
    found: Drawing | None = None
    if draw_kernels(device, width_of(group), vocabulary is not None) is not None:
        try:
            from outrider.engine.kernel_drawing import KernelDrawing  # it needs Triton

            found = KernelDrawing(group, rows, device, vocabulary)
        except Exception as error:
            log.warning("recorded steps draw tokens without kernels: %s", in_one_line(error))
    agreed = group.agree(found is not None)
    return found if agreed and found is not None else TorchDrawing(group, rows, device, vocabulary)
