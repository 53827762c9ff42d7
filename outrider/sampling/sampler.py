"""Draws tokens from logits: one pure function, the same for drafter and verifier.

A row's token depends on its logits, its parameters, its position and what comes before it in its session; on
no other row. With the noise keyed by (seed, position, token id), argmax of log p' + Gumbel is an exact sample
of p'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from outrider.sampling.noise import gumbel, row_key
from outrider.sampling.noisy_argmax import Ids, NoisyArgmax, noisy_argmax, row_keys, rows_at_once
from outrider.sampling.params import SamplingParams
from outrider.sampling.ranked import Ranked
from outrider.sampling.token_counts import TokenCounts
from outrider.sampling.waves import in_waves

__all__ = ["Ranked", "Row", "TokenCounts", "draw", "rank"]

SMALLEST_TEMPERATURE = 1e-30  # below it float32 divides by zero; as good as greedy already
ROUNDS = 2  # of rows_at_once, from which on more rows in a draw do not make each of them cheaper


class Row(NamedTuple):
    """One position to draw a token for."""

    params: SamplingParams
    position: int  # absolute position of the token drawn (prompt counted)
    history: TokenCounts | None  # of the committed tokens before it; needed only where params.penalized
    drafted: Sequence[int]  # drafted tokens between those and this position; they count as output
    after: int | None = None  # where given, the row is needed only if the row before it draws this token


def draw(logits: torch.Tensor, rows: Sequence[Row], vocab_size: int | None = None) -> torch.Tensor:
    """Returns one token for each row of logits [R, V] float32, which stay as they are: [R] int64.

    In this order: repetition penalty (prompt and output), frequency and presence penalty (output), logit
    bias, temperature, top_k (ties with the k-th stay), top_p (the smallest set of at least that mass), min_p,
    noise. Greedy rows stop after the bias. Only ids below `vocab_size`, where given, are drawn. Of rows that
    are not needed some are left out: waves.NOT_DRAWN."""
    if vocab_size is not None:
        logits = logits[:, :vocab_size]
    kinds = _kinds(rows)
    changed = any(params.penalized or params.logit_bias for params in kinds)
    if not changed and all(params.greedy for params in kinds):
        return _argmax(logits)
    at_once = ROUNDS * rows_at_once(logits.shape[1])
    if (
        logits.device.type != "cpu"  # where the host would have to wait for what the rows before drew
        or len(rows) <= at_once
        or all(row.after is None for row in rows)
    ):
        return _draw(logits, rows)
    draw_some: Callable[[Ids], Ids]
    if changed or any(params.greedy or _shapes(params) for params in kinds):

        def draw_some(wave: Ids) -> Ids:
            return _draw(logits[torch.from_numpy(wave)], [rows[index] for index in wave]).numpy()

    else:
        draw_some = NoisyArgmax(logits.numpy(), _temperatures(rows), _keys(rows)).draw
    return torch.tensor(in_waves([row.after for row in rows], at_once, draw_some))


def rank(
    logits: torch.Tensor, rows: Sequence[Row], count: int, vocab_size: int | None = None
) -> list[Ranked]:
    """Returns the `count` best of each row of logits [R, V], by what `draw` takes the largest of."""
    if vocab_size is not None:
        logits = logits[:, :vocab_size]
    scores = logits.clone()
    _penalize(scores, rows)
    _add_bias(scores, rows)
    sampled = [index for index, row in enumerate(rows) if not row.params.greedy]
    if sampled:
        index = torch.tensor(sampled, device=logits.device)
        some = [rows[i] for i in sampled]
        keys = [row_key(row.params.seed, row.position) for row in some]
        shaped = _shape(scores[index], some)
        scores[index] = shaped + gumbel(keys, shaped.shape[1], shaped.device)
    best = scores.topk(min(count, scores.shape[1]))
    shares = (best.values - scores.logsumexp(-1, keepdim=True)).exp()
    return [
        Ranked(tuple(ids), tuple(of)) for ids, of in zip(best.indices.tolist(), shares.tolist(), strict=True)
    ]


def _kinds(rows: Sequence[Row]) -> list[SamplingParams]:
    """Returns the parameters that occur: those of a session's rows are one object."""
    return list({id(row.params): row.params for row in rows}.values())


def _shapes(params: SamplingParams) -> bool:
    """Returns True if all of a row's logits together decide which tokens are ruled out."""
    return bool(params.top_k) or params.top_p < 1.0 or params.min_p > 0.0


def _draw(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Returns what `draw` does for all of the rows."""
    kinds = _kinds(rows)
    if any(params.penalized or params.logit_bias for params in kinds):
        logits = logits.clone()
        _penalize(logits, rows)
        _add_bias(logits, rows)
    if all(params.greedy for params in kinds):
        return _argmax(logits)
    sampled = [index for index, row in enumerate(rows) if not row.params.greedy]
    if len(sampled) == len(rows):
        return _noisy_argmax(logits, rows)
    tokens = _argmax(logits)
    index = torch.tensor(sampled, device=logits.device)
    tokens[index] = _noisy_argmax(logits[index], [rows[i] for i in sampled])
    return tokens


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """Returns the argmax. On a CPU numpy takes a fraction of torch's time; of equals both take the first."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.numpy().argmax(1))


def _noisy_argmax(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Returns (_shape(logits, rows) + noise).argmax(-1)."""
    if logits.device.type != "cpu":
        keys = [row_key(row.params.seed, row.position) for row in rows]
        return (_shape(logits, rows) + gumbel(keys, logits.shape[1], logits.device)).argmax(-1)
    temperature = _temperatures(rows)
    if any(_shapes(params) for params in _kinds(rows)):
        logits, temperature = _shape(logits, rows), np.ones_like(temperature)
    return torch.from_numpy(noisy_argmax(logits.numpy(), temperature, _keys(rows)))


def _temperatures(rows: Sequence[Row]) -> npt.NDArray[np.float32]:
    return np.array([max(row.params.temperature, SMALLEST_TEMPERATURE) for row in rows], np.float32)


def _keys(rows: Sequence[Row]) -> npt.NDArray[np.uint64]:
    return row_keys([row.params.seed for row in rows], [row.position for row in rows])


def _penalize(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Changes, in place, the logits of the tokens that came before."""
    vocab = logits.shape[1]
    entries = []
    for index, row in enumerate(rows):
        params = row.params
        if not params.penalized:
            continue
        if row.history is None:
            raise ValueError("a row with penalties needs its history")
        ids, counts = row.history.with_drafted(row.drafted)
        ids, counts = ids[ids < vocab], counts[ids < vocab]
        subtract = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        entries.append(
            (np.full_like(ids, index), ids, np.full(len(ids), params.repetition_penalty), subtract)
        )
    if not entries:
        return
    row_of, token, divide, less = (
        torch.from_numpy(np.concatenate(column)) for column in zip(*entries, strict=True)
    )
    row_of, token = row_of.to(logits.device), token.to(logits.device)
    factor = divide.to(logits)
    value = logits[row_of, token]
    value = torch.where(value > 0, value / factor, value * factor) - less.to(logits)
    logits[row_of, token] = value


def _add_bias(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    vocab = logits.shape[1]
    entries = [
        (index, token, bias)
        for index, row in enumerate(rows)
        for token, bias in row.params.logit_bias.items()
        if token < vocab
    ]
    if entries:
        row_of, token, bias = (
            torch.tensor(column, device=logits.device) for column in zip(*entries, strict=True)
        )
        logits[row_of, token] += bias.to(logits)


def _shape(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Returns log p' up to a constant a row: -inf where a token is ruled out, 0 at the likeliest."""
    params = [row.params for row in rows]
    temperature = _column([max(p.temperature, SMALLEST_TEMPERATURE) for p in params], logits)
    shaped = (logits - logits.amax(-1, keepdim=True)) / temperature
    vocab = logits.shape[1]
    limits = [min(p.top_k, vocab) if p.top_k else vocab for p in params]
    most = max((limit for limit in limits if limit < vocab), default=0)
    if most:
        best = shaped.topk(most).values  # [R, most], largest first
        limit = torch.tensor(limits, device=logits.device)[:, None]  # [R, 1]
        least = best.gather(1, limit.clamp(max=most) - 1).masked_fill_(limit == vocab, -torch.inf)
        shaped.masked_fill_(shaped < least, -torch.inf)
    if any(p.top_p < 1.0 for p in params):
        chosen = torch.tensor([i for i, p in enumerate(params) if p.top_p < 1.0], device=logits.device)
        top_p = torch.tensor(
            [p.top_p for p in params if p.top_p < 1.0], dtype=torch.float64, device=logits.device
        )
        shaped[chosen] = _within_mass(shaped[chosen], top_p[:, None])
    if any(p.min_p > 0.0 for p in params):
        floor = _column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], logits)
        shaped.masked_fill_(shaped < floor, -torch.inf)
    return shaped


def _within_mass(shaped: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps a token while the likelier ones have less than top_p [R, 1] together; of equal ones the lower id
    first."""
    ordered, ids = torch.sort(shaped, dim=-1, descending=True, stable=True)
    mass = ordered.double().softmax(-1)
    before = mass.cumsum(-1) - mass
    ordered = ordered.masked_fill(before >= top_p, -torch.inf)
    return torch.empty_like(shaped).scatter_(1, ids, ordered)


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]  # [R, 1]
