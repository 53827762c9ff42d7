"""The token with the largest log p' + noise, on a CPU, without computing the noise of all of them.

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


def row_keys(seeds: Sequence[int], positions: Sequence[int]) -> Bits:
    """noise.row_key of each seed and position: [R]."""
    keys = _mix64(np.array(seeds, dtype=np.uint64))
    keys += (np.array(positions, dtype=np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    return _mix64(keys)


def noisy_argmax(logits: Floats, temperature: Floats, keys: Bits) -> Ids:
    """(log p' + gumbel(keys)).argmax(1) for log p' = (logits - logits.max(1)) / temperature.

    `logits` [R, V]; `temperature` [R], above 0; `keys` [R]: token ids [R]. Of equals the lowest id; where
    log p' is not defined, the first id for which it is not."""
    logits = np.ascontiguousarray(logits)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities among the logits, or temperatures near 0
        tokens: Ids = logits.argmax(1)
        most = logits[np.arange(len(keys)), tokens]
        tokens[np.isnan(most)] = 0
        places, bits = _contenders(logits, temperature, keys, tokens, most)
        starts = places.searchsorted(np.arange(len(keys)) * logits.shape[1])  # of each row's, which has some
        counts = np.diff(starts, append=len(places))
        log_p = (logits.reshape(-1)[places] - most.repeat(counts)) / temperature.repeat(counts)
        cost = -np.log(_uniform(bits)) * np.exp(-log_p)
        enough = np.minimum.reduceat(cost, starts) * (1 + ROUNDING)
        best = (cost <= enough.repeat(counts)).nonzero()[0]  # hardly ever more than one of a row
    row, token = np.divmod(places[best], logits.shape[1])
    if (row[1:] == row[:-1]).any():  # as good as equal: then by the numbers as float32 has them
        score = log_p[best] + gumbel_of(torch.from_numpy(bits[best].view(np.int64))).numpy()
        order = np.lexsort((-token, score, row))
        row, token = row[order], token[order]
    tokens[row] = token  # of several of a row the last stays: the largest score, then the lowest id
    return tokens


def _contenders(
    logits: Floats, temperature: Floats, keys: Bits, likeliest: Ids, most: Floats
) -> tuple[Ids, Bits]:
    """Every token that could win: its place in the flattened logits, rising, and its bits: [n] each.
    `most` [R]: the logits of the likeliest tokens [R], which are among them."""
    count, vocab = logits.shape
    counters = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(GOLDEN)  # [V]
    reached = -np.log(_uniform(_mix64(keys + counters[likeliest])))  # what the likeliest token costs
    near = most - np.float32(SPREAD) * temperature  # [R] logits from which on no noise rules a token out
    rare = np.exp(((near - most) / temperature).astype(np.float64))  # p' of all below, at most
    least = 2.0**64 * (1 - reached * rare * (1 + ROUNDING)) - UNMIXED  # the bits with which those could win
    least_bits = np.fmax(least, 0.0).astype(np.uint64)
    rows = max(1, ELEMENTS_AT_ONCE // vocab)
    mixed = np.empty((min(rows, count), vocab), dtype=np.uint64)
    scratch = np.empty_like(mixed)
    places, bits = [], []
    for first in range(0, count, rows):
        some = slice(first, first + rows)
        here = np.arange(len(keys[some]))
        z = np.add(keys[some, None], counters, out=mixed[: len(here)])
        _mix64_but_its_end(z, scratch[: len(here)])
        could_win = z >= least_bits[some, None]
        could_win |= logits[some] >= near[some, None]
        could_win[here, likeliest[some]] = True
        found = could_win.reshape(-1).nonzero()[0]
        places.append(found + first * vocab)
        bits.append(_end_of_mix64(z.reshape(-1)[found]))
    return np.concatenate(places), np.concatenate(bits)


def _mix64(z: Bits) -> Bits:
    """noise.mix64 of each; works in place and returns its argument, as the two below do."""
    return _end_of_mix64(_mix64_but_its_end(z, np.empty_like(z)))


def _mix64_but_its_end(z: Bits, scratch: Bits) -> Bits:
    """The upper 31 bits are final."""
    for shift, multiplier in ((30, MULTIPLIER_1), (27, MULTIPLIER_2)):
        z ^= np.right_shift(z, np.uint64(shift), out=scratch)
        z *= np.uint64(multiplier)
    return z


def _end_of_mix64(z: Bits) -> Bits:
    z ^= z >> np.uint64(31)
    return z


def _uniform(bits: Bits) -> npt.NDArray[np.float64]:
    """u"""
    u: npt.NDArray[np.float64] = (bits >> np.uint64(12)).astype(np.float64)
    u += 0.5
    u *= 2.0**-52
    return u
