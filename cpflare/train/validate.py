"""Errors on held-out cases while training: subsamples now and then, whole surfaces at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from cpflare.data.loader import ShardReader
from cpflare.data.sampler import Sampler, Window
from cpflare.evaluate.metrics import FieldSums, mean_over_cases
from cpflare.evaluate.predict import Inference, predict_shard
from cpflare.models import Backbone
from cpflare.parallel.topology import Topology


def validation_windows(
    cases: Sequence[str],
    num_rows: Sequence[int],
    *,
    seed: int,
    max_cases: int,
    tokens: int | Literal["all"],
) -> tuple[list[Window], bool]:
    """The windows to evaluate, the same at every call, and whether they are less than everything.

    `max_cases` 0 stands for all.
    """
    count = len(cases) if max_cases == 0 else min(max_cases, len(cases))
    sampler = Sampler(cases, num_rows, tokens, 1, seed)
    chosen = [sampler.window(0, cases[i], num_rows[i]) for i in range(count)]
    return chosen, count < len(cases) or any(w.size < w.num_rows for w in chosen)


def validate(
    model: Backbone,
    reader: ShardReader,
    windows: Sequence[Window],
    topology: Topology,
    inference: Inference,
    before_case: Callable[[int, Window], None] = lambda index, window: None,
) -> dict[str, float]:
    """Mean over cases of each field's errors in physical units, equal on all ranks.

    Replicas share the cases out; the ranks of a CP group share each case's tokens. `before_case` is
    called on every rank for every window, in order; what it raises ends the evaluation.
    Communication: the model's reductions, and one all-reduce of the sums of all cases.

    Raises:
        NonFiniteError: a prediction is NaN or infinite (on all ranks alike).
        DataError: data that cannot be read.
    """
    fields = tuple(reader.normalizer.targets)
    table = torch.zeros(len(windows), FieldSums(fields).to_vector().size, dtype=torch.float64)
    for index, window in enumerate(windows):
        before_case(index, window)
        if index % topology.dp != topology.dp_rank:
            continue
        predictions = predict_shard(model, reader, window, inference)
        truth = reader.read_fields(window, (*fields, "area"))
        sums = FieldSums(fields)
        sums.add(predictions, truth, truth["area"])
        table[index] = torch.from_numpy(sums.to_vector())
    table = topology.world_comm.all_reduce(table.to(topology.device)).cpu()
    cases = {
        window.case: FieldSums.from_vector(fields, np.asarray(row)).metrics(window.case)
        for window, row in zip(windows, table, strict=True)
    }
    means = mean_over_cases(cases.values())
    return {f"{name}_{metric}": v for name, m in means.items() for metric, v in m.items()}
