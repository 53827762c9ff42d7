"""What attention is to this engine, and the function that stands in the place of a model's own.

The function is registered with transformers' attention interface under a name that no mask function is
registered for, so that the model builds no mask: what a token sees follows from its position and its
session's blocks alone. The step being run reaches it through a context variable, since some layers drop
unknown keyword arguments. How it is computed is an AttentionBackend's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from transformers import AttentionInterface

from outrider.engine.branching import LayOut
from outrider.engine.flat_inputs import Shape
from outrider.engine.kv_pools import KvPools
from outrider.engine.picking import Rule
from outrider.engine.recurrent_state import RecurrentLayer, RecurrentStates
from outrider.engine.step_inputs import View, Work
from outrider.engine.temperature import at_positions
from outrider.errors import ModelRefused

NAME = "outrider_paged"


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How a layer attends."""

    query_heads: int
    key_heads: int
    width: int  # of queries and keys
    value_width: int
    window: int | None  # positions that a token sees, itself included; None = all
    scale: float  # of the scores
    softcap: float | None  # scores are capped to +-softcap by tanh
    chunk: int | None = None  # a token sees nothing before the last multiple of it
    sinks: bool = False  # each query head has a score that no key gets

    @property
    def sharing(self) -> int:
        """Returns how many query heads share a key head."""
        return self.query_heads // self.key_heads

    @property
    def view(self) -> View:
        """Returns which keys tokens see."""
        return View(self.window, self.sharing, self.chunk)

    @property
    def fused(self) -> bool:
        """Returns whether torch's kernel can do it."""
        return self.softcap is None and self.width == self.value_width


class Inputs(Protocol):
    """A step on the device, as far as the model itself reads it."""

    @property
    def input_ids(self) -> torch.Tensor: ...  # [1, T]
    @property
    def position_ids(self) -> torch.Tensor: ...  # [1, T]
    @property
    def keep(self) -> torch.Tensor: ...  # [n] tokens whose logits are wanted
    @property
    def rows(self) -> int: ...  # real ones among those


class AttentionBackend(Protocol):
    """How tokens attend to their sessions' keys and values, and how these lie in memory."""

    layers: dict[int, LayerAttention]  # that attended in the last step
    others: set[int]  # layers that looked at earlier tokens in another way

    @property
    def name(self) -> str: ...

    @property
    def pools(self) -> KvPools: ...

    @property
    def states(self) -> RecurrentStates | None:
        """Returns the states of layers that keep one. If there are any, steps run in the order in which they
        were prepared, each once."""
        ...

    @property
    def fills_shapes(self) -> bool:
        """Returns whether a step can be filled up to a shape, as recorded steps need it."""
        ...

    @property
    def lay_out(self) -> LayOut | None:
        """Returns how the tokens of a tree get their places in a session's slots; None = a step takes no
        trees."""
        ...

    def prepare(self, works: Sequence[Work], shapes: Sequence[Shape] = ()) -> Any:
        """Returns the step in this process's memory, in the first of these shapes that holds it, else in its
        own. Reads the works, changes nothing."""
        ...

    def arrange(self, prepared: Any) -> None:
        """Copies what stands elsewhere in the pools than the step needs it, if layers do not; before it."""
        ...

    def on_device(self, prepared: Any) -> Inputs:
        """Returns what the forward pass reads."""
        ...

    def attend(
        self,
        layer: int,
        query: torch.Tensor,  # [Hq, T, D]
        key: torch.Tensor,  # [Hkv, T, D]
        value: torch.Tensor,  # [Hkv, T, Dv]
        inputs: Any,
        how: LayerAttention,
        sinks: torch.Tensor | None = None,  # [Hq]
        picked: torch.Tensor | None = None,  # [G, T, K]
    ) -> torch.Tensor:
        """Stores the step's keys and values, then lets each token see its session's up to its own position:
        [T, Hq, Dv]. `sinks`: scores that no key gets, if the layer has them. `picked`: as `pick` gave it."""
        ...

    def pick(
        self,
        layer: int,
        key: torch.Tensor,  # [T, D]
        inputs: Any,
        rule: Rule,
    ) -> torch.Tensor:
        """Stores an indexer's keys of the step's tokens. Returns which of its session's positions each token
        is to see, for each of G groups of query heads: [G, T, K] of bool. K depends on the step.

        Raises ModelRefused, with the reason as a phrase, if it cannot do that."""
        ...

    def earlier(
        self,
        layer: int,
        rows: torch.Tensor,  # [T, W]
        inputs: Any,
        count: int,
    ) -> torch.Tensor:
        """Stores a row of each of the step's tokens, and returns those of the `count` tokens before each and
        its own: [T, count + 1, W], zeros before a session's first token.

        Raises ModelRefused, with the reason as a phrase, if it cannot do that."""
        ...

    def carry_on(
        self,
        layer: int,
        which: RecurrentLayer,
        rows: torch.Tensor,  # [T, W]
        inputs: Any,
    ) -> list[torch.Tensor]:
        """Returns what each of the step's tokens reads of the state of all before and itself.

        Raises ModelRefused, with the reason as a phrase, if it cannot do that."""
        ...

    def batch_rows(self) -> None:
        """From now on rows attend together as far as this machine's kernels keep each row's bits."""
        ...

    def keeps_bits(self) -> bool:
        """Returns whether a row of the layers of the last step was measured to get the same bits in any
        company. From then on `lay_out` is such that this holds on branches, too."""
        ...

    def resized(self, num_blocks: int, num_states: int = 0) -> Self:
        """Returns the same for the same layers with so many empty blocks, and slots for states, whose memory
        is taken at once."""
        ...


@dataclass(slots=True, eq=False)
class RunningStep:
    """The step that a forward pass is running."""

    inputs: Inputs
    attention: AttentionBackend
    layers: dict[int, LayerAttention] = field(default_factory=dict)  # that have attended in this step
    others: set[int] = field(default_factory=set)  # layers that looked at earlier tokens in another way

    def earlier(self, layer: int, rows: torch.Tensor, count: int) -> torch.Tensor:
        """As AttentionBackend's."""
        self.others.add(layer)
        return self.attention.earlier(layer, rows, self.inputs, count)

    def carry_on(self, layer: int, which: RecurrentLayer, rows: torch.Tensor) -> list[torch.Tensor]:
        """As AttentionBackend's."""
        self.others.add(layer)
        return self.attention.carry_on(layer, which, rows, self.inputs)

    def pick(self, layer: int, key: torch.Tensor, rule: Rule) -> torch.Tensor:
        """As AttentionBackend's."""
        return self.attention.pick(layer, key, self.inputs, rule)


RUNNING: ContextVar[RunningStep] = ContextVar("outrider_running_step")


def run_model(model: Any, attention: AttentionBackend, inputs: Inputs) -> torch.Tensor:
    """Returns the logits [n, V] of the tokens to keep, in the model's own number format.

    Raises ModelRefused, with the reason as a phrase, for a model that keeps others."""
    step = RunningStep(inputs, attention)
    token = RUNNING.set(step)
    try:
        with torch.inference_mode():
            logits = model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                use_cache=False,
                logits_to_keep=inputs.keep,
            ).logits
    finally:
        RUNNING.reset(token)
    attention.layers, attention.others = step.layers, step.others
    kept: torch.Tensor = logits[0]
    if len(kept) != len(inputs.keep):
        raise ModelRefused("it does not take logits_to_keep")
    return kept


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, Hq, T, D]
    key: torch.Tensor,  # [1, Hkv, T, D]
    value: torch.Tensor,  # [1, Hkv, T, Dv]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,  # [1, T, K, G], as this engine's indexers give them
    block_indices: torch.Tensor | None = None,  # the same, in MiniMax-M3
    **ignored: object,
) -> tuple[torch.Tensor, None]:
    """Attends as transformers asks for it in every layer. Returns [1, T, Hq, Dv], and no attention weights.

    Raises ModelRefused, with the reason as a phrase, for a layer that needs something else."""
    step = RUNNING.get()
    indices = block_indices if indices is None else indices
    layer: int = getattr(module, "layer_idx", -1)
    if attention_mask is not None and indices is None:  # see indexer.py
        raise ModelRefused("its attention masks carry a meaning of their own")
    if position_bias is not None:
        raise ModelRefused("its attention adds a bias by position")
    if not getattr(module, "is_causal", True):
        raise ModelRefused("its attention is not causal")
    if layer in step.layers:
        raise ModelRefused(f"it attends more than once in layer {layer}")
    scale = scaling if scaling is not None else key.shape[3] ** -0.5
    window = sliding_window if sliding_window and sliding_window > 0 else None
    how = LayerAttention(
        query.shape[1],
        key.shape[1],
        key.shape[3],
        value.shape[3],
        window,
        scale,
        softcap,
        _chunk(module, layer),
        s_aux is not None,
    )
    step.layers[layer] = how
    query = at_positions(module, query, step.inputs.position_ids)
    picked = None if indices is None else indices[0].permute(2, 0, 1)
    attended = step.attention.attend(layer, query[0], key[0], value[0], step.inputs, how, s_aux, picked)
    return attended.contiguous()[None], None  # some models take a view of it


def _chunk(module: torch.nn.Module, layer: int) -> int | None:
    """Returns the chunk of a layer. transformers tells of it in the configuration alone, for its masks."""
    config = getattr(module, "config", None)
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    if not (0 <= layer < len(kinds) and kinds[layer] == "chunked_attention"):
        return None
    size: int = config.attention_chunk_size  # type: ignore[union-attr]
    return size


AttentionInterface.register(NAME, paged_attention)  # and deliberately no mask function of that name
