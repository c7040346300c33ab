"""Exactness broken on purpose: the comparisons of this suite must fail where one of these is made.

Each is a mistake that trains, looks plausible, and gives another answer for every number of ranks.
It is made inside the ranks and measured by the same functions as the tests that pass.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch

from cpflare.ops import chunked, merge
from cpflare.parallel.comm import Communicator

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


@contextmanager
def broken_by(name):
    with pytest.MonkeyPatch.context() as patch:
        BREAKS[name](patch)
        yield
