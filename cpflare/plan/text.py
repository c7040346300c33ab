"""A plan as text and as plain values for JSON."""

from __future__ import annotations

from typing import Any

from cpflare.plan.calibrate import Check
from cpflare.plan.planner import Planner, Prediction, stops_paying
from cpflare.plan.split import split_text, splits


def plan_values(planner: Planner, cells: int, ranks: int) -> dict[str, Any]:
    """All of a plan, for `--json`."""
    scaling = planner.scaling(cells)
    stop = stops_paying(scaling)
    return {
        "cells": cells,
        "ranks": ranks,
        "device": planner.device.name,
        "network": planner.network.name,
        "precision": planner.config.train.precision,
        "executor": planner.config.engine.executor,
        "prediction": planner.predict(cells, ranks).to_dict(),
        "fits": planner.fits(planner.predict(cells, ranks)),
        "fewest_ranks": planner.fewest_ranks(cells),
        "largest_chunk": planner.largest_chunk(cells, ranks),
        "scaling": [
            {**p.to_dict(), "efficiency": _efficiency(scaling[0], p), "fits": planner.fits(p)}
            for p in scaling
        ],
        "splits": [split.to_dict() for split in splits(planner, cells, ranks)],
        "pays_up_to": stop[0].ranks if stop else None,
        "because_of": stop[1] if stop else None,
    }


def plan_text(planner: Planner, cells: int, ranks: int, source: str) -> str:
    """A plan for people; `source` says where its rates come from."""
    config, device = planner.config, planner.device
    model = config.model
    prediction = planner.predict(cells, ranks)
    share = min(ranks, device.per_node) if device.shared_memory else 1
    verdict = "fits" if planner.fits(prediction) else "DOES NOT FIT"
    lines = [
        f"{model.mixer} C={model.channels} H={model.heads} M={model.latents} blocks={model.blocks},"
        f" {config.train.precision}, {config.engine.executor}, {planner.costs.parameters:,} "
        "parameters",
        f"{cells:,} cells over {ranks} × {device.name}: {prediction.tokens:,} cells a rank in "
        f"chunks of {prediction.chunk:,}",
        f"rates: {source}",
        "",
        f"step    {_time(prediction.step_s)}: products {_time(prediction.matmul_s)}, attention "
        f"{_time(prediction.attention_s)}, other operations {_time(prediction.pointwise_s)}, "
        f"communication {_time(prediction.comm_s)}, update {_time(prediction.fixed_s)}"
        + (
            f"; launching takes {_time(prediction.launch_s)}"
            if prediction.seen_launch_s > 0
            else ""
        ),
        f"memory  {_size(prediction.memory_bytes)} a rank: activations "
        f"{_size(prediction.activation_bytes)}, weights and optimiser "
        f"{_size(prediction.parameter_bytes)}, other {_size(prediction.other_bytes)}; {verdict} "
        f"({_size(device.memory_bytes / share)} a rank)",
        _fitting(planner, cells, ranks),
        split_text(splits(planner, cells, ranks), ranks, device.name),
        *_launching(planner, prediction),
        "",
        f"{'ranks':>6} {'step':>10} {'efficiency':>10} {'communication':>13} {'memory':>10}",
    ]
    scaling = planner.scaling(cells)
    for p in scaling:
        room = "" if planner.fits(p) else "  does not fit"
        lines.append(
            f"{p.ranks:>6} {_time(p.step_s):>10} {_efficiency(scaling[0], p):>10.3f} "
            f"{p.comm_s / p.step_s:>13.1%} {_size(p.memory_bytes):>10}{room}"
        )
    stop = stops_paying(scaling)
    lines.append("")
    if stop is None:
        lines.append(f"More ranks pay up to {scaling[-1].ranks}, the most looked at.")
    else:
        lines.append(
            f"More than {stop[0].ranks} ranks hardly pay: doubling them makes the step less than "
            f"1.25 times as fast. Most is lost to {stop[1]}."
        )
    return "\n".join(lines)


def check_text(checks: list[Check]) -> str:
    """Measured points beside their predictions, a line each."""
    lines = [f"{'measured point':<58} {'step':>9} {'plan':>9} {'':>7} {'memory':>10} {'plan':>10}"]
    for c in checks:
        lines.append(
            f"{c.point.name + ('' if c.seen else ' *'):<58} {_time(c.step_s):>9} "
            f"{_time(c.predicted_step_s):>9} {c.time_error:>+7.1%} {_size(c.memory_bytes):>10} "
            f"{_size(c.predicted_memory_bytes):>10} {c.memory_error:>+7.1%}"
        )
    lines.append("* not used for the fit")
    return "\n".join(lines)


def _fitting(planner: Planner, cells: int, ranks: int) -> str:
    fewest = planner.fewest_ranks(cells)
    chunk = planner.largest_chunk(cells, ranks)
    text = f"fits    from {fewest} rank(s)" if fewest else "fits    on no number of ranks to 1024"
    if chunk is None:
        other = "engine.executor=streamed" if planner.config.engine.executor != "streamed" else ""
        mend = f"; try {other}" if other else "; use more ranks"
        return f"{text}; no chunk fits on {ranks}{mend}"
    return f"{text}; the largest chunk that fits on {ranks} is {chunk:,} cells"


def _launching(planner: Planner, prediction: Prediction) -> list[str]:
    """What to do where the host launches more slowly than a GPU works."""
    if not (prediction.launch_overlaps and prediction.seen_launch_s > 0):
        return []
    launches = prediction.launch_s / planner.rates.kernel_s
    mends = ["more cells a rank"]
    if prediction.ranks > 1:
        mends.append("parallel.dp in place of parallel.cp")
    if not planner.config.engine.compile:
        mends.append("engine.compile=true")
    return [
        f"bound by launching: the host takes {_time(prediction.launch_s)} for {launches:,.0f} "
        f"operations, in which the GPU works for {_time(prediction.compute_s)}; what helps: "
        + ", ".join(mends)
    ]


def _efficiency(single: Prediction, prediction: Prediction) -> float:
    return single.step_s / (prediction.ranks * prediction.step_s)


def _time(seconds: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _size(num_bytes: float) -> str:
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes / 2**10:.3g} KiB"
