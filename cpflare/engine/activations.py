"""Block inputs of the streamed executor: the only tensors of size N, and where they are kept."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class ActivationStore:
    """Block inputs [B, n, C] by block index, written and read chunk by chunk.

    `half` keeps them in bf16 (the computation keeps its dtype), `host` in pinned memory of the
    host, copied without waiting. With `in_place` a block's output takes the place of its input,
    which is all that a forward without gradients needs.
    """

    def __init__(
        self, tokens: int, *, half: bool = False, host: bool = False, in_place: bool = False
    ) -> None:
        self.tokens, self.half, self.host, self.in_place = tokens, half, host, in_place
        self.buffers: dict[int, Tensor] = {}
        self.dtype: torch.dtype | None = None
        self.device: torch.device | None = None

    def put(self, index: int, rows: slice, x: Tensor) -> None:
        """Write a chunk x [B, m, C] of block `index`'s input."""
        self.dtype, self.device = x.dtype, x.device
        key = 0 if self.in_place else index
        if key not in self.buffers:
            on_host = self.host and x.device.type != "cpu"
            self.buffers[key] = torch.empty(
                (x.shape[0], self.tokens, x.shape[2]),
                dtype=torch.bfloat16 if self.half and x.dtype != torch.float64 else x.dtype,
                device="cpu" if on_host else x.device,
                pin_memory=on_host,
            )
        self.buffers[key][:, rows].copy_(x, non_blocking=True)

    def get(self, index: int, rows: slice) -> Tensor:
        """Read a chunk in the dtype and on the device of the computation.  [B, m, C]"""
        assert self.dtype is not None
        chunk = self.buffers[0 if self.in_place else index][:, rows]
        return chunk.to(device=self.device, dtype=self.dtype, non_blocking=True)

    keeps = True
    """Whether what is put can be got again without computing it."""

    def __contains__(self, index: int) -> bool:
        return (0 if self.in_place else index) in self.buffers

    def free(self, index: int) -> None:
        """Give up a block's input."""
        if not self.in_place:
            self.buffers.pop(index, None)


class NoActivations(ActivationStore):
    """Keeps nothing: a block's input is computed from the network's inputs whenever it is read.

    The blocks before it are token-local once their state is known. Compute grows with the square of
    the number of blocks, and no memory of size N is held: the last resort of a prediction.
    """

    keeps = False

    def __init__(self, tokens: int, compute: Callable[[int, slice], Tensor]) -> None:
        super().__init__(tokens)
        self.compute = compute

    def get(self, index: int, rows: slice) -> Tensor:
        return self.compute(index, rows)
