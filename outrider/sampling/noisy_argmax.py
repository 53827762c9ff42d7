"""Finds the token with the largest log p' + noise, on a CPU, without computing the noise of all of them.

The largest log p' + gumbel is the smallest *cost*, -log(u) / p', which is no less than (1 - u) / p'. What the
likeliest token costs is known at once. A token that is less likely by a factor of exp(SPREAD) can only cost
less where its u is close to 1. That is seen from the upper bits of its noise alone, for all tokens of a
vocabulary in a few passes; the logarithms are left for the few that could win.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from outrider.sampling.noise import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, gumbel_of

Bits = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

SPREAD = 5.0  # more leaves more likely tokens to look at, and fewer rare ones that their noise makes likely
ROUNDING = 1e-4  # more than what float32 makes of two numbers may change their order by, as a share of p'
UNMIXED = 2.0**34  # more than the last step of mix64 changes of a number
ELEMENTS_AT_ONCE = 2**16  # to stay in the processor's caches
MANY = 0.5  # of the tokens, that are likely: then the best of a few of them rules out most of the others
SAMPLE = 64  # so few


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> Bits:
    """Returns noise.row_key of each seed and position: [R]."""
    keys = _mix64(np.array(seeds, dtype=np.uint64))
    keys += (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    return _mix64(keys)


class NoisyArgmax:
    """(log p' + gumbel(keys)).argmax(1) for log p' = (logits - logits.max(1)) / temperature, of the rows that
    are asked for. Of equals the lowest id; where log p' is not defined, the first id for which it is not."""

    def __init__(self, logits: Floats, temperature: Floats, keys: Bits, at: Ids | None = None) -> None:
        """`logits` [N, V], of which the R rows are those `at` [R], or all; nothing is copied of them.
        `temperature` [R], above 0; `keys` [R]."""
        self._logits, self._temperature, self._keys = logits, temperature, keys
        self._at = np.arange(len(keys)) if at is None else at
        self._counters = np.arange(1, logits.shape[1] + 1, dtype=np.uint64) * np.uint64(GOLDEN)  # [V]
        self._likeliest: Ids = np.array([logits[row].argmax() for row in self._at], np.int64)
        most = self._most = logits[self._at, self._likeliest]
        self._likeliest[np.isnan(most)] = 0
        with np.errstate(over="ignore", invalid="ignore"):
            reached = _exponential(_mix64(keys + self._counters[self._likeliest]))  # the likeliest's cost
            # [R] logits from which on no noise rules a token out, and the bits with which one below could win
            near = self._near = most - np.float32(SPREAD) * temperature
            below = np.nextafter(near, -np.float32(np.inf))  # far from it, if the temperature is near 0
            rare = np.exp(((below - most) / temperature).astype(np.float64))  # p' of all below, at most
            self._least_bits = _least_bits(reached * rare)

    def draw(self, rows: Ids) -> Ids:
        """Returns the tokens [n] of the rows [n], which rise."""
        vocab, every = self._logits.shape[1], np.arange(len(rows))
        with np.errstate(over="ignore", invalid="ignore"):  # infinite logits, or temperatures near 0
            places, bits = self._contenders(rows)
            starts = places.searchsorted(every * vocab)  # of each row's, which has some
            counts = np.concatenate((starts[1:], [len(places)])) - starts
            logits = self._logits[self._at[rows].repeat(counts), places - (every * vocab).repeat(counts)]
            log_p = (logits - self._most[rows].repeat(counts)) / self._temperature[rows].repeat(counts)
            cost = _exponential(bits) * np.exp(-log_p)
            enough = np.minimum.reduceat(cost, starts) * (1 + ROUNDING)
            best = (cost <= enough.repeat(counts)).nonzero()[0]  # hardly ever more than one of a row
        which, token = np.divmod(places[best], vocab)
        if (which[1:] == which[:-1]).any():  # as good as equal: then by the numbers as float32 has them
            score = log_p[best] + gumbel_of(torch.from_numpy(bits[best].view(np.int64))).numpy()
            order = np.lexsort((-token, score, which))
            which, token = which[order], token[order]
        tokens = self._likeliest[rows]
        tokens[which] = token  # of several of a row the last stays: the largest score, then the lowest id
        return tokens

    def _contenders(self, rows: Ids) -> tuple[Ids, Bits]:
        """Returns every token that could win: its place in the flattened logits of these rows, rising, and
        its bits: [n] each. The likeliest tokens are among them."""
        vocab = self._logits.shape[1]
        at_once = min(rows_at_once(vocab), len(rows))
        mixed = np.empty((at_once, vocab), dtype=np.uint64)
        scratch, likely = np.empty_like(mixed), np.empty(mixed.shape, dtype=np.bool_)
        places, bits = [], []
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            count = len(some)
            z = np.add(self._keys[some, None], self._counters, out=mixed[:count])
            _mix64_but_its_end(z, scratch[:count])
            for index, row in enumerate(some):  # one by one: a column to compare with takes twice the time
                np.greater_equal(self._logits[self._at[row]], self._near[row], out=likely[index])
            could_win = z >= self._least_bits[some, None]
            could_win |= likely[:count]
            if np.count_nonzero(likely[:count]) > MANY * count * vocab:
                could_win &= z >= self._least_bits_of_any(some, z)[:, None]
            could_win[np.arange(count), self._likeliest[some]] = True
            found = could_win.reshape(-1).nonzero()[0]
            places.append(found + first * vocab)
            bits.append(_end_of_mix64(z.reshape(-1)[found]))
        return np.concatenate(places), np.concatenate(bits)

    def _least_bits_of_any(self, rows: Ids, z: Bits) -> Bits:
        """Returns the bits [n] with which a token could win against the best of the rows' first ones, however
        likely it is."""
        log_p = (self._logits[self._at[rows], :SAMPLE] - self._most[rows, None]) / self._temperature[
            rows, None
        ]
        cost = _exponential(_end_of_mix64(z[:, :SAMPLE].copy())) * np.exp(-log_p)
        return _least_bits(np.fmin.reduce(cost, axis=1))


def noisy_argmax(logits: Floats, temperature: Floats, keys: Bits) -> Ids:
    """Returns NoisyArgmax of all rows: token ids [R]."""
    return NoisyArgmax(logits, temperature, keys).draw(np.arange(len(keys)))


def rows_at_once(vocab: int) -> int:
    """Returns how many rows are looked at together."""
    return max(1, ELEMENTS_AT_ONCE // vocab)


def _least_bits(cost: npt.NDArray[np.float64]) -> Bits:
    """Returns the bits without which a token costs more, at p' = 1."""
    return np.fmax(2.0**64 * (1 - cost * (1 + ROUNDING)) - UNMIXED, 0.0).astype(np.uint64)


def _exponential(bits: Bits) -> npt.NDArray[np.float64]:
    """Returns -log(u)."""
    cost: npt.NDArray[np.float64] = -np.log(_uniform(bits))
    return cost


def _mix64(z: Bits) -> Bits:
    """Returns noise.mix64 of each; works in place and returns its argument, as the two below do."""
    return _end_of_mix64(_mix64_but_its_end(z, np.empty_like(z)))


def _mix64_but_its_end(z: Bits, scratch: Bits) -> Bits:
    """Returns the finalizer without its last operation: the upper 31 bits are final."""
    for shift, multiplier in ((30, MULTIPLIER_1), (27, MULTIPLIER_2)):
        z ^= np.right_shift(z, np.uint64(shift), out=scratch)
        z *= np.uint64(multiplier)
    return z


def _end_of_mix64(z: Bits) -> Bits:
    z ^= z >> np.uint64(31)
    return z


def _uniform(bits: Bits) -> npt.NDArray[np.float64]:
    """Returns u."""
    u: npt.NDArray[np.float64] = (bits >> np.uint64(12)).astype(np.float64)
    u += 0.5
    u *= 2.0**-52
    return u
