"""The order of the data: which cases and rows a step takes, a function of (seed, step) alone."""

from __future__ import annotations

import itertools

import pytest

from cpflare.data.sampler import Sampler
from cpflare.errors import DataError

CASES = ("run_1", "run_2", "run_3", "run_4", "run_5")
ROWS = (101, 157, 128, 113, 2)


def sampler(*, cases=CASES, rows=ROWS, tokens=40, per_step=2, seed=5):
    return Sampler(cases, rows, tokens, per_step, seed)


def order(drawn, num_steps):
    """The cases of the first steps, one after another."""
    return [window.case for step in range(num_steps) for window in drawn.windows(step)]


def rows_of(window, num_shards):
    """All rows of a window, shard after shard."""
    parts = [part for r in range(num_shards) for part in window.shard(num_shards, r)]
    return list(itertools.chain.from_iterable(range(p.start, p.stop) for p in parts))


def test_an_epoch_takes_every_case_once_in_an_order_of_its_own():
    taken = order(sampler(per_step=1), 50)
    epochs = [tuple(taken[first : first + 5]) for first in range(0, 50, 5)]
    assert all(sorted(epoch) == sorted(CASES) for epoch in epochs)
    # Ten draws among 120 orders: that all were one order has a chance of 120^-9.
    assert len(set(epochs)) > 1


def test_a_step_runs_on_into_the_next_epoch():
    drawn = sampler(per_step=2)
    taken = order(drawn, 5)
    assert sorted(taken[:5]) == sorted(CASES)
    assert sorted(taken[5:]) == sorted(CASES)
    # The third of these steps holds the last case of the first epoch and the first of the second.
    assert [drawn.epoch_of(step) for step in range(6)] == [0, 0, 0, 1, 1, 2]


@pytest.mark.parametrize("per_step", [2, 3, 4, 12])
def test_the_sequence_of_cases_is_that_of_single_steps(per_step):
    one_by_one = order(sampler(per_step=1), 60)
    assert order(sampler(per_step=per_step), 60 // per_step) == one_by_one


def test_it_is_a_function_of_seed_and_step_without_memory():
    asked_backwards = sampler()
    backwards = {step: asked_backwards.windows(step) for step in reversed(range(8))}
    assert [sampler().windows(step) for step in range(8)] == [backwards[s] for s in range(8)]
    other = sampler(seed=6)
    assert order(other, 10) != order(sampler(), 10)
    starts = [[w.start for w in d.windows(s)] for d in (other, sampler()) for s in range(8)]
    assert starts[:8] != starts[8:]


def windows_of(case, drawn, num_steps):
    """step -> window of a case, for the steps that take it."""
    pairs = [(step, window) for step in range(num_steps) for window in drawn.windows(step)]
    return {step: window for step, window in pairs if window.case == case}


@pytest.mark.parametrize(
    "other",
    [
        {"per_step": 1},
        {"per_step": 4},
        {"cases": ("run_9", "run_3"), "rows": (64, 128)},
        {"cases": CASES[::-1], "rows": ROWS[::-1]},
    ],
    ids=["one a step", "four a step", "other cases", "reversed"],
)
def test_a_window_depends_on_seed_step_and_case_alone(other):
    own = windows_of("run_3", sampler(), 60)
    others = windows_of("run_3", sampler(**other), 60)
    both = own.keys() & others.keys()
    assert len(both) >= 3
    assert [own[step] for step in both] == [others[step] for step in both]


def test_windows_start_anywhere_and_differ_between_steps_and_cases():
    starts = [w.start for w in windows_of("run_2", sampler(per_step=5), 400).values()]
    assert len(starts) == 400
    assert all(0 <= start < 157 for start in starts)
    # 400 uniform draws from 157 rows leave a given row out with chance exp(-2.5): about 144 are
    # drawn, with a deviation of 3.
    assert len(set(starts)) > 125
    same_rows = sampler(cases=("a", "b"), rows=(157, 157), per_step=2)
    pairs = [[w.start for w in same_rows.windows(step)] for step in range(50)]
    assert sum(a == b for a, b in pairs) < 10


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 7, 41])
def test_shards_of_any_number_of_ranks_make_the_same_window(num_shards):
    wrapped = 0
    for step in range(30):
        for window in sampler().windows(step):
            expected = [(window.start + i) % window.num_rows for i in range(window.size)]
            assert rows_of(window, num_shards) == expected
            assert sum(window.shard_sizes(num_shards)) == window.size
            assert max(window.shard_sizes(num_shards)) - min(window.shard_sizes(num_shards)) <= 1
            wrapped += window.start + window.size > window.num_rows
    assert wrapped >= 5


def test_each_shard_is_as_long_as_its_size_says():
    for window in sampler().windows(0):
        for r, size in enumerate(window.shard_sizes(3)):
            assert sum(part.stop - part.start for part in window.shard(3, r)) == size


@pytest.mark.parametrize("tokens", ["all", 157, 158, 10**9])
def test_all_tokens_are_all_rows_once(tokens):
    drawn = sampler(tokens=tokens)
    for step in range(5):
        for window in drawn.windows(step):
            assert rows_of(window, 3) == list(range(window.num_rows))


def test_a_case_with_fewer_rows_than_tokens_is_taken_whole():
    window = next(iter(windows_of("run_5", sampler(), 5).values()))
    assert (window.size, window.num_rows) == (2, 2)
    assert window.shard_sizes(4) == [1, 1, 0, 0]
    assert window.shard(4, 3) == []


def test_a_case_without_cells_is_an_error_that_names_it():
    with pytest.raises(DataError, match=r"run_2.*no cells.*(prepare|take)"):
        sampler(rows=(101, 0, 128, 113, 2))


def test_no_cases_are_an_error_that_names_the_key():
    with pytest.raises(DataError, match=r"no cases.*data\.train_split"):
        sampler(cases=(), rows=())
