"""Indexers, which pick the keys that a layer attends to, as DeepSeek-V3.2, GLM-5 and MiniMax-M3 have them.

Their own code keeps an indexer's keys in a cache of its own and marks what it picks in the layer's mask.
Here its keys lie in the pool, in their tokens' slots, as keys and values do: rejected tokens, shared prefixes
and a session that goes on elsewhere need nothing more. What it picks goes with the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.engine.attention import RUNNING
from outrider.engine.picking import Blocks, Rule, Weighed

NAME = "indexer"  # of the module, in the layer's attention
NO_MASK = torch.empty(1, 1, 0, 0)  # the layer's own code takes a part of its mask; ours builds none


@dataclass(frozen=True, slots=True)
class Turned:
    """How queries and keys are turned by their positions."""

    pairs: bool = False  # neighbours are turned together; else numbers of the two halves
    last: bool = False  # a head's last numbers are turned; else its first

    def __call__(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """x [1, T, H, D] with cosines and sines [1, T, 1, R] of the R numbers that are turned."""
        width = cosines.shape[-1]
        turned, rest = (x[..., -width:], x[..., :-width]) if self.last else (x[..., :width], x[..., width:])
        (cos, other_cos), (sin, other_sin) = cosines.chunk(2, -1), sines.chunk(2, -1)
        some, others = (turned[..., 0::2], turned[..., 1::2]) if self.pairs else turned.chunk(2, -1)
        parts = [some * cos - others * sin, others * other_cos + some * other_sin]
        return torch.cat([rest, *parts] if self.last else [*parts, rest], dim=-1)


HALVES = Turned()
OWN = {  # by their classes
    "AXK2Indexer": HALVES,
    "DeepseekV32Indexer": HALVES,
    "Dots3NoteTextIndexer": Turned(pairs=True),
    "GlmMoeDsaIndexer": Turned(pairs=True),
    "HYV4Indexer": Turned(last=True),
}
OWN_OF_BLOCKS = {"MiniMaxM3VLIndexer"}
KINDS = {"minimax_m3_sparse"}  # of layers, beside those that say that they attend


class Indexer(nn.Module):
    """Stands in the place of transformers' module, whose parts it has."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.wq_b, self.wk, self.k_norm, self.weights_proj = own.wq_b, own.wk, own.k_norm, own.weights_proj
        self.layer_idx: int = own.layer_idx
        self.heads: int = own.n_heads
        self.width: int = own.head_dim
        self.index_topk: int = own.index_topk
        self.turned = OWN[type(own).__name__]

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, W]
        q_resid: torch.Tensor,  # [1, T, R]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *_: object,
        **__: object,
    ) -> torch.Tensor:
        """Returns which keys each token sees: [1, T, K, 1] of bool."""
        cosines, sines = (each[:, :, None] for each in position_embeddings)
        query = self.wq_b(q_resid).view(1, -1, self.heads, self.width)
        key = self.wk(hidden_states)
        norm = self.k_norm.weight.dtype  # which may be finer
        key = self.k_norm(key.to(norm)).to(key.dtype)[:, :, None]
        query, key = self.turned(query, cosines, sines), self.turned(key, cosines, sines)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
        weights = weights * (self.heads * self.width) ** -0.5
        rule = Weighed(query[0], weights[0], self.index_topk)
        return _picked(self.layer_idx, key[0, :, 0], rule)


class BlockIndexer(nn.Module):
    """The same where blocks are picked for each key head, as in MiniMax-M3."""

    def __init__(self, own: Any) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.q_norm, self.k_norm = own.q_proj, own.k_proj, own.q_norm, own.k_norm
        self.layer_idx: int = own.layer_idx
        self.width: int = own.head_dim
        self.block_size: int = own.block_size
        self.topk_blocks: int = own.topk_blocks
        self.local_blocks: int = own.local_blocks

    def forward(
        self,
        hidden_states: torch.Tensor,  # [1, T, W]
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *_: object,
    ) -> torch.Tensor:
        """Returns which keys each token sees, for each key head: [1, T, K, G] of bool."""
        cosines, sines = (each[:, :, None, : self.width] for each in position_embeddings)
        query = self.q_norm(self.q_proj(hidden_states).unflatten(-1, (-1, self.width)))
        key = self.k_norm(self.k_proj(hidden_states)[:, :, None])
        query, key = HALVES(query, cosines, sines), HALVES(key, cosines, sines)
        rule = Blocks(query[0], self.block_size, self.topk_blocks, self.local_blocks)
        return _picked(self.layer_idx, key[0, :, 0], rule)


def _picked(layer: int, key: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Returns [1, T, K, G]: so a token's row begins alike in longer steps."""
    return RUNNING.get().pick(layer, key, rule).permute(1, 2, 0)[None]


def are_in(model: nn.Module) -> bool:
    """Returns whether a model has any of this engine's."""
    return any(isinstance(module, Indexer | BlockIndexer) for module in model.modules())


def obstacle(model: nn.Module) -> str | None:
    """Returns why a model's own cannot be replaced, as a phrase."""
    own = {type(module).__name__ for name, module in model.named_modules() if name.split(".")[-1] == NAME}
    if own <= OWN.keys() | OWN_OF_BLOCKS:
        return None
    return "its attention picks keys by an indexer of its own, which is not served here"


def reaches(module: object) -> dict[str, int]:
    """Returns attributes that tell how many keys a module picks, with fewer, so that some are left out of a
    short text."""
    blocks = {"topk_blocks": 3, "block_size": 7} if hasattr(module, "topk_blocks") else {}
    return {"index_topk": 23, **blocks}


def take_over(model: nn.Module) -> None:
    """Puts this engine's into the place of the model's own."""
    for layer in list(model.modules()):
        own = getattr(layer, NAME, None)
        if type(own).__name__ in OWN_OF_BLOCKS:
            setattr(layer, NAME, BlockIndexer(own))
        elif type(own).__name__ in OWN:
            setattr(layer, NAME, Indexer(own))
            layer.register_forward_pre_hook(_without_mask, with_kwargs=True)


def _without_mask(
    layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return inputs, {**named, "attention_mask": NO_MASK}
