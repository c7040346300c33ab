"""What complete architectures share: blocks of latents among themselves, and an MLP of theirs."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from cpflare.models.layers import LayerNorm, merge_heads, split_heads


class LatentBlock(nn.Module):
    """z += attention(norm(z)); z += mlp(norm(z)), for replicated latents z [B, M, C]."""

    def __init__(
        self, channels: int, heads: int, ratio: int, *, approximate: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.approximate = heads, approximate
        self.norm1, self.norm2 = LayerNorm(channels), LayerNorm(channels)
        self.qkv_proj = nn.Linear(channels, 3 * channels, bias=bias)
        self.out_proj = nn.Linear(channels, channels)
        self.fc1 = nn.Linear(channels, ratio * channels)
        self.fc2 = nn.Linear(ratio * channels, channels)

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = (split_heads(t, self.heads) for t in self.qkv_proj(self.norm1(z)).chunk(3, -1))
        scores = q.shape[-1] ** -0.5 * (q @ k.mT)
        z = z + self.out_proj(merge_heads(scores.softmax(dim=-1).to(v.dtype) @ v))
        hidden = F.gelu(self.fc1(self.norm2(z)), approximate=self.approximate)
        out: Tensor = z + self.fc2(hidden)
        return out


class DeepMLP(nn.Module):
    """gelu(fc1 x); then r += gelu(fc r), `layers` times; then fc2.  [..., a] -> [..., b]"""

    def __init__(self, in_channels: int, hidden: int, out_channels: int, layers: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_channels, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.fc2 = nn.Linear(hidden, out_channels)

    def features(self, x: Tensor) -> Tensor:
        """The last hidden layer.  [..., a] -> [..., hidden]"""
        r = F.gelu(self.fc1(x))
        for layer in self.layers:
            r = r + F.gelu(layer(r))
        return r

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.features(x))
        return out
