"""Attention to keys that have been brought together, by torch's own function, so that rows keep their bits.

What a token gets must not depend on the rows beside it: see step_inputs for how the calls are cut.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from outrider.engine.activations import sigmoid
from outrider.engine.attention import LayerAttention
from outrider.engine.kv_pools import KvPools
from outrider.engine.step_inputs import StepInputs


def attend(
    pools: KvPools,
    layer: int,
    query: torch.Tensor,  # [Hq, T, D]
    key: torch.Tensor,  # [Hkv, T, D]
    value: torch.Tensor,  # [Hkv, T, Dv]
    inputs: StepInputs,
    how: LayerAttention,
    sinks: torch.Tensor | None = None,  # [Hq]
    picked: torch.Tensor | None = None,  # [G, T, K] of bool
) -> torch.Tensor:
    """Writes the step's keys and values, then lets each token see its session's, or the picked ones among
    them: [T, Hq, Dv]."""
    pools.copy_slots(layer, inputs.moves)
    pools.write(layer, key, value, inputs.slots)
    queries = query.transpose(0, 1)  # [T, Hq, D]
    plain = not how.fused or (how.sinks and query.device.type != "cpu")
    attend_rows = _explicit if plain else _alone if inputs.row_batching is None else _batched
    tiles = inputs.tiles(how.view)
    if len(tiles) == 1 and len(tiles[0].calls) == 1:
        keys, values = pools.gather(layer, tiles[0].blocks, tiles[0].sessions)  # [S, Hkv, K, W]
        mask = _only(picked, tiles[0].calls[0][2], how)
        return attend_rows(queries, keys, values, mask, how, sinks)
    out = query.new_empty(queries.shape[0], how.query_heads, how.value_width)  # [T, Hq, Dv]
    for tile in tiles:
        keys, values = pools.gather(layer, tile.blocks, tile.sessions)
        for tokens, sessions, mask in tile.calls:
            mask = _only(None if picked is None else picked[:, tokens], mask, how)
            out[tokens] = attend_rows(queries[tokens], keys[sessions], values[sessions], mask, how, sinks)
    return out


def _only(picked: torch.Tensor | None, mask: torch.Tensor, how: LayerAttention) -> torch.Tensor:
    """Returns the mask [n, 1, R, K] of a call in which its tokens see these keys [G, T, at least K] alone:
    [n, H, R, K]. G is 1, or there is a group for each key head."""
    if picked is None:
        return mask
    entries, _, rows, keys = mask.shape
    groups, tokens = len(picked), picked.shape[1] // entries
    together = rows >= tokens * how.sharing  # rows of all query heads that share a key head
    of_rows = torch.arange(rows, device=mask.device) // (how.sharing if together else 1)
    seen = picked[:, :, :keys].reshape(groups, entries, tokens, keys)[:, :, of_rows.clamp_(max=tokens - 1)]
    if groups > 1 and not together:
        seen = seen.repeat_interleave(how.sharing, 0)
    return mask.masked_fill(~seen.transpose(0, 1), -torch.inf)


def _alone(
    query: torch.Tensor,  # [n, Hq, D]
    key: torch.Tensor,  # [1 or n, Hkv, K, W >= D]
    value: torch.Tensor,
    mask: torch.Tensor,  # [n, 1 or Hq, 1, K]
    how: LayerAttention,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attends with each row in a product of its own."""
    n = query.shape[0]
    if key.shape[0] != n:
        key, value = key.expand(n, -1, -1, -1), value.expand(n, -1, -1, -1)
    query = F.pad(query, (0, key.shape[3] - how.width))[:, :, None]
    attended, sums = _fused(query, key, value, mask, how)  # [n, Hq, 1, W], [n, Hq, 1]
    attended = attended[:, :, 0, : how.width]
    return attended if sinks is None else _beside(attended, sums[:, :, 0], sinks)


def _batched(
    query: torch.Tensor,  # [n * t, Hq, D] t tokens of each of n sessions
    key: torch.Tensor,  # [n, Hkv, K, W >= D]
    value: torch.Tensor,
    mask: torch.Tensor,  # [n, 1 or the products of a token, R, K]
    how: LayerAttention,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attends with all rows that share a key head in one product: R rows are those of t tokens and the query
    heads of the key head, and what fills them up. Where R is less than that, each query head has a
    product."""
    n, _, filled, _ = mask.shape
    tokens = query.shape[0] // n
    sharing = how.sharing if filled >= tokens * how.sharing else 1
    heads, rows = how.query_heads // sharing, tokens * sharing
    per_head = query.view(n, tokens, heads, sharing, how.width).transpose(1, 2)
    padded = query.new_zeros(n, heads, filled, key.shape[3])
    padded[:, :, :rows, : how.width].view(per_head.shape).copy_(per_head)
    attended, sums = _fused(padded, key, value, mask, how)
    attended = attended[:, :, :rows, : how.width]  # [n, heads, rows, D]
    per_token = attended.view(n, heads, tokens, sharing, how.width).transpose(1, 2)
    per_token = per_token.reshape(-1, how.query_heads, how.width)
    if sinks is None:
        return per_token
    sums = sums[:, :, :rows].reshape(n, heads, tokens, sharing).transpose(1, 2)
    return _beside(per_token, sums.reshape(-1, how.query_heads), sinks)


def _fused(
    query: torch.Tensor,  # [n, H, R, W]
    key: torch.Tensor,  # [n, Hkv, K, W]
    value: torch.Tensor,
    mask: torch.Tensor,  # [n, 1 or the products of a token, R, K]
    how: LayerAttention,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what torch's kernel gives [n, H, R, W], and, if the layer has sinks, the logarithm of each
    row's sum [n, H, R]."""
    if how.sinks:
        attended, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=how.scale
        )
        return attended, sums
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=how.scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return attended, attended


def _beside(
    attended: torch.Tensor,  # [T, Hq, D]
    sums: torch.Tensor,  # [T, Hq] logarithms of the sums that weights were divided by
    sinks: torch.Tensor,  # [Hq]
) -> torch.Tensor:
    """Returns what the weights give if the softmax has a column of the sinks, which attends to nothing."""
    shares = sigmoid(sums - sinks.float())
    return attended * shares[..., None].to(attended.dtype)


def _explicit(
    query: torch.Tensor,  # [n, Hq, D]
    key: torch.Tensor,  # [1 or n, Hkv, K, W >= D]
    value: torch.Tensor,  # [1 or n, Hkv, K, W >= Dv]
    mask: torch.Tensor,  # [n, 1 or Hq, 1, K]
    how: LayerAttention,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Does what the fused kernel cannot: capped scores, values of another width than keys. One row a
    product."""
    n, shared = query.shape[0], how.sharing
    per_head = query.reshape(n, how.key_heads, shared, how.width)
    out = query.new_empty(n, how.key_heads, shared, how.value_width)
    for session in range(key.shape[0]):
        rows = slice(None) if key.shape[0] == 1 else slice(session, session + 1)
        for head in range(how.key_heads):
            q = per_head[rows, head].reshape(-1, 1, how.width)  # [r, 1, D]
            scores = _product(q, key[session, head, :, : how.width].T) * how.scale  # [r, 1, K]
            if how.softcap is not None:
                scores = torch.tanh(scores / how.softcap) * how.softcap
            of_head = mask[rows, head * shared if mask.shape[1] > 1 else 0]  # [r, 1, K]
            hidden = of_head.expand(-1, shared, -1).reshape(scores.shape)
            scores = scores + hidden
            if sinks is not None:
                column = sinks[head * shared : (head + 1) * shared].to(scores.dtype).repeat(len(q) // shared)
                scores = torch.cat([scores, column[:, None, None]], dim=-1)
            weights = scores.softmax(-1, dtype=torch.float32)[:, :, : hidden.shape[-1]].to(value.dtype)
            attended = _product(weights, value[session, head, :, : how.value_width])  # [r, 1, Dv]
            out[rows, head] = attended.view(-1, shared, how.value_width)
    return out.view(n, how.query_heads, how.value_width)


def _product(rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
    """Returns [r, 1, m]: the product of each row [r, 1, n] by itself with what they share [n, m]. On a CPU it
    is computed in float32: in 16 bits a row's product may depend on how many there are, one time in
    thousands, which no trial finds."""
    if rows.device.type == "cpu":
        found = torch.bmm(rows.float(), shared.float().expand(len(rows), -1, -1))
        return found.to(rows.dtype)
    return torch.bmm(rows, shared.expand(len(rows), -1, -1))
