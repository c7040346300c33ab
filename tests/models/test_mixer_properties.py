"""What follows from the mixers' formulas in special cases."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from cpflare.config import EngineConfig, config_from_dict
from cpflare.engine import configure
from cpflare.errors import ConfigError
from cpflare.models import build_model, naive
from cpflare.models.layers import merge_heads
from cpflare.models.mixer import reduce_stages
from cpflare.models.mixers import MIXERS
from cpflare.models.site import Site
from cpflare.ops import Reducer
from cpflare.ops.random import keyed_places
from support.harness import relative_error

C, H, M, D, N = 16, 2, 4, 8, 11
EPS = 1e-5


def mixer_of(name, seed=7, **options):
    """A mixer with weights of unit scale, by itself."""
    values = {"mixer": name, "channels": C, "heads": H, "latents": M, "blocks": 1} | options
    config = config_from_dict({"model": values, "train": {"precision": "fp64"}}).model
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        mixer = MIXERS[name].build(config).double()
        for p in mixer.parameters():
            p += 0.3 * torch.randn(p.shape, dtype=torch.float64)
    return mixer


def run(mixer, x, site=None):
    site = site or Site()
    tokens = mixer.tokens(x, site)
    return mixer.emit(tokens, reduce_stages(mixer, [tokens], Reducer()))


def draw(tokens=N):
    return torch.randn(2, tokens, C, dtype=torch.float64)


@pytest.mark.parametrize("name", ["transolver", "transolver3"])
def test_one_slice_is_the_mean_for_every_token(name):
    mixer, x = mixer_of(name, latents=1), draw()
    mean = naive.split(mixer.value_proj(x), H).mean(dim=2, keepdim=True) * N / (N + EPS)
    expected = mixer.out_proj(merge_heads(mixer.slice_attention.value_proj(mean)))
    assert relative_error(run(mixer, x), expected.expand(-1, N, -1)) < 1e-12


@pytest.mark.parametrize("name", ["transolver", "transolver3", "cano", "galerkin"])
def test_every_token_twice_changes_nothing_but_what_eps_does(name):
    mixer, x = mixer_of(name), draw()
    once, twice = run(mixer, x), run(mixer, torch.cat([x, x], dim=1))[:, :N]
    assert relative_error(twice, once) < 1e-4


def test_a_slice_of_almost_no_mass_is_pulled_to_zero():
    mixer, x = mixer_of("transolver"), draw()
    with torch.no_grad():
        mixer.slice_proj.bias[1] = -20.0
    w = mixer.tokens(x, Site())["w"]
    assert 0 < w[:, :, :, 1].sum(dim=2).max() < 1e-3 * EPS
    gathered = []
    mixer.slice_attention.register_forward_hook(lambda module, args, out: gathered.append(args[0]))
    assert relative_error(run(mixer, x), naive.transolver(mixer, x, Site())) < 1e-12
    assert gathered[0][:, :, 1].abs().max() < 1e-2 * gathered[0].abs().max()


def test_both_orders_of_slicing_are_one_function():
    plain, fused = mixer_of("transolver"), mixer_of("transolver", slice_order="fused")
    x = draw()
    assert relative_error(run(fused, x), run(plain, x)) < 1e-12
    assert (fused.stages[0].reads, plain.stages[0].reads) == (("x", "w"), ("w", "f"))


def test_a_temperature_beyond_its_limits_stays_there():
    mixer, x = mixer_of("transolver"), draw()
    with torch.no_grad():
        mixer.temperature[:] = torch.tensor([0.01, 1.0])
    run(mixer, x).square().sum().backward()
    assert mixer.temperature.grad[0] == 0
    assert mixer.temperature.grad[1] != 0
    free = mixer_of("transolver", temperature_range=None)
    free.load_state_dict(mixer.state_dict())
    run(free, x).square().sum().backward()
    assert free.temperature.grad[0] != 0


def test_hot_tokens_belong_to_all_slices_alike():
    mixer, x = mixer_of("transolverpp", gumbel="never"), draw()
    with torch.no_grad():
        mixer.temperature[:] = 1e9
    mean = naive.split(mixer.x_proj(x), H).mean(dim=2, keepdim=True)
    expected = mixer.out_proj(merge_heads(mixer.slice_attention.value_proj(mean)))
    assert relative_error(run(mixer, x), expected.expand(-1, N, -1)) < 1e-4  # eps over N / M


def test_noise_is_of_the_gumbel_distribution_and_finite():
    mixer = mixer_of("transolverpp").train()
    noise = mixer.noise(torch.zeros(1, H, 50_000, D), Site(torch.arange(50_000)))
    assert noise.shape == (H, 50_000, M)
    assert noise.min() > -2.82
    assert noise.max() < 16.65
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(torch.pi**2 / 6, rel=0.02)


@pytest.mark.parametrize(
    ("gumbel", "in_training", "in_evaluation"),
    [("train", True, False), ("always", True, True), ("never", False, False)],
)
def test_noise_where_it_is_wanted(gumbel, in_training, in_evaluation):
    values = {"mixer": "transolverpp", "channels": C, "heads": H, "latents": M, "blocks": 2}
    model = build_model({"model": values | {"gumbel": gumbel}, "train": {"precision": "fp64"}})
    quiet = build_model({"model": values | {"gumbel": "never"}, "train": {"precision": "fp64"}})
    inputs, rows = torch.rand(2, N, 6, dtype=torch.float64), torch.arange(N)
    for training, noisy in ((True, in_training), (False, in_evaluation)):
        model.train(training), quiet.train(training)
        found = [model(inputs, rows, step) for step in (3, 3, 4)]
        expected = quiet(inputs)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], expected) is not noisy
        assert torch.equal(found[0], found[2]) is not (noisy and training)
    if in_training:
        with pytest.raises(ValueError, match="the mixer's noise needs the rows of the 11 tokens"):
            model.train()(inputs)


def test_clusters_without_a_preference_hold_the_mean_query():
    for cluster, scale in (("mean", 1.0 / (1.0 + EPS * M / N)), ("sum", N / M)):
        mixer, x = mixer_of("cano", cluster=cluster), draw()
        with torch.no_grad():
            mixer.cluster_weight.zero_()
        projections = mixer.query_proj, mixer.key_proj, mixer.value_proj
        q, k, v = (naive.split(project(x), H) for project in projections)
        z = F.scaled_dot_product_attention(scale * q.mean(dim=2, keepdim=True), k, v)
        expected = mixer.out_proj(merge_heads(z)).expand(-1, N, -1)
        assert relative_error(run(mixer, x), expected) < 1e-12


def test_a_sum_of_queries_is_the_mean_times_its_mass():
    x = draw()
    states = {}
    for cluster in ("mean", "sum"):
        mixer = mixer_of("cano", cluster=cluster)
        tokens = mixer.tokens(x, Site())
        states[cluster] = reduce_stages(mixer, [tokens], Reducer())["q_c"]
    mass = tokens["c"].sum(dim=2)[..., None]
    assert relative_error(states["sum"], states["mean"] * (mass + EPS)) < 1e-12


def test_places_are_drawn_without_repetition_and_by_key():
    for total in (1, 2, 7, 64, 1000):
        places = keyed_places(total, total, seed=1, step=0)
        assert sorted(places.tolist()) == list(range(total))
        assert torch.equal(keyed_places(total // 2, total, seed=1, step=0), places[: total // 2])
    assert len(keyed_places(0, 0, seed=1, step=0)) == 0
    draws = [keyed_places(100, 10_000, seed=s, step=t) for s, t in ((1, 0), (1, 1), (2, 0))]
    assert len({tuple(places.tolist()) for places in draws}) == 3
    assert draws[0].double().mean() == pytest.approx(5000, abs=1000)  # 3.5 deviations of 289


def place(inputs):
    return Site(inputs=inputs, position=slice(0, 3), total=inputs.shape[1])


def test_a_token_that_is_no_anchor_matters_to_itself_alone():
    mixer, x = mixer_of("abupt", anchors=5).eval(), draw()
    site = place(torch.rand(2, N, 3, dtype=torch.float64))
    anchors = keyed_places(5, N, seed=0, step=0).tolist()
    free = next(i for i in range(N) if i not in anchors)
    before = run(mixer, x, site)
    for index, alone in ((free, True), (anchors[0], False)):
        changed = x.clone()
        changed[:, index] += 1.0
        differs = (run(mixer, changed, site) != before).any(dim=-1).any(dim=0)
        assert differs[index]
        assert (differs.sum() == 1) == alone


def test_moving_all_positions_changes_nothing_but_moving_some_does():
    mixer, x = mixer_of("abupt", anchors=5), draw()
    positions = torch.rand(2, N, 3, dtype=torch.float64)
    before = run(mixer, x, place(positions))
    moved = positions + torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    assert relative_error(run(mixer, x, place(moved)), before) < 1e-10
    moved[:, ::2] += 0.1
    assert relative_error(run(mixer, x, place(moved)), before) > 1e-3


def test_full_attention_of_too_many_tokens_is_refused_with_its_cost():
    x = draw()
    with pytest.raises(ConfigError, match=r"full attention of 11 tokens takes 7\.7e\+03 FLOPs"):
        run(mixer_of("full", full_tokens=10), x)
    assert run(mixer_of("full", full_tokens=None), x).shape == x.shape


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mixer": "cano", "cluster": "sum"}, "model.cluster=sum.*train.precision=bf16"),
        ({"mixer": "abupt", "channels": 12, "heads": 3}, "channels=12 over model.heads=3 must be"),
        ({"mixer": "transolver", "temperature_range": [5.0, 0.1]}, "two positive numbers in order"),
        ({"mixer": "transolver", "temperature_range": ["a"]}, "a list of numbers or null"),
        ({"mixer": "flare", "anchors": 3}, "anchors=3 is an option of model.mixer=abupt, not of"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        config_from_dict({"model": options, "train": {"precision": "bf16"}})


@pytest.mark.parametrize("mixer", ["transolver", "transolverpp", "transolver3"])
def test_slices_start_as_everything_or_orthogonal(mixer):
    sizes = {"mixer": mixer, "channels": 64, "heads": 2, "latents": 32, "blocks": 1}
    for kind in ("backbone", "orthogonal"):
        model = build_model({"model": sizes | {"slice_init": kind}})
        weight = model.blocks[0].mixer.slice_proj.weight.detach()  # [32, 32]
        is_orthogonal = relative_error(weight @ weight.T, torch.eye(32)) < 1e-5
        assert is_orthogonal == (kind == "orthogonal")
        if kind == "backbone":
            assert weight.std() == pytest.approx(0.02, rel=0.1)


def model_of(mixer, **options):
    values = {"mixer": mixer, "channels": C, "heads": H, "latents": M, "blocks": 2} | options
    return build_model({"model": values, "train": {"precision": "fp64"}})


@pytest.mark.parametrize("engine", ["in_memory", "streamed"])
@pytest.mark.parametrize("mixer", ["perceiver", "lno"])
def test_latent_blocks_run_once_each_way(mixer, engine):
    model = configure(model_of(mixer), EngineConfig(executor=engine, chunk_tokens=3))
    runs, pulls = [], []
    for block in model.steps[0].latent_blocks:
        block.register_forward_hook(lambda *_: runs.append(torch.is_grad_enabled()))
        block.fc1.weight.register_hook(lambda grad: pulls.append(grad))
    outputs = model(torch.rand(2, N, 6, dtype=torch.float64))
    forward = len(runs)
    outputs.sum().backward()
    assert forward == 2
    assert len(runs) == (2 if engine == "in_memory" else 4)  # streamed, again under autograd
    assert len(pulls) == 2


def test_a_bias_of_all_tokens_scores_moves_no_mode():
    model = model_of("lno")
    step, inputs = model.steps[0], torch.rand(2, N, 6, dtype=torch.float64)
    site, x = Site(inputs=inputs), model.embed(inputs)
    before = reduce_stages(step, [step.tokens(x, site)], Reducer())["z"]
    outputs = model(inputs)
    with torch.no_grad():
        step.scores.fc2.bias[0] += 3.0
    assert torch.equal(reduce_stages(step, [step.tokens(x, site)], Reducer())["z"], before)
    assert relative_error(model(inputs), outputs) > 1e-6


def test_one_mode_is_read_alike_by_all_tokens():
    outputs = model_of("lno", latents=1)(torch.rand(2, N, 6, dtype=torch.float64))
    assert relative_error(outputs, outputs[:, :1].expand_as(outputs)) < 1e-12


def test_attention_to_constant_values_is_these_values_and_the_query():
    model = model_of("gnot")
    step = model.steps[1]
    with torch.no_grad():
        step.attention.value_proj.weight.zero_()
        step.attention.value_proj.bias.normal_()
    inputs = torch.rand(2, N, 6, dtype=torch.float64)
    site = Site(inputs=inputs, position=slice(0, 3))
    tokens = step.tokens(model.embed(inputs), site)
    state = reduce_stages(step, [tokens], Reducer())
    v = step.attention.value_proj.bias.unflatten(0, (H, 1, D))
    expected = step.attention.out_proj(merge_heads(tokens["q"] + v))
    assert relative_error(step.attention.read(tokens["q"], state["sums"]), expected) < 1e-12


def test_an_underflowing_normaliser_stays_finite():
    attention = model_of("gnot").steps[0].attention.float()
    q, sums = torch.zeros(1, H, 1, D), torch.zeros(1, H, D, D + 1)
    q[..., 0], sums[:, :, 1:] = 1.0, 1.0  # all mass of the keys on other features
    assert attention.read(q, sums).isfinite().all()


def test_shared_weights_stand_once_in_a_state_dict_and_load_again():
    model, other = model_of("gnot"), model_of("gnot")
    state = model.state_dict()
    assert state.keys() == dict(model.named_parameters()).keys()
    assert model.steps[0].branch is model.steps[2].branch
    with torch.no_grad():
        for p in other.parameters():
            p += 1.0
    other.load_state_dict(state)
    inputs = torch.rand(2, N, 6, dtype=torch.float64)
    assert torch.equal(other(inputs), model(inputs))
    del state["blocks.0.gate.fc1.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.0\.gate\.fc1\.bias"):
        other.load_state_dict(state)
