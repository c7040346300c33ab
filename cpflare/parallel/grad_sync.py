"""Replicated parameters: their gradients summed over the ranks, and their equality at the start."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from cpflare.errors import TopologyError
from cpflare.parallel.comm import Communicator

BUCKET_BYTES = 64 * 2**20
"""Gradients travel in buffers of at most this size (or one parameter's, where it is larger)."""


def sum_gradients(
    parameters: Iterable[nn.Parameter], comm: Communicator, extras: Tensor | None = None
) -> Tensor | None:
    """Sum the ranks' partial gradients, in place; a parameter without one counts as zero.

    Every rank's gradient is its own part of the objective, so the sum over all ranks (context-
    parallel ones and data-parallel replicas alike) is the gradient, given that each loss carries
    its share of the mean. `extras` [k] (the loss, say) rides along in the first buffer and comes
    back summed.

    Communication: one all-reduce a bucket; a single one up to 64 MiB of gradients.
    """
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if comm.size == 1:
        return extras
    if not grads and extras is not None:
        return comm.all_reduce(extras)
    total = extras
    for index, bucket in enumerate(_buckets(grads)):
        members = bucket if index or extras is None else [extras.to(bucket[0].dtype), *bucket]
        flat = comm.all_reduce(torch.cat([member.reshape(-1) for member in members]))
        pieces = flat.split([member.numel() for member in members])
        if len(members) > len(bucket):
            total, pieces = pieces[0], pieces[1:]
        summed = [piece.view_as(grad) for grad, piece in zip(bucket, pieces, strict=True)]
        torch._foreach_copy_(bucket, summed)  # one call, where a copy each is a launch each
    return total


def broadcast_parameters(model: nn.Module, comm: Communicator) -> str:
    """Give every rank the first rank's parameters and buffers, and compare; returns their hash.

    Communication: one broadcast a bucket and the exchange of a hash.

    Raises:
        TopologyError: the ranks hold different parameters afterwards.
    """
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
    if comm.size > 1:
        for bucket in _buckets(tensors):
            flat = comm.broadcast(torch.cat([t.reshape(-1) for t in bucket]))
            for tensor, piece in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                tensor.copy_(piece.view_as(tensor))
    digest = hash_tensors(tensors)
    require_agreement("the model's parameters", digest, comm)
    return digest


def hash_tensors(tensors: Iterable[Tensor]) -> str:
    """A hash of the exact values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def require_agreement(what: str, text: str, comm: Communicator) -> None:
    """Fail on all ranks where one holds another `text`, instead of hanging later.

    Communication: two small all-gathers. Raises TopologyError naming the rank that differs.
    """
    texts = comm.gather_texts(text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise TopologyError(
                f"{what} differ between ranks: rank 0 has {texts[0]}, rank {rank} has {other}; "
                "start every rank with the same command and files"
            )


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype, up to `BUCKET_BYTES` together."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and (size + num_bytes > BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += num_bytes
    if bucket:
        yield bucket
