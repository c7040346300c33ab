"""Chunks of a rank's tokens: how long they are, on a CPU and on a GPU."""

from __future__ import annotations

from torch import Tensor

CPU_CHUNK_BYTES = 2**19
"""Bytes of one activation of a chunk on a CPU: half a MiB, so that the two or three which an
operation touches stay near a core's own cache (`studies/notes.md`, chunks)."""

GPU_CHUNK = 2**18
"""Tokens of a streamed chunk on a GPU: long enough to keep it busy."""

_LEAST_CPU_CHUNK = 256
"""Fewer tokens cost more in calls than they save in the caches."""

_CHUNK_LENGTHS = 64
"""How many lengths of chunks follow one another before the first one comes again."""


def chunk_bounds(x: Tensor, width: int, chunk_tokens: int | None) -> list[slice]:
    """Bounds of the chunks of x [B, n, F]; one, if there are no tokens. See `default_chunk_tokens`.

    None is longer than `chunk_tokens`. On a CPU neighbours differ by a token, unless short: the C
    library's aligned allocation of a tensor does not fit into the hole that one of the same size
    left, so that with equal chunks a third of the memory lies waste; a smaller one does
    (`studies/notes.md`, chunks).
    """
    size = chunk_tokens or default_chunk_tokens(x, width)
    differ = x.device.type == "cpu" and size >= _LEAST_CPU_CHUNK
    bounds: list[slice] = []
    start = 0
    while start < x.shape[1] or not bounds:
        stop = start + (size - len(bounds) % _CHUNK_LENGTHS if differ else size)
        bounds.append(slice(start, stop))
        start = stop
    return bounds


def default_chunk_tokens(x: Tensor, width: int) -> int:
    """Tokens of a chunk: on a CPU what the caches hold, on a GPU the whole shard.

    x [B, n, F]: the rank's tokens; `width`: channels of the activations.
    """
    if x.device.type != "cpu":
        return max(x.shape[1], 1)
    return cpu_chunk_tokens(width, x.element_size())


def cpu_chunk_tokens(width: int, element_bytes: int) -> int:
    """Tokens of a chunk on a CPU, for activations of `width` channels of `element_bytes` each."""
    return max(CPU_CHUNK_BYTES // (width * element_bytes), _LEAST_CPU_CHUNK)


def gpu_chunk_tokens(width: int, widest: int) -> int:
    """Tokens of a streamed chunk on a GPU, for a model of `width` channels.

    `widest`: values a token of the widest tensor that the chunk makes. Up to four times the width
    the hidden layer of a feed-forward network goes.
    """
    return max(GPU_CHUNK * min(4 * width, widest) // widest, 1)
