"""Runs that build on a run: more steps after its end, its weights as a start, its store found."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from cpflare.config import config_from_dict
from cpflare.errors import CpflareError
from cpflare.train.optim import build_optimizer, build_schedule
from cpflare.train.run_dir import CONFIG, read_run
from support.stores import SMALL, read_metrics, read_weights, train_rank, write_store

COMMON = (*SMALL, "data.tokens=40", "train.eval_every=0", "train.ema=0.9")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return write_store(tmp_path_factory.mktemp("further") / "store")


def train(store, run_dir, steps, *more):
    own = [f"data.store={store.path}", f"run.dir={run_dir}", f"train.steps={steps}"]
    return train_rank(0, 1, [*own, *COMMON, *more])


@pytest.fixture(scope="module")
def done(store, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("done") / "run"
    train(store, run_dir, 3)
    return run_dir


def rates(schedule, steps):
    config = config_from_dict({"train": {"schedule": schedule, "warmup": 0.3}}).train
    course = build_schedule(build_optimizer(torch.nn.Linear(2, 2), config), config, steps)
    found = []
    for _ in range(steps):
        found.append(course.get_last_lr()[0])
        course.optimizer.step()
        course.step()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["onecycle", "cosine"])
def test_a_finished_run_goes_on_with_the_schedule_of_all_its_steps(store, tmp_path, schedule):
    train(store, tmp_path, 3, f"train.schedule={schedule}")
    text = train(store, tmp_path, 7, f"train.schedule={schedule}")
    lr = [event["lr"] for event in read_metrics(tmp_path)]
    assert lr[:3] == pytest.approx(rates(schedule, 3))
    assert lr[3:] == pytest.approx(rates(schedule, 7)[3:])
    assert f"the {schedule} schedule is drawn anew over all 7 steps" in text
    assert "resumed after step 3" in text


@pytest.mark.slow
def test_at_a_constant_rate_more_steps_are_those_of_a_longer_run(store, tmp_path):
    constant = "train.schedule=constant"
    train(store, tmp_path / "two", 2, constant)
    assert "the learning rate stays 0.001" in train(store, tmp_path / "two", 4, constant)
    train(store, tmp_path / "one", 4, constant)
    own, other = (read_weights(tmp_path / name) for name in ("two", "one"))
    assert all(torch.equal(value, other[name]) for name, value in own.items())


def test_a_run_that_goes_on_may_have_another_rate_and_nothing_else(store, done, tmp_path):
    shutil.copytree(done, tmp_path / "run")
    with pytest.raises(CpflareError, match=r"train\.weight_decay"):
        train(store, tmp_path / "run", 5, "train.weight_decay=0.5")
    with pytest.raises(CpflareError, match="steps=3, this run has 2"):
        train(store, tmp_path / "run", 2)
    train(store, tmp_path / "run", 5, "train.schedule=constant", "train.lr=1e-4")
    assert [event["lr"] for event in read_metrics(tmp_path / "run")][3:] == [1e-4, 1e-4]


def test_a_run_starts_with_the_weights_of_another(store, done, tmp_path):
    more = (f"train.init_from={done}", "train.lr=1e-30", "train.weight_decay=0")
    train(store, tmp_path / "run", 1, *more)
    own, other = read_weights(tmp_path / "run"), read_weights(done)
    assert all(torch.equal(value, other[name]) for name, value in own.items())
    text = train(store, tmp_path / "run", 2, *more)
    assert "resumed after step 1" in text
    with pytest.raises(CpflareError, match=r"train\.init_from=.*this run has None"):
        train(store, tmp_path / "run", 2, *more[1:])


def test_the_cases_of_the_run_before_count_as_seen(store, done, tmp_path):
    cases = set(read_run(done).dataset["train_cases"])
    only = "data.train_split=[run_4]"
    assert "run_4" not in cases
    train(store, tmp_path / "run", 1, f"train.init_from={done}", only)
    assert set(read_run(tmp_path / "run").dataset["train_cases"]) == {*cases, "run_4"}
    train(store, tmp_path / "run", 2, f"train.init_from={done}", only)
    assert set(read_run(tmp_path / "run").dataset["train_cases"]) == {*cases, "run_4"}


def test_other_statistics_are_told_and_those_of_the_own_store_are_used(done, tmp_path):
    def change(name, fields):
        fields["pressure"] += 100

    other = write_store(tmp_path / "store", change=change)
    text = train(other, tmp_path / "run", 1, f"train.init_from={done}")
    assert "was trained with other statistics" in text
    means = [read_run(path).normalizer.target_mean[0] for path in (tmp_path / "run", done)]
    assert means[0] == pytest.approx(means[1] + 100, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.channels=32", r"\[32\] there and \[64\] here; set model\.channels=16 as there"),
        ("model.blocks=3", r"absent there and .* here; set model\.blocks=2 as there"),
        ("data.inputs=[normal,position]", r"has data\.inputs=\['position', 'normal'\]"),
        ("train.init_from=nowhere", "nowhere does not exist"),
    ],
)
def test_weights_that_do_not_fit_are_refused_in_one_line(store, done, tmp_path, change, message):
    with pytest.raises(CpflareError, match=message) as caught:
        train(store, tmp_path / "run", 1, f"train.init_from={done}", change)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / CONFIG).exists()


@pytest.mark.slow
def test_a_run_finds_its_store_wherever_both_are(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    store = write_store(Path("store"))
    train(store, "runs/one", 1)
    for folder in (".", "runs", "/"):
        monkeypatch.chdir(tmp_path / "here" / folder)
        found = read_run(tmp_path / "here" / "runs" / "one").find_store()
        assert found.resolve() == tmp_path / "here" / "store"
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir(tmp_path)
    run = read_run(Path("there/runs/one"))
    assert run.find_store().resolve() == tmp_path / "there" / "store"
    # Another store of that name where the run is called from is not taken for it.
    write_store(
        Path("store"),
        {"run_1": 30, "run_2": 30},
        {"train": ["run_1"], "val": ["run_2"], "test": []},
    )
    assert run.find_store().resolve() == tmp_path / "there" / "store"
    shutil.rmtree("store")
    shutil.rmtree("there/store")
    with pytest.raises(CpflareError, match=r"the store of run .* is not at .*; say with --store"):
        run.find_store()


def test_a_run_that_does_not_say_where_its_store_is_uses_its_configuration(store, done, tmp_path):
    shutil.copytree(done, tmp_path / "run")
    content = yaml.safe_load((tmp_path / "run" / CONFIG).read_text())
    del content["dataset"]["store"]
    (tmp_path / "run" / CONFIG).write_text(yaml.safe_dump(content))
    assert re.fullmatch(re.escape(str(store.path)), str(read_run(tmp_path / "run").find_store()))
