"""Checkpoints through whole runs: resumed bitwise, complete or absent, kept, refused by name."""

from __future__ import annotations

import errno
import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cpflare.errors import CpflareError
from cpflare.train.checkpoint import save_checkpoint
from support.harness import relative_error, run_ranks
from support.stores import SMALL, read_metrics, read_weights, train_rank, write_store

STEPS = 12
EVERY = 3
SETTINGS = (
    *SMALL,
    f"train.steps={STEPS}",
    f"train.checkpoint_every={EVERY}",
    "train.keep=100",
    "data.tokens=53",
    # Everything that carries over from step to step.
    "train.ema=0.9",
    "train.clip=0.5",
    "model.dropout=0.1",
    "train.cases_per_step=2",
)
PRECISIONS = {
    "fp32": ["train.precision=fp32"],
    "fp64": ["train.precision=fp64"],
    # So large a rate makes gradients overflow, which changes the loss scale.
    "fp16": ["train.precision=fp16", "train.lr=0.1", "train.schedule=constant"],
}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("checkpoint") / "store")


def overrides_of(store, run_dir, *more):
    return [f"data.store={store.path}", f"run.dir={run_dir}", *SETTINGS, *more]


def train_alone(store, run_dir, *more):
    return train_rank(0, 1, overrides_of(store, run_dir, *more))


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    """An uninterrupted run for each precision."""
    runs = {}
    for precision, settings in PRECISIONS.items():
        runs[precision] = tmp_path_factory.mktemp(precision)
        train_alone(store, runs[precision], *settings)
    return runs


def steps_of(run_dir):
    return [int(p.name.removeprefix("step_")) for p in sorted(checkpoints(run_dir).glob("step_*"))]


def checkpoints(run_dir):
    return Path(run_dir) / "checkpoints"


def newest(run_dir):
    return max(checkpoints(run_dir).glob("step_*"))


def interrupted(run_dir, target, step):
    """A copy of a run as it lies when it was killed after `step` and before the next checkpoint."""
    shutil.copytree(run_dir, target)
    for path in checkpoints(target).glob("step_*"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    (checkpoints(target) / "latest").write_text(f"step_{step:08d}\n")
    (target / "model.safetensors").unlink()
    lines = (target / "metrics.jsonl").read_text().splitlines(keepends=True)
    # Two more steps were trained, and of the third one's line only a part reached the disk.
    (target / "metrics.jsonl").write_text("".join(lines[: step + 2]) + lines[step + 2][:40])
    return target


def course(run_dir):
    """What the steps of a run were, without what a clock or the machine says."""
    kept = ("step", "epoch", "cases", "loss", "grad_norm", "lr", "tokens")
    return [{key: event[key] for key in kept} for event in read_metrics(run_dir)]


def same_weights(a, b):
    first, second = read_weights(a), read_weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp64", "fp16"])
@pytest.mark.parametrize("step", [3, 6])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(store, whole, tmp_path, precision, step):
    run_dir = interrupted(whole[precision], tmp_path / "run", step)
    text = train_alone(store, run_dir, *PRECISIONS[precision])
    assert f"resumed after step {step}" in text
    assert course(run_dir) == course(whole[precision])
    assert same_weights(run_dir, whole[precision])
    own, other = (read_metrics(r, "eval") for r in (run_dir, whole[precision]))
    assert [e["pressure_rel_l2"] for e in own] == [e["pressure_rel_l2"] for e in other]
    assert steps_of(run_dir) == steps_of(whole[precision])
    overflows = [event["grad_norm"] is None for event in course(run_dir)[:6]]  # JSON has no inf
    assert any(overflows) == (precision == "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_run_goes_on_with_another_number_of_ranks(store, whole, tmp_path, world_size):
    run_dir = interrupted(whole["fp64"], tmp_path / "run", 6)
    run_ranks(world_size, train_rank, overrides_of(store, run_dir, "train.precision=fp64"))
    for a, b in zip(course(whole["fp64"]), course(run_dir), strict=True):
        # Six steps of fp64 in another order of summation.
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-9)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-9)
    weights, own = read_weights(whole["fp64"]), read_weights(run_dir)
    assert max(relative_error(own[name], w) for name, w in weights.items()) < 1e-9


@pytest.mark.slow
def test_a_finished_run_does_nothing_when_it_is_started_again(store, whole, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole["fp32"], run_dir)
    before = contents(run_dir)
    text = train_alone(store, run_dir)
    assert "nothing left to do" in text
    assert contents(run_dir) == before


def contents(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_run_stopped_before_its_final_weights_gets_them_when_it_is_started_again(
    store, whole, tmp_path
):
    """The last checkpoint is written before model.safetensors; a crash may come in between."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole["fp32"], run_dir)
    (run_dir / "model.safetensors").unlink()
    train_alone(store, run_dir)
    assert (run_dir / "model.safetensors").is_file()
    assert same_weights(run_dir, whole["fp32"])


def damage_by(way, file):
    data = file.read_bytes()
    if way == "missing":
        file.unlink()
    elif way == "empty":
        file.write_bytes(b"")
    elif way == "cut":
        file.write_bytes(data[: len(data) // 2])
    else:
        middle = len(data) // 2
        file.write_bytes(data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :])


def checkpoint_files(whole):
    return sorted(p.name for p in newest(whole["fp32"]).rglob("*") if p.is_file())


@pytest.mark.slow
@pytest.mark.parametrize("way", ["missing", "empty", "cut", "flipped"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_notice(store, whole, tmp_path, way):
    """Whatever file of it is hurt: the run goes on from the one before, to the same end."""
    for name in checkpoint_files(whole):
        if way == "flipped" and not name.endswith((".safetensors", ".pt")):
            continue  # a changed byte of text may say the same, or be what is not read
        run_dir = interrupted(whole["fp32"], tmp_path / name, 6)
        damage_by(way, newest(run_dir) / name)
        text = train_alone(store, run_dir)
        notices = [line for line in text.splitlines() if "notice" in line]
        assert len(notices) <= 1
        assert "resumed after step 3" in text, name
        if way != "missing":
            assert f"step_{6:08d}" in notices[0]
            assert "damaged" in notices[0]
        assert course(run_dir) == course(whole["fp32"])
        assert same_weights(run_dir, whole["fp32"])


@pytest.mark.slow
def test_with_every_checkpoint_damaged_the_run_starts_anew(store, whole, tmp_path):
    run_dir = interrupted(whole["fp32"], tmp_path / "run", 6)
    for path in checkpoints(run_dir).glob("step_*"):
        damage_by("cut", path / "model.safetensors")
    text = train_alone(store, run_dir)
    assert len([line for line in text.splitlines() if "notice" in line]) == 2
    assert "resumed" not in text
    assert course(run_dir) == course(whole["fp32"])
    assert same_weights(run_dir, whole["fp32"])


@pytest.mark.slow
def test_a_half_written_checkpoint_is_not_one(store, whole, tmp_path):
    run_dir = interrupted(whole["fp32"], tmp_path / "run", 6)
    half = checkpoints(run_dir) / f".step_{9:08d}.partial"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"\0" * 10)
    text = train_alone(store, run_dir)
    assert "resumed after step 6" in text
    assert same_weights(run_dir, whole["fp32"])
    assert not list(checkpoints(run_dir).glob(".*"))


def test_a_checkpoint_that_cannot_be_written_is_one_line_and_keeps_the_former(
    store, whole, tmp_path
):
    run_dir = interrupted(whole["fp32"], tmp_path / "run", 6)
    kept = contents(newest(run_dir))
    # A file stands where the next checkpoint must go, and a folder of that file's name cannot.
    (checkpoints(run_dir) / f"step_{9:08d}").write_text("in the way")
    with pytest.raises(CpflareError, match=r"step_00000009.*cannot be written.*run\.dir") as caught:
        train_alone(store, run_dir)
    assert "\n" not in str(caught.value)
    assert contents(run_dir / "checkpoints" / "step_00000006") == kept


def test_a_disk_that_fills_up_is_known_as_such_whatever_file_meets_it(tmp_path):
    """Training goes on after it, and not after other failures."""
    large, small = torch.zeros(10_000), torch.zeros(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for model, optimizer in ((large, small), (small, large)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))
        try:
            with pytest.raises(CpflareError, match="step_00000001 cannot be written") as caught:
                save_checkpoint(tmp_path, 1, {"w": model}, {"m": optimizer}, {}, keep=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.__cause__.errno == errno.EFBIG
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_newest_checkpoints_and_the_best_are_kept(store, tmp_path):
    more = ("train.keep=2", "train.eval_every=2", "train.checkpoint_every=2", "train.steps=10")
    held_out = ("data.val_split=[run_4]", "train.eval_tokens=all", "train.lr=0.3")
    # So large a rate does harm from the second evaluation on.
    train_alone(store, tmp_path, *more, *held_out, "train.schedule=constant", "train.ema=0")
    scores = {e["step"]: e["pressure_rel_l2"] for e in read_metrics(tmp_path, "eval")}
    best = min(scores, key=scores.get)
    assert best < 8, f"the best is among the newest, so nothing is tested: {scores}"
    assert steps_of(tmp_path) == [best, 8, 10]
    assert (checkpoints(tmp_path) / "latest").read_text().strip() == f"step_{10:08d}"


@pytest.mark.slow
def test_resume_never_starts_anew_and_its_checkpoints_are_those_of_the_new_run(
    store, whole, tmp_path
):
    """What an earlier run left in the folder must not be taken for this one's."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole["fp32"], run_dir)
    more = ("train.seed=1", "train.keep=2")
    fresh = tmp_path / "fresh"
    train_alone(store, fresh, *more)
    text = train_alone(store, run_dir, *more, "train.resume=never")
    assert "resumed" not in text
    assert course(run_dir) == course(fresh)
    assert same_weights(run_dir, fresh)
    # Go on after step 9 of the new run, as if it had been killed there.
    cut = interrupted(run_dir, tmp_path / "cut", 9)
    text = train_alone(store, cut, *more)
    assert "resumed after step 9" in text
    assert same_weights(cut, fresh)


def test_a_run_that_never_resumes_is_not_mixed_up_with_a_longer_former_one(store, whole, tmp_path):
    run_dir = tmp_path / "run"
    shutil.copytree(whole["fp32"], run_dir)  # checkpoints after steps 3 to 12
    more = ("train.steps=6", "train.keep=2")
    train_alone(store, run_dir, *more, "train.resume=never")
    latest = (checkpoints(run_dir) / "latest").read_text().strip()
    assert latest == f"step_{6:08d}"
    assert (checkpoints(run_dir) / latest).is_dir()
    text = train_alone(store, run_dir, *more)  # auto: this run is finished
    assert "nothing left to do" in text


@pytest.mark.slow
def test_a_named_checkpoint_is_gone_on_from(store, whole, tmp_path):
    source = checkpoints(whole["fp32"]) / f"step_{6:08d}"
    text = train_alone(store, tmp_path / "run", f"train.resume={source}")
    assert "resumed after step 6" in text
    assert same_weights(tmp_path / "run", whole["fp32"])
    assert course(tmp_path / "run") == course(whole["fp32"])[6:]


@pytest.mark.parametrize("what", ["absent", "empty", "damaged"])
def test_a_named_checkpoint_that_cannot_be_used_is_refused(store, whole, tmp_path, what):
    path = tmp_path / "elsewhere" / f"step_{6:08d}"
    if what == "damaged":
        shutil.copytree(checkpoints(whole["fp32"]) / path.name, path)
        damage_by("cut", path / "model.safetensors")
    elif what == "empty":
        path.mkdir(parents=True)
    with pytest.raises(CpflareError, match=f"{path.name}") as caught:
        train_alone(store, tmp_path / "run", f"train.resume={path}")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.channels=32", "model.channels=16"),
        ("model.mixer=flare", "model.mixer=flarepp"),
        ("train.lr=5e-3", "train.lr=0.001"),
        ("train.seed=7", "train.seed=0"),
        ("train.loss=rel_l2", "train.loss=mse"),
        ("train.precision=fp64", "train.precision=fp32"),
        ("data.position=relative", "data.position=absolute"),
        ("data.targets=[pressure]", "data.targets"),
        ("train.cases_per_step=1", "train.cases_per_step=2"),
        ("train.steps=24", "steps=12"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_the_key_that_differs(
    store, whole, tmp_path, override, key
):
    run_dir = interrupted(whole["fp32"], tmp_path / "run", 6)
    before = contents(run_dir)
    with pytest.raises(CpflareError, match=r"train\.resume=never") as caught:
        train_alone(store, run_dir, override)
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(run_dir) == before


def test_a_checkpoint_of_another_store_is_refused_on_all_ranks(store, whole, tmp_path):
    def change(name, fields):
        fields["pressure"] += 1

    other = write_store(tmp_path / "store", change=change)
    run_dir = interrupted(whole["fp32"], tmp_path / "run", 6)
    messages = run_ranks(2, refusal_of_rank, overrides_of(other, run_dir))
    assert messages[0] == messages[1]
    assert "store" in messages[0]
    assert "train.resume=never" in messages[0]


def refusal_of_rank(rank, world_size, overrides):
    try:
        train_rank(rank, world_size, overrides)
    except CpflareError as error:
        return str(error)
    return "no error"


def test_a_checkpoint_says_what_it_is_of_and_loads_without_the_trainer(whole):
    path = newest(whole["fp32"])
    weights = load_file(path / "model.safetensors")
    assert weights.keys() == read_weights(whole["fp32"]).keys()
    # The run's final weights are the averaged ones; a checkpoint holds those that train.
    assert any(not torch.equal(w, read_weights(whole["fp32"])[n]) for n, w in weights.items())
    state = json.loads((path / "state.json").read_text())
    assert state["step"] == STEPS
