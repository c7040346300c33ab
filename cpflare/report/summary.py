"""The report's headline figures: how well, how fast and how large, each with its unit."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cpflare.report.curves import History


def headline_figures(
    run_dir: Path, history: History, metrics: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Return (value, unit or prefix, meaning) of what a reader looks for first.

    Errors come from the evaluation of written predictions, or without one from training's best.
    """
    figures: list[tuple[str, str, str]] = []  # value, unit, what it is
    for field, values in (metrics.get("mean") or {}).items():
        if "rel_l2" in values:
            figures.append((f"{values['rel_l2']:.4f}", "", f"relative L2, {plain(field)}"))
    drag = (metrics.get("forces") or {}).get("Cd")
    if drag:
        figures.append((f"{drag['mae']:.4f}", "", "mean absolute error of Cd"))
    if not figures:
        for key in history.evaluation_keys():
            best = min(row[key] for row in history.evaluations if row.get(key) is not None)
            where = "subsample" if key.endswith("_sub") else "whole surfaces"
            name = plain(key.removesuffix("_sub").removesuffix("_rel_l2"))
            figures.append((f"{best:.4f}", "", f"best relative L2, {name}, {where}"))
    steps, losses = history.column("loss")
    if len(losses):
        figures.append((f"{losses[-1]:.3g}", "", f"loss at step {steps[-1]:,.0f}"))
    speed = history.column("tokens_per_s")[1]
    if len(speed):
        value, prefix = _engineering(float(np.median(speed)))
        figures.append((value, prefix, "cells/s, median in training"))
    memory = history.column("peak_mem_bytes")[1]
    if len(memory) and memory.max() > 0:
        figures.append((f"{memory.max() / 2**30:.2f}", " GiB", "peak memory of a rank"))
    seconds = float(history.column("step_s")[1].sum())
    if seconds > 0:
        figures.append((*_duration(seconds), "time in training steps"))
    parameters = _count_parameters(run_dir / "model.safetensors")
    if parameters:
        value, prefix = _engineering(parameters)
        figures.append((value, prefix, "parameters"))
    return figures


def plain(field: str) -> str:
    """Name a field in words."""
    return field.replace("_", " ")


def _engineering(value: float) -> tuple[str, str]:
    """Split a count into three significant digits and a prefix with a space before it."""
    for factor, prefix in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= factor:
            return f"{value / factor:.3g}", prefix
    return f"{value:.3g}", ""


def _duration(seconds: float) -> tuple[str, str]:
    for factor, unit in ((3600.0, " h"), (60.0, " min")):
        if seconds >= factor:
            return f"{seconds / factor:.1f}", unit
    return f"{seconds:.1f}", " s"


def _count_parameters(path: Path) -> int:
    """Count the values of a safetensors file from its header alone; 0 where it cannot be read."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 1 << 26)))
        shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
        return int(sum(np.prod(shape, dtype=np.int64) for shape in shapes))
    except (OSError, struct.error, ValueError, KeyError, TypeError):
        return 0  # only a figure of the summary: the report does not depend on the weights
