"""Guards: the comparisons of this suite must fail where the exactness is broken on purpose.

Each break is a mistake that trains, looks plausible, and gives another answer for every number of
ranks. It is made inside the ranks and measured by the same functions as the tests that pass.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch
from test_encode import draw, encode_shard, errors, far_apart
from test_models import FLAREPP, VARIANTS, compare, run_shard

from cpflare.ops import chunked, merge
from cpflare.parallel.comm import Communicator
from support.harness import run_ranks

# An unbroken comparison stays below 1e-10; a broken one must be off by whole percents.
CLEAR = 0.02


def keep_dz_partial(patch):
    """The gradient of Z is not summed over the ranks."""
    all_reduce = Communicator.all_reduce
    patch.setattr(
        Communicator,
        "all_reduce",
        lambda self, t, op="sum": t if op == "sum" else all_reduce(self, t, op),
    )


def use_local_statistics(patch, *, z_is_local, lse_is_local):
    """The backward's softmax or its coupling term comes from this rank's tokens alone."""
    exact = chunked.attend_backward

    def broken(dz, q, k, v, z, lse, *, scale):
        local_z, local_lse = chunked.attend(q, k, v, scale=scale)
        z, lse = local_z if z_is_local else z, local_lse if lse_is_local else lse
        return exact(dz, q, k, v, z, lse, scale=scale)

    patch.setattr(chunked, "attend_backward", broken)


def average_the_outputs(patch):
    """Ranks count alike, whatever their mass."""
    patch.setattr(merge, "merge_partials", lambda o, lse: (o.mean(0), torch.logsumexp(lse, 0)))


BREAKS = {
    "none": lambda patch: None,
    "dZ not reduced": keep_dz_partial,
    "local log-sum-exp": functools.partial(
        use_local_statistics, z_is_local=False, lse_is_local=True
    ),
    "local Z": functools.partial(use_local_statistics, z_is_local=True, lse_is_local=False),
    "local Z and log-sum-exp": functools.partial(
        use_local_statistics, z_is_local=True, lse_is_local=True
    ),
    "averaged outputs": average_the_outputs,
}

WRONG_GRADIENTS = {
    "dZ not reduced": {"dq", "dk", "dv"},
    "local log-sum-exp": {"dq", "dk", "dv"},
    "local Z": {"dq", "dk"},
    "local Z and log-sum-exp": {"dq", "dk", "dv"},
    "averaged outputs": {"z"},
}


@contextmanager
def broken_by(name):
    with pytest.MonkeyPatch.context() as patch:
        BREAKS[name](patch)
        yield


def encode_broken(name, rank, world_size, *args):
    with broken_by(name):
        return encode_shard(rank, world_size, *args)


def model_broken(name, rank, world_size, *args):
    with broken_by(name):
        return run_shard(rank, world_size, *args)


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


@pytest.mark.parametrize("variant", ["flare-layernorm", "flarepp-layernorm-gated-shared"])
@pytest.mark.parametrize("name", [name for name in BREAKS if name != "none"])
def test_the_model_s_comparison_sees(name, variant):
    found = compare(VARIANTS[variant], [4, 3], 7, functools.partial(model_broken, name))
    if name == "averaged outputs":
        assert found["loss"] > 1e-4
    else:
        assert found["loss"] < 1e-10  # only the gradients are broken, as in a run that trains on
    assert found["inputs"] > CLEAR
    keys = [key for key in found if key.endswith(("key_proj.weight", "value_proj.weight"))]
    assert len(keys) == 4
    assert max(found[key] for key in keys) > CLEAR
    assert found["in_proj.fc1.weight"] > CLEAR


def test_the_model_s_comparison_passes_where_nothing_is_broken():
    found = compare(FLAREPP, [4, 3], 7, functools.partial(model_broken, "none"))
    assert max(found.values()) < 1e-10


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
