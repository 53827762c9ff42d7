"""The usual decoder's forward pass on a GPU: four products and three other kernels a layer, and attention.

Products leave their parts to what reads them, the norm that follows a layer's end adds what the layer adds,
and keys and values go to the pool as they are turned. A row's bits do not depend on its company: each of
these kernels sums a row in an order of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from outrider.engine.attention import RUNNING, LayerAttention
from outrider.engine.flat_inputs import FlatInputs
from outrider.engine.packed import PackedColumns
from outrider.engine.paged_attention import PagedAttention
from outrider.engine.plain_pass import is_usual
from outrider.engine.triton_layers import TritonLinear
from outrider.engine.triton_products import GROUP
from outrider.engine.triton_rows import normed, turned

SILU = ("SiLUActivation", "SiLU")


class TritonLayer:
    """A decoder layer."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index: int = attention.layer_idx
        width = attention.head_dim
        queries, keys = attention.q_proj.out_features // width, attention.k_proj.out_features // width
        self.has_window = attention if hasattr(attention, "sliding_window") else attention.config
        self.plain = LayerAttention(queries, keys, width, width, None, attention.scaling, None)
        self.first_norm, self.second_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.head_norms = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
        self.query_key_value: TritonLinear = attention.q_proj.together.linear
        self.output: TritonLinear = attention.o_proj
        self.gate_up: TritonLinear = mlp.gate_proj.together.linear
        self.down: TritonLinear = mlp.down_proj

    def __call__(self, x: torch.Tensor, added: Added, positions: tuple[torch.Tensor, torch.Tensor]) -> Added:
        """Adds what comes from the layer before to x [T, H], and what attention gives; returns what the layer
        adds at its end."""
        inner = self.query_key_value.parts(_normed(x, added, self.first_norm))
        parts = self.output.parts(self._attended(inner, positions).reshape(len(x), -1))
        h = _normed(x, (parts, self.output.missing_bias(parts)), self.second_norm)
        parts = self.down.parts(self.gate_up.gated(h))
        return parts, self.down.missing_bias(parts)

    def _attended(self, parts: torch.Tensor, positions: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        window: int | None = getattr(self.has_window, "sliding_window", None)  # shorter in the check
        how, step = replace(self.plain, window=window) if window else self.plain, RUNNING.get()
        step.layers[self.index] = how
        attention, inputs, tokens = step.attention, step.inputs, parts.shape[1]
        query_norm, key_norm = self.head_norms
        norms, eps = None, 0.0
        if query_norm is not None and key_norm is not None:
            norms, eps = (query_norm.weight, key_norm.weight), query_norm.variance_epsilon
        dtype = self.query_key_value.dtype
        if isinstance(attention, PagedAttention) and isinstance(inputs, FlatInputs):
            like = parts.new_empty(how.key_heads, 0, how.width, dtype=dtype)
            pools, slots = attention.pools.made(self.index, like, like), inputs.slots
            again = inputs.again_ends, inputs.again
        else:
            both = parts.new_empty(2, tokens, how.key_heads, how.width, dtype=dtype)
            pools = both[0], both[1]
            slots, again = torch.arange(tokens, device=parts.device), None
        bias = self.query_key_value.missing_bias(parts)
        heads = how.query_heads, how.key_heads
        query = turned(parts, bias, norms, eps, positions, slots, again, pools, heads, dtype)
        if isinstance(attention, PagedAttention) and isinstance(inputs, FlatInputs):
            return attention.attend_stored(self.index, query, inputs, how)
        keys, values = (pool.transpose(0, 1) for pool in pools)
        return attention.attend(self.index, query.transpose(0, 1), keys, values, inputs, how)


Added = tuple[torch.Tensor | None, torch.Tensor | None]  # parts of a product, and their bias if it is missing


def _normed(x: torch.Tensor, added: Added, norm: Any) -> torch.Tensor:
    return normed(x, *added, norm.weight, norm.variance_epsilon)


class TritonPass:
    """A whole model's forward pass."""

    def __init__(self, model: Any) -> None:
        decoder = model.base_model
        self.embedding, self.rotary = decoder.embed_tokens, decoder.rotary_emb
        self.layers = [TritonLayer(layer) for layer in decoder.layers]
        self.norm, self.head = decoder.norm, model.get_output_embeddings()

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, **_: object
    ) -> CausalLMOutputWithPast:
        x = self.embedding(input_ids)
        cosines, sines = self.rotary(x, position_ids)
        positions = cosines[0].contiguous(), sines[0].contiguous()
        x = x[0].contiguous()
        added: Added = (None, None)
        for layer in self.layers:
            added = layer(x, added, positions)
        return CausalLMOutputWithPast(logits=self.head(_normed(x, added, self.norm)[logits_to_keep])[None])


def run_by_kernels(model: Any) -> bool:
    """Lets a model whose linear layers are TritonLinear run by this pass, if it is of the usual kind; returns
    whether. The check of the engine tells whether that is right."""
    if not is_usual(model, PackedColumns) or not all(map(_fits, model.base_model.layers)):
        return False
    for layer in model.base_model.layers:
        layer.mlp.gate_proj.together.linear.take_turns()
    model.forward = TritonPass(model)
    return True


def _fits(layer: Any) -> bool:
    attention, mlp = layer.self_attn, layer.mlp
    joined = attention.q_proj.together.linear, mlp.gate_proj.together.linear
    norms = layer.input_layernorm, layer.post_attention_layernorm
    return (
        type(mlp.act_fn).__name__ in SILU
        and all(isinstance(each, TritonLinear) for each in (*joined, attention.o_proj, mlp.down_proj))
        and all(hasattr(norm, "variance_epsilon") for norm in norms)
        and mlp.gate_proj.out_features % GROUP == 0
        and attention.head_dim % 2 == 0
    )
