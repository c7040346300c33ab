"""Long-thin attention: slices of the token axis, so that few latents keep a device busy.

With M of 64 to 128 rows on one side and millions of tokens on the other, a fused kernel has few
independent pieces unless it splits the long side by itself. A slice is a piece of its own; slices
of equal length are folded into the batch of one call (GPU), or follow one another while they fit
the cache (CPU; `studies/notes.md`, slices).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

CPU_SLICE = 2048
"""Tokens of a slice on a CPU: keys, values and their gradients of 8 heads stay in the L2 cache."""

CPU_BLOCK = 256
"""Keys of a slice of an encoder's backward on a CPU: the scores of the 512 that the kernel takes at
once, and their gradients, leave the L1 cache (`studies/notes.md`, slices)."""

CUDA_TILE = 64
"""Rows of one thread block of the fused CUDA kernels: B·H·ceil(M/64) blocks without slices."""

MIN_CUDA_SLICE = 1024
"""A slice shorter than this costs more in its merge than it gains."""

MAX_ELEMENTS = 2**31 - 1
"""Largest index that the kernels compute in 32 bits: elements of one tensor of a call."""

MAX_GRID = 65_535
"""Largest grid dimension, which the CUDA kernels use for the batch and for the heads."""


@contextmanager
def uncut() -> Iterator[None]:
    """Inside, a CPU's tokens are not cut, so that what is counted there is what a GPU does."""
    global CPU_SLICE, CPU_BLOCK
    before = CPU_SLICE, CPU_BLOCK
    CPU_SLICE = CPU_BLOCK = MAX_ELEMENTS
    try:
        yield
    finally:
        CPU_SLICE, CPU_BLOCK = before


@dataclass(frozen=True)
class Part:
    """`count` slices of `length` tokens from `start`, folded into the batch of one kernel call."""

    start: int
    length: int
    count: int

    def cut(self, t: Tensor) -> Tensor:
        """Fold the part's slices of a long tensor.  [B, H, N, ...] -> [B·S, H, n, ...], a view for
        B = 1."""
        part = t[:, :, self.start : self.start + self.count * self.length]
        if self.count == 1:
            return part
        folded: Tensor = part.unflatten(2, (self.count, self.length))  # [B, H, S, n, ...]
        return folded.transpose(1, 2).flatten(0, 1)

    def repeat(self, t: Tensor) -> Tensor:
        """The short tensor once a slice.  [B, H, M, ...] -> [B·S, H, M, ...]"""
        if self.count == 1:
            return t
        return t[:, None].expand(-1, self.count, *t.shape[1:]).flatten(0, 1)

    def put(self, out: Tensor, t: Tensor) -> None:
        """Write what the slices yield into their rows of a long tensor.

        t [B·S, H, n, ...] into out [B, H, N, ...]
        """
        rows = out[:, :, self.start : self.start + self.count * self.length]
        unfolded: Tensor = t.unflatten(0, (-1, self.count))  # [B, S, H, n, ...]
        rows.unflatten(2, (self.count, self.length)).copy_(unfolded.transpose(1, 2))

    def joined(self, t: Tensor) -> Tensor:
        """Undo `cut`: what the slices yield, side by side.  [B·S, H, n, ...] -> [B, H, S·n, ...],
        a view where the kernel has left B = 1 as it found it."""
        unfolded: Tensor = t.unflatten(0, (-1, self.count))
        return unfolded.transpose(1, 2).flatten(2, 3)

    def stacked(self, t: Tensor) -> Tensor:
        """What each slice yields for the short side.  [B·S, H, M, ...] -> [S, B, H, M, ...]"""
        unfolded: Tensor = t.unflatten(0, (-1, self.count))
        return unfolded.transpose(0, 1)

    def sum(self, t: Tensor, dtype: torch.dtype) -> Tensor:
        """The slices' sum for the short side.  [B·S, H, M, ...] -> [B, H, M, ...]"""
        unfolded: Tensor = t.unflatten(0, (-1, self.count))
        return unfolded.sum(dim=1, dtype=dtype)


@dataclass(frozen=True)
class Plan:
    """The parts that cover a token axis, in order."""

    parts: tuple[Part, ...]

    @property
    def is_whole(self) -> bool:
        """Whether there is nothing to cut."""
        return len(self.parts) == 1 and self.parts[0].count == 1


def plan_slices(long: Tensor, short: Tensor, *, blocks: bool = False, splits: bool = False) -> Plan:
    """How to cut the tokens of `long` [B, H, N, D], which meets `short` [B, H, M, D].

    The number of slices follows from the device: its multiprocessors on a GPU, the caches on a CPU,
    where `blocks` says that the kernel wants slices of `CPU_BLOCK`. `splits` says that a GPU's
    kernel splits the tokens by itself. N need not be divisible: the rest is a part by itself.
    """
    batch, heads, tokens, depth = long.shape
    if long.device.type == "cuda":
        tiles = batch * heads * -(-short.shape[2] // CUDA_TILE)
        wanted = 1 if splits else -(-2 * _multiprocessors(long.device) // tiles)
        most = max(min(tokens // MIN_CUDA_SLICE, MAX_GRID // batch), 1)
        count = min(wanted, most)
        # A rest costs as many launches as all other slices together.
        near = [*range(count, min(2 * count, most + 1)), *range(count, count // 2, -1)]
        count = next((n for n in near if tokens % n == 0), count) if count > 1 else 1
        length = tokens // count
    else:
        length = min(CPU_SLICE, CPU_BLOCK if blocks else CPU_SLICE, tokens)
        count = CPU_SLICE // length if blocks else 1
    # Guard the kernels' index limits: the folded tensors of one call.
    length = max(min(length, MAX_ELEMENTS // (batch * heads * depth)), 1)
    count = max(min(count, MAX_ELEMENTS // (batch * heads * depth * length)), 1)
    parts = [
        Part(start, length, min(count, (tokens - start) // length))
        for start in range(0, tokens - length + 1, length * count)
    ]
    covered = parts[-1].start + parts[-1].count * length
    if covered < tokens:
        parts.append(Part(covered, tokens - covered, 1))
    return Plan(tuple(parts))


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
