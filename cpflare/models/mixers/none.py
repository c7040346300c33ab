"""No mixer: tokens do not meet, which is what the others are measured against."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cpflare.config import ModelConfig
from cpflare.models.mixer import Stage, State, Tokens
from cpflare.models.site import Site


class NoMixer(nn.Module):
    """The block is its feed-forward network alone. Communication: none."""

    stages: tuple[Stage, ...] = ()

    @classmethod
    def from_config(cls, config: ModelConfig) -> NoMixer:
        return cls()

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        return Tokens({"x": lambda _: x})

    def emit(self, tokens: Tokens, state: State) -> Tensor:
        return torch.zeros_like(tokens["x"])
