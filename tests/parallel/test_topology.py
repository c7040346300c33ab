"""From torchrun's environment to DP × CP groups."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cpflare.config import ParallelConfig
from cpflare.errors import TopologyError
from cpflare.parallel.topology import (
    build_topology,
    environment_ranks,
    resolve_axes,
    start_ranks,
)
from support.harness import run_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@pytest.mark.parametrize(
    ("cp", "dp", "world_size", "expected"),
    [
        (None, None, 1, (1, 1)),
        (None, None, 8, (8, 1)),
        (4, None, 8, (4, 2)),
        (None, 2, 8, (4, 2)),
        (None, 8, 8, (1, 8)),
        (8, 1, 8, (8, 1)),
        (1, None, 3, (1, 3)),
        (2, 2, 4, (2, 2)),
        (3, 2, 6, (3, 2)),
    ],
)
def test_a_missing_axis_follows_from_the_other(cp, dp, world_size, expected):
    assert resolve_axes(ParallelConfig(cp=cp, dp=dp), world_size) == expected


@pytest.mark.parametrize(
    ("cp", "dp", "world_size", "what", "mends"),
    [
        (3, 2, 8, "cp=3 × parallel.dp=2 = 6 ranks, but WORLD_SIZE is 8", ["start 6", "cp=4"]),
        (4, 1, 8, "cp=4 × parallel.dp=1 = 4 ranks, but WORLD_SIZE is 8", ["start 4", "dp=2"]),
        (2, 8, 8, "cp=2 × parallel.dp=8 = 16 ranks, but WORLD_SIZE is 8", ["start 16", "dp=4"]),
        (3, None, 8, "ranks, but WORLD_SIZE is 8", ["start "]),
        (None, 3, 8, "ranks, but WORLD_SIZE is 8", ["start "]),
        (4, None, 2, "cp=4 × parallel.dp=1 = 4 ranks, but WORLD_SIZE is 2", ["start 4"]),
        (None, 4, 2, "cp=1 × parallel.dp=4 = 4 ranks, but WORLD_SIZE is 2", ["start 4"]),
        (3, 3, 4, "cp=3 × parallel.dp=3 = 9 ranks, but WORLD_SIZE is 4", ["start 9"]),
    ],
)
def test_axes_that_do_not_fit_name_all_numbers_and_the_mend(cp, dp, world_size, what, mends):
    with pytest.raises(TopologyError) as caught:
        resolve_axes(ParallelConfig(cp=cp, dp=dp), world_size)
    message = str(caught.value)
    assert what in message
    assert all(mend in message for mend in mends)
    assert "\n" not in message


def test_every_mend_of_an_axis_fits():
    for cp in (1, 2, 3, 4, 6):
        for dp in (1, 2, 3, 4, 6):
            for world_size in (1, 2, 3, 4, 6, 8, 12):
                if cp * dp == world_size:
                    assert resolve_axes(ParallelConfig(cp=cp, dp=dp), world_size) == (cp, dp)
                    continue
                with pytest.raises(TopologyError) as caught:
                    resolve_axes(ParallelConfig(cp=cp, dp=dp), world_size)
                mend = str(caught.value).split("; ")[1]
                given = {"cp": cp, "dp": dp}
                for axis in given:
                    if f"parallel.{axis}=" in mend:
                        value = int(mend.split(f"parallel.{axis}=")[1].split()[0])
                        resolve_axes(ParallelConfig(**given | {axis: value}), world_size)
                resolve_axes(ParallelConfig(**given), int(mend.split("start ")[1].split()[0]))


@pytest.fixture
def environment(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_torchrun_there_is_one_rank(environment):
    assert environment_ranks() == (0, 1, 0)
    assert start_ranks(5.0)[0] == 1
    assert not dist.is_initialized()


def test_torchrun_s_variables_are_read(environment):
    for name, value in zip(NAMES, ("5", "8", "1"), strict=True):
        environment.setenv(name, value)
    assert environment_ranks() == (5, 8, 1)


@pytest.mark.parametrize("under_torchrun", [False, True])
def test_slurm_s_variables_do_not_confuse(environment, under_torchrun):
    for name, value in {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "3",
        "SLURM_NNODES": "4",
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_NUM_TASKS": "4",
    }.items():
        environment.setenv(name, value)
    if not under_torchrun:
        assert environment_ranks() == (0, 1, 0)
        return
    for name, value in zip(NAMES, ("1", "2", "1"), strict=True):
        environment.setenv(name, value)
    assert environment_ranks() == (1, 2, 1)


@pytest.mark.parametrize("values", [("one", "2", "0"), ("0", "2.5", "0"), ("0", "2", "x")])
def test_variables_that_are_no_numbers_are_named(environment, values):
    for name, value in zip(NAMES, values, strict=True):
        environment.setenv(name, value)
    with pytest.raises(TopologyError) as caught:
        environment_ranks()
    assert all(
        f"{name}={value}" in str(caught.value) for name, value in zip(NAMES, values, strict=True)
    )


@pytest.mark.parametrize(
    ("values", "mend"),
    [
        ({"RANK": "0"}, "set WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "set RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "from 0 to WORLD_SIZE - 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "from 0 to WORLD_SIZE - 1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "from 0 to WORLD_SIZE - 1"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "-1"}, "do not fit"),
    ],
)
def test_variables_that_do_not_fit_are_named_with_the_mend(environment, values, mend):
    for name, value in values.items():
        environment.setenv(name, value)
    with pytest.raises(TopologyError) as caught:
        environment_ranks()
    assert all(f"{name}={value}" in str(caught.value) for name, value in values.items())
    assert mend in str(caught.value)


def test_a_local_rank_that_is_missing_is_the_rank(environment):
    environment.setenv("RANK", "1")
    environment.setenv("WORLD_SIZE", "2")
    assert environment_ranks() == (1, 2, 1)


def place(rank, world_size, cp, dp):
    """This rank's place, and who is in its groups by the values that meet there."""
    assert environment_ranks() == (rank, world_size, rank)
    size, device = start_ranks(30.0, "cpu")
    topology = build_topology(ParallelConfig(cp=cp, dp=dp), device)
    mine = torch.tensor(rank)
    return {
        "size": size,
        "place": (topology.rank, topology.dp_rank, topology.cp_rank),
        "axes": (topology.dp, topology.cp),
        "cp group": topology.cp_comm.all_gather(mine).tolist(),
        "cp rank": topology.cp_comm.rank,
        "world": topology.world_comm.all_gather(mine).tolist(),
        # The first rank of a group, not of the world, is the group's root.
        "cp root": int(topology.cp_comm.broadcast(torch.tensor(rank))),
        "device": str(device),
    }


@pytest.mark.parametrize(
    ("cp", "dp"), [(2, 2), (4, 1), (1, 4), (3, 1), (1, 2), (1, 1), (2, None), (None, None)]
)
def test_ranks_of_a_cp_group_are_neighbours(cp, dp):
    world_size = (cp or 2) * (dp or 2)
    for rank, found in enumerate(run_ranks(world_size, place, cp, dp)):
        width = cp or 4
        first = rank - rank % width
        neighbours = list(range(first, first + width)) if width > 1 else [rank]
        assert found["size"] == world_size
        assert found["axes"] == (world_size // width, width)
        assert found["place"] == (rank, rank // width, rank % width)
        assert found["cp rank"] == rank % width
        assert found["cp root"] == first
        if width > 1:
            assert found["cp group"] == neighbours
        if world_size > 1:
            assert found["world"] == list(range(world_size))
        assert found["device"] == "cpu"


def refuse(rank, world_size):
    try:
        build_topology(ParallelConfig(cp=2, dp=2), torch.device("cpu"))
    except TopologyError as error:
        return str(error)
    return None


def test_axes_that_do_not_fit_are_refused_on_all_ranks():
    messages = run_ranks(3, refuse)
    assert len(set(messages)) == 1
    assert "WORLD_SIZE is 3" in messages[0]


def group_timeouts(rank, world_size, cp, timeout_s):
    topology = build_topology(ParallelConfig(cp=cp, timeout_s=timeout_s), torch.device("cpu"))
    backend = topology.cp_comm.group._get_backend(torch.device("cpu"))
    topology.cp_comm.all_reduce(torch.ones(1))
    return backend.options._timeout.total_seconds(), dist.get_process_group_ranks(
        topology.cp_comm.group
    )


def test_a_subgroup_waits_no_longer_than_the_ranks_do():
    found = run_ranks(4, group_timeouts, 2, 50.0)
    assert found == [(40.0, [0, 1]), (40.0, [0, 1]), (40.0, [2, 3]), (40.0, [2, 3])]
