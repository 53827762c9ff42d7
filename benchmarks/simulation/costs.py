"""What a step takes on two machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Costs:
    name: str
    step: Callable[[int, int], float]  # (tokens, sessions) -> seconds of a target step
    draft_token: Callable[[int], float]  # sessions of one drafter -> seconds of a draft step
    drafter_sessions: int  # most sessions of one drafter: there are as many drafters as that takes


def _h200(tokens: int, sessions: int) -> float:
    """Returns the seconds by an assumed roofline: launch, weights or arithmetic whichever is longer, reading
    the sessions' KV."""
    return float(5e-3 + (8e-3**4 + (0.055e-3 * tokens) ** 4) ** 0.25 + 0.034e-3 * sessions)


CPU_STEP_MS = {1: 37.0, 4: 37.0, 8: 45.0, 16: 63.0, 32: 100.0, 64: 168.0}  # measured, one core


def _cpu(tokens: int, sessions: int) -> float:
    known, times = list(CPU_STEP_MS), list(CPU_STEP_MS.values())
    beyond = max(0, tokens - known[-1]) * (times[-1] - times[-2]) / (known[-1] - known[-2])
    return (float(np.interp(tokens, known, times)) + beyond) / 1e3


H200 = Costs("70B on H200-class, 8B draft", _h200, lambda sessions: 1.5e-3, 64)
CPU = Costs("205M and its draft, a CPU core each", _cpu, lambda sessions: 2e-3 + 0.1e-3 * sessions, 256)
