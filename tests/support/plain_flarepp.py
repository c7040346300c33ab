"""FLARE and FLARE++ in plain PyTorch, one rank, dense: what the models are tested against.

Written from the equations alone, with the published names in its state dict, and importing nothing
of the package. Attention is `scaled_dot_product_attention` by its mathematical definition.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


def head_norm(kind: str, width: int, affine: bool) -> nn.Module:
    if kind == "rmsnorm":
        return nn.RMSNorm(width, eps=1e-6, elementwise_affine=affine)
    return nn.LayerNorm(width, eps=1e-5, elementwise_affine=affine)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v"""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5)


class PlusLinear(nn.Module):
    """x + Linear(x), the published FLARE's projection of keys and values."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x)


class HeadsMixer(nn.Module):
    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.out_proj = nn.Linear(channels, channels)

    def split(self, x: Tensor) -> Tensor:
        batch, tokens, channels = x.shape
        return x.reshape(batch, tokens, self.heads, channels // self.heads).permute(0, 2, 1, 3)

    def merge(self, y: Tensor) -> Tensor:
        batch, heads, tokens, width = y.shape
        return self.out_proj(y.permute(0, 2, 1, 3).reshape(batch, tokens, heads * width))

    def scatter_gather(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = attend(q, k, v)  # every latent gathers from all tokens
        return attend(k, q, z)  # every token reads the latents


class PlainFlareMixer(HeadsMixer):
    def __init__(self, channels: int, heads: int, latents: int) -> None:
        super().__init__(channels, heads)
        self.latent_q = nn.Parameter(torch.randn(heads, latents, channels // heads))
        self.k_proj = PlusLinear(channels)
        self.v_proj = PlusLinear(channels)

    def forward(self, x: Tensor) -> Tensor:
        q = self.latent_q.repeat(x.shape[0], 1, 1, 1)
        k, v = self.split(self.k_proj(x)), self.split(self.v_proj(x))
        return self.merge(self.scatter_gather(q, k, v))


class PlainFlarePPMixer(HeadsMixer):
    def __init__(
        self, channels: int, heads: int, latents: int, norm: str, query: str, synthesis: str
    ) -> None:
        super().__init__(channels, heads)
        self.query, self.synthesis = query, synthesis
        width = channels // heads
        self.latent_q0 = nn.Parameter(torch.randn(heads, latents, width))
        if query == "gated":
            self.latent_q_fixed = nn.Parameter(torch.randn(heads, latents, width))
            self.gate_logit = nn.Parameter(torch.randn(heads))
            self.q_fixed_norm = head_norm(norm, width, affine=False)
        self.q0_norm = head_norm(norm, width, affine=True)
        self.k_norm = head_norm(norm, width, affine=True)
        self.k0_norm = head_norm(norm, width, affine=False)
        self.v0_norm = head_norm(norm, width, affine=False)
        self.k_proj = nn.Linear(channels, channels)
        self.v_proj = nn.Linear(channels, channels)
        if synthesis != "tied":
            self.k0_proj = nn.Linear(channels, channels)
        if synthesis == "separate":
            self.v0_proj = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.shape[0]
        k_raw, v = self.split(self.k_proj(x)), self.split(self.v_proj(x))
        k0 = k_raw if self.synthesis == "tied" else self.split(self.k0_proj(x))
        k0 = self.k0_norm(k0)
        v0 = k0
        if self.synthesis == "separate":
            v0 = self.v0_norm(self.split(self.v0_proj(x)))
        q = attend(self.q0_norm(self.latent_q0).repeat(batch, 1, 1, 1), k0, v0)
        if self.query == "gated":
            gate = torch.sigmoid(self.gate_logit).reshape(1, -1, 1, 1)
            q = self.q_fixed_norm(self.latent_q_fixed) + gate * q
        return self.merge(self.scatter_gather(q, self.k_norm(k_raw), v))


class PlainMLP(nn.Module):
    def __init__(self, width_in: int, hidden: int, width_out: int, output_residual: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width_in, hidden)
        self.fcs = nn.ModuleList([nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)])
        self.fc2 = nn.Linear(hidden, width_out)
        self.output_residual = output_residual and hidden == width_out

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(x), approximate="tanh")
        if x.shape[-1] == h.shape[-1]:
            h = h + x
        for fc in self.fcs:
            h = h + F.gelu(fc(h), approximate="tanh")
        return self.fc2(h) + h if self.output_residual else self.fc2(h)


class PlainFFN(nn.Module):
    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, hidden)
        self.fc2 = nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class PlainBlock(nn.Module):
    def __init__(self, channels: int, ratio: int, norm: str, mixer: nn.Module) -> None:
        super().__init__()
        self.norm1 = head_norm(norm, channels, affine=True)
        self.norm2 = head_norm(norm, channels, affine=True)
        self.mixer = mixer
        self.ffn = PlainFFN(channels, ratio * channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class PlainModel(nn.Module):
    """[B, N, F] -> [B, N, O]; all parameters drawn at a scale where every one matters."""

    def __init__(
        self,
        mixer: str,
        *,
        features: int,
        outputs: int,
        channels: int,
        heads: int,
        latents: int,
        blocks: int,
        ratio: int = 2,
        norm: str = "layernorm",
        query: str = "gated",
        synthesis: str = "shared",
    ) -> None:
        super().__init__()

        def build() -> nn.Module:
            if mixer == "flare":
                return PlainFlareMixer(channels, heads, latents)
            return PlainFlarePPMixer(channels, heads, latents, norm, query, synthesis)

        self.in_proj = PlainMLP(features, channels, channels, output_residual=True)
        self.blocks = nn.ModuleList(
            PlainBlock(channels, ratio, norm, build()) for _ in range(blocks)
        )
        head = PlainMLP(channels, channels, outputs, output_residual=False)
        self.out_proj = nn.Sequential(head_norm(norm, channels, affine=True), head)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                std = 1.0 if "latent" in name else 0.3
                parameter.copy_(centre + std * torch.randn_like(parameter))

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_proj(x)
        for block in self.blocks:
            x = block(x)
        return self.out_proj(x)
