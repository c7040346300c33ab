"""Errors on held-out cases while training: subsamples now and then, whole surfaces at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cpflare.config import Config
from cpflare.data.loader import ShardReader
from cpflare.data.sampler import Sampler, Window
from cpflare.evaluate.metrics import FieldSums, mean_over_cases
from cpflare.evaluate.predict import Inference, predict_shard
from cpflare.models import Backbone
from cpflare.parallel.comm import to_host
from cpflare.parallel.topology import Topology


class StopInEvaluation(Exception):
    """Leaves an evaluation half-way, on all ranks before the same case."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Evaluation(NamedTuple):
    """What an evaluation found, equal on all ranks."""

    event: dict[str, Any]  # the line of metrics.jsonl
    shown: list[str]  # its entries for the log
    score: float  # what the best checkpoint is chosen by
    is_sub: bool  # whether less than all cells of all cases was evaluated


class Validation:
    """The held-out cases of a run, and how they are evaluated."""

    def __init__(
        self, config: Config, reader: ShardReader, cases: Sequence[str], topology: Topology
    ) -> None:
        self.config, self.reader, self.cases, self.topology = config, reader, cases, topology

    def evaluate(self, model: Backbone, step: int, *, whole: bool) -> Evaluation:
        """Mean over cases of each field's errors in physical units, after `step` steps.

        Communication: the model's reductions, and one all-reduce of the sums of all cases.

        Raises:
            StopInEvaluation: a signal asked for it.
            NonFiniteError: a prediction is NaN or infinite (on all ranks alike).
            DataError: data that cannot be read.
        """
        start = time.perf_counter()
        windows, is_sub = self._windows(whole)
        values = self._errors(model, windows, step)
        suffix = "_sub" if is_sub else ""
        event = {
            "kind": "eval",
            "step": step,
            "cases": [window.case for window in windows],
            "tokens": sum(window.size for window in windows),
            "eval_s": time.perf_counter() - start,
            **{f"{name}{suffix}": value for name, value in values.items()},
        }
        targets = self.reader.normalizer.targets
        first = "pressure" if "pressure" in targets else targets[0]
        shown = [f"{name}_rel_l2{suffix}" for name in targets]
        return Evaluation(event, shown, values[f"{first}_rel_l2"], is_sub)

    def _windows(self, whole: bool) -> tuple[list[Window], bool]:
        """The windows, the same at every call, and whether they are less than everything."""
        train, rows = self.config.train, self.reader.store.rows
        cases = self.cases if whole else self.cases[: train.eval_cases or None]  # 0 stands for all
        sizes = [rows[name] for name in cases]
        sampler = Sampler(cases, sizes, "all" if whole else train.eval_tokens, 1, train.seed)
        windows = [sampler.window(0, case, size) for case, size in zip(cases, sizes, strict=True)]
        is_sub = len(cases) < len(self.cases) or any(w.size < w.num_rows for w in windows)
        return windows, is_sub

    def _errors(self, model: Backbone, windows: Sequence[Window], step: int) -> dict[str, float]:
        """Replicas share the cases out; the ranks of a CP group share each case's tokens."""
        topology, lifeline = self.topology, self.topology.lifeline
        train = self.config.train
        inference = Inference(topology.device, train.precision, self.config.engine)
        fields = tuple(self.reader.normalizer.targets)
        table = torch.zeros(len(windows), FieldSums(fields).to_vector().size, dtype=torch.float64)
        for index, window in enumerate(windows):
            lifeline.place = f"evaluation after step {step}, case {window.case}"
            # Once a round in which every replica has a case: within, none waits for another.
            asked = index % topology.dp == 0
            why = topology.stop.agree(topology.world_comm, topology.device) if asked else None
            if why is not None:
                raise StopInEvaluation(why)
            if index % topology.dp != topology.dp_rank:
                continue
            predictions = predict_shard(model, self.reader, window, inference)
            truth = self.reader.read_fields(window, (*fields, "area"))
            sums = FieldSums(fields)
            sums.add(predictions, truth, truth["area"])
            table[index] = torch.from_numpy(sums.to_vector())
        table = to_host(topology.world_comm.all_reduce(table.to(topology.device)))
        cases = {
            window.case: FieldSums.from_vector(fields, np.asarray(row)).metrics(window.case)
            for window, row in zip(windows, table, strict=True)
        }
        means = mean_over_cases(cases.values())
        return {f"{name}_{metric}": v for name, m in means.items() for metric, v in m.items()}
