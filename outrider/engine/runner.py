"""The runner part of an engine: how the model's operations are asked for in a step.

Here call by call; replayed.py repeats what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from outrider.engine.attention import AttentionBackend, Inputs, run_model
from outrider.engine.group import Group
from outrider.engine.step_inputs import Work
from outrider.sampling.ranked import Ranked
from outrider.sampling.sampler import Row, rank
from outrider.sampling.vocab_parallel import Draws


class Runner(Protocol):
    """Runs a prepared step of this process's part of the model."""

    @property
    def name(self) -> str: ...

    @property
    def compiled(self) -> bool:
        """Returns whether torch's compiler compiles what steps run."""
        ...

    def stop_compiling(self) -> None:
        """From now on what has not been compiled runs as it is."""
        ...

    def prepare(self, works: Sequence[Work]) -> Any:
        """Returns the step as the attention backend makes it. Reads the works, changes nothing."""
        ...

    def logits(self, prepared: Any) -> torch.Tensor:
        """Returns [rows, V], or this process's part of it, float32, in the order of the works and their rows;
        valid until the next step."""
        ...

    def choose(self, prepared: Any, draws: Draws) -> list[int]:
        """Returns the tokens drawn. The step is over on the device when this returns. `draws` hear before
        when the host has nothing to do but wait, or where it has something all along, when it begins."""
        ...

    def rank(
        self,
        prepared: Any,
        rows: Sequence[Row],
        count: int,
        vocab_size: int,
        vocabulary: torch.Tensor | None,
    ) -> list[Ranked]:
        """Returns the `count` best tokens of each row, of which there are some; see sampler.rank."""
        ...


class CallByCall:
    """Implements Runner: the host asks for each operation as it comes."""

    name = "calls"

    def __init__(self, model: Any, attention: AttentionBackend, group: Group) -> None:
        self.model = model
        self.attention = attention
        self.group = group
        self.device: torch.device = next(model.parameters()).device
        self._may_compile = True

    @property
    def compiled(self) -> bool:
        return any(module._compiled_call_impl is not None for module in self.model.modules())

    def stop_compiling(self) -> None:
        self._may_compile = not self.compiled

    def prepare(self, works: Sequence[Work]) -> Any:
        return self.attention.prepare(works)

    def run(self, inputs: Inputs) -> torch.Tensor:
        """Returns [n, V] of the tokens to keep, or this process's part, in the model's own number format."""
        if self._may_compile:
            return run_model(self.model, self.attention, inputs)
        with torch.compiler.set_stance("eager_on_recompile"):
            return run_model(self.model, self.attention, inputs)

    def logits(self, prepared: Any) -> torch.Tensor:
        self.attention.arrange(prepared)
        inputs = self.attention.on_device(prepared)
        return self.run(inputs)[: inputs.rows].float()

    def choose(self, prepared: Any, draws: Draws) -> list[int]:
        draws.asked()
        chosen = self.group.choose(self.logits(prepared), draws)
        if not chosen:
            self.wait()
        return chosen

    def rank(
        self,
        prepared: Any,
        rows: Sequence[Row],
        count: int,
        vocab_size: int,
        vocabulary: torch.Tensor | None,
    ) -> list[Ranked]:
        return rank(self.logits(prepared), rows, count, vocab_size, vocabulary)

    def wait(self) -> None:
        """Waits until the device has done what it was asked for."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
