"""Collectives of a communicator, their counts, agreement between ranks, and the harness itself."""

from __future__ import annotations

import contextlib
import io
import os
import time

import pytest
import torch
import torch.distributed as dist

from cpflare.errors import ConfigError, CpflareError, DataError
from cpflare.parallel.comm import Communicator, as_communicator
from cpflare.parallel.runtime import agreed, run_guarded
from support.harness import RanksFailed, run_ranks


def collect_everything(rank, world_size):
    """Results and traffic of each collective, with strided tensors where one may pass them."""
    comm = as_communicator(dist.group.WORLD)
    assert (comm.rank, comm.size) == (rank, world_size)
    grid = torch.arange(6.0).view(2, 3) * (rank + 1)
    strided = grid.t()
    if rank % 2 == 0:  # the others hold the same numbers in another order of memory
        strided = strided.contiguous()
    assert strided.is_contiguous() == (rank % 2 == 0)
    results = {
        "sum": comm.all_reduce(strided.clone(memory_format=torch.preserve_format)),
        "max": comm.all_reduce((-strided).clone(memory_format=torch.preserve_format), "max"),
        "gather": comm.all_gather(strided),
        "scalar": comm.all_gather(torch.tensor(rank)),
        "broadcast": comm.broadcast(grid.clone()),
        "texts": comm.gather_texts("é" * rank),
    }
    sizes = list(range(world_size))
    results["rows"] = comm.gather_rows(torch.full((rank, 2), float(rank)), sizes)
    return results, comm.take_traffic(), comm.take_traffic()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_collective_is_what_it_says(world_size):
    grid = torch.arange(6.0).view(2, 3)
    answers = run_ranks(world_size, collect_everything)
    for rank, (results, _, _) in enumerate(answers):
        assert torch.equal(results["sum"], grid.t() * sum(range(1, world_size + 1)))
        assert torch.equal(results["max"], -grid.t())
        stacked = torch.stack([grid.t() * (r + 1) for r in range(world_size)])
        assert torch.equal(results["gather"], stacked)
        assert results["scalar"].tolist() == list(range(world_size))
        assert torch.equal(results["broadcast"], grid)
        assert results["texts"] == ["é" * r for r in range(world_size)]
        if rank:
            assert results["rows"] is None
        else:
            expected = [[float(r)] * 2 for r in range(world_size) for _ in range(r)]
            assert results["rows"].tolist() == expected


def test_traffic_counts_calls_and_bytes_once_and_starts_anew():
    for _, traffic, afterwards in run_ranks(2, collect_everything):
        assert traffic.calls["all_reduce_sum"] == 1
        assert traffic.calls["all_reduce_max"] == 1
        assert traffic.calls["broadcast"] == 1
        assert traffic.calls["gather"] == 1
        assert traffic.calls["all_gather"] == 2 + 2  # two of tensors, two within the texts'
        # Three grids of 6 floats and a broadcast, a whole number, lengths, 2 bytes of text, a row.
        assert traffic.bytes == 4 * 24 + 8 + 8 + 2 + 8
        assert traffic.num_calls == 8
        assert traffic.seconds > 0
        assert afterwards.num_calls == 0
        assert afterwards.bytes == 0


def test_a_communicator_of_none_is_one_rank():
    comm = as_communicator(None)
    assert (comm.rank, comm.size) == (0, 1)
    assert as_communicator(comm) is comm
    x = torch.ones(2)
    assert torch.equal(comm.all_reduce(x), x)
    assert torch.equal(comm.all_gather(x), x[None])
    assert comm.gather_texts("a") == ["a"]
    assert comm.take_traffic().num_calls == 0


def set_up(rank, world_size, messages):
    """What a set-up step that fails with `messages[rank]` raises on this rank."""
    try:
        with agreed(Communicator(dist.group.WORLD)):
            if messages[rank]:
                raise DataError(messages[rank])
    except CpflareError as error:
        return type(error).__name__, str(error)
    return None


def test_an_error_of_one_rank_is_raised_on_all():
    outcomes = run_ranks(3, set_up, ["", "no such case run_7", ""])
    assert outcomes == [("AgreedError", "[rank 1] no such case run_7")] * 3


def test_an_error_of_all_ranks_needs_no_rank_s_number():
    assert run_ranks(2, set_up, ["bad key"] * 2) == [("AgreedError", "bad key")] * 2


def test_agreement_without_an_error_lets_all_go_on():
    assert run_ranks(2, set_up, ["", ""]) == [None, None]


def guard(rank, world_size, kind):
    """Run a main that fails on rank 1 while rank 0 waits for it; exit status, time and output."""

    def main():
        comm = Communicator(dist.group.WORLD)
        if kind == "agreed":
            with agreed(comm):
                if rank == 1:
                    raise ConfigError("train.lr=-1 must be positive")
        elif kind == "everywhere":
            with agreed(comm):
                raise ConfigError("train.lr=-1 must be positive")
        elif kind == "alone" and rank == 1:
            raise DataError("case run_7: field p is absent; name it in the field map")
        comm.all_reduce(torch.ones(1))

    begun = time.monotonic()
    output = io.StringIO()
    with contextlib.redirect_stderr(output):
        try:
            status = run_guarded(main)
        except RuntimeError as error:
            status = type(error).__name__
    return status, time.monotonic() - begun, output.getvalue()


def test_a_guarded_run_ends_with_status_0():
    for status, _, output in run_ranks(2, guard, "none"):
        assert status == 0
        assert output == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("agreed", "error: [rank 1] train.lr=-1 must be positive\n"),
        ("everywhere", "error: train.lr=-1 must be positive\n"),
    ],
)
def test_an_agreed_error_is_one_line_of_rank_0_and_status_2_everywhere(kind, line):
    answers = run_ranks(2, guard, kind)
    assert [status for status, _, _ in answers] == [2, 2]
    assert [output for _, _, output in answers] == [line, ""]


def test_a_rank_that_fails_alone_says_so_once_and_releases_the_waiting_one():
    (waiting, waited_s, output_0), (status, _, output_1) = run_ranks(2, guard, "alone")
    assert status == 2
    lines = [line for line in (output_0 + output_1).splitlines() if "run_7" in line]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert lines[0].endswith("case run_7: field p is absent; name it in the field map")
    assert waiting not in (0, 2)  # an error of the collective, raised or as a status
    assert waited_s < 10


def test_the_traceback_is_shown_to_those_who_ask_for_it(capsys):
    def main():
        raise DataError("case run_7: absent")

    assert run_guarded(main) == 2
    assert capsys.readouterr().err == "error: case run_7: absent\n"
    assert run_guarded(main, debug=True) == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("error: case run_7: absent\n")


def test_an_error_that_is_no_user_s_is_neither_swallowed_nor_taken_for_one(capsys):
    def main():
        raise RuntimeError("a bug")

    try:
        status = run_guarded(main)
    except RuntimeError:
        return
    assert status not in (0, 2)
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "a bug" in shown


def fail_in_three_ways(rank, world_size, way):
    if rank == world_size - 1:
        if way == "raises":
            raise KeyError("found me")
        if way == "hangs":
            time.sleep(60)
        if way == "dies":
            os._exit(7)
    return rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "world_size", "text"),
    [("raises", 2, "found me"), ("hangs", 1, "no answer in"), ("dies", 1, "exit code 7")],
)
def test_the_harness_reports_a_rank_that(way, world_size, text):
    with pytest.raises(RanksFailed) as caught:
        run_ranks(world_size, fail_in_three_ways, way, timeout_s=1.0 if way == "hangs" else 30.0)
    assert list(caught.value.tracebacks) == [world_size - 1]
    assert text in caught.value.tracebacks[world_size - 1]
