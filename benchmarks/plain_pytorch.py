"""FLARE++ as one would write it in plain PyTorch: what the executors are measured against.

Imports nothing of the package: `scaled_dot_product_attention`, contiguous `nn.Linear`, `LayerNorm`,
ordinary autograd. The names in its state dict are the published ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PlainMLP(nn.Module):
    """Residual MLP of the input projection and the output head."""

    def __init__(self, width_in: int, hidden: int, width_out: int, plus_h: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width_in, hidden)
        self.fcs = nn.ModuleList([nn.Linear(hidden, hidden) for _ in range(2)])
        self.fc2 = nn.Linear(hidden, width_out)
        self.plus_x, self.plus_h = width_in == hidden, plus_h

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.fc1(x), approximate="tanh")
        if self.plus_x:
            h = h + x
        for fc in self.fcs:
            h = h + F.gelu(fc(h), approximate="tanh")
        out: Tensor = self.fc2(h)
        return out + h if self.plus_h else out


class PlainFFN(nn.Module):
    """fc2(gelu(fc1(x)))"""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        return out


class PlainMixer(nn.Module):
    """Synthesise queries, encode, decode."""

    def __init__(self, width: int, heads: int, latents: int) -> None:
        super().__init__()
        self.heads, head = heads, width // heads
        self.latent_q0 = nn.Parameter(torch.empty(heads, latents, head))
        self.latent_q_fixed = nn.Parameter(torch.empty(heads, latents, head))
        self.gate_logit = nn.Parameter(torch.empty(heads))
        self.q0_norm = nn.LayerNorm(head)
        self.k_norm = nn.LayerNorm(head)
        self.plain_norm = nn.LayerNorm(head, elementwise_affine=False)
        self.k0_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        return x.view(batch, tokens, self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        k0 = self.plain_norm(self.split(self.k0_proj(x)))
        q0 = self.q0_norm(self.latent_q0).expand(batch, -1, -1, -1)
        dynamic = F.scaled_dot_product_attention(q0, k0, k0)
        gate = torch.sigmoid(self.gate_logit)[:, None, None]
        q = self.plain_norm(self.latent_q_fixed) + gate * dynamic
        k = self.k_norm(self.split(self.k_proj(x)))
        v = self.split(self.v_proj(x))
        z = F.scaled_dot_product_attention(q, k, v)
        y = F.scaled_dot_product_attention(k, q, z)
        out: Tensor = self.out_proj(y.transpose(1, 2).reshape(batch, tokens, width))
        return out


class PlainBlock(nn.Module):
    """Pre-norm residual block."""

    def __init__(self, width: int, heads: int, latents: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.mixer = PlainMixer(width, heads, latents)
        self.norm2 = nn.LayerNorm(width)
        self.ffn = PlainFFN(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        out: Tensor = x + self.ffn(self.norm2(x))
        return out


class PlainFlarePP(nn.Module):
    """The whole network: inputs [B, N, F] -> outputs [B, N, O]."""

    def __init__(
        self, inputs: int, outputs: int, *, width: int, heads: int, latents: int, blocks: int
    ) -> None:
        super().__init__()
        self.in_proj = PlainMLP(inputs, width, width, plus_h=True)
        self.blocks = nn.ModuleList([PlainBlock(width, heads, latents) for _ in range(blocks)])
        self.out_proj = nn.Sequential(
            nn.LayerNorm(width), PlainMLP(width, width, outputs, plus_h=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_proj(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.out_proj(x)
        return out
