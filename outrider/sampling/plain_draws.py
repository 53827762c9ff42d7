"""Draws tokens by operations of numpy and torch, on any device: what sampler.py gives without kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.sampling.how import How, how
from outrider.sampling.noise import gumbel, gumbel_at, row_key
from outrider.sampling.noisy_argmax import Ids, NoisyArgmax, noisy_argmax, row_keys, rows_at_once
from outrider.sampling.ranked import Ranked
from outrider.sampling.shaping import SMALLEST_TEMPERATURE, Row, change, shape
from outrider.sampling.waves import in_waves

ROUNDS = 2  # of rows_at_once, from which on more rows in a draw do not make each of them cheaper


def draw(logits: torch.Tensor, rows: Sequence[Row], vocab_size: int | None) -> torch.Tensor:
    """Does what sampler.draw does."""
    if vocab_size is not None:
        logits = logits[:, :vocab_size]
    ways = {id(row.params): how(row.params) for row in rows}
    hows = np.array([ways[id(row.params)] if row.allowed is None else How.WHOLE for row in rows])
    if logits.device.type != "cpu":  # where the host would have to wait for what the rows before drew
        return _draw_on_device(logits, rows, hows)
    if (hows == How.GREEDY).all():
        return torch.from_numpy(logits.numpy().argmax(1))  # a fraction of torch's time; equals: the first
    draws = _Draws(logits, rows, hows)
    at_once = ROUNDS * rows_at_once(logits.shape[1])
    if len(rows) <= at_once or all(row.after is None for row in rows):
        return torch.from_numpy(draws.draw(np.arange(len(rows))))
    return torch.tensor(in_waves([row.after for row in rows], at_once, draws.draw))


def rank(
    logits: torch.Tensor,
    rows: Sequence[Row],
    count: int,
    vocab_size: int | None,
    vocabulary: torch.Tensor | None,
) -> list[Ranked]:
    """Does what sampler.rank does, but leaves in what can never be drawn."""
    if vocabulary is None:
        scores = _scored(logits[:, :vocab_size].clone(), rows)
    else:
        scores, vocabulary = _scored_of(logits, rows, vocab_size, vocabulary)
    best = scores.topk(min(count, scores.shape[1]))
    ids_of = best.indices if vocabulary is None else vocabulary[best.indices]
    shares = (best.values - scores.logsumexp(-1, keepdim=True)).exp()
    return [Ranked(tuple(ids), tuple(of)) for ids, of in zip(ids_of.tolist(), shares.tolist(), strict=True)]


class _Draws:
    """The draws of some rows on a CPU, of which any may be asked for."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[Row], hows: npt.NDArray[np.int64]) -> None:
        self._logits, self._rows, self._hows = logits, rows, hows
        noisy = (hows == How.NOISY).nonzero()[0]
        self._place = np.zeros(len(rows), np.int64)  # of each among the noisy ones
        self._place[noisy] = np.arange(len(noisy))
        if len(noisy):
            some = [rows[index] for index in noisy]
            temperature = [max(row.params.temperature, SMALLEST_TEMPERATURE) for row in some]
            self._noisy = NoisyArgmax(logits.numpy(), np.array(temperature, np.float32), _keys(some), noisy)

    def draw(self, which: Ids) -> Ids:
        """Returns the tokens [n] of the rows [n], which rise."""
        hows, tokens = self._hows[which], np.empty(len(which), np.int64)
        logits = self._logits.numpy()
        for place in (hows == How.GREEDY).nonzero()[0]:
            tokens[place] = logits[which[place]].argmax()
        if (noisy := hows == How.NOISY).any():
            tokens[noisy] = self._noisy.draw(self._place[which[noisy]])
        if (whole := hows == How.WHOLE).any():
            tokens[whole] = self._from_whole(which[whole])
        return tokens

    def _from_whole(self, which: Ids) -> Ids:
        rows = [self._rows[index] for index in which]
        logits = self._logits[torch.from_numpy(which)]
        change(logits, rows)
        tokens: Ids = logits.numpy().argmax(1)
        drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            some = [rows[index] for index in drawn]
            shaped = shape(logits[drawn], some).numpy()
            tokens[drawn] = noisy_argmax(shaped, np.ones(len(some), np.float32), _keys(some))
        return tokens


def _draw_on_device(logits: torch.Tensor, rows: Sequence[Row], hows: npt.NDArray[np.int64]) -> torch.Tensor:
    """Returns the tokens of all rows."""
    tokens = logits.argmax(-1)
    if others := (hows != How.GREEDY).nonzero()[0].tolist():
        tokens[others] = _scored(logits[others], [rows[index] for index in others]).argmax(-1)
    return tokens


def _scored(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Turns logits [R, V] into what the largest is taken of, in place, and returns them."""
    change(logits, rows)
    if sampled := [index for index, row in enumerate(rows) if not row.params.greedy]:
        some = [rows[index] for index in sampled]
        keys = [row_key(row.params.seed, row.position) for row in some]
        logits[sampled] = shape(logits[sampled], some) + gumbel(keys, logits.shape[1], logits.device)
    return logits


def _scored_of(
    logits: torch.Tensor, rows: Sequence[Row], vocab_size: int | None, vocabulary: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the same of logits [R, K] of these ids [K], less those from `vocab_size` on, and the ids left:
    at least one."""
    known = vocabulary.to(logits.device)
    if vocab_size is not None:
        known = known[: max(1, int((known < vocab_size).sum()))]
    scores = logits[:, : len(known)].clone()
    if changed := [index for index, row in enumerate(rows) if _changed(row)]:
        whole = scores.new_zeros(len(changed), int(known[-1]) + 1)  # ids are what changes are told by
        whole[:, known] = scores[changed]
        change(whole, [rows[index] for index in changed])
        scores[changed] = whole[:, known]
        scores[scores.amax(-1) == -torch.inf] = 0.0  # a grammar leaves none of these ids: any is as bad
    if sampled := [index for index, row in enumerate(rows) if not row.params.greedy]:
        some = [rows[index] for index in sampled]
        keys = [row_key(row.params.seed, row.position) for row in some]
        scores[sampled] = shape(scores[sampled], some) + gumbel_at(keys, known)
    return scores, known


def _changed(row: Row) -> bool:
    return row.params.penalized or bool(row.params.biases) or row.allowed is not None


def _keys(rows: Sequence[Row]) -> npt.NDArray[np.uint64]:
    return row_keys([row.params.seed for row in rows], [row.position for row in rows])
