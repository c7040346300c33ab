"""GNOT: linear attention to encoded inputs and to the tokens, with experts gated by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cpflare.config import ModelConfig
from cpflare.models.latent import DeepMLP
from cpflare.models.layers import LayerNorm, merge_heads, split_heads
from cpflare.models.mixer import State, Tokens, to_attention_dtype
from cpflare.models.parts import Parts
from cpflare.models.site import Site
from cpflare.models.stages import SumStage
from cpflare.models.step import Step
from cpflare.ops.attention import statistics_dtype
from cpflare.schema import Count

_COORDINATES = 3
_LAYERS = 2


@dataclass(frozen=True)
class GnotConfig(ModelConfig):
    """The options of GNOT, which takes model.blocks of its own blocks."""

    gnot_experts: Annotated[Count, "feed-forward networks that a token's position mixes"] = 3


class NormalisedAttention(nn.Module):
    """Y_i = q_i (sum_j k_j v_j^T) / (q_i . sum_j k_j) + q_i, q and k softmaxed over features.

    Communication, as a stage: one sum of B·H·D·(D+1) values, and one backward.
    Source: GNOT's normalised attention, with the `+ q` of both public codes.
    """

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_proj, self.key_proj, self.value_proj, self.out_proj = (
            nn.Linear(channels, channels) for _ in range(4)
        )

    @property
    def stage(self) -> SumStage:
        return SumStage(self.product, ("k", "v"), lambda total, state: {"sums": total})

    def features(self, projected: Tensor) -> Tensor:
        """Softmax over a head's features, in the statistics' dtype.  [B, H, n, D]"""
        t = split_heads(projected, self.heads)
        return torch.softmax(t.to(statistics_dtype(t.dtype)), dim=-1)

    def product(self, tokens: Tokens) -> Tensor:
        """[sum of k v^T | sum of k].  [B, H, D, D+1]"""
        k, v = tokens["k"], tokens["v"]
        with torch.autocast(k.device.type, enabled=False):
            return torch.cat([k.mT @ v.to(k.dtype), k.sum(dim=2)[..., None]], dim=-1)

    def read(self, q: Tensor, sums: Tensor) -> Tensor:
        """What tokens with queries q [B, H, n, D] make of the sums.  [B, n, C]"""
        with torch.autocast(q.device.type, enabled=False):
            mass = q @ sums[..., -1:]
            y = q @ sums[..., :-1] / mass.clamp(min=torch.finfo(q.dtype).tiny) + q
        out: Tensor = self.out_proj(to_attention_dtype(merge_heads(y)))
        return out


class Experts(nn.Module):
    """sum_e g_e MLP_e(x), the weights g [B, n, E] given.  x [B, n, C] -> the same"""

    def __init__(self, channels: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.fc1 = nn.ModuleList(nn.Linear(channels, hidden) for _ in range(experts))
        self.fc2 = nn.ModuleList(nn.Linear(hidden, channels) for _ in range(experts))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        pairs = zip(self.fc1, self.fc2, weights.unbind(-1), strict=True)
        parts = [g[..., None].to(x.dtype) * fc2(F.gelu(fc1(x))) for fc1, fc2, g in pairs]
        return torch.stack(parts).sum(dim=0)


class Gate(nn.Module):
    """Weights of the experts from a token's position.  [B, n, 3] -> [B, n, E]"""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(_COORDINATES, hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, experts)

    def forward(self, positions: Tensor) -> Tensor:
        logits = self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(positions)))))
        return torch.softmax(logits.to(statistics_dtype(logits.dtype)), dim=-1)


class GnotStep(Step):
    """Half a block: x += attention(LN x); x += LN(experts(x)), with the block's gate.

    With a `branch` the attention is to LN(z), the encoded inputs, else to the tokens themselves.
    x [B, n, C] -> [B, n, C]. Communication: one sum of B·H·D·(D+1) values, and one backward.
    Source: GNOT (heterogeneous normalised attention, geometric gating), one input function.
    """

    def __init__(
        self, config: GnotConfig, index: int, gate: Gate, branch: DeepMLP | None = None
    ) -> None:
        super().__init__(index)
        channels = config.channels
        self.norm1, self.norm2 = LayerNorm(channels), LayerNorm(channels)
        self.attention = NormalisedAttention(channels, config.heads)
        hidden = int(channels * config.ffn_ratio)
        self.experts = Experts(channels, hidden, config.gnot_experts)
        self.gate, self.branch = gate, branch
        self.norm_z = LayerNorm(channels) if branch is not None else None

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"positions"} | ({"inputs"} if self.branch is not None else set()))

    @property
    def stages(self) -> tuple[SumStage, ...]:
        return (self.attention.stage,)

    def tokens(self, x: Tensor, site: Site) -> Tokens:
        attention = self.attention

        def source(t: Tokens) -> Tensor:
            if self.branch is None or self.norm_z is None:
                return t["x"]
            out: Tensor = self.norm_z(self.branch(site.inputs))
            return out

        return Tokens(
            {
                "x": lambda _: self.norm1(x),
                "z": source,
                "q": lambda t: attention.features(attention.query_proj(t["x"])),
                "k": lambda t: attention.features(attention.key_proj(t["z"])),
                "v": lambda t: split_heads(attention.value_proj(t["z"]), attention.heads),
            }
        )

    def mix(self, x: Tensor, tokens: Tokens, state: State, site: Site) -> Tensor:
        x = x + self.attention.read(tokens["q"], state["sums"])
        out: Tensor = x + self.norm2(self.experts(x, self.gate(site.positions)))
        return out


def gnot_parts(config: GnotConfig, in_channels: int, out_channels: int) -> Parts:
    """Trunk MLP, two steps a block, and an output MLP; trunk and branch both read the inputs.

    The branch is one for all blocks, the gate one for both steps of a block.
    """
    width = config.channels
    branch = DeepMLP(in_channels, width, width, _LAYERS)
    steps: list[Step] = []
    for block in range(config.blocks):
        gate = Gate(int(width * config.ffn_ratio), config.gnot_experts)
        steps.append(GnotStep(config, 2 * block, gate, branch))
        steps.append(GnotStep(config, 2 * block + 1, gate))
    trunk = DeepMLP(in_channels, width, width, _LAYERS)
    return Parts(trunk, steps, nn.Identity(), DeepMLP(width, width, out_channels, _LAYERS))
