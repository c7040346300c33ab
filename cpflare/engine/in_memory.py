"""The in-memory executor: ordinary autograd over the whole shard, computed chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from cpflare.engine.casting import Cast, cast_dtype, weights_to_cast, with_casts
from cpflare.engine.chunks import chunk_bounds
from cpflare.engine.modules import require_no_hooks, with_leaves
from cpflare.engine.recompute import recomputed
from cpflare.models.backbone import Backbone, Site, Step
from cpflare.models.conditioning import Conditioning, with_conditions
from cpflare.models.mixer import reduce_stages
from cpflare.ops import Reducer


def run_in_memory(model: Backbone, inputs: Tensor, site: Site) -> Tensor:
    """inputs [B, n, F] -> outputs [B, n, O]. Communication: as the model's own forward."""
    require_no_hooks(model.blocks)
    weights: Sequence[Tensor] = ()
    casts: Sequence[Tensor] = ()
    if (dtype := cast_dtype(model)) is not None:
        weights = weights_to_cast(model)
        casts = Cast.apply(dtype, *weights)  # type: ignore[no-untyped-call]
        model = with_casts(model, weights, casts)
    sources = {id(cast): weight for cast, weight in zip(casts, weights, strict=True)}
    bounds = chunk_bounds(inputs, model.widest, model.chunk_tokens)
    sites = [site.part(rows) for rows in bounds]
    if model.conditioning is not None:
        conditions = [model.conditions(inputs[:, rows]) for rows in bounds]
        sites = with_conditions(model.conditioning, conditions, sites, model.reducer)
    xs = [model.embed(inputs[:, rows]) for rows in bounds]  # [B, n, C] each
    for step in model.steps:
        xs = run_block(step, xs, model.reducer, sites, sources)
    outputs = [model.head(x) for x in xs]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def run_block(
    block: Step,
    xs: Sequence[Tensor],
    reducer: Reducer,
    sites: Sequence[Site],
    sources: Mapping[int, Tensor] | None = None,
) -> list[Tensor]:
    """All chunks of this rank's tokens through a step. Communication: one reduction a stage.

    `sources` are the weights of which the step holds casts, by the casts' ids.
    """
    tokens = [block.tokens(x, site) for x, site in zip(xs, sites, strict=True)]
    state = reduce_stages(block, tokens, reducer)
    steer = sites[0].steer
    assert steer is None or isinstance(steer, Conditioning)
    feed = _feeding(block, steer, sources or {})
    return [
        feed(block.mix(x, chunk, state, site), site)
        for x, chunk, site in zip(xs, tokens, sites, strict=True)
    ]


def _feeding(
    block: Step, steer: Conditioning | None, sources: Mapping[int, Tensor]
) -> Callable[[Tensor, Site], Tensor]:
    """The feed-forward network without keeping its hidden layer, most of what a block would hold:
    the backward computes it again. A compiler makes that choice by itself."""
    if not block.fed or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return block.feed
    # What steers the block has parameters of its own, and activations that have gradients.
    both = nn.ModuleList([block] if steer is None else [block, steer])
    parameters = list(both.parameters())
    twins, leaves = with_leaves(both, parameters)
    fed = (*block.fed, *both[1:])
    own = {id(p) for part in fed for p in part.parameters()}
    used = [
        (sources.get(id(p), p), leaf)
        for p, leaf in zip(parameters, leaves, strict=True)
        if id(p) in own
    ]
    given, read = zip(*used, strict=True)
    twin = twins[0]
    assert isinstance(twin, Step)

    def feed(x: Tensor, site: Site) -> Tensor:
        def again(x: Tensor, *activations: Tensor) -> Tensor:
            if steer is None:
                return twin.feed(x, site)
            steering = twins[1]
            assert isinstance(steering, Conditioning)
            return twin.feed(x, site.with_activations(steering, activations))

        return recomputed(again, [x, *site.activations], given, read)

    return feed
