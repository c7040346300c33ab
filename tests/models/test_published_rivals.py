"""Weights of rivals' public classes: their names, and the outputs of plain restatements of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cpflare.errors import DataError
from cpflare.models import build_model
from cpflare.models.mixer import reduce_stages
from cpflare.models.published_rivals import load_anchor_attention, load_lno, load_transolver
from support.harness import relative_error

WIDTH, HEADS, LATENTS = 24, 2, 5
D = WIDTH // HEADS


def heads(x):
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class PlainPhysicsAttention(nn.Module):
    """Slices of an irregular mesh, attention among them, and back, as it was published."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(1, HEADS, 1, 1) + 0.2)
        self.in_project_x = nn.Linear(WIDTH, WIDTH)
        self.in_project_fx = nn.Linear(WIDTH, WIDTH)
        self.in_project_slice = nn.Linear(D, LATENTS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(D, D, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))

    def forward(self, x):
        w = (self.in_project_slice(heads(self.in_project_x(x))) / self.temperature).softmax(-1)
        mass = w.sum(dim=2)[..., None]
        slices = w.mT @ heads(self.in_project_fx(x)) / (mass + 1e-5)
        q, k, v = self.to_q(slices), self.to_k(slices), self.to_v(slices)
        mixed = (q @ k.mT / D**0.5).softmax(dim=-1) @ v
        return self.to_out((w @ mixed).transpose(1, 2).flatten(2))


class PlainAnchorAttention(nn.Module):
    """All tokens attend to all, which are the anchors, turned by their positions."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, positions):
        q, k, v = (heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        per = D // 6
        speed = 10000.0 ** -(torch.arange(per, dtype=x.dtype) / per)
        angle = (1000 * positions[..., None] * speed).flatten(2)[:, None]
        turn = torch.polar(torch.ones_like(angle), angle)
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn
            ).flatten(-2)
            for t in (q, k)
        )
        mixed = (q @ k.mT / D**0.5).softmax(dim=-1) @ v
        return self.proj(mixed.transpose(1, 2).flatten(2))


class PlainMLP(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.input, self.output = nn.Linear(a, WIDTH), nn.Linear(WIDTH, b)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        r = F.gelu(self.input(x))
        for layer in self.hidden:
            r = r + F.gelu(layer(r))
        return self.output(r)


class PlainSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.Wq, self.Wk, self.Wv, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, z):
        q, k, v = heads(self.Wq(z)), heads(self.Wk(z)), heads(self.Wv(z))
        mixed = (q @ k.mT / D**0.5).softmax(dim=-1) @ v
        return self.proj(mixed.transpose(1, 2).flatten(2))


class PlainLatentBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = PlainSelfAttention()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, z):
        z = z + self.self_attn(self.ln1(z))
        return z + self.mlp(self.ln2(z))


class PlainLNO(nn.Module):
    """Scores of positions write to modes and read from them, as it was published."""

    def __init__(self):
        super().__init__()
        self.trunk_projector, self.branch_projector = PlainMLP(6, WIDTH), PlainMLP(6, WIDTH)
        self.out_mlp = PlainMLP(WIDTH, 4)
        self.attention_projector = PlainMLP(WIDTH, LATENTS)
        self.attn_blocks = nn.Sequential(PlainLatentBlock(), PlainLatentBlock())

    def forward(self, inputs):
        score = self.attention_projector(self.trunk_projector(inputs))
        z = self.attn_blocks(score.softmax(dim=1).mT @ self.branch_projector(inputs))
        return self.out_mlp(score.softmax(dim=-1) @ z)


def build(mixer, **options):
    sizes = {"channels": WIDTH, "heads": HEADS, "latents": LATENTS, "blocks": 2}
    model = {"mixer": mixer, **sizes, **options}
    return build_model({"model": model, "train": {"precision": "fp64"}})


def mixed(model, x, inputs):
    """The first block's mixer by itself."""
    block, site = model.blocks[0], model.site_of(inputs, None, 0)
    block.norm1 = nn.Identity()
    tokens = block.tokens(x, site)
    return block.mixer.emit(tokens, reduce_stages(block, [tokens], model.reducer))


@pytest.mark.parametrize("mixer", ["transolver", "transolver3"])
def test_transolver_s_attention_is_the_published_one(mixer):
    plain = PlainPhysicsAttention().double()
    model = build(mixer, temperature_range=None)
    load_transolver(model.blocks[0].mixer, plain.state_dict())
    x = torch.randn(2, 30, WIDTH, dtype=torch.float64)
    found = mixed(model, x, torch.rand(2, 30, 6, dtype=torch.float64))
    # Transolver-3's order differs by the slices' bias times eps over their mass.
    assert relative_error(found, plain(x)) < (1e-12 if mixer == "transolver" else 1e-4)


def test_anchor_attention_is_the_published_one():
    plain = PlainAnchorAttention().double()
    model = build("abupt", anchors=30).eval()
    load_anchor_attention(model.blocks[0].mixer, plain.state_dict())
    x, inputs = (torch.randn(2, 30, c, dtype=torch.float64) for c in (WIDTH, 6))
    inputs = inputs.sigmoid()
    assert relative_error(mixed(model, x, inputs), plain(x, inputs[..., :3])) < 1e-11


def test_lno_is_the_published_one():
    plain = PlainLNO().double()
    model = build("lno")
    inputs = torch.rand(2, 30, 6, dtype=torch.float64)
    before = model(inputs)
    load_lno(model, {f"module.{n}": v for n, v in plain.state_dict().items()})
    assert relative_error(model(inputs), plain(inputs)) < 1e-12
    assert relative_error(before, plain(inputs)) > 0.1


def test_what_does_not_fit_is_named():
    state = PlainPhysicsAttention().state_dict()
    mixer = build("transolver").blocks[0].mixer
    with pytest.raises(DataError, match=r"missing value_proj\.weight"):
        load_transolver(mixer, {n: v for n, v in state.items() if n != "in_project_fx.weight"})
    with pytest.raises(DataError, match=r"slice_proj\.bias has shape \[7\]"):
        load_transolver(mixer, state | {"in_project_slice.bias": torch.zeros(7)})
    with pytest.raises(DataError, match="normalises queries and keys"):
        load_anchor_attention(build("abupt").blocks[0].mixer, {"q.weight": torch.zeros(2, 2)})
    state = PlainLNO().state_dict()
    del state["attn_blocks.1.self_attn.Wk.weight"]
    with pytest.raises(DataError, match=r"missing blocks\.0\.latent_blocks\.1\.qkv_proj"):
        load_lno(build("lno"), state)
