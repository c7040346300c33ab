"""Giving a model its ranks: the one place where a model and a communicator meet."""

from __future__ import annotations

import torch.distributed as dist

from cpflare.models import Backbone
from cpflare.ops import Reducer
from cpflare.parallel.comm import Communicator, as_communicator


def parallelize(model: Backbone, group: dist.ProcessGroup | Communicator | None) -> Backbone:
    """Let the model's tokens meet over all ranks of `group`; returns the same model.

    Afterwards its forward takes this rank's tokens and every rank must call it. The parameters stay
    replicated, and their gradients are this rank's partial sums
    (`cpflare.parallel.grad_sync.sum_gradients` adds them).
    """
    model.reducer = Reducer(as_communicator(group))
    return model
