"""The CUDA branches, run on a GPU without data, and what they may ask of a real one."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch

from cpflare.config import config_from_dict
from cpflare.errors import ConfigError
from cpflare.plan.counting import count_costs
from support.fake_cuda import NoFakeCuda, build, on_fake_gpu
from support.fake_cuda_steps import count_step, make_learner, predict, resume_step, train
from support.stores import SMALL, train_rank, write_store

try:
    build()
except NoFakeCuda as error:
    pytest.skip(f"no fake GPU: {error}", allow_module_level=True)

SIZES = {"channels": 16, "heads": 2, "blocks": 2, "latents": 4}


def settings(mixer="flarepp", precision="fp32", **engine):
    return {
        "model": {"mixer": mixer, **SIZES},
        "train": {"precision": precision},
        "engine": engine,
    }


# ---- the device itself ---------------------------------------------------------------------------


def send(gpu, kind):
    group = torch.distributed.group.WORLD
    t = {
        "cpu": torch.zeros(4),
        "strided": torch.zeros(4, 2, device="cuda").t(),
        "int16": torch.zeros(4, device="cuda", dtype=torch.int16),
        "fine": torch.zeros(4, device="cuda"),
    }[kind]
    torch.distributed.all_reduce(t, group=group)
    return dict(gpu.collectives)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [("cpu", "device type cpu"), ("strided", "contiguous"), ("int16", "NCCL has no dtype")],
)
def test_collectives_refuse_what_nccl_refuses(kind, message):
    assert on_fake_gpu(send, "fine", world_size=2) == {"allreduce": 1}
    with pytest.raises(AssertionError, match=message):
        on_fake_gpu(send, kind, world_size=2)


def wait(gpu):
    t = torch.ones(3, device="cuda") + torch.ones(3).to("cuda", non_blocking=True)
    bool(t.sum() != 7.0)
    return gpu.counts(), dict(gpu.copies)


@pytest.mark.slow
def test_launches_waits_and_copies_are_counted():
    counts, copies = on_fake_gpu(wait)
    # ones and a fill of it, the copy, the sum of the two and of all, and the comparison
    assert (counts["launches"], counts["syncs"], counts["copies"]) == (5, 1, 1)
    assert list(copies) == ["to device elsewhere"]


def test_the_device_stays_in_its_process():
    on_fake_gpu(wait)
    assert torch.cuda.Event.__module__.startswith("torch.")


# ---- steps ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["in_memory", "streamed"])
@pytest.mark.parametrize("mixer", ["flare", "flarepp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_waits_once_for_the_device(executor, mixer, precision):
    chosen = settings(mixer, precision, executor=executor, chunk_tokens=30)
    counts = on_fake_gpu(count_step, chosen, 50, rank=1, world_size=4)
    assert list(counts["sync_lines"].values()) == [1], counts["sync_lines"]
    assert counts["copies"] == 4  # inputs, targets and rows; the step's scalars


# Launches of a step of one of four ranks with 25,000 tokens each: the budget, and what it took when
# this was written, which may fall and not rise.
LAUNCHES = {
    ("flare", "fp32"): (650, 620),
    ("flare", "bf16"): (800, 650),
    ("flarepp", "fp32"): (1000, 970),
    ("flarepp", "bf16"): (1200, 985),
    ("flarepp", "fp16"): (1200, 1000),
}


@pytest.mark.slow
@pytest.mark.parametrize(("mixer", "precision"), LAUNCHES)
def test_a_step_keeps_its_budget(mixer, precision):
    chosen = {"model": {"mixer": mixer}, "train": {"precision": precision}}
    counts = on_fake_gpu(count_step, chosen, 25_000, world_size=4)
    assert counts["launches"] <= min(LAUNCHES[mixer, precision])
    assert counts["collectives"] == {"flare": 17, "flarepp": 33}[mixer]
    assert counts["syncs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plan_counts_what_the_device_is_asked_for(precision):
    chosen = settings(precision=precision)
    counted = count_costs(config_from_dict(chosen), on_gpu=True).at(300, 300).kernels
    launches = on_fake_gpu(count_step, chosen, 300)["launches"]
    assert counted == pytest.approx(launches, rel=0.3)


def compile_without_compilers(gpu, variable):
    with patch.dict(os.environ, {"PATH": "/nowhere", "CC": variable}):
        try:
            make_learner(settings(compile=True))
        except ConfigError as error:
            return str(error)


@pytest.mark.parametrize(("variable", "named"), [("", "cc or gcc or clang"), ("mycc", "mycc")])
def test_compiling_for_a_gpu_takes_a_c_compiler_and_says_so(variable, named):
    message = on_fake_gpu(compile_without_compilers, variable)
    assert f"needs the C compiler {named}, which is not on PATH" in message
    assert "variable CC" in message


@pytest.mark.slow
@pytest.mark.parametrize("offload", ["host", "bf16"])
def test_a_step_with_its_block_inputs_elsewhere(offload):
    chosen = settings(executor="streamed", chunk_tokens=30, offload=offload)
    counts = on_fake_gpu(count_step, chosen, 50, rank=0, world_size=2)
    assert counts["syncs"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 8), (3, 8)])
@pytest.mark.parametrize("tokens", [0, 50])
def test_every_rank_sends_the_same_whatever_its_tokens(rank, world_size, tokens):
    counts = on_fake_gpu(count_step, settings(), tokens, rank=rank, world_size=world_size)
    expected = {} if world_size == 1 else {"allreduce": 3 * 4 + 1}  # 4 encoders, the gradients
    assert counts["kinds"] == expected
    assert counts["syncs"] == 1


@pytest.mark.slow
def test_replicas_send_no_more_than_ranks_of_one_group():
    both = settings() | {"parallel": {"dp": 2, "cp": 2}}
    expected = on_fake_gpu(count_step, settings(), 50, rank=2, world_size=4)["kinds"]
    found = on_fake_gpu(count_step, both, 50, rank=2, world_size=4)["kinds"]
    assert found == expected == {"allgather_base": 4, "allreduce": 4 + 1}


def norm_dtypes(gpu, chosen, kernel):
    count_step(gpu, chosen, 50)
    return {str(dtype).removeprefix("torch.") for dtype in gpu.dtypes[f"aten::{kernel}"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("norm", "kernel"), [("rmsnorm", "_fused_rms_norm"), ("layernorm", "native_layer_norm")]
)
@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_norms_give_the_precision_of_the_run(norm, kernel, precision, dtype):
    chosen = settings("flare", precision)
    chosen["model"]["norm"] = norm
    assert on_fake_gpu(norm_dtypes, chosen, kernel) == {dtype}


# ---- predictions, trainings and what they resume -------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "sizes"),
    [(0, [40]), (0, [20, 20]), (1, [20, 20]), (0, [9, 0, 7, 30]), (1, [9, 0, 7, 30]),
     (3, [9, 0, 7, 30]), (0, [0, 0, 0, 5])],
)  # fmt: skip
def test_a_prediction_comes_together_on_the_first_rank(rank, sizes):
    found = on_fake_gpu(predict, settings(), sizes, rank=rank, world_size=len(sizes))
    cells = sum(sizes)
    assert found == (None if rank else {"pressure": (cells,), "wall_shear": (cells, 3)})


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store, and the checkpoints of a run on it on the CPU."""
    folder = tmp_path_factory.mktemp("fake_gpu")
    write_store(folder / "store")
    more = ["train.checkpoint_every=1", "train.keep=9", f"run.dir={folder / 'cpu'}"]
    train_rank(0, 1, [*overrides(folder), *more])
    return folder


def overrides(folder):
    return [f"data.store={folder / 'store'}", *SMALL, "train.steps=4", "train.eval_every=2"]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (3, 4)])
def test_a_training_with_its_evaluations_and_checkpoints(store, tmp_path, rank, world_size):
    more = ["train.checkpoint_every=1", f"run.dir={tmp_path}", "train.ema=0.5"]
    found = on_fake_gpu(train, overrides(store) + more, rank=rank, world_size=world_size)
    assert found["checkpoints"] == ([1, 2, 3, 4] if rank == 0 else [])


@pytest.mark.slow
def test_a_step_after_a_resume_is_like_any_other(store):
    """From a checkpoint of a CPU, whose optimiser was another program."""
    before = on_fake_gpu(count_step, settings(), 40, rank=0, world_size=2)
    path = store / "cpu" / "checkpoints" / "step_00000002"
    after = on_fake_gpu(resume_step, settings(), path, rank=0, world_size=2)
    assert after == {name: before[name] for name in after}


@pytest.mark.slow
def test_a_training_goes_on(store, tmp_path):
    path = store / "cpu" / "checkpoints" / "step_00000002"
    more = [f"train.resume={path}", f"run.dir={tmp_path}", "train.checkpoint_every=1"]
    assert on_fake_gpu(train, overrides(store) + more)["checkpoints"] == [3, 4]
