"""What a block of each mixer costs: messages, bytes, parameters and FLOPs, against the formulas."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cpflare.config import config_from_dict
from cpflare.models import build_model
from cpflare.models.mixers import MIXERS
from cpflare.plan.counting import CPU_ATTENTION
from cpflare.scaling.messages import messages_of

C, H, M, TOKENS = 48, 4, 8, 8
D, P = C // H, C * C + C
BLOCKS = 2
ANCHORS = 5

SOFTMAX, SUM = "softmax", "sum"

# Of a block: stages with their values forward and backward, parameters, and FLOPs a token.
BLOCK_MIXERS = {
    "flare": ([(SOFTMAX, H * M * (D + 1), H * M * D)], 3 * P + M * C, 6 * C * C + 8 * M * C),
    "flarepp": (
        [(SOFTMAX, H * M * (D + 1), H * M * D)] * 2,
        4 * P + 2 * M * C + H + 4 * D,
        8 * C * C + 12 * M * C,
    ),
    "transolver": (
        [(SUM, H * M * (D + 1), H * M * (D + 1))],
        3 * P + D * M + M + H + 3 * D * D,
        6 * C * C + 6 * M * C,
    ),
    "transolverpp": (
        [(SUM, H * M * (D + 1), H * M * (D + 1))],
        2 * P + 2 * D * M + 3 * M + 1 + H + 3 * D * D,
        4 * C * C + 8 * M * C + 2 * H * M,
    ),
    "transolver3": (
        [(SUM, H * M * (D + 1), H * M * (D + 1))],
        3 * P + D * M + M + H + 3 * D * D,
        6 * H * M * C,
    ),
    "galerkin": ([(SUM, H * D * D + 1, H * D * D + 1)], 4 * P + 4 * D, 8 * C * C + 4 * C * D),
    "cano": (
        [(SUM, H * M * (D + 1), H * M * (D + 1)), (SOFTMAX, H * M * (D + 1), H * M * D)],
        4 * P + C * M,
        8 * C * C + 10 * M * C,
    ),
    "isab": (
        [(SOFTMAX, H * M * (D + 1), H * M * D)],
        8 * P + 8 * C + M * C,
        8 * C * C + 8 * M * C,
    ),
    "abupt": (
        [(SUM, 2 * ANCHORS * C, 2 * ANCHORS * C)],
        4 * P,
        4 * C * C + 4 * ANCHORS * C,
    ),
    "none": ([], 0, 0),
}

IN, OUT, LAYERS, EXPERTS, R = 6, 4, 2, 3, 2  # inputs, outputs, and sizes of the architectures


def latent_parameters(ratio):
    return 3 * C * C + P + 4 * C + 2 * ratio * C * C + ratio * C + C


def mlp_parameters(a, b):
    return a * C + C + LAYERS * P + C * b + b


def mlp_flops(a, b):
    return 2 * (a * C + LAYERS * C * C + C * b)


ENDS = mlp_parameters(IN, C) + mlp_parameters(C, OUT)
HALF = [(SUM, H * D * (D + 1), H * D * (D + 1))]

# Of a whole model: stages, parameters and FLOPs a token. Those of Perceiver IO stand between the
# backbone's ends, whose projections are MLPs of the same form, with a norm.
ARCHITECTURES = {
    "perceiver": (
        [(SOFTMAX, H * M * (D + 1), H * M * D)],
        ENDS + 2 * C + M * C + 3 * P + 2 * C + BLOCKS * latent_parameters(4) + 4 * P + 4 * C,
        mlp_flops(IN, C) + mlp_flops(C, OUT) + 8 * C * C + 8 * M * C,
    ),
    "lno": (
        [(SOFTMAX, M * (C + 1), M * C)],
        ENDS
        + mlp_parameters(IN, C)
        + mlp_parameters(C, M)
        + BLOCKS * (latent_parameters(2) + 3 * C),  # its query, key and value have biases
        2 * mlp_flops(IN, C) + mlp_flops(C, OUT) + mlp_flops(C, M) - 2 * C * M + 8 * M * C,
    ),
    "gnot": (
        HALF * 2 * BLOCKS,
        ENDS
        + mlp_parameters(IN, C)
        + BLOCKS * (8 * P + 10 * C + 2 * EXPERTS * (2 * R * C * C + R * C + C))
        + BLOCKS * (3 * R * C + R * C + R * R * C * C + R * C + EXPERTS * R * C + EXPERTS),
        mlp_flops(IN, C)
        + mlp_flops(C, OUT)
        + BLOCKS * mlp_flops(IN, C)  # the branch, made anew in each block
        + 2 * BLOCKS * (8 * C * C + 4 * C * D + 2 * C + EXPERTS * 4 * R * C * C)
        + 2 * BLOCKS * 2 * (3 * R * C + R * R * C * C + EXPERTS * R * C),  # the gate, twice a block
    ),
}

OPTIONS = {"abupt": {"anchors": ANCHORS}}


def config_of(mixer, **options):
    model = {"mixer": mixer, "channels": C, "heads": H, "latents": M, "blocks": BLOCKS}
    return config_from_dict({"model": model | OPTIONS.get(mixer, {}) | options})


def test_the_table_has_every_mixer():
    assert {*MIXERS} == {*BLOCK_MIXERS, *ARCHITECTURES, "full"}


def expected_messages(stages, ranks):
    """Kinds and bytes of a model's messages, forward and then backward."""
    forward, backward = [], []
    for kind, values, back in stages:
        if kind == SUM:
            forward.append(("all_reduce", 4 * values))
        elif ranks <= 4:
            forward.append(("all_gather", 4 * values))
        else:
            forward += [("all_reduce", 4 * (values - back)), ("all_reduce", 4 * values)]
        backward.append(("all_reduce", 4 * back))
    return forward, backward[::-1]


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("mixer", [*BLOCK_MIXERS, *ARCHITECTURES])
def test_messages_are_those_of_the_stages(mixer, ranks):
    whole = ARCHITECTURES[mixer][0] if mixer in ARCHITECTURES else BLOCK_MIXERS[mixer][0] * BLOCKS
    forward, backward = expected_messages(whole, ranks)
    sent = [(m.kind, m.num_bytes) for m in messages_of(config_of(mixer), ranks).stages]
    if mixer == "abupt" and ranks > 1:
        assert sent.pop(0) == ("all_gather", 8)  # the number of tokens, once a forward
    assert sent == (forward + backward if ranks > 1 else [])


@pytest.mark.parametrize("ranks", [2, 5])
def test_full_attention_sends_every_token_s_keys_and_values(ranks):
    sent = [(m.kind, m.num_bytes) for m in messages_of(config_of("full"), ranks).stages]
    block = [("all_gather", 8), ("all_gather", 4 * 2 * C * TOKENS)]
    assert sent == block * BLOCKS + [("all_reduce", 4 * 2 * C * TOKENS * ranks)] * BLOCKS


@pytest.mark.parametrize("mixer", [*BLOCK_MIXERS, "full"])
def test_parameters(mixer):
    mixers = [block.mixer for block in build_model(config_of(mixer)).blocks]
    found = [sum(p.numel() for p in part.parameters()) for part in mixers]
    expected = 4 * P if mixer == "full" else BLOCK_MIXERS[mixer][1]
    assert found == [expected] * BLOCKS


def flops(mixer, tokens):
    model = build_model(config_of(mixer)).eval()
    inputs = torch.rand(tokens, 6)
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        model(inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize("mixer", BLOCK_MIXERS)
def test_flops_a_token(mixer):
    found = flops(mixer, 96) - flops(mixer, 32) - flops("none", 96) + flops("none", 32)
    assert found == BLOCKS * 64 * BLOCK_MIXERS[mixer][2]


def test_full_attention_s_flops_grow_with_the_square():
    few, many = (flops("full", n) - flops("none", n) for n in (32, 64))
    assert few == BLOCKS * 32 * (8 * C * C + 4 * 32 * C)
    assert many == BLOCKS * 64 * (8 * C * C + 4 * 64 * C)


@pytest.mark.parametrize("mixer", ARCHITECTURES)
def test_a_complete_architecture_s_parameters_and_flops_a_token(mixer):
    model = build_model(config_of(mixer))
    assert sum(p.numel() for p in model.parameters()) == ARCHITECTURES[mixer][1]
    assert flops(mixer, 96) - flops(mixer, 32) == 64 * ARCHITECTURES[mixer][2]
