"""The encoder's comparison must fail where its exactness is broken on purpose."""

from __future__ import annotations

import functools

import pytest
import torch

from cpflare.ops import merge
from cpflare.parallel.comm import Communicator
from support.breaks import BREAKS, CLEAR, broken_by
from support.exact_encoder import draw, encode_shard, errors, far_apart
from support.harness import run_ranks

WRONG_GRADIENTS = {
    "dZ not reduced": {"dq", "dk", "dv"},
    "local log-sum-exp": {"dq", "dk", "dv"},
    "local Z": {"dq", "dk"},
    "local Z and log-sum-exp": {"dq", "dk", "dv"},
    "averaged outputs": {"z"},
}


def encode_broken(name, rank, world_size, *args):
    with broken_by(name):
        return encode_shard(rank, world_size, *args)


@pytest.mark.parametrize("sizes", [[5, 3], [2, 4, 1]], ids=str)
@pytest.mark.parametrize("name", BREAKS)
def test_the_encoder_s_comparison_sees(name, sizes):
    case = draw(sizes)
    results = run_ranks(len(sizes), functools.partial(encode_broken, name), *case, 4)
    found = errors(results, *case)
    wrong = WRONG_GRADIENTS.get(name, set())
    assert all(found[key] > CLEAR for key in wrong), found
    if name != "averaged outputs":
        assert all(error < 1e-12 for key, error in found.items() if key not in wrong), found


def merge_without_the_maximum(rank, world_size, *args):
    """Z = sum exp(L_r) O_r / sum exp(L_r): L_max is taken as 0, on both merge paths."""

    def merge_partials(o, lse):
        mass = torch.exp(lse)
        return (mass[..., None] * o).sum(0) / mass.sum(0)[..., None], torch.log(mass.sum(0))

    start_all_reduce = Communicator.start_all_reduce

    def no_max(self, t, op="sum"):
        return (lambda: torch.zeros_like(t)) if op == "max" else start_all_reduce(self, t, op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "merge_partials", merge_partials)
        patch.setattr(Communicator, "start_all_reduce", no_max)
        return encode_shard(rank, world_size, *args)


@pytest.mark.parametrize("gather_up_to", [4, 0])
def test_a_merge_without_the_maximum_overflows_at_120_in_fp32(gather_up_to):
    def compare_at(case, run):
        return errors(run_ranks(2, run, *case, gather_up_to), *case)

    near, far = draw([3, 4], torch.float32), far_apart([3, 4], torch.float32, alternate=True)
    for keys in far[1]:
        keys[..., 0] *= 2  # scores of ±120 in place of ±60: exp(120) exceeds fp32, exp(60) does not
    assert max(compare_at(near, merge_without_the_maximum).values()) < 1e-5
    assert max(compare_at(far, encode_shard).values()) < 1e-3
    assert compare_at(far, merge_without_the_maximum)["z"] > CLEAR
