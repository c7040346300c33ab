"""Randomness of a token: a counter-based function of (seed, step, layer, global row).

It depends neither on the ranks, nor on chunks, nor on recomputation, since nothing is drawn from a
stream: the same token gets the same numbers wherever and however often it is computed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def token_uniform(rows: Tensor, channels: int, *, seed: int, step: int, layer: int) -> Tensor:
    """Uniform numbers in [0, 1) for every token and channel.  rows [n] int64 -> [n, channels] fp32

    Source: the SplitMix64 finaliser (Steele, Lea, Flood 2014) over a counter of row and channel.
    """
    key = torch.zeros((), dtype=torch.int64, device=rows.device)
    for part in (seed, step, layer):
        key = _mix(key + _GOLDEN + part)
    counters = rows[:, None] * channels + torch.arange(channels, device=rows.device)
    bits = _mix(_mix(counters + key) + _GOLDEN)
    return (_shift(bits, 40)).to(torch.float32) * 2.0**-24


def token_dropout(x: Tensor, rows: Tensor, p: float, *, seed: int, step: int, layer: int) -> Tensor:
    """Zero a share `p` of the entries and scale the others by 1 / (1 - p).

    x [B, n, C] -> the same
    """
    keep = token_uniform(rows, x.shape[-1], seed=seed, step=step, layer=layer) >= p  # [n, C]
    return x * (keep.to(x.dtype) / (1.0 - p))


@functools.lru_cache(maxsize=4)
def keyed_places(count: int, total: int, *, seed: int, step: int) -> Tensor:
    """The first `count` places of a keyed permutation of `total`.

    -> [count] int64 on the CPU, all different, in [0, total); shared, so not to be changed
    Source: a Feistel network over the next power of 4, walked until it is back in the range.
    """
    half = max((total - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    key = torch.zeros((), dtype=torch.int64)
    for part in (seed, step, total):
        key = _mix(key + _GOLDEN + part)

    def permuted(places: Tensor) -> Tensor:
        left, right = places >> half, places & mask
        for turn in range(4):
            mixed = _mix(_mix(right + key + turn) + _GOLDEN)
            left, right = right, left ^ (mixed & mask)
        return (left << half) | right

    places = permuted(torch.arange(count))
    while (outside := places >= total).any():
        places = torch.where(outside, permuted(places), places)
    return places


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own shifts the sign in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
