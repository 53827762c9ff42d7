"""Attention over the paged pool, in the place of a Hugging Face model's own.

Registered with transformers' attention interface under a name that no mask function is registered for, so
that the model builds no mask: what a token sees follows from its position and its session's blocks alone. The
step being run reaches this function through a context variable, since some layers drop unknown keyword
arguments.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from outrider.engine.flat_inputs import FlatInputs
from outrider.engine.kv_pools import KvPools
from outrider.engine.step_inputs import StepInputs
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

    @property
    def sharing(self) -> int:
        """Query heads that share a key head."""
        return self.query_heads // self.key_heads

    @property
    def fused(self) -> bool:
        """Whether torch's kernel can do it."""
        return self.softcap is None and self.width == self.value_width


@dataclass(slots=True, eq=False)
class RunningStep:
    """The step that a forward pass is running."""

    inputs: StepInputs | FlatInputs
    pools: KvPools
    layers: dict[int, LayerAttention] = field(default_factory=dict)  # that have attended in this step


RUNNING: ContextVar[RunningStep] = ContextVar("outrider_running_step")


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
    **ignored: object,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: [1, T, Hq, Dv], and no attention weights.

    Raises ModelRefused, with the reason as a phrase, for a layer that needs something else."""
    step = RUNNING.get()
    layer: int = getattr(module, "layer_idx", -1)
    if attention_mask is not None:
        raise ModelRefused("its attention masks carry a meaning of their own")
    if position_bias is not None:
        raise ModelRefused("its attention adds a bias by position")
    if s_aux is not None:
        raise ModelRefused("its attention has sinks, which this engine does not compute")
    if not getattr(module, "is_causal", True):
        raise ModelRefused("its attention is not causal")
    if layer in step.layers:
        raise ModelRefused(f"it attends more than once in layer {layer}")
    scale = scaling if scaling is not None else key.shape[3] ** -0.5
    window = sliding_window if sliding_window and sliding_window > 0 else None
    how = LayerAttention(query.shape[1], key.shape[1], key.shape[3], value.shape[3], window, scale, softcap)
    step.layers[layer] = how
    return attend(step, layer, query[0], key[0], value[0], how)[None], None


def attend(
    step: RunningStep,
    layer: int,
    query: torch.Tensor,  # [Hq, T, D]
    key: torch.Tensor,  # [Hkv, T, D]
    value: torch.Tensor,  # [Hkv, T, Dv]
    how: LayerAttention,
) -> torch.Tensor:
    """Writes the step's keys and values, then lets each token see its session's: [T, Hq, Dv]."""
    step.pools.write(layer, key, value, step.inputs.slots)
    queries = query.transpose(0, 1)  # [T, Hq, D]
    if isinstance(step.inputs, FlatInputs):
        return step.inputs.kernel.attend(queries, *step.pools.of(layer), step.inputs, how)
    attend_rows = _explicit if not how.fused else _alone if step.inputs.row_batching is None else _batched
    tiles = step.inputs.tiles(how.window, how.sharing)
    if len(tiles) == 1 and len(tiles[0].calls) == 1:
        keys, values = step.pools.gather(layer, tiles[0].blocks, tiles[0].sessions)  # [S, Hkv, K, W]
        return attend_rows(queries, keys, values, tiles[0].calls[0][2], how)
    out = query.new_empty(queries.shape[0], how.query_heads, how.value_width)  # [T, Hq, Dv]
    for tile in tiles:
        keys, values = step.pools.gather(layer, tile.blocks, tile.sessions)
        for tokens, sessions, mask in tile.calls:
            out[tokens] = attend_rows(queries[tokens], keys[sessions], values[sessions], mask, how)
    return out


def _alone(
    query: torch.Tensor,  # [n, Hq, D]
    key: torch.Tensor,  # [1 or n, Hkv, K, W >= D]
    value: torch.Tensor,
    mask: torch.Tensor,  # [n, 1, 1, K]
    how: LayerAttention,
) -> torch.Tensor:
    """Each row in a product of its own."""
    n = query.shape[0]
    if key.shape[0] != n:
        key, value = key.expand(n, -1, -1, -1), value.expand(n, -1, -1, -1)
    attended = F.scaled_dot_product_attention(
        F.pad(query, (0, key.shape[3] - how.width))[:, :, None],
        key,
        value,
        attn_mask=mask,
        scale=how.scale,
        enable_gqa=how.sharing > 1,
    )  # [n, Hq, 1, W]
    return attended[:, :, 0, : how.width]


def _batched(
    query: torch.Tensor,  # [n * t, Hq, D] t tokens of each of n sessions
    key: torch.Tensor,  # [n, Hkv, K, W >= D]
    value: torch.Tensor,
    mask: torch.Tensor,  # [n, 1, R, K]
    how: LayerAttention,
) -> torch.Tensor:
    """All rows that share a key head in one product: R rows are those of t tokens and the query heads of the
    key head, and what fills them up. Where R is less than that, each query head has a product."""
    n, _, filled, _ = mask.shape
    tokens = query.shape[0] // n
    sharing = how.sharing if filled >= tokens * how.sharing else 1
    heads, rows = how.query_heads // sharing, tokens * sharing
    query = query.reshape(n, tokens, heads, sharing, how.width).transpose(1, 2)
    query = query.reshape(n, heads, rows, how.width)
    attended = F.scaled_dot_product_attention(
        F.pad(query, (0, key.shape[3] - how.width, 0, filled - rows)),
        key,
        value,
        attn_mask=mask,
        scale=how.scale,
        enable_gqa=heads != how.key_heads,
    )[:, :, :rows, : how.width]  # [n, heads, rows, D]
    per_token = attended.view(n, heads, tokens, sharing, how.width).transpose(1, 2)
    return per_token.reshape(-1, how.query_heads, how.width)


def _explicit(
    query: torch.Tensor,  # [n, Hq, D]
    key: torch.Tensor,  # [1 or n, Hkv, K, W >= D]
    value: torch.Tensor,  # [1 or n, Hkv, K, W >= Dv]
    mask: torch.Tensor,  # [n, 1, 1, K]
    how: LayerAttention,
) -> torch.Tensor:
    """What the fused kernel cannot do: capped scores, values of another width than keys. One row a
    product."""
    n, shared = query.shape[0], how.sharing
    per_head = query.reshape(n, how.key_heads, shared, how.width)
    out = query.new_empty(n, how.key_heads, shared, how.value_width)
    for session in range(key.shape[0]):
        rows = slice(None) if key.shape[0] == 1 else slice(session, session + 1)
        for head in range(how.key_heads):
            q = per_head[rows, head].reshape(-1, 1, how.width)  # [r, 1, D]
            scores = (
                torch.bmm(q, key[session, head, :, : how.width].T.expand(len(q), -1, -1)) * how.scale
            )  # [r, 1, K]
            if how.softcap is not None:
                scores = torch.tanh(scores / how.softcap) * how.softcap
            hidden = mask[rows, 0].expand(-1, shared, -1).reshape(scores.shape)
            weights = (scores + hidden).softmax(-1, dtype=torch.float32).to(value.dtype)
            attended = torch.bmm(
                weights, value[session, head, :, : how.value_width].expand(len(q), -1, -1)
            )  # [r, 1, Dv]
            out[rows, head] = attended.view(-1, shared, how.value_width)
    return out.view(n, how.query_heads, how.value_width)


AttentionInterface.register(NAME, paged_attention)  # and deliberately no mask function of that name
