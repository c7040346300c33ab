"""What `train.precision` means: the dtype of weights and inputs, and the forward's autocast."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def weight_dtype(precision: str) -> torch.dtype:
    """Weights, inputs and losses: fp64 in fp64 runs, else fp32."""
    return torch.float64 if precision == "fp64" else torch.float32


def autocast(device: torch.device, precision: str) -> AbstractContextManager[Any]:
    """Mixed precision of the forward for bf16 and fp16; nothing for fp32 and fp64."""
    if precision in _AUTOCAST:
        return torch.autocast(device.type, dtype=_AUTOCAST[precision])
    return nullcontext()
