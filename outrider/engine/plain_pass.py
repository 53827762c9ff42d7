"""The forward pass of the usual decoder in fewer operations: on a CPU each costs its dispatch.

What lies between the products of a layer begins with cold caches, since weights have just passed through
them: its time is that of the number of operations, and of the Python around them. Models whose layers are a
norm, attention with rotated queries and keys, a norm and a gated MLP run by the pass below. It rounds as
their own code does: a trial shows the same bits, or the model's own code stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from outrider.engine.activations import PlacelessActivation, silu, silu_of_rows
from outrider.engine.attention import RUNNING, LayerAttention, run_model
from outrider.engine.gathered_attention import BLOCK_SIZE, GatheredAttention
from outrider.engine.native_attention import NativeAttention, keeping_bits
from outrider.engine.native_decoder import NativeDecoder, Rotations
from outrider.engine.native_layers import DecoderLayer, Layer, NativeLinear, run, run_gated
from outrider.engine.norms import ShortNorm
from outrider.engine.packed import PackedColumns
from outrider.engine.step_inputs import Work

# Decoder layers of transformers' that are exactly this.
USUAL = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")
PROBED = (1, 2, 33)  # tokens of the steps of a trial
ALIKE = (
    0.05  # how far the logits of native code may lie from those of the model's own code, as a share of their
)
# length: in 8 bits a number that is rounded otherwise takes others with it

Positions = tuple[torch.Tensor, torch.Tensor]  # [T, 1, D] cosines, and sines with the sign of each half


class PlainLayer:
    """A decoder layer's forward pass."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        width = attention.head_dim
        queries, keys = attention.q_proj.out_features // width, attention.k_proj.out_features // width
        self.index: int = attention.layer_idx
        self.how = LayerAttention(queries, keys, width, width, None, attention.scaling, None)
        self.first_norm = layer.input_layernorm.forward
        self.second_norm = layer.post_attention_layernorm.forward
        self.query_key_value = attention.q_proj.together.linear.forward
        self.head_norms = _head_norms(attention)
        self.output = attention.o_proj.forward
        self.gate_up = mlp.gate_proj.together.linear.forward
        self.down = mlp.down_proj.forward
        self.activation = mlp.act_fn.function if isinstance(mlp.act_fn, PlacelessActivation) else mlp.act_fn

    def __call__(self, x: torch.Tensor, positions: Positions) -> torch.Tensor:
        """x [T, H] is left as it is."""
        x = self.output(self._attended(self.first_norm(x), positions)).add_(x)
        gate, up = self.gate_up(self.second_norm(x)).chunk(2, -1)
        found: torch.Tensor = self.down(self.activation(gate).mul_(up)).add_(x)
        return found

    def _attended(self, x: torch.Tensor, positions: Positions) -> torch.Tensor:
        how, (cosines, sines) = self.how, positions
        heads = self.query_key_value(x).view(x.shape[0], -1, how.width)  # [T, Hq + 2 Hkv, D]
        turned = heads[:, : how.query_heads + how.key_heads]
        if self.head_norms:
            each = zip(self.head_norms, turned.split((how.query_heads, how.key_heads), 1), strict=True)
            turned = torch.cat([norm(some) for norm, some in each], 1)
        turned = (turned * cosines).add_(turned.roll(how.width // 2, -1).mul_(sines)).transpose(0, 1)
        step = RUNNING.get()
        step.layers[self.index] = how
        attended = step.attention.attend(
            self.index,
            turned[: how.query_heads],
            turned[how.query_heads :],
            heads[:, how.query_heads + how.key_heads :].transpose(0, 1),
            step.inputs,
            how,
        )
        return attended.reshape(x.shape[0], -1)


class NativeLayer(PlainLayer):
    """A layer in three calls of native code, which do the norms and the activation, too; all of them are one
    call beside native attention: see PlainPass."""

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self._inner = _behind(layer.input_layernorm, self.query_key_value.__self__)
        self._both = _behind(layer.post_attention_layernorm, self.gate_up.__self__)
        self._output, self._down = layer.self_attn.o_proj.layer, layer.mlp.down_proj.layer
        linears = self._inner, self._output, self._both, self._down
        self.native = DecoderLayer.of(linears, self.head_norms)
        self.first_norm = nn.Identity().forward
        self.query_key_value = lambda x: run(self._inner, x)

    @classmethod
    def fits(cls, layer: Any) -> bool:
        attention, mlp = layer.self_attn, layer.mlp
        joined = attention.q_proj.together.linear, mlp.gate_proj.together.linear
        head_norms = _head_norms(attention)
        return (
            all(isinstance(norm, ShortNorm) for norm in head_norms)
            and len({norm.eps for norm in head_norms}) < 2
            and all(isinstance(each, NativeLinear) for each in (*joined, attention.o_proj, mlp.down_proj))
            and all(
                isinstance(norm, nn.Identity) or linear.may_stand_behind(norm)
                for norm, linear in zip(
                    (layer.input_layernorm, layer.post_attention_layernorm), joined, strict=True
                )
            )
            and isinstance(mlp.act_fn, PlacelessActivation)
            and mlp.act_fn.function in (silu, silu_of_rows)
        )

    def __call__(self, x: torch.Tensor, positions: Positions) -> torch.Tensor:
        attended = self._attended(x, positions)
        return run_gated(self._both, self._down, run(self._output, attended, x))


def _head_norms(attention: Any) -> list[Any]:
    """Returns the norms of heads of queries and of keys, if there are any."""
    return [getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)]


def _behind(norm: nn.Module, linear: NativeLinear) -> Layer:
    return linear.after(norm) if isinstance(norm, ShortNorm) else linear.layer


class Logits(NamedTuple):
    """A model's output, as far as it is read."""

    logits: torch.Tensor  # [1, n, V]


class PlainPass:
    """A whole model's forward pass."""

    def __init__(self, model: Any, layers: Sequence[PlainLayer]) -> None:
        decoder = model.base_model
        self.embedding, self.rotary = decoder.embed_tokens, decoder.rotary_emb
        self.layers = layers
        self.norm, self.head = decoder.norm, model.get_output_embeddings()
        self._last_norm, self._kept = decoder.norm, torch.empty(0)
        head = None
        if isinstance(self.head, NativeLinear) and self.head.may_stand_behind(self.norm):
            head = _behind(self.norm, self.head)
            self.norm, self.head = nn.Identity(), partial(run, head)
        width = layers[0].how.width
        self.signs = torch.ones(width)
        self.signs[: width // 2] = -1
        self._decoder: NativeDecoder | None = None
        native = [layer for layer in layers if isinstance(layer, NativeLayer)]
        if len(native) == len(layers) and NativeDecoder.fits(self.embedding, self.rotary):
            hows, rotations = {each.index: each.how for each in native}, Rotations(self.rotary, width)
            every = [each.native for each in native]
            self._decoder = NativeDecoder(self.embedding, rotations, every, hows, head)

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_to_keep: torch.Tensor, **_: object
    ) -> Logits:
        step = RUNNING.get()
        if self._decoder is not None and isinstance(step.attention, NativeAttention):
            step.layers.update(self._decoder.hows)
            self._kept, logits = self._decoder.run(step.attention, step.inputs)
            return Logits((logits if logits.shape[1] else self.head(self.norm(self._kept)))[None])
        x = self.embedding(input_ids)
        cosines, sines = self.rotary(x, position_ids)
        positions = cosines[0, :, None], (sines[0] * self.signs)[:, None]
        x = x[0]
        for layer in self.layers:
            x = layer(x, positions)
        self._kept = x[logits_to_keep]
        return Logits(self.head(self.norm(self._kept))[None])

    @property
    def states(self) -> torch.Tensor:
        """Returns what the output layer was given in the last pass: [n, H]."""
        found: torch.Tensor = self._last_norm(self._kept)
        return found


def run_plainly(model: Any) -> bool:
    """Lets a packed model run by this pass, if it is of the usual kind and gets the same bits by it; returns
    whether."""
    if not is_usual(model, PackedColumns):
        return False
    activations = [layer.mlp.act_fn for layer in model.base_model.layers]
    gates = [each for each in activations if isinstance(each, PlacelessActivation) and each.function is silu]
    for gate in gates:
        gate.function = silu_of_rows
    native = all(NativeLayer.fits(layer) for layer in model.base_model.layers)
    attention = keeping_bits(model, -(-sum(PROBED) // BLOCK_SIZE), native)
    own = _trial(model, attention), dict(attention.layers)
    kind = NativeLayer if native else PlainLayer
    model.forward = PlainPass(model, [kind(layer) for layer in model.base_model.layers])
    plain = _trial(model, attention), dict(attention.layers)
    same = _alike if native else torch.equal
    if own[1] == plain[1] and all(map(same, own[0], plain[0])):
        return True
    del model.forward
    for gate in gates:
        gate.function = silu
    return False


def runs_plainly(model: Any) -> bool:
    """Returns whether a pass of ours stands in the place of the model's own code."""
    return "forward" in vars(model)


def is_usual(model: Any, linear: type[nn.Module]) -> bool:
    """Returns whether a model is such a decoder, whose linear layers that are given one tensor are of this
    type."""
    decoder = model.base_model
    names = {name for name, _ in decoder.named_children()}
    usual = names == {"embed_tokens", "layers", "norm", "rotary_emb"} and len(decoder.layers) > 0
    return usual and all(
        type(layer).__name__ in USUAL
        and isinstance(layer.self_attn.q_proj, linear)
        and isinstance(layer.mlp.gate_proj, linear)
        for layer in decoder.layers
    )


def _alike(some: torch.Tensor, others: torch.Tensor) -> bool:
    return bool((some - others).norm() <= ALIKE * some.norm())


def _trial(model: Any, attention: GatheredAttention) -> list[torch.Tensor]:
    """Returns the logits of some tokens, read in a few steps."""
    generator, start, found = torch.Generator().manual_seed(8), 0, []
    for count in PROBED:
        tokens = torch.randint(model.config.get_text_config().vocab_size, (count,), generator=generator)
        work = Work(range(attention.pools.num_blocks), start, tokens.tolist(), count)
        found.append(run_model(model, attention, attention.prepare([work])))
        start += count
    return found
