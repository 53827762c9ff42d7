"""States of recurrent layers carried on by native_recurrence.cpp, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.engine.native import library, loaded
from outrider.engine.native_layers import check

LANES = 16  # numbers at a time, as in native.h


def carries(state: torch.Tensor) -> bool:
    """Returns whether it carries on such a state of a layer."""
    return state.device.type == "cpu" and state.shape[-1] % LANES == 0 and library() is not None


def carry(
    rule: str, state: torch.Tensor, given: Sequence[torch.Tensor], read: torch.Size, *more: int
) -> list[torch.Tensor]:
    """Carries `state` on, in place, by a rule of native_recurrence.cpp over n tokens of which that much is
    `given`, each [n, ...] in float32. Returns what each token reads, together `read` [n, ...]."""
    held = [each.contiguous() for each in given]
    out = torch.empty(read, dtype=torch.float32)
    check(state, *held)
    run: Any = getattr(loaded(), rule)
    pointers = (each.data_ptr() for each in (state, *held, out))
    run(*pointers, len(out), *state.shape, *more, torch.get_num_threads())
    return list(out)
