"""Latent Neural Operator: positions say which modes a token writes to and reads from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from cpflare.config import ModelConfig
from cpflare.models.latent import DeepMLP, LatentBlock
from cpflare.models.mixer import State, Tokens, to_attention_dtype
from cpflare.models.parts import Parts
from cpflare.models.site import Site
from cpflare.models.stages import SoftmaxStage
from cpflare.models.step import Step
from cpflare.ops.attention import statistics_dtype
from cpflare.schema import Count

_RATIO = 2


@dataclass(frozen=True)
class LnoConfig(ModelConfig):
    """The options of the Latent Neural Operator, which takes model.blocks latent blocks."""

    lno_layers: Annotated[Count, "hidden layers of its MLPs beside the first"] = 2


class LnoStep(Step):
    """The whole architecture between trunk and output MLP, as one step.

        S = f W_s^T + b_s of the trunk's features;  y = branch MLP(inputs)
        z = softmax_N(S)^T y;  latent blocks;  r = softmax_M(S) z

    The scores are normalised over tokens to encode and over modes to decode: an encoder of one head
    with the width C and the scale 1, where b_s, the same for all tokens, drops out.

    x [B, n, C] -> [B, n, C]. Communication: one encoder of M·(C+1) values a model.
    Source: LNO (physics-cross-attention, shared scores); trunk and branch both read the inputs.
    """

    needs = frozenset({"inputs"})

    def __init__(self, config: LnoConfig, in_channels: int) -> None:
        super().__init__(0)
        channels, layers = config.channels, config.lno_layers
        self.modes = config.latents
        self.branch = DeepMLP(in_channels, channels, channels, layers)
        self.scores = DeepMLP(channels, channels, config.latents, layers)
        self.latent_blocks = nn.ModuleList(
            LatentBlock(channels, config.heads, _RATIO, approximate="none", bias=True)
            for _ in range(config.blocks)
        )

    @property
    def widest(self) -> int:
        return self.modes

    @property
    def stages(self) -> tuple[SoftmaxStage, ...]:
        stage = SoftmaxStage(
            query=lambda state: self.scores.fc2.weight[None, None],  # [1, 1, M, C]
            keys="f",
            values="y",
            finish=self.finish,
            scale=1.0,
        )
        return (stage,)

    def finish(self, gathered: Tensor, state: State) -> State:
        """The latent blocks.  [B, 1, M, C] -> z [B, M, C]. Replicated, once each way."""
        z = gathered[:, 0]
        for block in self.latent_blocks:
            z = block(z)
        return {"z": z}

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        return Tokens(
            {
                "f": lambda _: self.scores.features(x)[:, None],  # [B, 1, n, C]
                "y": lambda _: self.branch(site.inputs)[:, None],
            }
        )

    def mix(self, x: Tensor, tokens: Tokens, state: State, site: Site) -> Tensor:
        scores = self.scores.fc2(tokens["f"][:, 0])  # [B, n, M]
        weights = torch.softmax(scores.to(statistics_dtype(scores.dtype)), dim=-1)
        return to_attention_dtype(weights) @ to_attention_dtype(state["z"])


def lno_parts(config: LnoConfig, in_channels: int, out_channels: int) -> Parts:
    """Trunk MLP, the one step, and the output MLP, without a norm before it.

    Torch's initial values train: the published initialiser is never called.
    """
    width, layers = config.channels, config.lno_layers
    return Parts(
        DeepMLP(in_channels, width, width, layers),
        [LnoStep(config, in_channels)],
        nn.Identity(),
        DeepMLP(width, width, out_channels, layers),
        initialise=False,
    )
