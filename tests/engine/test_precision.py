"""Mixed precision: half-precision products, but merges, statistics, norms and losses in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cpflare.config import EngineConfig, config_from_dict
from cpflare.engine import configure, parallelize
from cpflare.models import build_model
from cpflare.models.layers import make_norm
from cpflare.ops import encode, naive
from cpflare.parallel.comm import Communicator
from cpflare.train.loss import case_loss
from support.harness import relative_error, run_ranks
from support.stores import SMALL, read_metrics, train_rank, write_store

H, M, D = 4, 16, 16
SCALE = D**-0.5
TOKENS = 1200
CASES = 6
ONE_ROUNDING_MORE = 1.45
SHARDS = {
    1: [1200],
    2: [100, 1100],
    3: [1200 - 2 * 399, 399, 399],
    4: [300, 300, 0, 600],
}


def rms_error(found, expected):
    """Root mean square of the difference over that of the expected values."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def draw(dtype):
    q, dz = (torch.randn(1, H, M, D, dtype=torch.float64).to(dtype) for _ in range(2))
    k, v = (torch.randn(1, H, TOKENS, D, dtype=torch.float64).to(dtype) for _ in range(2))
    return q, k, v, dz


def encode_on_ranks(rank, world_size, q, k, v, dz, sizes):
    """The encoder with the dtypes of all its messages, and this rank's gradients."""
    comm = Communicator(dist.group.WORLD)
    dtypes = record_messages(comm)
    q, k, v = (
        t.clone().requires_grad_()
        for t in (q, k.split(sizes, dim=2)[rank], v.split(sizes, dim=2)[rank])
    )
    z = encode(q, k, v, scale=SCALE, group=comm)
    z.backward(dz / world_size)  # each rank's share of the gradient
    return z.detach(), q.grad, k.grad, v.grad, dtypes


def record_messages(comm):
    dtypes = []
    for name in ("all_reduce", "all_gather"):
        collective = getattr(comm, name)

        def record(tensor, *rest, collective=collective):
            dtypes.append(tensor.dtype)
            return collective(tensor, *rest)

        setattr(comm, name, record)
    return dtypes


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_encoder_s_error_does_not_grow_with_the_ranks(dtype):
    q, k, v, dz = draw(dtype)
    references = [t.double().requires_grad_() for t in (q, k, v)]
    expected = naive.encode(*references, scale=SCALE)
    gradients = torch.autograd.grad(expected, references, dz.double())
    errors = {}
    for ranks, sizes in SHARDS.items():
        parts = run_ranks(ranks, encode_on_ranks, q, k, v, dz, sizes)
        assert all(set(part[4]) == {torch.float32} for part in parts)
        assert all(torch.equal(part[0], parts[0][0]) for part in parts)
        errors[ranks] = [
            rms_error(parts[0][0], expected),
            rms_error(sum(part[1].double() for part in parts), gradients[0]),
            rms_error(torch.cat([part[2] for part in parts], dim=2), gradients[1]),
            rms_error(torch.cat([part[3] for part in parts], dim=2), gradients[2]),
        ]
    assert min(errors[1]) > 0.1 * torch.finfo(dtype).eps
    for which, alone in enumerate(errors[1]):
        # A shard's result leaves the kernel in half precision and the merged one is rounded again:
        # two roundings where a single call has one, sqrt(2), however many ranks there are.
        assert all(errors[ranks][which] < ONE_ROUNDING_MORE * alone for ranks in (2, 3, 4)), which
        assert errors[4][which] < 1.1 * errors[2][which], which


def build(norm="rmsnorm", mixer="flarepp"):
    model = {"mixer": mixer, "channels": 32, "heads": 4, "latents": 8, "blocks": 3, "norm": norm}
    return build_model(config_from_dict({"model": model, "train": {"precision": "bf16"}}))


def model_on_ranks(rank, world_size, mixer, cases, sizes, executor):
    """Outputs, loss and gradients of each case in bf16 autocast, and the dtypes of all messages."""
    comm = Communicator(dist.group.WORLD)
    dtypes = record_messages(comm)
    results = []
    for inputs, targets in cases:
        model = configure(
            parallelize(build(mixer=mixer), comm), EngineConfig(executor=executor, chunk_tokens=256)
        )
        shard = [t.split(sizes)[rank] for t in (inputs, targets)]
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(shard[0])
        objective, value = case_loss("mse", outputs, shard[1], TOKENS, comm, "made")
        objective.backward()
        assert value.dtype == torch.float32
        results.append((outputs.detach(), value, [p.grad for p in model.parameters()]))
    assert set(dtypes) <= {torch.float32}
    return results


def geometric_mean(values):
    """Of positive numbers, so that no parameter outweighs the others."""
    return float(torch.tensor(list(values)).log().mean().exp())


def reference_of(model, inputs, targets):
    """The same in fp64."""
    model.zero_grad()
    outputs = model(inputs.double())
    loss = (outputs - targets).square().mean()
    loss.backward()
    return outputs, loss, [p.grad for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["in_memory", "streamed"])
@pytest.mark.parametrize("mixer", ["flare", "flarepp"])
def test_a_bf16_model_s_error_does_not_grow_with_the_ranks(mixer, executor):
    # A gradient's error varies by a factor of two from case to case, on ranks and on one, and with
    # the processor's kernels: what is compared is the mean over parameters and cases.
    cases = [(torch.randn(TOKENS, 6), torch.randn(TOKENS, 4)) for _ in range(CASES)]
    model = build(mixer=mixer).double()
    expected = [reference_of(model, *case) for case in cases]
    errors = {}
    for ranks, sizes in SHARDS.items():
        parts = run_ranks(ranks, model_on_ranks, mixer, cases, sizes, executor)
        by_case = [
            (
                rms_error(torch.cat([part[0] for part in shards]), outputs),
                float(sum(part[1] for part in shards) / loss.detach()) - 1,
                geometric_mean(
                    rms_error(sum(part[2][index] for part in shards), gradient)
                    for index, gradient in enumerate(gradients)
                    if gradient.any()
                ),
            )
            for shards, (outputs, loss, gradients) in zip(
                zip(*parts, strict=True), expected, strict=True
            )
        ]
        means = torch.tensor(by_case).square().mean(dim=0).sqrt().tolist()
        errors[ranks] = dict(zip(("outputs", "loss", "gradients"), means, strict=True))
    assert 1e-4 < errors[1]["outputs"] < 0.05
    assert 1e-4 < errors[1]["gradients"] < 0.1
    for ranks in (2, 3, 4):
        for name in ("outputs", "gradients"):
            assert errors[ranks][name] < ONE_ROUNDING_MORE * errors[1][name], (ranks, name)
        # The loss is an average, whose error may cancel by chance; it stays below the outputs'.
        assert errors[ranks]["loss"] < errors[1]["outputs"], ranks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["mse", "rel_l2"])
def test_the_loss_is_summed_in_fp32(kind, dtype):
    # In bf16 the sum of a million squares would stop growing at 256 of them.
    outputs = (torch.randn(250_000, 4) + 3.0).to(dtype).requires_grad_()
    targets = torch.randn(250_000, 4)
    comm = Communicator(None)
    objective, value = case_loss(kind, outputs, targets, len(outputs), comm, "made")
    assert value.dtype == torch.float32
    squares = (outputs.double() - targets.double()).square()
    exact = (
        squares.mean()
        if kind == "mse"
        else (squares.sum() / targets.double().square().sum()).sqrt()
    )
    assert float(value) == pytest.approx(float(exact.detach()), rel=1e-5)
    objective.backward()
    assert outputs.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_compute_their_statistics_in_fp32(kind, dtype):
    norm = make_norm(kind, 512)
    x = (torch.randn(64, 512) + (20.0 if kind == "layernorm" else 0.0)).to(dtype)
    expected = make_norm(kind, 512).double()(x.double())
    with torch.autocast("cpu", dtype):
        found = norm(x)
    # Only the result is rounded: half a unit of the largest value. Statistics in the input's dtype
    # would err by a unit of the mean, which is six times as large as any result.
    assert relative_error(found, expected) < 0.75 * torch.finfo(dtype).eps


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["in_memory", "streamed"])
def test_twenty_steps_in_fp16_with_a_loss_scale(executor, tmp_path):
    write_store(
        tmp_path / "store",
        {"run_1": 48, "run_2": 40},
        {"train": ["run_1", "run_2"], "val": [], "test": []},
    )
    overrides = [
        *SMALL,
        f"data.store={tmp_path / 'store'}",
        f"run.dir={tmp_path / 'run'}",
        "data.val_split=[]",
        "data.tokens=24",
        "train.precision=fp16",
        "train.steps=20",
        "train.lr=3e-3",
        "train.clip=1.0",
        f"engine.executor={executor}",
    ]
    train_rank(0, 1, overrides)
    losses = [event["loss"] for event in read_metrics(tmp_path / "run")]
    assert len(losses) == 20
    assert all(loss == loss and loss < 10 for loss in losses)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
