"""The modules of a model: those of the shared backbone, for whose mixers there is a place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def input_projection(config: ModelConfig, in_channels: int) -> nn.Module:
    """The backbone's input projection.  [F] -> [C]"""
    width = config.channels
    return ResidualMLP(in_channels, width, width, input_residual=True, output_residual=True)


def output_head(config: ModelConfig, out_channels: int) -> tuple[nn.Module, nn.Module]:
    """The backbone's output norm and output projection.  [C] -> [O]"""
    width = config.channels
    return (
        make_norm(config.norm, width),
        ResidualMLP(width, width, out_channels, input_residual=True, output_residual=False),
    )


def backbone_parts(
    config: ModelConfig, in_channels: int, out_channels: int, mixers: Iterable[Mixer]
) -> Parts:
    """The shared backbone with a block for each mixer.

    Weights are drawn in the order of the modules: a seed's weights must stay what they are.
    """
    in_proj = input_projection(config, in_channels)
    kind = ConditionedBlock if is_steered(config) else Block
    blocks = [kind(config, index, mixer) for index, mixer in enumerate(mixers)]
    return Parts(in_proj, blocks, *output_head(config, out_channels))
