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

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from outrider.uploading import uploaded

MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
WHOLE = 64  # token ids are computed in multiples of it, so that vectorized kernels leave none over
ELEMENTS_AT_ONCE = 2**16  # on CPU, to stay in its caches


def row_key(seed: int, position: int) -> int:
    """Returns the key of all noise at an absolute position: an integer below 2**64."""
    return mix64(mix64(seed) + (position + 1) * GOLDEN)


def gumbel(
    keys: Sequence[int], vocab_size: int, device: torch.device | str = "cpu", offset: int = 0
) -> torch.Tensor:
    """Returns standard Gumbel numbers [R, vocab_size] float32 for token ids from `offset` on, one row for
    each key."""
    return gumbel_from(_starts(keys, torch.device(device)), vocab_size, offset)


def gumbel_at(keys: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
    """Returns the numbers [R, K] float32 that `gumbel` has for these token ids [K], on their device."""
    return gumbel_of_ids(_starts(keys, ids.device), ids)


def gumbel_of_ids(starts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Returns the same, from keys [R] int64 with the bits of the row keys, on the ids' device."""
    return gumbel_of(mix64_tensor(starts[:, None] + (ids + 1) * _signed(GOLDEN)))


def gumbel_from(starts: torch.Tensor, vocab_size: int, offset: int = 0) -> torch.Tensor:
    """Returns what `gumbel` does, from keys [R] int64 with the bits of the row keys, on their device."""
    out = torch.empty(len(starts), vocab_size, dtype=torch.float32, device=starts.device)
    padded = -(-vocab_size // WHOLE) * WHOLE
    for some, bits in _bits(starts, padded, offset):
        out[some] = gumbel_of(bits)[:, :vocab_size]
    return out


def mix64(z: int) -> int:
    """Returns SplitMix64's finalizer of an integer, taken modulo 2**64."""
    z &= MASK
    z = ((z ^ (z >> 30)) * MULTIPLIER_1) & MASK
    z = ((z ^ (z >> 27)) * MULTIPLIER_2) & MASK
    return z ^ (z >> 31)


def mix64_tensor(z: torch.Tensor) -> torch.Tensor:
    """Returns mix64 of int64 numbers, read as unsigned; works in place and returns its argument."""
    scratch = torch.empty_like(z)
    for shift, multiplier in ((30, MULTIPLIER_1), (27, MULTIPLIER_2)):
        z ^= _shifted(z, shift, scratch)
        z *= _signed(multiplier)
    z ^= _shifted(z, 31, scratch)
    return z


def _bits(starts: torch.Tensor, width: int, offset: int = 0) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields the bits [r, width] of some rows at a time, for token ids from `offset` on."""
    device = starts.device
    ids = torch.arange(offset + 1, offset + 1 + width, dtype=torch.int64, device=device)  # [V]
    counters = ids * _signed(GOLDEN)
    rows = max(1, ELEMENTS_AT_ONCE // max(1, width)) if device.type == "cpu" else max(1, len(starts))
    for first in range(0, len(starts), rows):
        some = slice(first, first + rows)
        yield some, mix64_tensor(starts[some, None] + counters)


def _starts(keys: Sequence[int], device: torch.device) -> torch.Tensor:
    return uploaded(np.array(keys, dtype=np.uint64).view(np.int64), device)


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """Returns u, float64."""
    return _shifted(bits, 12, torch.empty_like(bits)).double().add_(0.5).mul_(2.0**-52)


def gumbel_of(bits: torch.Tensor) -> torch.Tensor:
    """Returns the numbers, float32, that belong to such bits."""
    return _uniform(bits).log_().neg_().log_().neg_().float()


def _shifted(z: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """Returns z >> bits without sign, into `out`: int64's own shift copies the sign bit, which is masked
    off."""
    torch.bitwise_right_shift(z, bits, out=out)
    out &= 2 ** (64 - bits) - 1
    return out


def _signed(value: int) -> int:
    """Returns the int64 with the same bits."""
    value &= MASK
    return value - 2**64 if value >= 2**63 else value
