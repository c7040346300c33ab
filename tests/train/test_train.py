"""Training over ranks: the same answer for every world size, and that answer is the plain one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from cpflare.config import load_config
from cpflare.data.normalize import Normalizer
from cpflare.data.sampler import Sampler
from cpflare.data.store import Store
from cpflare.errors import NonFiniteError
from cpflare.models import build_model
from cpflare.train.optim import build_schedule
from support.harness import relative_error, run_ranks
from support.stores import SIZES, SMALL, SPLITS, read_metrics, read_weights, train_rank, write_store

STEPS = 20
# 20 optimiser steps of fp64 in another order of summation; the interface promises it.
SAME = 1e-9

SETTINGS = {
    # Clipping works in most steps, and the final weights are the averaged ones.
    "flarepp-mse": [
        "model.mixer=flarepp",
        "train.loss=mse",
        "data.tokens=53",
        "train.clip=0.5",
        "train.ema=0.9",
    ],
    "flare-rel_l2": [
        "model.mixer=flare",
        "model.dropout=0.1",
        "train.loss=rel_l2",
        "train.schedule=cosine",
        "data.tokens=all",
        "data.position=relative",
    ],
}
STREAMED = ("engine.executor=streamed", "engine.chunk_tokens=16")
LAYOUTS = {
    "R=1": (1, 1, ()),
    "R=2": (2, 1, ()),
    "R=3": (3, 1, ()),
    "DP2": (2, 2, ()),
    "DP2×CP2": (4, 2, ()),
    "R=1 streamed": (1, 1, STREAMED),
    "R=3 streamed": (3, 1, STREAMED),
}

STEP_KEYS = {
    *("kind", "step", "epoch", "cases", "loss", "grad_norm", "lr", "tokens", "step_s", "data_s"),
    *("comm_s", "tokens_per_s", "peak_mem_bytes"),
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("train") / "store")


@pytest.fixture(scope="module")
def trained(store, tmp_path_factory):
    """Runs by (settings, layout), each made once."""
    runs = {}

    def run(settings, layout):
        if (settings, layout) not in runs:
            run_dir = tmp_path_factory.mktemp("run")
            world_size, dp, engine = LAYOUTS[layout]
            more = (*SETTINGS[settings], *engine, f"parallel.dp={dp}")
            overrides = overrides_of(store, run_dir, *more)
            run_ranks(world_size, train_rank, overrides)
            runs[settings, layout] = run_dir
        return runs[settings, layout]

    return run


def overrides_of(store, run_dir, *more):
    common = (f"data.store={store.path}", f"run.dir={run_dir}", f"train.steps={STEPS}")
    return [*common, *SMALL, "train.precision=fp64", "train.cases_per_step=2", *more]


def train_alone(store, run_dir, *more):
    train_rank(0, 1, overrides_of(store, run_dir, *more))
    return run_dir


@pytest.mark.slow
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
@pytest.mark.parametrize("settings", SETTINGS)
def test_twenty_steps_are_the_same_on_every_number_of_ranks(trained, settings, layout):
    one, other = trained(settings, "R=1"), trained(settings, layout)
    steps, others = read_metrics(one), read_metrics(other)
    assert len(steps) == len(others) == STEPS
    for a, b in zip(steps, others, strict=True):
        assert all(a[key] == b[key] for key in ("step", "epoch", "cases", "lr", "tokens"))
        assert b["loss"] == pytest.approx(a["loss"], rel=SAME)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=SAME)
    weights, own = read_weights(one), read_weights(other)
    assert weights.keys() == own.keys()
    assert {
        name: e for name, w in weights.items() if (e := relative_error(own[name], w)) > SAME
    } == {}
    (last,), (other_last,) = read_metrics(one, "eval"), read_metrics(other, "eval")
    for name, value in last.items():
        if name.startswith(("pressure", "wall_shear")):
            assert other_last[name] == pytest.approx(value, rel=SAME)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_settings_do_what_they_are_there_for(trained, settings):
    """Otherwise the comparison over ranks would compare less than it says."""
    steps = read_metrics(trained(settings, "R=1"))
    assert steps[-1]["loss"] != steps[0]["loss"]
    seen = {case for step in steps for case in step["cases"]}
    assert seen == set(SPLITS["train"])
    assert SIZES["run_5"] < 3  # so that some rank is empty
    if settings == "flarepp-mse":
        assert sum(step["grad_norm"] > 0.5 for step in steps) > STEPS / 2
        assert any(step["tokens"] % 2 for step in steps)
        assert {step["tokens"] for step in steps} <= {53 + 53, 53 + 2}


@pytest.mark.slow
def test_the_streamed_executor_is_at_work(trained):
    """Chunks are summed in another order, which shows in the last digits of some step."""
    in_memory, streamed = (trained("flarepp-mse", layout) for layout in ("R=1", "R=1 streamed"))
    losses = [[step["loss"] for step in read_metrics(run)] for run in (in_memory, streamed)]
    assert losses[0] != losses[1]


def plain_training(store, overrides):
    """The same training written down plainly: dense losses and PyTorch's optimiser, one process."""
    config = load_config(None, overrides)
    train = config.train
    model = build_model(config)
    scale = Normalizer.from_statistics(config, store.statistics)
    cases = SPLITS["train"]
    sampler = Sampler(cases, [SIZES[c] for c in cases], config.data.tokens, 2, train.seed)
    weights = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Linear)}
    groups = [[p for p in model.parameters() if (id(p) in weights) == d] for d in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}],
        lr=train.lr,
        weight_decay=train.weight_decay,
    )
    schedule = build_schedule(optimizer, train, STEPS)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for window in sampler.windows(step):
            rows = (window.start + np.arange(window.size)) % window.num_rows
            case = store.case(window.case)
            fields = {name: values[rows] for name, values in case.read(centred=True).items()}
            outputs = model(scale.encode_inputs(fields, case.offset, torch.float64))
            targets = scale.encode_targets(fields, torch.float64)
            loss = loss + (outputs - targets).square().mean() / 2
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip)))
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
        for name, p in model.named_parameters():
            average[name].lerp_(p.detach(), 1 - train.ema)
    return losses, norms, average


@pytest.mark.slow
def test_the_answer_is_that_of_a_plain_training(store, trained):
    run_dir = trained("flarepp-mse", "R=3")
    losses, norms, average = plain_training(
        store, overrides_of(store, run_dir, *SETTINGS["flarepp-mse"])
    )
    steps = read_metrics(run_dir)
    assert [step["loss"] for step in steps] == pytest.approx(losses, rel=SAME)
    assert [step["grad_norm"] for step in steps] == pytest.approx(norms, rel=SAME)
    weights = read_weights(run_dir)
    assert weights.keys() == average.keys()
    assert max(relative_error(weights[name], value) for name, value in average.items()) < SAME


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_final_evaluation_is_that_of_the_final_weights_on_whole_cases(store, trained, settings):
    run_dir = trained(settings, "DP2×CP2")
    config = load_config(None, overrides_of(store, run_dir, *SETTINGS[settings]))
    model = build_model(config)
    model.load_state_dict(read_weights(run_dir))
    scale = Normalizer.from_statistics(config, store.statistics)
    case = store.case("run_4")
    fields = case.read(centred=True)
    with torch.no_grad():
        outputs = model.eval()(scale.encode_inputs(fields, case.offset, torch.float64))
    (event,) = read_metrics(run_dir, "eval")
    assert (event["step"], event["cases"], event["tokens"]) == (STEPS, ["run_4"], 113)
    for name, values in scale.decode_targets(outputs).items():
        truth = fields[name].astype(np.float64)
        expected = np.linalg.norm(values - truth) / np.linalg.norm(truth)
        assert event[f"{name}_rel_l2"] == pytest.approx(expected, rel=SAME)


@pytest.mark.slow
def test_metrics_have_the_keys_of_the_interface(trained):
    for layout in ("R=1", "R=3"):
        run_dir = trained("flarepp-mse", layout)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        assert {json.loads(line)["kind"] for line in lines} == {"step", "eval"}
        for number, step in enumerate(read_metrics(run_dir), start=1):
            assert step.keys() == STEP_KEYS
            assert step["step"] == number
            assert step["epoch"] == (number - 1) * 2 // len(SPLITS["train"])
            assert step["step_s"] >= step["data_s"] >= 0
            assert step["tokens_per_s"] == pytest.approx(step["tokens"] / step["step_s"])
            # More than an interpreter with PyTorch, less than the machine.
            assert 5e7 < step["peak_mem_bytes"] < 1e11


@pytest.mark.parametrize("layout", ["R=1", "R=3"])
def test_the_time_of_communication_is_a_part_of_the_step_s(trained, layout):
    for step in read_metrics(trained("flarepp-mse", layout)):
        assert (step["comm_s"] > 0) == (layout != "R=1")
        assert 0 <= step["comm_s"] <= step["step_s"], step["step"]


def first_step(store, folder, layout, settings):
    world_size, dp, _ = LAYOUTS[layout]
    more = ["train.precision=fp32", "train.steps=1", f"parallel.dp={dp}"]
    overrides = overrides_of(store, folder, *SETTINGS[settings], *more)
    run_ranks(world_size, train_rank, overrides)
    config = load_config(None, overrides)
    model = build_model(config)
    model.load_state_dict(read_weights(folder))
    scale = Normalizer.from_statistics(config, store.statistics)
    case = store.case("run_4")
    with torch.no_grad():
        inputs = scale.encode_inputs(case.read(centred=True), case.offset, torch.float32)
        return read_metrics(folder)[0], model.eval()(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS)
def test_one_step_in_fp32_is_the_same_to_its_rounding(store, tmp_path, settings):
    step, outputs = first_step(store, tmp_path / "one", "R=1", settings)
    assert outputs.dtype == torch.float32
    for layout in ("R=3", "DP2×CP2"):
        other, own = first_step(store, tmp_path / layout, layout, settings)
        # What the interface promises for one step of fp32.
        assert other["loss"] == pytest.approx(step["loss"], rel=2e-5)
        assert other["grad_norm"] == pytest.approx(step["grad_norm"], rel=2e-5)
        assert relative_error(own, outputs) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("mixer", ["flare", "flarepp"])
def test_mixed_precision_learns(store, tmp_path, precision, mixer):
    """A few steps on one case over two ranks bring the loss down, about as they do in fp32."""
    settings = (f"model.mixer={mixer}", "train.steps=16", "train.lr=1e-2", "model.norm=rmsnorm")
    one_case = ("data.train_split=[run_2]", "data.tokens=all", "train.schedule=constant")
    losses = {}
    for kind in (precision, "fp32"):
        more = (*settings, *one_case, f"train.precision={kind}")
        run_ranks(2, train_rank, overrides_of(store, tmp_path / kind, *more))
        losses[kind] = [step["loss"] for step in read_metrics(tmp_path / kind)]
    # fp32 comes from 0.96 to 0.78 in these steps.
    assert losses[precision][-1] < 0.9 * losses[precision][0]
    # bf16 keeps 8 bits: the same course to some percent at first, and not the very same numbers.
    assert losses[precision][:2] == pytest.approx(losses["fp32"][:2], rel=0.03)
    assert losses[precision] != losses["fp32"]
    assert all(w.dtype == torch.float32 for w in read_weights(tmp_path / precision).values())


@pytest.mark.slow
def test_epochs_count_cases_and_the_default_step_takes_one_case_a_replica(store, tmp_path):
    more = ["train.steps=null", "train.epochs=2", "parallel.dp=2", "train.cases_per_step=null"]
    run_ranks(2, train_rank, overrides_of(store, tmp_path / "dp", *more))
    steps = read_metrics(tmp_path / "dp")
    assert [len(step["cases"]) for step in steps] == [2] * 4
    train_alone(store, tmp_path / "one", *more[:2], "train.cases_per_step=3")
    assert len(read_metrics(tmp_path / "one")) == 3  # two epochs of four cases, three a step


@pytest.mark.slow
def test_evaluations_on_the_way_are_limited_and_say_so(store, tmp_path):
    splits = ("data.train_split=[run_1,run_2]", "data.val_split=[run_3,run_4]")
    limits = ("train.eval_every=2", "train.eval_cases=1", "train.eval_tokens=40")
    train_alone(store, tmp_path, "train.steps=6", *splits, *limits)
    events = read_metrics(tmp_path, "eval")
    assert [event["step"] for event in events] == [2, 4, 6]
    for event in events[:2]:
        assert (event["cases"], event["tokens"]) == (["run_3"], 40)
        assert 0 < event["pressure_rel_l2_sub"] < 10
    assert (events[2]["cases"], events[2]["tokens"]) == (["run_3", "run_4"], 128 + 113)
    for event in events:
        names = {name for name in event if name.startswith(("pressure", "wall_shear"))}
        assert len(names) >= 8
        assert all(name.endswith("_sub") == (event["step"] < 6) for name in names)


@pytest.fixture(scope="module")
def wild(tmp_path_factory):
    """A store in which run_3, outside the training statistics, overflows fp32 in one stored row."""

    def change(name, fields):
        if name == "run_3":
            fields["pressure"][17] = 1e30

    splits = {"train": ["run_1", "run_2", "run_5"], "val": ["run_4"], "test": ["run_3"]}
    return write_store(tmp_path_factory.mktemp("wild") / "store", splits=splits, change=change)


WILD = ("data.train_split=[run_1,run_3]", "data.tokens=all", "train.precision=fp32")


def error_of_rank(rank, world_size, overrides):
    try:
        train_rank(rank, world_size, overrides)
    except NonFiniteError as error:
        return str(error)
    return "no error"


def test_a_loss_that_is_not_finite_stops_all_ranks_alike(wild, tmp_path):
    more = (*WILD, "train.cases_per_step=1", "train.checkpoint_every=1")
    messages = run_ranks(3, error_of_rank, overrides_of(wild, tmp_path, *more))
    assert len(set(messages)) == 1
    assert "run_3" in messages[0]
    assert "train.nonfinite=skip" in messages[0]
    assert not (tmp_path / "model.safetensors").exists()
    assert all(np.isfinite(step["loss"]) for step in read_metrics(tmp_path))


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_skipped_on_all_ranks_alike(wild, tmp_path):
    more = (*WILD, "train.cases_per_step=1", "train.nonfinite=skip", "train.steps=8")
    run_ranks(3, train_rank, overrides_of(wild, tmp_path / "three", *more))
    train_alone(wild, tmp_path / "one", *more)
    steps = [read_metrics(tmp_path / run) for run in ("three", "one")]
    for a, b in zip(*steps, strict=True):
        assert a["cases"] == b["cases"]
        for step in (a, b):  # JSON has no NaN
            assert (step["loss"] is not None) == (step["cases"] == ["run_1"])
    weights = [read_weights(tmp_path / run) for run in ("three", "one")]
    for name, value in weights[0].items():
        assert torch.isfinite(value).all()
        # Four steps of fp32, whose rounding Adam may enlarge up to the learning rate, 1e-3.
        assert torch.allclose(value, weights[1][name], rtol=0, atol=2e-3)
    config = load_config(None, overrides_of(wild, tmp_path, *more))
    fresh = build_model(config).state_dict()
    assert not torch.equal(weights[0]["out_proj.fc2.weight"], fresh["out_proj.fc2.weight"])


@pytest.mark.slow
def test_a_case_with_fewer_cells_than_ranks_trains_with_a_notice(store, tmp_path):
    tiny = ("data.train_split=[run_5]", "train.steps=3", "data.val_split=[run_5]")
    texts = run_ranks(3, train_rank, overrides_of(store, tmp_path / "three", *tiny))
    train_alone(store, tmp_path / "one", *tiny)
    three, one = ([s["loss"] for s in read_metrics(tmp_path / n)] for n in ("three", "one"))
    assert three == pytest.approx(one, rel=SAME)
    notices = [line for line in "".join(texts).splitlines() if "notice" in line]
    assert len(notices) == 1
    assert "2 cells" in notices[0]
    assert "3 ranks" in notices[0]
    assert texts[1:] == ["", ""]  # only rank 0 speaks


def test_the_run_s_files_are_there_and_load_without_the_trainer(trained, store):
    run_dir = trained("flarepp-mse", "R=2")
    names = {path.name for path in run_dir.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "checkpoints", "model.safetensors"} <= names
    assert not [name for name in names if name.startswith(".")]
    latest = (run_dir / "checkpoints" / "latest").read_text().strip()
    assert latest == f"step_{STEPS:08d}"
    assert (run_dir / "checkpoints" / latest).is_dir()
    assert Store.open(store.path).identity == store.identity  # training writes nothing into it
