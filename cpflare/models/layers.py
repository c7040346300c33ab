"""Token-local layers: norms, residual MLPs, the feed-forward network, heads, initial values."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

INIT_STD = 0.02

CAST = "cast_"
"""Before the name of a parameter: where an executor leaves it when it has cast it already
(`cpflare.engine.casting`)."""


def make_norm(kind: str, width: int, *, affine: bool = True) -> nn.Module:
    """LayerNorm (eps 1e-5) or RMSNorm (eps 1e-6) over the last dimension."""
    if kind == "layernorm":
        return LayerNorm(width, eps=1e-5, elementwise_affine=affine)
    assert kind == "rmsnorm"
    return RMSNorm(width, eps=1e-6, elementwise_affine=affine)


class LayerNorm(nn.LayerNorm):
    """LayerNorm in its input's dtype; computed in fp32 inside."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = _in_dtype_of(x, self, "weight"), _in_dtype_of(x, self, "bias")
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMSNorm in its input's dtype; computed in fp32 inside.

    Half-precision inputs with fp32 weights would take torch off its fused kernel and leave an fp32
    output, and so would the autocast of a GPU, which runs norms in fp32.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = _in_dtype_of(x, self, "weight")
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def _in_dtype_of(x: Tensor, norm: nn.Module, name: str) -> Tensor | None:
    weight: Tensor | None = norm._parameters[name]
    cast = norm._parameters.get(CAST + name)
    if cast is not None and cast.dtype == x.dtype:
        return cast
    return None if weight is None else weight.to(x.dtype)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """[B, n, H·D] -> [B, H, n, D], a view."""
    heads_last: Tensor = x.unflatten(-1, (heads, -1))
    return heads_last.transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """[B, H, n, D] -> [B, n, H·D]"""
    return x.transpose(1, 2).flatten(-2)


def gelu(x: Tensor) -> Tensor:
    """GELU in its tanh form, as the published models use it."""
    return F.gelu(x, approximate="tanh")


class FeedForward(nn.Module):
    """fc2(gelu(fc1(x)))"""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, hidden)
        self.fc2 = nn.Linear(hidden, channels)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(gelu(self.fc1(x)))
        return out


class ResidualMLP(nn.Module):
    """h = act(fc1(x)); h += act(fc(h)) for each hidden layer; fc2(h).

    `input_residual` adds x to the first and `output_residual` h to the last layer, each where the
    widths agree.
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        out_channels: int,
        *,
        layers: int = 2,
        input_residual: bool,
        output_residual: bool,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(in_channels, hidden)
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers))
        self.fc2 = nn.Linear(hidden, out_channels)
        self.input_residual = input_residual and in_channels == hidden
        self.output_residual = output_residual and hidden == out_channels

    def forward(self, x: Tensor) -> Tensor:
        h = gelu(self.fc1(x))
        if self.input_residual:
            h = h + x
        for layer in self.layers:
            h = h + gelu(layer(h))
        out: Tensor = self.fc2(h)
        return out + h if self.output_residual else out


class TokenProjection(nn.Linear):
    """A square projection that starts at identity + N(0, 0.02) truncated at ±2."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels)

    @torch.no_grad()
    def initialise(self) -> None:
        nn.init.trunc_normal_(self.weight, std=INIT_STD, a=-2.0, b=2.0)
        self.weight += torch.eye(self.in_features, dtype=self.weight.dtype)
        nn.init.zeros_(self.bias)


class ZeroProjection(nn.Linear):
    """A projection that starts with zero weight and bias."""

    @torch.no_grad()
    def initialise(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class OrthogonalProjection(nn.Linear):
    """A projection that starts with orthonormal rows, or columns, and zero bias."""

    @torch.no_grad()
    def initialise(self) -> None:
        nn.init.orthogonal_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def initialise_linear(module: nn.Module) -> None:
    """Linear weights N(0, 0.02) and zero bias; those that start in another way do so."""
    if isinstance(module, TokenProjection | OrthogonalProjection | ZeroProjection):
        module.initialise()
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=INIT_STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def latent_parameter(heads: int, latents: int, head_width: int) -> nn.Parameter:
    """Learned latents N(0, 0.02).  [H, M, D]"""
    return nn.Parameter(torch.randn(heads, latents, head_width) * INIT_STD)
