"""The shared noise: one Gumbel number for every (seed, position, token id), computed wherever it is needed.

A counter-based generator in the form of SplitMix64 (Steele, Lea, Flood: "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014). All arithmetic is modulo 2**64:

    mix64(z):  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
               z = (z ^ (z >> 27)) * 0x94D049BB133111EB
               z ^ (z >> 31)
    key      = mix64(mix64(seed) + (position + 1) * 0x9E3779B97F4A7C15)        one for each row
    bits     = mix64(key + (token + 1) * 0x9E3779B97F4A7C15)
    u        = ((bits >> 12) + 0.5) * 2**-52                                    exact, strictly inside (0, 1)
    gumbel   = float32(-log(-log(u))), logarithms in float64

What is guaranteed: `bits` and `u` are the same on every platform. The logarithm is the platform's; good ones
differ by a unit in the last place of float64, which changes the float32 result about once in 10**8 numbers,
then by one unit in its last place. On one platform a number depends on nothing but its key and its token id.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

Bits = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float32]

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
WHOLE = 64  # token ids are computed in multiples of it, so that vectorized kernels leave none over
ELEMENTS_AT_ONCE = 2**16  # on CPU, to stay in its caches
ROUNDING = 1e-4  # more than the float32 numbers below are off, as a share


def row_key(seed: int, position: int) -> int:
    """The key of all noise at an absolute position: an integer below 2**64."""
    return mix64(mix64(seed) + (position + 1) * GOLDEN)


def gumbel(
    keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu", offset: int = 0
) -> torch.Tensor:
    """Standard Gumbel numbers [R, vocab_size] float32 for token ids from `offset` on, one row for each
    key."""
    return gumbel_from(_starts(keys, torch.device(device)), vocab_size, offset)


def gumbel_from(starts: torch.Tensor, vocab_size: int, offset: int = 0) -> torch.Tensor:
    """The same from keys [R] int64 with the bits of the row keys, on their device."""
    out = torch.empty(len(starts), vocab_size, dtype=torch.float32, device=starts.device)
    padded = -(-vocab_size // WHOLE) * WHOLE
    for some, bits in _bits(starts, padded, offset):
        out[some] = _numbers(bits)[:, :vocab_size]
    return out


def noisy_argmax(shaped: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
    """(shaped + gumbel(keys)).argmax(-1) for log p' up to a constant, [R, V] float32: [R] int64.

    The largest log p + gumbel is the smallest -log(u) / p, which is no less than (1 - u) / p. So only the few
    tokens for which that is small enough need their logarithms."""
    if shaped.device.type != "cpu":
        return (shaped + gumbel(keys, shaped.shape[1], shaped.device)).argmax(-1)
    logs, vocab = shaped.numpy(), shaped.shape[1]
    starts = np.array(keys, dtype=np.uint64)[:, None]  # [R, 1]
    counters = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    rows = max(1, ELEMENTS_AT_ONCE // vocab)
    tokens = np.empty(len(keys), dtype=np.int64)
    with np.errstate(over="ignore", invalid="ignore"):  # of tokens that are ruled out
        for first in range(0, len(keys), rows):
            some = slice(first, first + rows)
            tokens[some] = _largest(logs[some], _mix64_array(starts[some] + counters))
    return torch.from_numpy(tokens)


def _largest(logs: Floats, bits: Bits) -> npt.NDArray[np.int64]:
    """Of each row [r, V] the token with the largest logs + gumbel."""
    over_p = np.exp(-logs)
    least = (~bits >> np.uint64(12)).astype(np.float32)  # 2**52 (1 - u), rounded down
    least *= over_p
    each = np.arange(len(logs))
    likely = least.argmin(1)
    reached = -np.log((bits[each, likely] >> np.uint64(12)) + 0.5) + 52 * math.log(2)  # -log(u)
    reached *= over_p[each, likely] * 2.0**52 * (1 + ROUNDING)  # by that token; the winner's is no larger
    could_win = least <= reached.astype(np.float32)[:, None]
    could_win[each, likely] = True
    row, token = could_win.nonzero()  # by row, then by id
    scores = logs[row, token] + _numbers(torch.from_numpy(bits[row, token].view(np.int64))).numpy()
    best = np.lexsort((token, -scores, row))
    winners: npt.NDArray[np.int64] = token[best][np.searchsorted(row, each)]
    return winners


def _mix64_array(z: Bits) -> Bits:
    """mix64 of each; works in place and returns its argument."""
    scratch = np.empty_like(z)
    for shift, multiplier in ((30, MULTIPLIER_1), (27, MULTIPLIER_2)):
        z ^= np.right_shift(z, np.uint64(shift), out=scratch)
        z *= np.uint64(multiplier)
    z ^= np.right_shift(z, np.uint64(31), out=scratch)
    return z


def mix64(z: int) -> int:
    """SplitMix64's finalizer of an integer, taken modulo 2**64."""
    z &= MASK
    z = ((z ^ (z >> 30)) * MULTIPLIER_1) & MASK
    z = ((z ^ (z >> 27)) * MULTIPLIER_2) & MASK
    return z ^ (z >> 31)


def mix64_tensor(z: torch.Tensor) -> torch.Tensor:
    """mix64 of int64 numbers, read as unsigned; works in place and returns its argument."""
    scratch = torch.empty_like(z)
    for shift, multiplier in ((30, MULTIPLIER_1), (27, MULTIPLIER_2)):
        z ^= _shifted(z, shift, scratch)
        z *= _signed(multiplier)
    z ^= _shifted(z, 31, scratch)
    return z


def _bits(starts: torch.Tensor, width: int, offset: int = 0) -> Iterator[tuple[slice, torch.Tensor]]:
    """The bits [r, width] of some rows at a time, for token ids from `offset` on."""
    device = starts.device
    ids = torch.arange(offset + 1, offset + 1 + width, dtype=torch.int64, device=device)  # [V]
    counters = ids * _signed(GOLDEN)
    rows = max(1, ELEMENTS_AT_ONCE // max(1, width)) if device.type == "cpu" else max(1, len(starts))
    for first in range(0, len(starts), rows):
        some = slice(first, first + rows)
        yield some, mix64_tensor(starts[some, None] + counters)


def _starts(keys: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device)


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """u, float64"""
    return _shifted(bits, 12, torch.empty_like(bits)).double().add_(0.5).mul_(2.0**-52)


def _numbers(bits: torch.Tensor) -> torch.Tensor:
    """float32"""
    return _uniform(bits).log_().neg_().log_().neg_().float()


def _shifted(z: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """z >> bits without sign, into `out`: int64's own shift copies the sign bit, which is masked off."""
    torch.bitwise_right_shift(z, bits, out=out)
    out &= 2 ** (64 - bits) - 1
    return out


def _signed(value: int) -> int:
    """The int64 with the same bits."""
    value &= MASK
    return value - 2**64 if value >= 2**63 else value
