"""What a conditioning does at the start, whom it reaches, what it sends, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cpflare.config import EngineConfig, config_from_dict
from cpflare.engine import configure
from cpflare.engine.conditions import same_conditions
from cpflare.errors import ConfigError
from cpflare.models import build_model
from cpflare.scaling.messages import messages_of
from support.every_mixer import CONDITIONED, CONDITIONS, ENGINES, SIZES, build, config_of

STEERED = [name for name in CONDITIONED if "in context" not in name]
FROM_THE_START = [n for n in STEERED if CONDITIONED[n].get("modulation_gate") != "zero"]


def model_of(**options):
    config = {"model": SIZES | options, "train": {"precision": "fp64"}}
    if options.get("conditioning", "none") != "none":
        config["data"] = CONDITIONS
    return build_model(config)


@pytest.mark.parametrize("variant", FROM_THE_START)
def test_a_fresh_model_is_the_unconditioned_one_bit_for_bit(variant):
    options = dict(CONDITIONED[variant])
    fresh, plain = model_of(**options), model_of(mixer=options["mixer"])
    inputs = torch.rand(1, 20, 10, dtype=torch.float64)
    assert torch.equal(fresh(inputs), plain(inputs[..., :6]))
    own = plain.state_dict()
    shared = {name: t for name, t in fresh.state_dict().items() if name in own}
    assert all(torch.equal(t, own[name]) for name, t in shared.items())
    assert own.keys() - shared.keys() <= {n for n in own if ".norm" in n}


def test_with_a_gate_that_starts_at_zero_every_block_is_the_identity():
    model = model_of(mixer="flarepp", conditioning="padanorm", modulation_gate="zero")
    inputs = torch.rand(1, 20, 10, dtype=torch.float64)
    assert torch.equal(model(inputs), model.head(model.embed(inputs)))


@pytest.mark.parametrize(
    ("conditioning", "reach"),
    [("in_context", "one"), ("padanorm", "one"), ("global", "all"), ("cross_attention", "all")],
)
@pytest.mark.parametrize("engine", ["in memory", "streamed"])
def test_a_token_s_condition_reaches_whom_its_definition_says(conditioning, reach, engine):
    """Without a mixer tokens meet in the conditioning alone, or not at all."""
    CONDITIONED["probe"] = {"mixer": "none", "conditioning": conditioning}
    try:
        model = configure(build("probe"), ENGINES[engine])
    finally:
        del CONDITIONED["probe"]
    inputs = torch.rand(1, 12, 10, dtype=torch.float64)
    with torch.no_grad():
        before = model(inputs)
        inputs[0, 5, 6:] += 1.0
        moved = (model(inputs) - before).abs().amax(dim=-1)[0] > 1e-12
    assert moved.tolist() == [reach == "all" or token == 5 for token in range(12)]


def test_a_condition_that_is_the_same_everywhere_modulates_as_the_mean_does():
    both = {}
    for kind in ("global", "padanorm"):
        model = model_of(mixer="flarepp", conditioning=kind, modulation_shared="all")
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.conditioning.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
        inputs = torch.rand(1, 20, 10, generator=torch.Generator().manual_seed(2)).double()
        inputs[..., 6:] = inputs[:, :1, 6:]
        both[kind] = model(inputs)
    assert (both["global"] - both["padanorm"]).abs().max() < 1e-12


@pytest.mark.parametrize("conditioning", ["global", "padanorm", "cross_attention"])
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_messages_of_a_conditioning_are_few_and_small(conditioning, ranks):
    """One stage a model: F_c + 1 = 5 values; or 3 latents of 2 heads, 8 channels and a sum."""
    options = {"conditioning": conditioning, "conditioning_latents": 3}
    with_it = messages_of(config_of_model(**options), ranks).stages
    without = messages_of(config_of_model(), ranks).stages
    if ranks == 1:
        assert list(with_it) == list(without) == []
        return
    extra = sum(m.num_bytes for m in with_it) - sum(m.num_bytes for m in without)
    latents, more = 2 * 3, 0 if ranks <= 4 else 4 * 2 * 3  # a maximum of each, above four ranks
    # The pooled conditions have no gradient, unless the inputs have.
    values = {"global": 5, "padanorm": 0, "cross_attention": latents * 9 + latents * 8}
    assert extra == 4 * values[conditioning] + (more if conditioning == "cross_attention" else 0)
    own = {"global": 1, "padanorm": 0, "cross_attention": 2 if ranks <= 4 else 3}
    assert len(with_it) - len(without) == own[conditioning]


def config_of_model(**options):
    data = CONDITIONS if options else {}
    model = SIZES | {"mixer": "flare", "heads": 2} | options
    return config_from_dict({"model": model, "data": data})


def test_parameters_are_counted():
    width, layers, c, blocks, channels = 8, 3, SIZES["channels"], SIZES["blocks"], 4
    encoder = channels * width + width + (layers - 1) * (width**2 + width)
    for shared, count in (("none", 2 * blocks), ("sites", 2), ("all", 1)):
        options = {"modulation_shared": shared, "conditioning": "padanorm"}
        model = model_of(
            mixer="flare", conditioning_width=width, conditioning_layers=layers, **options
        )
        found = sum(p.numel() for p in model.conditioning.parameters())
        assert found == encoder + count * 3 * c * (width + 1)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["flarepp padanorm", "flarepp cross attention"])
@pytest.mark.parametrize("engine", ["in memory", "streamed"])
def test_conditions_that_stay_are_encoded_once_and_change_no_bit(variant, engine):
    model = configure(build(variant), ENGINES[engine]).eval()
    inputs = torch.rand(1, 12, 10, dtype=torch.float64)
    steps = [inputs, inputs.clone(), inputs.clone()]
    for step in steps[1:]:
        step[..., :6] = torch.rand(1, 12, 6)

    def flops_of(context):
        with torch.no_grad(), FlopCounterMode(display=False) as counter, context:
            outputs = [model(step) for step in steps]
        return counter.get_total_flops(), outputs

    class Nothing:
        def __enter__(self): ...
        def __exit__(self, *_): ...

    fresh, expected = flops_of(Nothing())
    kept, found = flops_of(same_conditions(model))
    assert all(map(torch.equal, found, expected))
    once = 2 * 12 * sum(p.numel() for n, p in model.conditioning.encoder.named_parameters()
                        if "weight" in n)  # fmt: skip
    assert fresh - kept >= 2 * once
    assert model.conditioning.kept is None


def test_kept_conditions_are_of_one_set_of_tokens_and_of_no_training():
    model = build("flarepp padanorm")
    with same_conditions(model), torch.no_grad():
        model(torch.rand(1, 12, 10, dtype=torch.float64))
        with pytest.raises(ValueError, match="other tokens"):
            model(torch.rand(1, 9, 10, dtype=torch.float64))
    with same_conditions(model), pytest.raises(RuntimeError, match="no gradients"):
        model(torch.rand(1, 12, 10, dtype=torch.float64))


def test_what_cannot_be_conditioned_is_refused():
    for values, message in (
        ({"model": {"conditioning": "padanorm"}}, "needs data.condition or data.parameters"),
        ({"data": {"condition": ["normal"]}}, "set model.conditioning"),
        (
            {"data": {"condition": ["pressure"]}, "model": {"conditioning": "global"}},
            "must be some of position, normal",
        ),
        (
            {"data": {"parameters": ["a", "a"]}, "model": {"conditioning": "global"}},
            "each parameter once",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            config_from_dict(values)


def test_a_conditioned_model_takes_its_conditions_behind_its_inputs():
    config = config_of("flarepp padanorm")
    assert (config.input_channels, config.condition_channels) == (10, 4)
    with pytest.raises(ValueError, match=r"the model reads \[B, n, 10\]"):
        build_model(config)(torch.rand(1, 5, 6, dtype=torch.float64))


@pytest.mark.parametrize("engine", [n for n in ENGINES if n != "one chunk"])
def test_dropout_beside_a_conditioning_is_that_of_the_row(engine):
    inputs, rows = torch.rand(1, 12, 10, dtype=torch.float64), torch.randperm(100)[:12]
    found = []
    for executor in (None, ENGINES[engine]):
        model = build("flarepp padanorm", dropout=0.3).train()
        if executor is not None:
            configure(model, executor)
        outputs = model(inputs, rows=rows, step=2)
        outputs.square().sum().backward()
        found.append([outputs, *(p.grad for p in model.parameters())])
    assert all((a - b).abs().max() < 1e-12 * b.abs().max() for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["flarepp padanorm", "flarepp global"])
def test_a_compiled_model_with_conditions_is_the_eager_one(variant):
    inputs = torch.rand(1, 12, 10)
    eager, compiled = build(variant, "fp32"), build(variant, "fp32")
    configure(compiled, EngineConfig(compile=True))
    with torch.no_grad():
        assert (compiled(inputs) - eager(inputs)).abs().max() < 1e-5
