"""The modules of a model: those of the shared backbone, for whose mixers there is a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from cpflare.config import ModelConfig
from cpflare.models.conditioning import ConditionedBlock, is_steered
from cpflare.models.layers import ResidualMLP, make_norm
from cpflare.models.mixer import Mixer
from cpflare.models.step import Block, Step


@dataclass(frozen=True)
class Parts:
    """Input projection [F] -> [C], steps, and the head, a norm and a projection [C] -> [O].

    `initialise` says whether the backbone's rule draws the weights anew, or torch's stay.
    """

    in_proj: nn.Module
    steps: Sequence[Step]
    out_norm: nn.Module
    out_proj: nn.Module
    initialise: bool = True


def projections(
    config: ModelConfig, in_channels: int, out_channels: int
) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The backbone's input projection, output norm and output projection."""
    width = config.channels
    return (
        ResidualMLP(in_channels, width, width, input_residual=True, output_residual=True),
        make_norm(config.norm, width),
        ResidualMLP(width, width, out_channels, input_residual=True, output_residual=False),
    )


def backbone_parts(
    config: ModelConfig, in_channels: int, out_channels: int, mixers: Sequence[Mixer]
) -> Parts:
    """The shared backbone with a block for each mixer."""
    in_proj, out_norm, out_proj = projections(config, in_channels, out_channels)
    kind = ConditionedBlock if is_steered(config) else Block
    blocks = [kind(config, index, mixer) for index, mixer in enumerate(mixers)]
    return Parts(in_proj, blocks, out_norm, out_proj)
