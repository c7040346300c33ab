"""The encoder on real ranks and what is compared with the dense reference in fp64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cpflare.ops import encode, merge, naive
from cpflare.parallel.comm import Communicator
from support.harness import relative_error

B, H, M, D = 2, 2, 3, 4
SCALE = D**-0.5


def draw(sizes, dtype=torch.float64):
    """Queries, every shard's keys and values, and every rank's own part of the objective."""

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64).to(dtype)

    q = normal(B, H, M, D)
    k, v = ([normal(B, H, n, D) for n in sizes] for _ in range(2))
    return q, k, v, [normal(B, H, M, D) for _ in sizes]


def encode_shard(rank, world_size, q, k, v, parts, gather_up_to):
    """This rank's output, gradients of its part of the objective <z, part_r>, and traffic."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "GATHER_UP_TO", gather_up_to)
        comm = Communicator(dist.group.WORLD)
        inputs = [t.requires_grad_() for t in (q, k[rank], v[rank])]
        z = encode(*inputs, scale=SCALE, group=comm)
        forward = comm.take_traffic()
        gradients = torch.autograd.grad((z * parts[rank]).sum(), inputs)
        return z.detach(), *gradients, forward, comm.take_traffic()


def reference(q, k, v, parts):
    """z and the gradients of the whole objective <z, sum of the parts>, dense in fp64."""
    q, k, v = q.double(), torch.cat(k, dim=2).double(), torch.cat(v, dim=2).double()
    inputs = [t.requires_grad_() for t in (q, k, v)]
    z = naive.encode(*inputs, scale=SCALE)
    weight = torch.stack([part.double() for part in parts]).sum(0)
    return z.detach(), *torch.autograd.grad(z, inputs, weight, materialize_grads=True)


def errors(results, q, k, v, parts):
    """Largest error of the output and of every gradient, over all ranks."""
    z, dq, dk, dv = reference(q, k, v, parts)
    found = {
        "dq": (torch.stack([r[1].double() for r in results]).sum(0), dq),
        "dk": (torch.cat([r[2] for r in results], dim=2), dk),
        "dv": (torch.cat([r[3] for r in results], dim=2), dv),
    }
    outcome = {name: relative_error(*pair) for name, pair in found.items()}
    outcome["z"] = max(relative_error(r[0], z) for r in results)
    return outcome


def far_apart(sizes, dtype, *, alternate):
    """Shards whose scores lie 120 apart in turn: in every row, or in turn between the rows."""
    q, k, v, parts = draw(sizes, dtype)
    q[..., 0] = 1.0
    if alternate:
        q[..., 1::2, 0] = -1.0
    for rank, keys in enumerate(k):
        keys[..., 0] = (60.0 if rank % 2 else -60.0) / SCALE
    gaps = naive.encode_lse(q.double(), k[1].double(), scale=SCALE)
    gaps = gaps - naive.encode_lse(q.double(), k[0].double(), scale=SCALE)
    assert gaps.abs().min() > 110
    assert (gaps < 0).any() == alternate
    return q, k, v, parts
