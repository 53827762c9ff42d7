"""Shapes rows of logits as their parameters say. What becomes of a row, and what it costs, is its own affair.

Every step leaves finite logits where it finds some, but for the -inf of tokens that top_k, top_p or min_p
rule out: an infinity would become NaN in the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from outrider.grammar import Allowed
from outrider.sampling.cuts import beyond_mass, kth_largest
from outrider.sampling.params import SamplingParams
from outrider.sampling.token_counts import TokenCounts
from outrider.uploading import uploaded

SMALLEST_TEMPERATURE = 1e-30  # below it float32 divides by zero; as good as greedy already
MOST = torch.finfo(torch.float32).max

Ids = npt.NDArray[np.int64]
Penalties = tuple[int, SamplingParams, Ids, npt.NDArray[np.float32]]
"""A row, its parameters, ids [n] and what to subtract of the logit of each [n]."""


class Row(NamedTuple):
    """One position to draw a token for."""

    params: SamplingParams
    position: int  # absolute position of the token drawn (prompt counted)
    history: TokenCounts | None  # of the committed tokens before it; needed only where params.penalized
    drafted: Sequence[int]  # drafted tokens between those and this position; they count as output
    after: int | None = None  # where given, the row is needed only if the row before it draws this token
    allowed: Allowed | None = None  # where given, what its session's grammar lets come here


def change(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Applies penalties, bias and grammars to logits [R, V] float32, in place: what a grammar does not allow
    is -inf."""
    _penalize(logits, rows)
    _add_bias(logits, rows)
    for index, row in enumerate(rows):
        if row.allowed is not None and (mask := row.allowed()) is not None:
            bits = np.unpackbits(mask, count=logits.shape[1], bitorder="little")
            logits[index].masked_fill_(uploaded(bits == 0, logits.device), -torch.inf)


def shape(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Returns log p' [R, V] up to a constant a row: -inf where a token is ruled out, 0 at the likeliest."""
    of_rows = [max(row.params.temperature, SMALLEST_TEMPERATURE) for row in rows]
    temperature = uploaded(np.array(of_rows, np.float32), logits.device)
    most = logits.amax(-1, keepdim=True)
    shaped = ((logits - most) / temperature[:, None]).clamp_(-MOST, MOST)
    for params, which in _by_params(rows):
        if params.cut:
            cut = _cut_on_cpu if logits.device.type == "cpu" else _cut_on_device
            shaped[which] = cut(shaped[which], params)
    return shaped


def _by_params(rows: Sequence[Row]) -> list[tuple[SamplingParams, list[int]]]:
    """Returns the rows of each of the parameters that occur: those of a session's rows are one object."""
    found: dict[int, tuple[SamplingParams, list[int]]] = {}
    for index, row in enumerate(rows):
        found.setdefault(id(row.params), (row.params, []))[1].append(index)
    return list(found.values())


def _cut_on_cpu(log_p: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Rules tokens of rows [r, V] out, in place, and returns them."""
    floor = np.float32(math.log(params.min_p)) if params.min_p > 0.0 else None
    for row in log_p.numpy():
        if 0 < params.top_k < len(row):
            row[row < kth_largest(row, params.top_k)] = -np.inf
        if params.top_p < 1.0:
            row[beyond_mass(row, params.top_p)] = -np.inf
        if floor is not None:
            row[row < floor] = -np.inf
    return log_p


def _cut_on_device(log_p: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Does the same, for rows together: there a sort costs less than the host's part of anything else."""
    if 0 < params.top_k < log_p.shape[1]:
        least = log_p.topk(params.top_k).values[:, -1:]
        log_p.masked_fill_(log_p < least, -torch.inf)
    if params.top_p < 1.0:
        ordered, ids = torch.sort(log_p, dim=-1, descending=True, stable=True)
        mass = ordered.double().softmax(-1)
        before = mass.cumsum(-1) - mass
        log_p.scatter_(1, ids, ordered.masked_fill_(before >= params.top_p, -torch.inf))
    if params.min_p > 0.0:
        log_p.masked_fill_(log_p < math.log(params.min_p), -torch.inf)
    return log_p


def _penalize(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    """Changes the logits of the tokens that came before: of those that are committed, then of the drafted
    ones, which count more often than those say."""
    committed, drafted = [], []
    subtracted: dict[int, npt.NDArray[np.float32]] = {}  # by history: once a session
    for index, row in enumerate(rows):
        params = row.params
        if not params.penalized:
            continue
        if row.history is None:
            raise ValueError("a row with penalties needs its history")
        ids, counts = row.history.committed
        if id(row.history) not in subtracted:
            subtracted[id(row.history)] = penalty_of(params, counts)
        committed.append((index, params, ids, subtracted[id(row.history)]))
        if row.drafted:
            ids, counts = row.history.with_drafted(row.drafted)
            drafted.append((index, params, ids, penalty_of(params, counts)))
    changes = [_penalized(logits, entries) for entries in (committed, drafted) if entries]
    for row_of, token, value in changes:
        logits[row_of, token] = value


def penalty_of(params: SamplingParams, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Returns what frequency and presence penalty subtract of logits of tokens that occur so often: [n]."""
    less = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return less.astype(np.float32)


def _penalized(
    logits: torch.Tensor, entries: Sequence[Penalties]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns rows, ids and their new logits [n], of the ids that there are."""
    sizes = [len(ids) for _, _, ids, _ in entries]
    row_of = np.repeat([row for row, _, _, _ in entries], sizes)
    factor = np.repeat(np.array([p.repetition_penalty for _, p, _, _ in entries], np.float32), sizes)
    token = np.concatenate([ids for _, _, ids, _ in entries])
    less = np.concatenate([less for _, _, _, less in entries])
    row_of_, token_, factor_, less_ = _there(logits, row_of, token, factor, less)
    value = logits[row_of_, token_]
    value = torch.where(value > 0, value / factor_, value * factor_) - less_
    return row_of_, token_, value.clamp_(-MOST, MOST)


def _add_bias(logits: torch.Tensor, rows: Sequence[Row]) -> None:
    biased = [(index, row.params.biases) for index, row in enumerate(rows) if row.params.biases]
    if not biased:
        return
    row_of = np.repeat([row for row, _ in biased], [len(bias) for _, bias in biased])
    token = np.concatenate([np.frombuffer(bias.ids, np.int64) for _, bias in biased])
    added = np.concatenate([np.frombuffer(bias.added, np.float32) for _, bias in biased])
    row_of_, token_, added_ = _there(logits, row_of, token, added)
    logits[row_of_, token_] = (logits[row_of_, token_] + added_).clamp_(-MOST, MOST)


def _there(
    logits: torch.Tensor, row_of: Ids, token: Ids, *columns: npt.NDArray[np.float32]
) -> list[torch.Tensor]:
    """Returns the columns on the logits' device, without ids that cannot be drawn: a prompt may hold some."""
    found: list[npt.NDArray[Any]] = [row_of, token, *columns]
    if token.max(initial=0) >= logits.shape[1]:
        there = token < logits.shape[1]
        found = [column[there] for column in found]
    return [uploaded(column, logits.device) for column in found]
