"""What a target's output layer is given where it writes: a speculator learns to guess from that."""

from __future__ import annotations

from typing import Any

import torch

from distillation.texts import STATE, States
from outrider.engine.speculator import LastStates

MOST = torch.finfo(torch.float16).max


class KeptStates:
    """The states of a model's last step, in the directions in which its checkpoint has them."""

    def __init__(self, model: Any) -> None:
        self._last = LastStates(model)
        self._turned = getattr(model, "turned", None)

    def rows(self) -> States:
        """Returns [n, H], in the order of the step's logits."""
        with torch.inference_mode():
            states = self._last.states.float()
            if self._turned is not None:
                stream, norm = self._turned
                states = stream.back(states) * norm
            found: States = states.clamp(-MOST, MOST).cpu().numpy().astype(STATE)
        return found
