"""Runs that are killed for real go on: bitwise on as many ranks, to rounding on others."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import time

import pytest
import torch

from cpflare.train.checkpoint import find_checkpoint, load_checkpoint
from support import runs
from support.stores import SMALL, read_metrics, read_weights, write_store

SIZES = {"run_1": 60, "run_2": 57, "run_3": 28, "run_4": 43}
SPLITS = {"train": ["run_1", "run_2", "run_3"], "val": ["run_4"], "test": []}
STEPS = 10
SETTINGS = (
    *SMALL,
    f"train.steps={STEPS}",
    "train.checkpoint_every=4",
    "train.eval_every=0",
    "data.tokens=40",
    # Two cases of three a step: step 4 ends in the midst of an epoch.
    "train.cases_per_step=2",
    "train.ema=0.9",
    "train.clip=0.5",
    "model.dropout=0.1",
)
SOON_S = 60.0


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("resume") / "store", SIZES, SPLITS)


def overrides_of(store, run_dir, *more):
    return [f"data.store={store.path}", f"run.dir={run_dir}", *SETTINGS, *more]


def train(store, folder, *more, ranks=2, fault=None, expected=None, **environment):
    run = runs.start(
        ranks, overrides_of(store, folder / "run", *more), folder / "log", fault, environment
    )
    assert run.wait(SOON_S) == (expected if expected is not None else [0] * ranks), run.text
    return run


@pytest.fixture(scope="module")
def whole(store, tmp_path_factory):
    """Runs that nobody kills, by precision."""
    folders = {}

    def get(precision):
        if precision not in folders:
            folders[precision] = tmp_path_factory.mktemp(precision)
            train(store, folders[precision], f"train.precision={precision}")
        return folders[precision] / "run"

    return get


def kill_all_in_step_7(rank):
    from cpflare.train.checkpoint import CheckpointWriter

    submit = CheckpointWriter.submit
    # Step 4's checkpoint is whole by then, as it is where steps take longer than a write.
    CheckpointWriter.submit = lambda self, *values: (submit(self, *values), self.wait())
    for each in range(2):
        runs.at_step(each, 7, lambda: os.kill(os.getpid(), signal.SIGKILL))(rank)


@pytest.fixture(scope="module")
def killed(store, tmp_path_factory):
    """Copies of runs that were killed in step 7, of which steps 5 and 6 are lost, by precision."""
    folders = {}

    def get(precision):
        if precision not in folders:
            folder = folders[precision] = tmp_path_factory.mktemp(f"killed-{precision}")
            more = f"train.precision={precision}"
            train(store, folder, more, fault=kill_all_in_step_7, expected=[-9, -9])
            newest, _ = find_checkpoint(folder / "run" / "checkpoints")
            assert newest.name == "step_00000004"
        copy = tmp_path_factory.mktemp("copy")
        shutil.copytree(folders[precision] / "run", copy / "run")
        return copy

    return get


def losses(run_dir):
    return [event["loss"] for event in read_metrics(run_dir)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_four_steps_a_kill_and_six_are_bitwise_ten(store, whole, killed, precision):
    folder = killed(precision)
    again = train(store, folder, f"train.precision={precision}")
    assert "resumed after step 4" in again.text
    assert losses(folder / "run") == losses(whole(precision))
    assert [e["step"] for e in read_metrics(folder / "run")] == list(range(1, STEPS + 1))
    own, other = (
        load_checkpoint(path / "checkpoints" / f"step_{STEPS:08d}", torch.device("cpu"))
        for path in (folder / "run", whole(precision))
    )
    assert same(own[0], other[0])
    assert same(own[1], other[1])
    assert own[2]["progress"] == other[2]["progress"]


def same(a, b):
    """Whether nested values are bitwise equal."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.mark.slow
def test_another_number_of_ranks_and_another_split_go_on_with_the_same_losses(store, whole, killed):
    for ranks, dp in ((1, 1), (3, 1), (2, 2)):
        folder = killed("fp32")
        train(store, folder, f"parallel.dp={dp}", ranks=ranks)
        for own, other in zip(losses(folder / "run"), losses(whole("fp32")), strict=True):
            assert own == pytest.approx(other, rel=1e-6), (ranks, dp)


@pytest.mark.slow
def test_a_split_that_would_change_the_cases_of_a_step_is_refused_by_name(store, tmp_path):
    """Left to itself, train.cases_per_step follows parallel.dp."""
    follow = ("train.cases_per_step=null", "train.steps=4")
    train(store, tmp_path, *follow, "train.checkpoint_every=2", "parallel.dp=2")
    run = train(store, tmp_path, *follow, "train.steps=4", "parallel.dp=1", expected=[2, 2])
    (message,) = run.errors
    assert "train.cases_per_step=2" in message


@pytest.mark.slow
def test_what_a_launcher_starts_again_goes_on_whatever_train_resume_says(store, killed):
    folder = killed("fp32")
    run = train(store, folder, "train.resume=never", TORCHELASTIC_RESTART_COUNT="1")
    assert "resumed after step 4" in run.text


# ---- complete or absent -----------------------------------------------------------------------


def die_in_the_write(moment):
    """Kill the process at a moment of writing its second checkpoint."""

    def fault(rank):
        from cpflare import files
        from cpflare.train import checkpoint

        calls = {"save": 0, "flush": 0, "latest": 0}

        def deadly(name, function, number):
            def call(*arguments, **keywords):
                calls[name] += 1
                if moment == name and calls[name] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **keywords)

            return call

        checkpoint.torch.save = deadly("save", torch.save, 2)
        # Four files and folders are flushed for each checkpoint, one for `latest`, and twice the
        # folder of both.
        files._flush = deadly("flush", files._flush, 7 + 4)
        checkpoint._point_at = deadly("latest", checkpoint._point_at, 2)

    return fault


def die_in_save(rank):
    die_in_the_write("save")(rank)


def die_before_the_rename(rank):
    die_in_the_write("flush")(rank)


def die_after_the_rename(rank):
    die_in_the_write("latest")(rank)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "newest", "left"),
    [
        (die_in_save, 3, True),
        (die_before_the_rename, 3, True),
        (die_after_the_rename, 6, False),
    ],
)
def test_a_kill_in_the_midst_of_a_write_leaves_whole_checkpoints_only(
    store, tmp_path, fault, newest, left
):
    more = ("train.checkpoint_every=3", "train.steps=9")
    train(store, tmp_path, *more, ranks=1, fault=fault, expected=[-9])
    checkpoints = tmp_path / "run" / "checkpoints"
    path, notices = find_checkpoint(checkpoints)
    assert path.name == f"step_{newest:08d}"
    assert len(notices) == left
    run = train(store, tmp_path, *more, ranks=1)
    assert f"resumed after step {newest}" in run.text
    assert ("was cut short" in run.text) == left
    assert not list(checkpoints.glob(".*"))
    assert (checkpoints / "latest").read_text() == "step_00000009\n"


def write_until_two_more_steps_are_told(rank):
    """A disk so slow that a write takes two steps and more."""
    from cpflare.train import checkpoint

    save = checkpoint.save_checkpoint

    def save_slowly(directory, step, *values, **more):
        metrics = directory.parent / "metrics.jsonl"
        deadline = time.monotonic() + 20
        while step == 4 and metrics.read_text().count("\n") < 6:
            if time.monotonic() > deadline:
                raise AssertionError("no step was told while the checkpoint was written")
            time.sleep(0.01)
        return save(directory, step, *values, **more)

    checkpoint.save_checkpoint = save_slowly


@pytest.mark.slow
def test_steps_go_on_while_a_checkpoint_is_written_and_it_holds_the_step_it_is_of(
    store, whole, tmp_path
):
    train(store, tmp_path, "train.keep=9", fault=write_until_two_more_steps_are_told)
    own, other = (
        load_checkpoint(run / "checkpoints" / f"step_{STEPS:08d}", torch.device("cpu"))
        for run in (tmp_path / "run", whole("fp32"))
    )
    assert same(own[:2], other[:2])
    *_, state = load_checkpoint(
        tmp_path / "run" / "checkpoints" / "step_00000004", torch.device("cpu")
    )
    assert state["progress"]["step"] == 4


@pytest.mark.slow
def test_two_trainings_do_not_share_a_folder(store, tmp_path):
    first = runs.start(1, overrides_of(store, tmp_path / "run"), tmp_path / "first", wait_in_step_3)
    first.wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists())
    second = train(store, tmp_path, expected=[2, 2])
    (message,) = second.errors
    assert "in use by another training" in message
    (tmp_path / "go").touch()
    assert first.wait(SOON_S) == [0]


def wait_in_step_3(rank):
    from cpflare.train.loop import Trainer

    run = Trainer.run

    def wait(self):
        go = self.run_dir.parent / "go"

        def action():
            deadline = time.monotonic() + 60
            while not go.exists() and time.monotonic() < deadline:
                time.sleep(0.02)

        runs.at_step(0, 3, action)(rank)
        run(self)

    Trainer.run = wait


def limit_files(rank):
    """As `ulimit -f` does; a write beyond it fails as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))


@pytest.mark.slow
def test_a_full_disk_leaves_the_checkpoint_before_in_use(store, whole, killed):
    folder = killed("fp32")
    run = train(store, folder, fault=limit_files, expected=[2, 2])
    notices = [line for line in run.text.splitlines() if line.startswith("[rank 0] notice:")]
    assert "step_00000008 cannot be written" in notices[0]
    assert "step_00000004 stays in use" in notices[0]
    (message,) = run.errors
    assert "free some space" in message
    checkpoints = folder / "run" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_00000004"]
    # With space again, the run comes to the same end.
    train(store, folder)
    assert losses(folder / "run") == losses(whole("fp32"))


def run_out_of_space_for_a_while(rank):
    """The metrics' file cannot grow while steps 3 to 5 are told."""
    from cpflare.train import run_dir

    write = run_dir.MetricsLog.write

    class Full:
        def __init__(self, file):
            self.file, self.left = file, 3

        def write(self, data):
            self.left -= 1
            if self.left >= 0:
                self.file.write(data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    def written(self, event):
        if event["step"] == 3 and not isinstance(self._file, Full):
            self._file = Full(self._file)
        write(self, event)

    run_dir.MetricsLog.write = written


@pytest.mark.slow
def test_metrics_lines_are_whole_and_once_on_a_disk_that_is_full_for_a_while(
    store, whole, tmp_path
):
    run = train(store, tmp_path, fault=run_out_of_space_for_a_while)
    assert run.text.count("cannot be written for now") == 1
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [*range(1, STEPS + 1), STEPS]
    assert losses(tmp_path / "run") == losses(whole("fp32"))
    assert read_weights(tmp_path / "run").keys() == read_weights(whole("fp32")).keys()
